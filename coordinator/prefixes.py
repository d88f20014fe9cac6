"""What ended sessions computed, kept in spare lanes for prompts that begin alike: the next turn of a chat. Pure.

A session that ends gives its lane back as ever. Before, what it holds is copied at every stage into a lane that nobody
uses, under an id of its own that no client knows; a later prompt that begins with the same tokens copies that and is
read from there on. Open, copy and close travel in band, so that all stages hold the same.

Kept lanes yield to whoever needs them, the one longest unused first: this coordinator's streams take them by name, and
stages give them to another's that would find none, after which copies from there are refused and all is read. A new
epoch forgets them all: the stages do, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence

from coordinator.generation import GenerationRequest, SamplingParams
from coordinator.session import OutFrame, Session, State

PREFIX_TOKENS_MIN = 32  # a shorter one is read again in about the time that copying and the frames for it take


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
    ) -> None:
        """Keep at most n_max lanes, each as a session of its own; None leaves the number to each epoch, see `renew`.

        free_lanes() are those that no running session has, ascending.
        """
        self._n_asked, self._session_ids, self._free_lanes = n_max, session_ids, free_lanes
        self.n_max = n_max or 0
        self._kept: list[Kept] = []

    @property
    def lanes(self) -> list[int]:
        """The kept lanes, the one longest unused first."""
        return [kept.lane for kept in self._kept]

    def lanes_before(self, session: Session) -> list[int]:
        """Return the kept lanes in the order in which the session may take them: what it would copy is the last."""
        source, _ = self._longest(session)
        return sorted(self.lanes, key=lambda lane: source is not None and lane == source.lane)

    def figures(self) -> dict[str, int]:
        """Return what is kept, for GET /v1/pipeline."""
        return {"lanes": len(self._kept), "tokens": sum(len(kept.tokens) for kept in self._kept)}

    def start(self, session: Session) -> list[OutFrame]:
        """Start a session that has a lane; returns its first frames, behind the close of a kept lane that it takes."""
        frames = [frame for kept in list(self._kept) if kept.lane == session.lane for frame in self._drop(kept)]
        frames += session.start()
        source, n_common = self._longest(session)
        if source is None:
            return frames
        self._used(source)
        return frames + session.continue_from(source.session, n_common)

    def _longest(self, session: Session) -> tuple[Kept | None, int]:
        """Return what begins like the session's history for longest, and for how many tokens; None: nothing does."""
        if not session.request.cache_prompt or session.replays:  # after a fault of its own it reads everything itself
            return None, 0
        known = session.history[:-1]  # the last token is read in any case, for what follows it
        shared = ((common_tokens(kept.tokens, known), kept) for kept in self._kept)
        n_common, source = max(shared, key=lambda found: found[0], default=(0, None))
        return (source, n_common) if n_common >= PREFIX_TOKENS_MIN else (None, 0)

    def _used(self, kept: Kept) -> None:
        self._kept.remove(kept)
        self._kept.append(kept)

    def keep(self, session: Session) -> list[OutFrame]:
        """Keep what a session that ends now holds, if there is a lane for it besides its own.

        Returns the frames that do it; they go before the session's close. Who ends in the middle of its prompt leaves
        nothing: which rows of it the stages have is not known.
        """
        held = session.history[:-1]  # the last token was sampled; nobody has said that its row was computed
        is_computed = session.state in (State.DECODE, State.DONE) and len(held) >= PREFIX_TOKENS_MIN
        if not (is_computed and self.n_max and session.request.cache_prompt):
            return []
        for kept in self._kept:
            if common_tokens(kept.tokens, held) == len(held):
                self._used(kept)
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

    def renew(self, n_lanes: int, *, is_per_lane: bool) -> None:
        """A new epoch begins with so many lanes: nothing is kept.

        Where nobody said how many may be, half of them may where lanes have KV cells of their own: streams take the
        lower half, and those that travel together have neighbouring lanes. Where lanes share their cells, every row is
        held against those of kept lanes too, and none may be.
        """
        self._kept.clear()
        if self._n_asked is None:
            self.n_max = n_lanes // 2 if is_per_lane else 0

    def _drop(self, kept: Kept) -> list[OutFrame]:
        self._kept.remove(kept)
        return kept.session.cancel()


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
