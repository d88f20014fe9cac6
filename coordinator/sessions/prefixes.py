"""The prefix cache: prompts reuse the KV cells of sessions that begin with the same tokens. Pure.

A new session that shares its beginning with a running one copies those cells as soon as the other's rows have left. In
a burst of requests with one system prompt, or several choices of one request, the first one reads it for all.

Ended sessions are kept in spare lanes for the next turn of a chat. Before a session gives its lane back, every stage
copies its cells into an unused lane, under a session id that no client knows. A later prompt with the same beginning
copies the cells back and reads only its rest. Open, copy and close travel in band, so all stages hold the same.

Kept lanes yield to streams, the least recently used first. This coordinator's streams take them by name. Stages also
give them to another coordinator that finds no free lane; copies from them are then refused, and the prompt is read in
full. A new epoch forgets all kept lanes, here and at the stages, which store them as far as their tiers allow. Stages
remember the lanes of running sessions for a while, so these continue from there when only a link broke.
"""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from relayline.coordinator.sessions.checkpoints import nearest, stop_at, stops_of, turn_ends
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import OutFrame, Session, State
from relayline.coordinator.sessions.tier import NO_TIER, Stored, Tier, TierFacts
from relayline.wire.envelopes.frames import Flag

PREFIX_TOKENS_MIN = 32  # a shorter one is read again in about the time that copying and the frames for it take
SOURCES_MAX = 64  # running sessions that one which starts is compared with, of those that begin alike
_NOBODYS = GenerationRequest("", (0,), 1, SamplingParams())  # of sessions that stand for no client's


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """One kept lane."""

    session: Session  # of no client; its history lists the lane's tokens
    lane: int

    @property
    def tokens(self) -> list[int]:
        """The tokens that the lane holds."""
        return self.session.history


class Prefixes:
    """The kept lanes of one pipeline, in the order of their last use."""

    def __init__(
        self,
        n_max: int | None,
        session_ids: Iterator[int],
        free_lanes: Callable[[], Sequence[int]],
        running: Mapping[int, Session],
        ends_message: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Keep at most n_max lanes, each as a session. None leaves the number to each epoch, see `renew`.

        0 also turns off copies from running sessions. free_lanes() returns the lanes without a session, ascending.
        ends_message(token): see `checkpoints.stops_of`.
        """
        self._n_asked, self._session_ids, self._free_lanes = n_max, session_ids, free_lanes
        self._running, self._ends_message = running, ends_message
        self.n_max = n_max or 0
        self._kept: list[Kept] = []
        self._left_rows: dict[int, int] = {}  # session id -> tokens that all stages hold from the epoch before
        self.tier = Tier()  # what lanes held before they were taken
        self._keeps_state = False  # stages can copy from, or resume at, checkpoints and whole lanes alone

    @property
    def lanes(self) -> list[int]:
        """The kept lanes, the one longest unused first."""
        return [kept.lane for kept in self._kept]

    def lanes_before(self, session: Session) -> list[int]:
        """Return the kept lanes in the order in which the session may take them, the one it would copy from last."""
        source, _ = self._longest(session, [kept.session for kept in self._kept])
        return sorted(self.lanes, key=lambda lane: source is not None and lane == source.lane)

    def figures(self) -> dict[str, int]:
        """Return the kept lanes for GET /v1/pipeline."""
        return {"lanes": len(self._kept), "tokens": sum(len(kept.tokens) for kept in self._kept)}

    def start(self, session: Session) -> list[OutFrame]:
        """Start a session that has a lane; returns its first frames, behind the close of a kept lane that it takes."""
        frames = [frame for kept in list(self._kept) if kept.lane == session.lane for frame in self._retire(kept)]
        self.tier.ended(session.session_id)  # a failure before this does not count against the new source
        n_kept = self._left_rows.pop(session.session_id, 0)
        if self._keeps_state:
            n_kept = nearest(session, min(n_kept, len(session.history) - 1), is_held=True)
        frames += session.start(n_kept)
        if self._keeps_state and self._n_asked != 0 and session.request.cache_prompt:
            session.stops = stops_of(session, self._ends_message)
        if session.n_sent:
            return frames
        kept, running = [kept.session for kept in self._kept], self._sources(session)
        leader, n_later = self._longest(session, running)
        source, n_now = self._longest(session, [*kept, *running], is_held=True)
        stored, n_stored = self._stored(session, n_now)
        if leader is not None and n_later >= max(n_now, n_stored) + PREFIX_TOKENS_MIN:
            session.follow(leader, n_later)
            if self._keeps_state:
                stop_at(leader, n_later)
        elif stored is not None:
            frames += self.tier.restore(session, stored, n_stored)
        elif source is not None:
            self._kept.sort(key=lambda kept: kept.session is source)  # the most recently used is at the end
            frames += session.continue_from(source, n_now)
        return frames

    def _stored(self, session: Session, n_now: int) -> tuple[Stored | None, int]:
        """Return a stored prefix that is worth more than the n_now tokens that can be copied from a lane."""
        if self._n_asked == 0 or not session.request.cache_prompt or session.replays:
            return None, 0
        n_least = n_now + PREFIX_TOKENS_MIN - 1
        stored, n_stored = self.tier.longest(session.history, n_least, session.request.cells)
        n_stored = session.request.whole_until(n_stored)
        return (stored, n_stored) if n_stored > n_least else (None, 0)

    def _sources(self, session: Session) -> list[Session]:
        """Return running sessions that it may copy from: at once, or when they have read so far."""
        if self._n_asked == 0:
            return []
        beginning = session.history[:PREFIX_TOKENS_MIN]
        alike = (
            other
            for other in self._running.values()
            if other.request.cache_prompt
            and _hold_alike(other, session)
            and other.state in (State.PREFILL, State.DECODE)
            and other.history[:PREFIX_TOKENS_MIN] == beginning
            and not other.waits_for(session)
            and not other.waits_in_vain
        )
        return list(itertools.islice(alike, SOURCES_MAX))

    def keep(self, session: Session) -> list[OutFrame]:
        """Keep the cells of a session that ends now: in a spare lane, else in the stages' tier; on disks in any case.

        Returns the frames that do it; they go before the session's close. A session that ends in the middle of its
        prompt is not kept, because it is not known which of its rows the stages have.
        """
        held = session.history[: session.n_left]
        if self._keeps_state and session.state is State.DECODE:  # a row of its last token may be under way
            held = held[: session.checkpoints[-1] if session.checkpoints else 0]
        is_computed = session.state in (State.DECODE, State.DONE) and len(held) >= PREFIX_TOKENS_MIN
        if not is_computed or self._n_asked == 0 or not session.request.cache_prompt:
            return []
        # Of a lane with a recurrent state no other than the whole can be copied: guesses behind its end go first.
        guesses = [OutFrame(session, len(held), (), Flag.TRIM)] if self._keeps_state and session.guesses else []
        places = turn_ends(session, self._ends_message) if self.tier.is_used and not self._keeps_state else ()
        key = self.tier.name(session, len(held), places)
        on_disk = self.tier.store(session, len(held), key) if self.tier.is_on_disk else []
        in_lane = self._keep_lane(session, held, key)
        return [*guesses, *on_disk, *(self.tier.store(session, len(held), key) if in_lane is None else in_lane)]

    def _keep_lane(self, session: Session, held: list[int], key: int) -> list[OutFrame] | None:
        """Copy a session's tokens into a spare lane; None if there is none."""
        if not self.n_max:
            return None
        for kept in self._kept_like(session):
            if common_tokens(kept.tokens, held) == len(held):
                self._kept.sort(key=lambda other: other is kept)
                return []
        lanes = self._free_lanes()
        frames: list[OutFrame] = []
        for kept in self._kept_like(session):
            if common_tokens(kept.tokens, held) == len(kept.tokens):  # an earlier turn
                frames += self._drop(kept)
        if len(self._kept) >= self.n_max:
            frames += self._retire(self._kept[0])
        free = [lane for lane in lanes if lane not in self.lanes]
        if not free and self._kept:
            frames += self._retire(self._kept[0])
            free = [lane for lane in lanes if lane not in self.lanes]
        if not free:
            return [*frames, *self.tier.store(session, len(held), key)]
        own = session.request
        request = GenerationRequest("", tuple(held), 1, SamplingParams(), adapter=own.adapter, circle=own.circle)
        lane = free[-1]  # running ones take the lowest
        copy = Session(next(self._session_ids), request, lambda _: False, lane=lane, kept_key=key)
        self._kept.append(Kept(copy, lane))
        return [*frames, *copy.start(), *copy.continue_from(session, len(held))]

    def refused(self, session_ids: Collection[int], *, is_full: bool) -> list[OutFrame]:
        """Handle a frame that a stage refused, perhaps because of the lane it was copied from. Returns closes.

        A lane that a stage could not keep, or no longer has, must not be copied: another coordinator may have taken it.
        When running sessions lack room, kept lanes go first.
        """
        for session_id in session_ids:
            self.tier.refused(session_id)
        refused = [kept for kept in self._kept if is_full or kept.session.session_id in session_ids]
        return [frame for kept in refused for frame in self._drop(kept)]

    def lost(self, keys: Iterable[int]) -> list[OutFrame]:
        """A stage does not have these stored prefixes. Returns frames that let the others forget them."""
        return [
            OutFrame(Session(next(self._session_ids), _NOBODYS, lambda _: False), 0, (), Flag.STORE, key)
            for key in keys
            if self.tier.lost(key)
        ]

    def renew(
        self,
        n_lanes: int,
        *,
        is_per_lane: bool,
        left_rows: Mapping[int, int] = MappingProxyType({}),
        keeps_state: bool = False,
        tier: TierFacts = NO_TIER,
        read_ns: Callable[[int], float] = lambda _: 0.0,
    ) -> None:
        """Begin a new epoch with this number of lanes. Kept lanes are forgotten; sessions resume from `left_rows`.

        `left_rows` maps every session that a stage knows to the number of its tokens that all stages hold.

        Without a configured number, half of the lanes may be kept if each lane has its own KV cells. Streams then take
        the lower half, so streams of one flight have neighbouring lanes. If lanes share their cells, none is kept:
        every row would attend over the kept cells too.
        """
        self.tier.renew(tier, read_ns, kept=self._stored_by_stages(), keeps_state=keeps_state)
        self._kept.clear()
        self._left_rows, self._keeps_state = dict(left_rows), keeps_state
        if self._n_asked is None:
            self.n_max = n_lanes // 2 if is_per_lane else 0

    def _stored_by_stages(self) -> list[Stored]:
        """Return what stages store by themselves when an epoch ends."""
        named = [(kept.session.kept_key, kept) for kept in self._kept if kept.session.kept_key]
        return [
            Stored(
                key,
                len(kept.tokens),
                array("i", kept.tokens),
                tuple(kept.session.checkpoints),
                cells=kept.session.request.cells,
            )
            for key, kept in named
        ]

    def known_keys(self) -> frozenset[int]:
        """Return the keys of stored prefixes on which no notes are wanted."""
        return self.tier.keys() | {kept.session.kept_key for kept in self._kept if kept.session.kept_key}

    def left_behind(self, going_on: Iterable[Session]) -> list[OutFrame]:
        """Return closes for all lanes held from the last epoch, except those of these sessions, which start now."""
        wanted = {session.session_id for session in going_on}
        closed = [key for key, n_tokens in self._left_rows.items() if key not in wanted or not n_tokens]
        for key in closed:
            del self._left_rows[key]
        return [OutFrame(Session(key, _NOBODYS, lambda _: False), 0, (), Flag.CLOSE) for key in closed]

    def _longest(
        self, session: Session, sources: Iterable[Session], *, is_held: bool = False
    ) -> tuple[Session | None, int]:
        """Return the source with the longest common beginning, and its length in tokens; None if no source has one.

        `is_held` counts only tokens that the sources hold already. A source that decodes is always counted so: after a
        restart it may hold fewer tokens than its history has, and it reads no more of them. Where stages keep a
        recurrent state, a beginning ends at a checkpoint that they have, or will have.
        """
        if not session.request.cache_prompt or session.replays:  # after its own failure it computes everything itself
            return None, 0
        known = session.history[:-1]  # the last token is read in any case, for what follows it
        best, n_best = None, PREFIX_TOKENS_MIN - 1
        for source in sources:
            if not _hold_alike(source, session):
                continue
            if n_best >= len(known) or source.history[n_best : n_best + 1] != known[n_best : n_best + 1]:
                continue  # no better, and comparing long histories takes its time
            n_common = common_tokens(source.history, known)
            holds = is_held or source.state is State.DECODE
            if holds:
                n_common = min(n_common, source.n_held)
            if self._keeps_state:
                n_common = nearest(source, n_common, is_held=holds)
            n_common = session.request.whole_until(n_common)
            if n_common > n_best:
                best, n_best = source, n_common
        return (best, n_best) if best is not None else (None, 0)

    def _kept_like(self, session: Session) -> list[Kept]:
        """Return the kept lanes whose rows could serve the session."""
        return [kept for kept in self._kept if _hold_alike(kept.session, session)]

    def _retire(self, kept: Kept) -> list[OutFrame]:
        """Give up a kept lane; its tokens go to the stages' tier."""
        return [*self.tier.store(kept.session, len(kept.tokens), kept.session.kept_key or 0), *self._drop(kept)]

    def _drop(self, kept: Kept) -> list[OutFrame]:
        self._kept.remove(kept)
        return kept.session.cancel()


def _hold_alike(one: Session, other: Session) -> bool:
    """Return whether equal tokens of two sessions have equal cells, which may serve both."""
    return one.request.cells == other.request.cells


def held_by_all(held: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Return of every session that any stage knows how many tokens all of them hold.

    `held` has, for each stage, the sessions of the last epoch: {session id: tokens of its history}.
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
