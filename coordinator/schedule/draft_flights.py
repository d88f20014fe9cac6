"""The drafts of decoding streams: which go along with their rows, and which follow in separate flights. Pure.

The scheduler asks, in two places: as a decode flight is about to leave, and when nothing else does and stages would
stand idle. There are no drafts during prefill, because prompt rows already fill the stages.

A draft flight belongs to one stream, and exists only if every stream has its own flights: of a group of several those
whose guesses are right would part from the others, and flights of fewer streams leave instead of full ones. It must not
slow other streams down, so it has to fit into the stages' idle time, see `fits`.

Lanes with a recurrent state can be taken back by some rows of their last step, and no more if a step of several other
lanes came after it. So there guesses go along with rows only, and only while there are STATE_STREAMS_MAX streams:
then no such step comes but for streams that begin, and a lane that it meets is read anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relayline.coordinator.schedule.draft_plan import FOLLOWING_CHANCE_MIN, Offers, Traffic, best_counts
from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.coordinator.sessions.session import OutFrame, Session
from relayline.wire.common.bounds import DRAFT_TOKENS_MAX, DRAFTED_ROWS_MAX
from relayline.wire.settings.table import DRAFT_AUTO

STATE_STREAMS_MAX = 2  # decoding ones, whose lanes have a recurrent state: more of them may meet in a step
SHARE_MAX = 4  # times its share of a flight's guesses that one stream may have: more are not worth looking at


class DraftFlights:
    """Of one epoch."""

    def __init__(self, n_tokens: int, rewind_rows: int = 0) -> None:
        """`n_tokens` as ScheduleConfig.draft. `rewind_rows`: with recurrent states, guesses that may go with a row."""
        self._n_tokens, self._rewind_rows = n_tokens, rewind_rows
        self._offers = Offers()
        self._followed: dict[int, tuple[Session, int]] = {}  # session id -> whose next guesses may follow, and how many

    def forget(self, session_id: int) -> None:
        """No row of the session is under way any more, or its rows under way were guessed wrong."""
        self._followed.pop(session_id, None)

    def ended(self, session_id: int) -> None:
        """The session ended, however."""
        self.forget(session_id)
        self._offers.put(session_id, ())

    @property
    def may_follow(self) -> bool:
        """Whether there are streams whose guesses may follow in separate flights."""
        return bool(self._followed)

    def are_of(self, frames: Sequence[OutFrame], n_streams: int) -> bool:
        """Return whether any of these frames may take guesses along. n_streams: those that decode."""
        if self._n_tokens == 0 or (self._rewind_rows and n_streams > STATE_STREAMS_MAX):
            return False
        return any(frame.session.acceptance is not None for frame in frames)

    def extend(self, frames: Sequence[OutFrame], planner: GroupPlanner, traffic: Traffic) -> None:
        """Let guesses go along with the rows of a decode flight."""
        if self._n_tokens != DRAFT_AUTO:
            room = planner.draft_room(len(frames))
            for frame in frames:
                frame.session.extend(frame, max(0, min(self._n_tokens, room, self._longest)))
                room -= len(frame.tokens) - 1
            return
        if not planner.is_known:
            return
        n_asked = min(self._longest, SHARE_MAX * DRAFTED_ROWS_MAX // len(frames))
        chances = [frame.session.chances(n_asked + 1) for frame in frames]
        for frame in frames:
            self._offers.put(frame.session.session_id, ())
        if not any(chances):
            return
        counts = best_counts(planner, chances, traffic, self._offers)
        for frame, count, each in zip(frames, counts, chances, strict=True):
            if count:
                frame.session.extend(frame, count)
            self._offers.put(frame.session.session_id, each[:-1])
            if not self._rewind_rows:
                self._followed[frame.session.session_id] = (frame.session, 1 + count)

    @property
    def _longest(self) -> int:
        return min(DRAFT_TOKENS_MAX, self._rewind_rows or DRAFT_TOKENS_MAX)

    def following(self, fits: Callable[[int], bool]) -> OutFrame | None:
        """Return the likeliest next guesses, for stages that would stand idle; None if there are none.

        fits: whether the stages have time for a flight of this many rows.
        """
        best: Session | None = None
        chance_min, n_best = FOLLOWING_CHANCE_MIN, 0
        for session, n_tokens in self._followed.values():
            chances = session.chances(1) if fits(n_tokens) else []
            if chances and chances[0] >= chance_min and (best is None or chances[0] > chance_min):
                best, chance_min, n_best = session, chances[0], n_tokens
        return best.guess(n_best) if best is not None else None
