"""The sessions of a stage: their lanes, samplers and marks, and the effect of controls. Decode thread only.

Sessions are named by QueuedFrame.session_key: (route_id, session_id). When an epoch ends, its sessions' lanes are
*left* for the next one. If only a link broke, the coordinator continues from them. Left lanes yield like kept ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from llguidance import LLMatcher, LLTokenizer

from relayline.stage.queue_types import QueuedFrame
from relayline.stage.sampling.constraint import begin
from relayline.stage.sampling.grammars import grammars
from relayline.stage.sampling.penalties import biases_of
from relayline.stage.sampling.pooling import Pool
from relayline.stage.sampling.sampler import SamplingOptions, SessionSampler
from relayline.stage.steps.handing import Handing
from relayline.stage.steps.lane_states import LaneStates
from relayline.stage.steps.lanes import Lane, LaneTable
from relayline.stage.steps.predicting import Predicting
from relayline.stage.steps.step_types import Engine, Predictor
from relayline.wire.common.errors import InvalidRequestError, NotServedError, RelaylineError, SessionError
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb


class Sessions:
    """All sessions of all routes."""

    def __init__(
        self,
        engine: Engine,
        lanes: LaneTable,
        vocabulary: LLTokenizer | None,
        states: LaneStates | None = None,
        predictor: Predictor | None = None,
    ) -> None:
        self._engine, self._lanes, self._vocabulary = engine, lanes, vocabulary
        self.states = states or LaneStates(engine, None, None)
        self.predicting = Predicting(engine, predictor)
        self.handing = Handing(lanes, self.states.saver)
        self.samplers: dict[tuple[int, int], SessionSampler] = {}
        self.wants_logits: set[tuple[int, int]] = set()
        self.pools: dict[tuple[int, int], Pool] = {}  # of sessions that sample nothing: their prompts become embeddings
        self.cancelled: set[tuple[int, int]] = set()  # their close has arrived; the event loop adds, a close removes
        # Reported sessions: what follows a fault in the pipeline cannot fit either, and is dropped without a word until
        # the session begins again. Bounded by SESSIONS_PER_LINK_MAX; past it every frame is reported.
        self.broken: set[tuple[int, int]] = set()

    def begin_grammar(self, grammar: str, said: Sequence[int]) -> Future[LLMatcher] | None:
        """Begin to prepare a grammar, and have it read the session's tokens.

        Any thread. Returns None where this stage does not sample, or there is no grammar.
        """
        if self._vocabulary is None:
            return None
        try:
            return begin(self._vocabulary, grammar, said)
        except InvalidRequestError:
            return None  # its opening says so

    def control(self, frame: QueuedFrame) -> None:
        """Apply a control. Raises RelaylineError, without any change, where it cannot be applied."""
        if frame.flags & Flag.OPEN:
            self._open(frame)
        elif frame.flags & Flag.CLOSE:
            self.close(frame.session_key)
        elif frame.flags & Flag.TRIM:
            self._trim(frame)
        elif frame.flags & Flag.COPY_PREFIX:
            self._copy(frame)
        elif frame.flags & Flag.STORE:
            self._store(frame)
        elif frame.flags & Flag.RESTORE:
            self._restore(frame)

    def _trim(self, frame: QueuedFrame) -> Lane:
        """Drop what the frame's lane holds from the frame's position on; return the lane. Raises RelaylineError."""
        self._settle(frame.session_key)
        lane, drop_from = self._lanes.trim(frame.session_id, frame.route_id, frame.position)
        if drop_from is not None:
            self._engine.check_rewind(lane.index, drop_from)
            self._engine.drop_from(lane.index, drop_from)
            lane.next_position = drop_from
        return lane

    def _copy(self, frame: QueuedFrame) -> None:
        for session_id in (frame.argument, frame.session_id):
            self._settle((frame.route_id, session_id))
        try:
            source, target = self._lanes.prefix(frame.argument, frame.session_id, frame.route_id, frame.position)
            self._engine.check_rewind(source.index, frame.position)
            self.states.copy(source.index, target.index, frame.position, self._filled(frame, target))
        except RelaylineError:
            self.states.filled(frame.session_key)
            raise

    def _restore(self, frame: QueuedFrame) -> None:
        self._settle(frame.session_key)
        try:
            lane, _ = self._lanes.trim(frame.session_id, frame.route_id, 0)
            if lane.next_position:
                raise SessionError(f"session {frame.session_id:x} already holds {lane.next_position} positions")
            done, is_alone = self._filled(frame, lane), self._lanes.n_used <= 1
            self.states.restore(frame.argument, lane.index, frame.position, done, is_alone=is_alone)
        except RelaylineError:
            self.states.filled(frame.session_key)
            raise

    def _filled(self, frame: QueuedFrame, lane: Lane) -> Callable[[bool], None]:
        """Return what is called once the lane holds what this control asks for, or will not hold it."""

        def done(is_whole: bool) -> None:
            if self._lanes.has(lane):
                if is_whole:
                    lane.next_position = frame.position
                else:
                    self._engine.clear(lane.index)  # the session's rows do not fit then, and are refused
            self.states.filled(frame.session_key)

        return done

    def make_way(self, frames: Iterable[QueuedFrame]) -> None:
        """Rows of these frames run next: their lanes are filled now, and what still reads positions that they are
        written to does so now."""
        copies = self.states.copies
        for frame in frames:
            if (lane := self._lanes.lane_of(frame.session_key)) is not None:
                copies.settle(lane.index)
                copies.before_rows(lane.index, frame.position + frame.n_rows)

    def _settle(self, key: tuple[int, int]) -> None:
        if (lane := self._lanes.lane_of(key)) is not None:
            self.states.copies.settle(lane.index)

    def begin_restore(self, key: int) -> Future[None] | None:
        """Begin to read a state that is on the disk alone, None where there is none to wait for. Any thread."""
        return self.states.begin(key)

    def begin_fill(self, frame: QueuedFrame) -> Future[None] | None:
        """Return what the rest of a session waits for behind a control that fills its lane, None: nothing. Any
        thread."""
        return self.states.hold(frame)

    def _store(self, frame: QueuedFrame) -> None:
        """Store a lane's state. If that fails, the coordinators are told that it is not there."""
        if not frame.position:
            self.states.forget(frame.argument)
            return
        try:
            lane = self._trim(frame)
        except RelaylineError:
            self.states.on_dropped(frame.argument)
            return
        self.states.store(frame.argument, lane.index, frame.position, is_alone=self._lanes.n_used <= 1)

    def _store_kept(self, lanes: Iterable[Lane]) -> None:
        """Kept sessions lose their lanes, and not by their coordinator's wish: it would have had them stored before."""
        kept = [(lane.kept_key, lane.index, lane.next_position) for lane in lanes if lane.kept_key]
        self.states.store_all([each for each in kept if each[2]])

    def _open(self, frame: QueuedFrame) -> None:
        options, key = frame.options or pb.SessionOptions(), frame.session_key
        sampler = self._sampler(options)  # first, because it may refuse
        pool = self._pool(sampler.options) if sampler is not None else None
        if kept := self._lanes.in_the_way(frame.session_id, frame.route_id):
            self._store_kept([kept])
            self.close((kept.route_id, kept.session_id))
        try:
            wanted, now_ns = frame.argument - 1, frame.arrived_ns
            lane = self._lanes.open(frame.session_id, frame.route_id, wanted, is_kept=options.kept, now_ns=now_ns)
            lane.kept_key = options.kept_key if options.kept else 0
        except BaseException:
            if sampler is not None:
                sampler.close()
            raise
        self.broken.discard(key)
        if sampler is None:
            return
        if previous := self.samplers.pop(key, None):
            previous.close()
        self.samplers[key] = sampler
        self.predicting.open(key, options.told, options.told_from)
        self.pools.pop(key, None)
        if pool is not None:
            self.pools[key] = pool
        self.wants_logits.discard(key)
        if options.wants_logits:
            self.wants_logits.add(key)

    def _sampler(self, options: pb.SessionOptions) -> SessionSampler | None:
        """Return what picks a session's tokens, on the last stage. Raises ProtocolError, InvalidRequestError."""
        sampling = SamplingOptions(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=options.seed,
            n_logprobs=options.n_logprobs,
            frequency_penalty=options.frequency_penalty,
            presence_penalty=options.presence_penalty,
            logit_bias=biases_of(options.bias_tokens, options.biases),
            grammar=options.grammar,
            numbers=dict(options.numbers),
            allowed_tokens=tuple(options.allowed_tokens),
            held_back_tokens=tuple(options.held_back_tokens),
            dry_breakers=tuple(itertools.accumulate(options.dry_breaker_steps)),
            dry_sequences=tuple(tuple(each.tokens) for each in options.dry_sequences),
            bad_words=tuple(tuple(word.tokens) for word in options.bad_words),
            thought_marks=tuple(tuple(mark.tokens) for mark in options.thought_marks),
        )
        if not self._engine.is_last:
            return None
        return SessionSampler(sampling, self._engine.n_vocab, options.said, self._vocabulary, options.read)

    def _pool(self, options: SamplingOptions) -> Pool | None:
        """Return what pools a session's hidden rows, None for one that samples. Raises NotServedError."""
        kind, hidden = int(options.number("pooling")), self._engine.hidden
        if not kind:
            return None
        if hidden is None:
            text = "this model's last stage gives no hidden rows; on a GPU it does with --embeddings, on a CPU always"
            raise NotServedError(f"embeddings: {text}, if its architecture has them at all")
        if not options.number("ranked"):
            return Pool(kind, self._engine.n_embd)
        if hidden.rank_head is None:
            raise NotServedError("reranking: this model's last stage has no head that ranks")
        return Pool(kind, self._engine.n_embd, hidden.rank_head.chances)

    def close(self, key: tuple[int, int]) -> None:
        """Give a session's lane and sampler back; it need not be open."""
        lane = self._lanes.close(key[1], key[0])
        if lane is not None:
            self.states.copies.cancel(lane.index)
            self._engine.clear(lane.index)
        self._forget_marks(key)

    def forget_grammars(self) -> None:
        """The engine ends: what its grammars keep in memory goes."""
        if self._vocabulary is not None:
            grammars.forget(self._vocabulary)

    def _forget_marks(self, key: tuple[int, int]) -> None:
        if sampler := self.samplers.pop(key, None):
            sampler.close()
        self.predicting.close(key)
        self.cancelled.discard(key)
        self.pools.pop(key, None)
        self.wants_logits.discard(key)
        self.broken.discard(key)

    # --- ends of epochs -----------------------------------------------------------------------------------------------

    def leave_route(self, route_id: int, *, stores: bool = True) -> int:
        """Leave the lanes of a route's sessions for its next epoch; returns how many are not empty.

        A kept lane, an ended session and one with a fault leave nothing, since no session would continue from there.
        `stores`: what kept lanes hold goes to the tier, the latest first.
        """
        lanes = self._lanes.of_route(route_id)
        if stores:
            self._store_kept(reversed(lanes))
        for lane in lanes:
            key = (route_id, lane.session_id)
            if lane.is_kept or not lane.next_position or key in self.cancelled or key in self.broken:
                self.close(key)
            else:
                self._engine.drop_from(lane.index, lane.next_position)  # possible remains of a failed step
                self._forget_marks(key)
                lane.is_left = True
        self._end(route_id)
        return len(self._lanes.of_route(route_id))

    def held(self, route_id: int) -> dict[int, int]:
        """Return the rows held by a route's sessions: {session id: positions}."""
        return {lane.session_id: lane.next_position for lane in self._lanes.of_route(route_id)}

    def forget_left(self, route_id: int) -> None:
        """No epoch has claimed the lanes that a route left."""
        for lane in self._lanes.of_route(route_id):
            if lane.is_left:
                self.close((route_id, lane.session_id))

    def forget_route(self, route_id: int) -> None:
        """Close all sessions of a route."""
        for lane in self._lanes.of_route(route_id):
            self.close((route_id, lane.session_id))
        self._end(route_id)

    def _end(self, route_id: int) -> None:
        self.states.forget_route(route_id)
        self.cancelled.clear()  # only a shortcut: closes that other routes still have queued lose nothing
        self.broken = {key for key in self.broken if key[0] != route_id}
