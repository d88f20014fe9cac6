"""One request's life at the coordinator: the frames that it sends, and its reaction to sampled tokens. Pure.

The coordinator owns `history`: prompt and generated tokens. Stages hold only caches of it. So recovery needs no special
case: at a new epoch `start` opens the session again and replays, as prefill, the tokens that some stage no longer
holds. Only a token for position `len(history)` is ever accepted, so a repeated or late one changes nothing.

    WAITING --start--> PREFILL --first sample--> DECODE --last sample--> DONE
       |  ^               |  ^------ start (new epoch) -----|               ^
       |  +-- give_way ---+------------ give_way -----------+               |
       +---- cancel ------+------------- cancel ------------+---------------+
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
from collections.abc import Callable, Sequence

import msgspec

from relayline.coordinator.sessions.drafts import Acceptance, Drafter
from relayline.coordinator.sessions.frame import Frame, Opening
from relayline.coordinator.sessions.generation import (
    ROW_TOKEN_MIN,
    FinishReason,
    GenerationRequest,
    PromptScore,
    TokenEvent,
)
from relayline.coordinator.sessions.guesses import Guesses
from relayline.coordinator.sessions.told_guesses import ToldFacts, ToldGuesses
from relayline.wire.common import bounds
from relayline.wire.common.checkpoints import kept_positions
from relayline.wire.common.errors import RelaylineError, StaleEpochError
from relayline.wire.common.sampler_fields import POOLINGS
from relayline.wire.envelopes.frames import Flag, grid_argument
from relayline.wire.envelopes.session_ids import with_adapter

REPLAYS_MAX = 3  # replays of one session after its own failures, before it ends with an error


class State(enum.Enum):
    """See the module's diagram."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


# What is asked for with every token: in Python 3.11 an enum's attribute takes several times as long as a name.
_PREFILL, _DECODE = State.PREFILL, State.DECODE


@dataclasses.dataclass(slots=True)
class OutFrame:
    """One frame for stage 0 that has not left: guesses may still join it, and its session continues."""

    session: Session
    position: int
    tokens: tuple[int, ...]  # empty for controls
    flags: int
    argument: int = 0  # of an open: the lane that it is best given, plus one; with Flag.GRID: `grid_argument`
    followers: tuple[int, ...] = ()  # see Frame

    @property
    def n_drafted(self) -> int:
        """How many of its tokens are guesses."""
        return sum(self.position + row >= len(self.session.history) for row in range(len(self.tokens)))

    def leave(self) -> Frame:
        """Return the frame as it leaves now."""
        flags, session = self.flags, self.session
        n_drafted = self.n_drafted if flags & Flag.DRAFTED else 0
        opening = session.opening() if flags & Flag.OPEN else None
        rows = session.request.rows_at(self.position, len(self.tokens)) if flags & Flag.PREFILL else None
        return Frame(
            session.session_id,
            self.position,
            self.tokens,
            flags,
            self.argument,
            n_drafted,
            opening,
            self.followers,
            rows,
        )


@dataclasses.dataclass(slots=True, eq=False)
class Session:
    """One generation."""

    session_id: int
    request: GenerationRequest
    is_end: Callable[[int], bool]
    """Whether a token ends generation (the vocabulary's end-of-generation set)."""
    state: State = State.WAITING
    history: list[int] = dataclasses.field(default_factory=list)
    replays: int = 0
    n_refused: int = 0  # times that stages had no lane for it
    n_opened: int = 0  # tokens of the history when it was opened last
    mirostat_mus: tuple[float | None, float | None] = (None, None)
    """The state of mirostat or adaptive-p behind the last token, and at the latest open; None: not reported yet."""
    n_sent: int = 0  # rows of the history sent in this epoch, or copied, while in PREFILL; then it stays
    n_kept: int = 0  # of these, rows that all stages held from the epoch before
    n_copied: int = 0  # of these, rows that another session had computed
    copied_from: int = 0  # that session; 0: none
    stops: list[int] = dataclasses.field(default_factory=list)
    """Ascending: where chunks of its history are to end, and stages to keep a checkpoint; none where none is needed."""
    checkpoints: list[int] = dataclasses.field(default_factory=list)
    """Ascending: how many tokens all stages can take it back to, or copy, once its rows have got there."""
    leader: Session | None = None  # that session, while these rows have not all left for stage 0 as its own
    kept_key: int | None = None
    """Not None: no client reads it, it only keeps tokens that others may copy, and stages may take its lane. They then
    store them under this key, unless it is 0."""
    lane: int = -1  # given by admission; stages take the same number where it is free
    acceptance: Acceptance | None = None  # what all streams know of their drafts; None: this one is not drafted
    ahead: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
    """Guesses under way: tokens that would follow the history."""
    is_restarted: bool = False  # within this epoch: answers from before may still come, and be ahead of its rows
    admitted_ns: int = 0
    started_ns: int = 0  # when it first got a lane; 0: not yet
    scores: list[PromptScore] = dataclasses.field(default_factory=list)
    """Of the prompt's tokens behind the first, as far as they have come; none unless they are asked for."""
    guesses: Guesses | None = None

    def __post_init__(self) -> None:
        """Begin with the prompt and what was said before, under an id that says its adapter."""
        self.session_id = with_adapter(self.session_id, self.request.adapter)
        self.history.extend(self.request.prompt_tokens)
        self.history.extend(self.request.said)

    @property
    def n_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.history) - len(self.request.prompt_tokens)

    @property
    def is_replay(self) -> bool:
        """Whether it was lost with others: its prefill is of a history that its client has read a part of already."""
        return self.state is State.PREFILL and self.n_generated > 0 and not self.replays

    @property
    def prefill_left(self) -> int:
        """Rows of the history that have not been sent in this epoch."""
        return len(self.history) - self.n_sent if self.state is _PREFILL else 0

    @property
    def n_left(self) -> int:
        """Rows of the history that have left for certain, once a token has come."""
        n_rows = len(self.history) - 1  # the row of the last token may wait in the scheduler's pool
        return min(n_rows, self.n_sent) if self.is_restarted else n_rows

    @property
    def n_held(self) -> int:
        """Rows of the history that have left for stage 0: sessions sent later may copy them."""
        if self.state is State.DECODE:
            return self.n_left
        return self.n_sent if self.state is State.PREFILL and self.leader is None else 0

    @property
    def is_orphan(self) -> bool:
        """Whether the leader ended or lost its lane before it had read the tokens that this session wants to copy."""
        return self.leader is not None and self.leader.state in (State.WAITING, State.DONE)

    @property
    def reader(self) -> Session:
        """The session that reads the rows it waits for: itself, or the last leader in its chain."""
        found = self
        while found.leader is not None:
            found = found.leader
        return found

    @property
    def waits_in_vain(self) -> bool:
        """Whether it, or a leader that it waits for, is an orphan."""
        waiting: Session | None = self
        while waiting is not None and not waiting.is_orphan:
            waiting = waiting.leader
        return waiting is not None

    def waits_for(self, other: Session) -> bool:
        """Return whether it is the other session, or depends on it."""
        waiting: Session | None = self
        while waiting is not None and waiting is not other:
            waiting = waiting.leader
        return waiting is other

    def may_replay(self, error: RelaylineError, *, is_retryable: bool) -> bool:
        """Return whether to start it again after a stage refused one of its frames."""
        # The fault may lie in the cells that it copied or still held. Next time it reads everything itself.
        is_retryable |= self.n_copied > 0 or self.n_kept > 0
        return is_retryable and not isinstance(error, StaleEpochError) and self.replays < REPLAYS_MAX

    def count_replay(self) -> None:
        """Count a replay, unless it went on from cells of the last epoch: stages may have had to give those away."""
        self.replays += not self.n_kept

    def start(self, n_kept: int = 0) -> list[OutFrame]:
        """Open the session at every stage; its history is then prefilled in chunks. A new epoch resumes it this way.

        Its first n_kept tokens are not sent, because all stages still hold at least these from the last epoch.
        """
        if self.state is State.DONE:
            return []
        self.ahead.clear()
        # A session that waited for its leader has sent nothing that a stage could answer.
        self.is_restarted = self.state is not State.WAITING and (self.leader is None or self.is_restarted)
        # If one stage gave its cells away, others may still hold theirs, and would refuse a copy into that lane.
        is_there = self.n_kept > 0 and self.state is not State.WAITING
        is_lost = self.request.scores_prompt and n_kept > len(self.scores)
        if is_lost or (n_kept and self.request.sampling.number("pooling")):
            n_kept, is_there = 0, True  # rows whose scores were lost, or that are pooled, are read again
        self.state, self.leader = State.PREFILL, None
        self.n_opened = len(self.history)
        self.mirostat_mus = self.mirostat_mus[0], self.mirostat_mus[0]
        self.n_copied = self.copied_from = 0
        # The last row is computed again, because its token may be lost.
        self.n_sent = self.n_kept = self.request.whole_until(min(n_kept, len(self.history) - 1))
        self.stops, self.checkpoints = [], [at for at in self.checkpoints if at <= self.n_sent]
        opening = OutFrame(self, 0, (), Flag.OPEN, self.lane + 1)
        return [opening, OutFrame(self, self.n_sent, (), Flag.TRIM)] if self.n_sent or is_there else [opening]

    def opening(self) -> Opening:
        """Return the settings that its open carries to the stages."""
        sampling, n_prompt = self.request.sampling, len(self.request.prompt_tokens)
        said = self.history[n_prompt : self.n_opened] if sampling.looks_back else []
        n_said_max = bounds.GRAMMAR_TOKENS_MAX if sampling.grammar else bounds.PENALTY_TOKENS_MAX
        read: Sequence[int] = ()
        if sampling.looks_at_prompt:
            prompt = self.request.prompt_tokens
            read = [each for each in prompt if each < ROW_TOKEN_MIN] if self.request.images else prompt
            read = read[-bounds.PENALTY_TOKENS_MAX :]
        sampling = sampling.behind(said, n_prompt).resumed(self.mirostat_mus[1])
        last_said, is_kept = tuple(said[-n_said_max:]), self.kept_key is not None
        told_from = max(0, self.n_opened - bounds.TOLD_TOKENS_MAX)
        told = tuple(self.history[told_from : self.n_opened]) if may_predict(self) and not is_kept else ()
        return Opening(
            sampling, self.request.wants_logits, is_kept, self.kept_key or 0, last_said, tuple(read), told, told_from
        )

    def continue_from(self, source: Session, n_tokens: int) -> list[OutFrame]:
        """Copy the first n_tokens from another session with the same beginning, and read on from there.

        Call it right after `start`. n_tokens is less than the history that is to be read.
        """
        self.n_sent = self.n_copied = n_tokens
        self.copied_from = source.session_id
        self.checkpoints = [at for at in source.checkpoints if at <= n_tokens]
        self.stops = [at for at in self.stops if at > n_tokens]
        return [OutFrame(self, n_tokens, (), Flag.COPY_PREFIX, source.session_id)]

    def follow(self, leader: Session, n_tokens: int) -> None:
        """Wait until another session with the same beginning has sent its first n_tokens: see `catch_up`.

        Call it right after `start`. n_tokens is less than the history that is to be read.
        """
        self.continue_from(leader, n_tokens)
        self.leader = leader

    def catch_up(self) -> list[OutFrame]:
        """Copy the leader's sent rows and read on from there, if it has sent enough; else return no frames."""
        if self.leader is None or self.leader.n_held < self.n_copied:
            return []
        leader, self.leader = self.leader, None
        return self.continue_from(leader, self.n_copied)

    def next_chunk(self, rows_max: int) -> OutFrame | None:
        """Return the next rows of the history to prefill, None when all have been sent.

        Only rows of an image that attend to each other may be more than rows_max.
        """
        if self.prefill_left == 0:
            return None
        at = self.n_sent
        end = min(at + rows_max, self.stops[0]) if self.stops else at + rows_max
        if (border := self.request.border_behind(at)) is not None:
            end = min(end, border)  # a frame holds tokens or rows of an image
        flags = Flag.PREFILL
        if self.request.images and (image := self.request.mutual_at(at)) is not None:
            # Where its first rows were copied, they had seen these.
            end, flags = image.end, flags | Flag.MUTUAL
            self.stops = [stop for stop in self.stops if stop >= end]
        argument = 0
        if self.request.images and (image := self.request.grid_at(at)) is not None and image.grid is not None:
            # Stages cannot come back to the middle of it.
            self.stops = [stop for stop in self.stops if stop <= at or stop >= image.end]
            end, flags = min(at + rows_max, image.end), flags | Flag.GRID
            argument = grid_argument(at - image.start, *image.grid)
        followers: tuple[int, ...] = ()
        n_prompt = len(self.request.prompt_tokens)
        if _is_looked_at(self.request, at) and at < n_prompt - 1:
            # The last row scores nothing: what follows it is the answer.
            rows_max = bounds.SCORED_ROWS_MAX if self.request.sampling.number("pooling") != POOLINGS["cls"] else 1
            end = min(end, at + rows_max, n_prompt - (len(self.history) > n_prompt))
            flags, followers = Flag.SCORED, tuple(self.history[at + 1 : end + 1])
        tokens = tuple(self.history[at:end])
        self.n_sent += len(tokens)
        if self.n_sent == len(self.history):
            flags |= Flag.WANTS_SAMPLE
        if self.stops and self.n_sent == self.stops[0]:
            del self.stops[0]
            self.checkpoints = sorted(kept_positions([*self.checkpoints, self.n_sent]))
            flags |= Flag.CHECKPOINT
        if followers:
            followers += (0,) * (len(tokens) - len(followers))
        return OutFrame(self, at, tokens, flags, argument, followers)

    def sampled(
        self,
        position: int,
        token: int,
        logprob: float | None = None,
        top: tuple[tuple[int, float], ...] = (),
        logits: bytes = b"",
        embedding: bytes = b"",
        mirostat_mu: float | None = None,
    ) -> tuple[TokenEvent | None, list[OutFrame]]:
        """Take a sampled token. Returns the event for the client and the frames that follow from it.

        A token for any other position than the next is an echo of a retry and changes nothing. The row of a rightly
        guessed token is under way already, so no frame follows.
        """
        history, request = self.history, self.request
        if self.state not in (_PREFILL, _DECODE) or position != len(history):
            return None, []
        is_replaying = (
            self.state is _PREFILL and len(history) > self.n_sent
        )  # an answer from before the replay: true, but the stages lack rows
        if is_replaying and self.request.sampling.looks_back:
            return None, []  # the last stage knows the tokens before it, and will pick this one again
        if self.guesses is None and (self.acceptance is not None or self.request.prediction):
            self.guesses = Guesses(Drafter(self.history, self.request.prediction, self.acceptance or Acceptance()))
        history.append(token)
        n_generated = len(history) - len(request.prompt_tokens)
        if mirostat_mu != self.mirostat_mus[0]:
            self.mirostat_mus = mirostat_mu, self.mirostat_mus[1]
        is_end = not request.ignore_eos and self.is_end(token)
        is_full = n_generated >= request.max_tokens
        reason: FinishReason | None = "stop" if is_end else "length" if is_full else None
        n_cached = self.n_copied if n_generated == 1 else 0
        is_drafted = bool(self.ahead) and self.ahead.popleft() == token
        is_predicted = self.guesses is not None and self.guesses.take(token)
        scores = tuple(self.scores) if self.scores and n_generated == 1 else ()
        event = TokenEvent(token, logprob, top, reason, is_end, logits, n_cached, is_predicted, is_drafted, scores)
        event = msgspec.structs.replace(event, embedding=embedding) if embedding else event
        if event.finish_reason is not None:
            return event, self.cancel()
        if is_replaying:
            return event, []  # the rest of the replay now ends with this token
        self.state = _DECODE
        if is_drafted:
            return event, []
        self.ahead.clear()
        return event, [OutFrame(self, position, (token,), Flag.WANTS_SAMPLE)]

    def chances(self, n_tokens: int) -> list[float]:
        """Return for each guess after those under way the probability that all up to it are right: see `guess`.

        No guess ends the answer or goes beyond its last token.
        """
        guesses = self._guesses(n_tokens)
        return self.guesses.chances(self.ahead, len(guesses)) if self.guesses and guesses else []

    def _guesses(self, n_tokens: int) -> list[int]:
        n_left = self.request.max_tokens - self.n_generated - 1 - len(self.ahead)
        if self.guesses is None or self.acceptance is None or self.is_restarted:
            return []
        if self.state is not State.DECODE or n_left <= 0:
            return []
        guesses = self.guesses.tokens(self.ahead, min(n_tokens, n_left))
        if self.request.images:  # no answer continues with a row of an image
            guesses = list(itertools.takewhile(lambda token: token < ROW_TOKEN_MIN, guesses))
        if self.request.ignore_eos:
            return guesses
        return list(itertools.takewhile(lambda token: not self.is_end(token), guesses))

    def extend(self, frame: OutFrame, n_tokens: int) -> None:
        """Let the next guesses travel behind the row of a frame that has not left.

        Not if the token's successor is known already, for instance from before a replay: it follows without a guess.
        """
        guesses = self._guesses(n_tokens) if frame.position == len(self.history) - 1 else []
        if guesses:
            frame.tokens, frame.flags = (*frame.tokens, *guesses), frame.flags | Flag.DRAFTED
            self.ahead.extend(guesses)

    def guess(self, n_tokens: int) -> OutFrame | None:
        """Return the next guesses, behind all rows under way, as a separate frame; None where there are none."""
        position, guesses = len(self.history) + len(self.ahead), self._guesses(n_tokens)
        if not guesses:
            return None
        self.ahead.extend(guesses)
        return OutFrame(self, position, tuple(guesses), Flag.WANTS_SAMPLE | Flag.DRAFTED | Flag.GUESSED)

    def give_way(self) -> list[OutFrame]:
        """Wait for a lane again, with nothing lost; the frames say so to stages at which it is open."""
        if self.state not in (State.PREFILL, State.DECODE):
            return []
        self.ahead.clear()
        self.state = State.WAITING
        return [OutFrame(self, 0, (), Flag.CLOSE)]

    def cancel(self) -> list[OutFrame]:
        """End the session wherever it is; stages give its lane back."""
        frames = self.give_way()
        self.state = State.DONE
        return frames


def may_predict(session: Session) -> bool:
    """Return whether the last stage guesses tokens for the session where it is asked to: not beside a draft model."""
    if session.acceptance is None or not session.acceptance.has_predictions or session.request.images:
        return False
    told = session.guesses.told if session.guesses is not None else None
    return told is None or not told.facts.is_own_model


def take_guesses(
    session: Session, position: int, tokens: Sequence[int], chances: Sequence[float], facts: ToldFacts, now_ns: int
) -> None:
    """Take the guesses of the last stage's prediction layers for the tokens from `position` on.

    `facts`: of these layers. A model that drafts for the stream is heard alone.
    """
    guesses = session.guesses
    if guesses is None or session.state is State.DONE:
        return
    if guesses.told is None:
        guesses.told = ToldGuesses(session.history, facts)
    if guesses.told.facts is facts:
        guesses.told.tell(position, tokens, chances, now_ns, follows=False)


def take_score(session: Session, position: int, score: PromptScore) -> bool:
    """Take the score of the token at a position of the session's prompt; False where that is none of the prompt."""
    if not 0 < position < len(session.request.prompt_tokens):
        return False
    if position == len(session.scores) + 1:  # else an echo
        session.scores.append(score)
    return True


def _is_looked_at(request: GenerationRequest, at: int) -> bool:
    """Return whether the last stage looks at more of a prompt's chunk from here on than its last row."""
    is_first = at == 0 and request.sampling.number("pooling") == POOLINGS["cls"]
    return request.scores_prompt or request.sampling.reads_all or is_first
