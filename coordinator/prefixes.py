"""What ended sessions computed, kept in spare lanes for prompts that begin alike: the next turn of a chat. Pure.

A session that ends gives its lane back as ever. Before, what it holds is copied at every stage into a
lane that nobody uses, under an id of its own that no client knows; a later prompt that begins with the same tokens
copies that and is read from there on. Open, copy and close travel in band, so that all stages hold the same.

Kept lanes yield to whoever needs them, the one longest unused first. A new epoch forgets them all: the stages do, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

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
        n_max: int,
        session_ids: Iterator[int],
        free_lanes: Callable[[], Sequence[int]],
        noted: Callable[[int, int], None],
    ) -> None:
        """Keep at most n_max lanes, each as a session of its own.

        free_lanes() are those that no running session has, ascending. noted(n_asked, n_copied) hears of every prompt:
        its tokens, and those of them that are copied.
        """
        self.n_max, self._session_ids, self._free_lanes, self._noted = n_max, session_ids, free_lanes, noted
        self._kept: list[Kept] = []

    @property
    def lanes(self) -> list[int]:
        """The kept lanes, the one longest unused first."""
        return [kept.lane for kept in self._kept]

    def figures(self) -> dict[str, int]:
        """Return what is kept, for GET /v1/pipeline."""
        return {"lanes": len(self._kept), "tokens": sum(len(kept.tokens) for kept in self._kept)}

    def start(self, session: Session) -> list[OutFrame]:
        """Start a session that has a lane; returns its first frames, behind the close of a kept lane that it takes."""
        frames = [frame for kept in list(self._kept) if kept.lane == session.lane for frame in self._drop(kept)]
        frames += session.start()
        if not self.n_max or session.replays:  # after a fault of its own it reads everything itself
            return frames
        known = session.history[:-1]  # the last token is read in any case, for what follows it
        shared = ((common_tokens(kept.tokens, known), kept) for kept in self._kept)
        n_common, source = max(shared, key=lambda found: found[0], default=(0, None))
        if source is None or n_common < PREFIX_TOKENS_MIN:
            self._noted(len(session.history), 0)
            return frames
        self._noted(len(session.history), n_common)
        self._kept.remove(source)
        self._kept.append(source)  # used last
        return frames + session.continue_from(source.session, n_common)

    def keep(self, session: Session) -> list[OutFrame]:
        """Keep what a session that ends now holds, if there is a lane for it besides its own.

        Returns the frames that do it; they go before the session's close. Who ends in the middle of its prompt leaves
        nothing: which rows of it the stages have is not known.
        """
        held = session.history[:-1]  # the last token was sampled; nobody has said that its row was computed
        if session.state not in (State.DECODE, State.DONE) or len(held) < PREFIX_TOKENS_MIN or not self.n_max:
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
        copy = Session(next(self._session_ids), request, lambda _: False, lane=free[-1])  # running ones take the lowest
        self._kept.append(Kept(copy, copy.lane))
        return [*frames, *copy.start(), *copy.continue_from(session, len(held))]

    def refused(self, session_id: int, *, is_full: bool) -> list[OutFrame]:
        """A stage refused something of a session. Returns the frames that give lanes back.

        Nobody may copy what a stage could not keep; and where its lanes are all taken, as by another coordinator, those
        that are only kept are the first to go.
        """
        refused = [kept for kept in self._kept if is_full or kept.session.session_id == session_id]
        return [frame for kept in refused for frame in self._drop(kept)]

    def forget(self) -> None:
        """A new epoch begins."""
        self._kept.clear()

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
