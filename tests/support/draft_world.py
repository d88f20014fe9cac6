"""Sessions on a fake last stage, and a coordinator that guesses their tokens, rightly and wrongly. A lane's output is a
whole row of logits that depends on its whole content, so every filter and penalty has work to do.
"""

from __future__ import annotations

import collections
import random
import zlib
from collections.abc import Sequence

import numpy as np
from llguidance import LLTokenizer

from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps.lanes import LaneTable
from relayline.stage.steps.run_ahead import RunAhead
from relayline.stage.steps.step import StepExecutor
from relayline.stage.steps.step_types import StepResult
from relayline.wire.common.errors import NativeError
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.fakes import (
    CTX,
    ROUTE,
    VOCAB,
    WIDTH,
    FakeEmbeddings,
    FakeEngine,
    control,
    greedy,
    new_wiring,
    rows_frame,
    step_of,
)

Key = tuple[int, int]  # of a session: (route, session id)
KEYS: tuple[Key, ...] = ((ROUTE, 0), (ROUTE, 1), (ROUTE + 1, 0))
SAMPLE, GUESSES = Flag.WANTS_SAMPLE, Flag.WANTS_SAMPLE | Flag.DRAFTED
FOLLOWING = GUESSES | Flag.GUESSED  # whose first row is a guess as well


def frame_of(key: Key, position: int, tokens: Sequence[int], flags: int) -> QueuedFrame:
    """Rows that are their tokens."""
    rows = np.repeat(np.asarray(tokens, np.float32)[:, None], WIDTH, axis=1)
    frame = rows_frame(key[1], position, rows, flags, route_id=key[0])
    if flags & Flag.DRAFTED:
        frame.draft_tokens = tuple(tokens)
    return frame


def answers_of(result: StepResult, key: Key) -> tuple[list[pb.Sampled], list[int], list[str]]:
    """A step's answers for one session: samples, passed positions, labels of faults."""
    mine = [output for output in result.outputs if output.route_id == key[0]]
    return (
        [each for output in mine for each in output.samples if each.session_id == key[1]],
        [each.position for output in mine for each in output.progress if each.session_id == key[1]],
        [each.label for output in mine for each in output.faults if each.session_id == key[1]],
    )


class DraftWorld:
    """A last stage, and the state of its coordinators."""

    def __init__(
        self,
        options: dict[str, object],
        vocabulary: LLTokenizer | None = None,
        n_vocab: int = VOCAB,
        seed: int = 0,
        ahead_rows: int = 0,
    ) -> None:
        """`ahead_rows`: rows of a step that may be computed before they are asked for; 0: none."""
        self.options, self.n_vocab, self.seed = {"n_logprobs": 2, **options}, n_vocab, seed
        self.engine = FakeEngine(n_lanes=len(KEYS) + 1, is_last=True)
        self.engine.n_vocab, self.engine.make_logits = n_vocab, self.logits_of
        self.nan_at: set[tuple[int, int]] = set()  # (first token of a lane, its length) of rows without numbers
        lanes = LaneTable(len(KEYS) + 1, CTX)
        self.executor = StepExecutor(self.engine, lanes, 0, FakeEmbeddings(), vocabulary=vocabulary)
        self.ahead = RunAhead(self.executor, ahead_rows)
        for route_id in {key[0] for key in KEYS}:
            self.executor.reset_route(route_id, new_wiring(self.engine))
        self.n_dropped = self.n_accepted = 0  # frames not computed, guesses that were right
        self.lost: set[Key] = set()  # sessions that had a fault and have not begun again
        self.history: dict[Key, list[int]] = {}
        self.said: dict[Key, list[pb.Sampled]] = {key: [] for key in KEYS}
        for index, key in enumerate(KEYS):
            self.begin(key, [1 + index, 2, 3][: 2 + key[1]])

    def logits_of(self, lane: list[tuple[float, ...]]) -> np.ndarray:
        content = np.array([row[0] for row in lane], np.float32).tobytes()
        rng = np.random.default_rng([zlib.crc32(content), self.seed])
        logits = rng.standard_normal(self.n_vocab).astype(np.float32)
        return np.full_like(logits, np.nan) if (lane[0][0], len(lane)) in self.nan_at else logits

    def begin(self, key: Key, history: list[int], n_said: int = 0) -> None:
        """Open a session and read its history, whose last n_said tokens were sampled."""
        self.history[key] = list(history)
        self.lost.discard(key)
        options = greedy(**self.options, said=history[len(history) - n_said :])
        opening = control(key[1], Flag.OPEN, route_id=key[0], options=options)
        self.run([opening, frame_of(key, 0, history, Flag.PREFILL | SAMPLE)])

    def run(self, frames: list[QueuedFrame], *, n_times: int = 1) -> StepResult:
        """Run one step, perhaps repeated; take its answers, and check them against its frames."""
        result = self._executed(frames)
        for _ in range(n_times - 1):
            state = self.state
            again = self._executed(frames)
            assert [answers_of(again, key) for key in KEYS] == [answers_of(result, key) for key in KEYS]
            assert self.state == state
        for frame in frames:
            if not frame.is_control:
                self._take(frame, *answers_of(result, frame.session_key))
        self.executor.lanes.check()
        return result

    def _executed(self, frames: list[QueuedFrame]) -> StepResult:
        """Run one step as the runner does, its parts as one result; then compute ahead as much as possible."""
        results = [self.ahead.execute(part) for part in self.ahead.parts(step_of(*frames))]
        results[-1].outputs = [output for result in results for output in result.outputs]
        if self.ahead.is_due and (step := self.ahead.next_step(0)) is not None:
            self.ahead.compute(step)
        return results[-1]

    def _take(self, frame: QueuedFrame, samples: list[pb.Sampled], passed: list[int], faults: list[str]) -> None:
        key, end = frame.session_key, frame.position + frame.n_rows
        if key in self.lost and frame.flags & Flag.DRAFTED:
            assert (samples, passed, faults) == ([], [], []), "frames behind a fault are dropped silently"
            return
        if faults:
            self.lost.add(key)
        positions = [each.position for each in samples]
        first = frame.position + 1 if frame.flags & Flag.DRAFTED else end
        assert positions == list(range(first, first + len(positions)))
        assert all(position <= end for position in positions)
        answers = [position for position in positions if position == end] + passed + [end] * len(faults)
        assert answers == [end], "one answer for its end, and no other"
        self.n_dropped += not samples and bool(passed) and bool(frame.flags & Flag.DRAFTED)
        self.n_accepted += max(0, len(samples) - 1)
        for sampled in samples:
            if sampled.position == len(self.history[key]):
                self.history[key].append(sampled.token)
                self.said[key].append(sampled)

    def row(self, key: Key) -> QueuedFrame:
        """The next true row of a session."""
        history = self.history[key]
        return frame_of(key, len(history) - 1, history[-1:], SAMPLE)

    def guessed(self, key: Key, truth: Sequence[int], rng: random.Random) -> list[QueuedFrame]:
        """The next true row and guesses behind it, in frames that leave one after another."""
        position = len(self.history[key]) - 1
        n_guesses = min(rng.randrange(9), len(truth) - position - 2)  # the last row brings the last token
        tokens = [self.history[key][-1]]
        for ahead in range(max(0, n_guesses)):
            is_wrong = rng.random() < 0.15
            tokens.append((truth[position + 1 + ahead] + is_wrong * rng.randrange(1, self.n_vocab)) % self.n_vocab)
        frames: list[QueuedFrame] = []
        while tokens:
            count = rng.randint(1, len(tokens))
            is_plain = not frames and count == 1 and rng.random() < 0.5
            flags = SAMPLE if is_plain else FOLLOWING if frames else GUESSES
            frames.append(frame_of(key, position, tokens[:count], flags))
            position, tokens = position + count, tokens[count:]
        return frames

    def play(self, truth: dict[Key, list[int]], rng: random.Random, faults: float = 0.0) -> int:
        """Continue with drafts until every session has all its true tokens. Returns how many faults there were.

        `faults` is their chance in a step. Frames that left after a fault arrive before the session begins again.
        """
        queues: dict[Key, collections.deque[QueuedFrame]] = {key: collections.deque() for key in KEYS}
        n_faults = 0
        while True:
            for key in KEYS:
                if not queues[key] and key in self.lost:
                    self.nan_at.clear()
                    n_faults += 1
                    self.begin(key, self.history[key], len(self.said[key]))
                if not queues[key] and len(self.history[key]) < len(truth[key]):
                    queues[key].extend(self.guessed(key, truth[key], rng))
            waiting = [key for key in KEYS if queues[key]]
            if not waiting:
                return n_faults
            if rng.random() < faults:
                self.engine.fail_next = NativeError("told to")
            elif rng.random() < faults:
                key = rng.choice(KEYS)
                self.nan_at = {(self.history[key][0], len(self.history[key]) + rng.randrange(4))}
            chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
            frames = [queues[key].popleft() for key in chosen]
            self.run(frames, n_times=1 if faults else rng.choice((1, 1, 1, 2)))
            self.engine.fail_next = None

    @property
    def state(self) -> object:
        """The table, the lanes without rows that were not asked for, and the samplers."""
        open_lanes = self.executor.lanes._by_session
        table = {key: (lane.index, lane.next_position) for key, lane in open_lanes.items()}
        rows = {key: list(self.engine.lanes[lane.index][: lane.next_position]) for key, lane in open_lanes.items()}
        return table, rows, {k: s.last for k, s in self.executor.sessions.samplers.items()}


def played_plainly(world: DraftWorld, n_tokens: int) -> dict[Key, list[int]]:
    """The sessions' tokens, computed one row at a time."""
    for _ in range(n_tokens):
        world.run([world.row(key) for key in KEYS])
    return world.history
