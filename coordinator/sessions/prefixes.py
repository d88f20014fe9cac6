"""What other sessions have computed, or are about to, for prompts that begin alike. Pure.

Who shares a beginning with a running session copies it as soon as that one's rows have left: of a burst of requests
with one system prompt, or of several choices of one, the first reads it for all.

And what ended sessions computed is kept in spare lanes: for the next turn of a chat. A session that ends gives its lane
back as ever. Before, what it holds is copied at every stage into a lane that nobody uses, under an id of its own that
no client knows; a later prompt that begins with the same tokens copies that and is read from there on. Open, copy and
close travel in band, so that all stages hold the same.

Kept lanes yield to whoever needs them, the one longest unused first: this coordinator's streams take them by name, and
stages give them to another's that would find none, after which copies from there are refused and all is read. A new
epoch forgets them all: the stages do, too. What running sessions held in the epoch before stages remember for a while:
where only a link broke, these go on from there.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import OutFrame, Session, State
from relayline.wire.envelopes.frames import Flag

PREFIX_TOKENS_MIN = 32  # a shorter one is read again in about the time that copying and the frames for it take
SOURCES_MAX = 64  # running sessions that one which starts is compared with, of those that begin alike


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """One kept lane."""

    session: Session  # not any client's; its history is what the lane holds
    lane: int

    @property
    def tokens(self) -> list[int]:
        """What the lane holds."""
        return self.session.history


class Prefixes:
    """The kept lanes of one pipeline, in the order of their last use."""

    def __init__(
        self,
        n_max: int | None,
        session_ids: Iterator[int],
        free_lanes: Callable[[], Sequence[int]],
        running: Mapping[int, Session],
    ) -> None:
        """Keep at most n_max lanes, each as a session of its own; None leaves the number to each epoch, see `renew`.

        With 0 nothing is copied from the running sessions, by their ids, either. free_lanes() are those that none of
        these has, ascending.
        """
        self._n_asked, self._session_ids, self._free_lanes = n_max, session_ids, free_lanes
        self._running = running
        self.n_max = n_max or 0
        self._kept: list[Kept] = []
        self._there: dict[int, int] = {}  # session id -> tokens that all stages hold from the epoch before

    @property
    def lanes(self) -> list[int]:
        """The kept lanes, the one longest unused first."""
        return [kept.lane for kept in self._kept]

    def lanes_before(self, session: Session) -> list[int]:
        """Return the kept lanes in the order in which the session may take them: what it would copy is the last."""
        source, _ = _longest(session, [kept.session for kept in self._kept])
        return sorted(self.lanes, key=lambda lane: source is not None and lane == source.lane)

    def figures(self) -> dict[str, int]:
        """Return what is kept, for GET /v1/pipeline."""
        return {"lanes": len(self._kept), "tokens": sum(len(kept.tokens) for kept in self._kept)}

    def start(self, session: Session) -> list[OutFrame]:
        """Start a session that has a lane; returns its first frames, behind the close of a kept lane that it takes."""
        frames = [frame for kept in list(self._kept) if kept.lane == session.lane for frame in self._drop(kept)]
        frames += session.start(self._there.pop(session.session_id, 0))
        if session.n_sent:
            return frames
        kept, running = [kept.session for kept in self._kept], self._sources(session)
        leader, n_later = _longest(session, running)
        source, n_now = _longest(session, [*kept, *running], is_held=True)
        if leader is not None and n_later >= n_now + PREFIX_TOKENS_MIN:
            session.follow(leader, n_later)
        elif source is not None:
            self._kept.sort(key=lambda kept: kept.session is source)  # the one used last stands at the end
            frames += session.continue_from(source, n_now)
        return frames

    def _sources(self, session: Session) -> list[Session]:
        """Return running sessions that it may copy from: at once, or when they have read so far."""
        if self._n_asked == 0:
            return []
        beginning = session.history[:PREFIX_TOKENS_MIN]
        alike = (
            other
            for other in self._running.values()
            if other.request.cache_prompt
            and other.state in (State.PREFILL, State.DECODE)
            and other.history[:PREFIX_TOKENS_MIN] == beginning
            and not other.waits_for(session)
            and not other.waits_in_vain
        )
        return list(itertools.islice(alike, SOURCES_MAX))

    def keep(self, session: Session) -> list[OutFrame]:
        """Keep what a session that ends now holds, if there is a lane for it besides its own.

        Returns the frames that do it; they go before the session's close. Who ends in the middle of its prompt leaves
        nothing: which rows of it the stages have is not known.
        """
        held = session.history[: session.n_left]
        is_computed = session.state in (State.DECODE, State.DONE) and len(held) >= PREFIX_TOKENS_MIN
        if not (is_computed and self.n_max and session.request.cache_prompt):
            return []
        for kept in self._kept:
            if common_tokens(kept.tokens, held) == len(held):
                self._kept.sort(key=lambda other: other is kept)
                return []
        lanes = self._free_lanes()
        frames: list[OutFrame] = []
        for kept in list(self._kept):
            if common_tokens(kept.tokens, held) == len(kept.tokens):  # an earlier turn
                frames += self._drop(kept)
        if len(self._kept) >= self.n_max:
            frames += self._drop(self._kept[0])
        free = [lane for lane in lanes if lane not in self.lanes]
        if not free and self._kept:
            frames += self._drop(self._kept[0])
            free = [lane for lane in lanes if lane not in self.lanes]
        if not free:
            return frames
        request = GenerationRequest("", tuple(held), 1, SamplingParams())
        lane = free[-1]  # running ones take the lowest
        copy = Session(next(self._session_ids), request, lambda _: False, lane=lane, is_kept=True)
        self._kept.append(Kept(copy, lane))
        return [*frames, *copy.start(), *copy.continue_from(session, len(held))]

    def refused(self, session_ids: Collection[int], *, is_full: bool) -> list[OutFrame]:
        """A stage refused something of a session, and perhaps for what it was copied from. Returns closes.

        Nobody may copy what a stage could not keep, or no longer has: other coordinators' streams may have its lane.
        And where there is no room for what runs, whatever is only kept is the first to go.
        """
        refused = [kept for kept in self._kept if is_full or kept.session.session_id in session_ids]
        return [frame for kept in refused for frame in self._drop(kept)]

    def renew(self, n_lanes: int, *, is_per_lane: bool, there: Mapping[int, int] = MappingProxyType({})) -> None:
        """A new epoch begins with so many lanes: nothing is kept but, of running sessions, what is `there` already.

        `there` names all sessions that any stage knows, with the tokens of their histories that all of them hold.

        Where nobody said how many may be, half of them may where lanes have KV cells of their own: streams take the
        lower half, and those that travel together have neighbouring lanes. Where lanes share their cells, every row is
        held against those of kept lanes too, and none may be.
        """
        self._kept.clear()
        self._there = dict(there)
        if self._n_asked is None:
            self.n_max = n_lanes // 2 if is_per_lane else 0

    def left_behind(self, going_on: Iterable[Session]) -> list[OutFrame]:
        """Return closes for what is there of any but these sessions, which will be started now."""
        wanted = {session.session_id for session in going_on}
        closed = [key for key, n_tokens in self._there.items() if key not in wanted or not n_tokens]
        for key in closed:
            del self._there[key]
        nobodys = GenerationRequest("", (0,), 1, SamplingParams())
        return [OutFrame(Session(key, nobodys, lambda _: False), 0, (), Flag.CLOSE) for key in closed]

    def _drop(self, kept: Kept) -> list[OutFrame]:
        self._kept.remove(kept)
        return kept.session.cancel()


def _longest(session: Session, sources: Iterable[Session], *, is_held: bool = False) -> tuple[Session | None, int]:
    """Return which source begins like the session's history for longest, and for how many tokens; None: none does.

    `is_held` counts only what the sources hold already. Of one that decodes nothing else counts in any case: what it
    was started again with may be less than it has said, and it reads nothing more.
    """
    if not session.request.cache_prompt or session.replays:  # after a fault of its own it reads everything itself
        return None, 0
    known = session.history[:-1]  # the last token is read in any case, for what follows it
    best, n_best = None, PREFIX_TOKENS_MIN - 1
    for source in sources:
        if n_best >= len(known) or source.history[n_best : n_best + 1] != known[n_best : n_best + 1]:
            continue  # no better, and comparing long histories takes its time
        n_common = common_tokens(source.history, known)
        if is_held or source.state is State.DECODE:
            n_common = min(n_common, source.n_held)
        if n_common > n_best:
            best, n_best = source, n_common
    return (best, n_best) if best is not None else (None, 0)


def held_by_all(held: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Return of every session that any stage knows how many tokens all of them hold.

    `held` is what sessions of the epoch before hold at each stage: {session id: tokens of its history}.
    """
    sessions = {session_id for at_stage in held for session_id in at_stage}
    return {session_id: min(at_stage.get(session_id, 0) for at_stage in held) for session_id in sessions}


def common_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two histories begin with in common."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
