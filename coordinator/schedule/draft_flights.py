"""The drafts of decoding streams: which go along with their rows, and which follow in separate flights. Pure.

The scheduler asks, in two places: as a decode flight is about to leave, and when nothing else does and stages would
stand idle. There are no drafts during prefill, because prompt rows already fill the stages.

A draft flight belongs to one stream, and exists only if every stream has its own flights. In a group of several, those
whose guesses are right would part from the others, and flights of fewer streams would leave. A draft flight must not
slow other streams down, so it has to fit into the stages' idle time, see `fits`.

Lanes with a recurrent state can be taken back by some rows of their last step, and no more if a step of several other
lanes came after it. So there guesses go along with rows only, and only while there are STATE_STREAMS_MAX streams:
then no such step comes but for streams that begin, and a lane that it meets is read anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relayline.coordinator.schedule.draft_plan import FOLLOWING_CHANCE_MIN, Offers, Traffic, best_counts
from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.coordinator.sessions.session import OutFrame, Session, may_predict
from relayline.wire.common.bounds import DRAFT_TOKENS_MAX, DRAFTED_ROWS_MAX
from relayline.wire.envelopes.frames import Flag
from relayline.wire.settings.table import DRAFT_AUTO

STATE_STREAMS_MAX = 2  # decoding ones, whose lanes have a recurrent state: more of them may meet in a step
PREDICTED_STREAMS_MAX = 4  # decoding ones for which the last stage is asked to guess
VAIN_MAX = 8  # frames of a stream without any guess, before the last stage is asked rarely
ASK_AGAIN, ASK_AGAIN_FRAMES = 64, 4  # then: of so many frames, for the first ones alone
SHARE_MAX = 4  # times its share of a flight's guesses that one stream may have: more are not worth looking at


def offered(session: Session, n_tokens: int) -> list[float]:
    """Return the chances of a session's guesses as `best_counts` takes them: of n_tokens, and one more.

    Guesses of a model come one by one: behind the last one that is known stands no chance, and so it may leave.
    """
    chances = session.chances(n_tokens + 1)
    if chances and len(chances) <= n_tokens and session.guesses is not None and session.guesses.told is not None:
        chances.append(0.0)
    return chances


class DraftFlights:
    """Of one epoch."""

    def __init__(self, n_tokens: int, rewind_rows: int = 0, predictions: int = 0) -> None:
        """`n_tokens` as ScheduleConfig.draft. `rewind_rows`: with recurrent states, guesses that may go with a row.
        `predictions`: tokens that the last stage guesses behind a sample where it is asked to.
        """
        self.predicts = predictions > 0 and n_tokens != 0
        """Whether the last stage's prediction layers make guesses."""
        self._n_vain: dict[int, int] = {}  # session id -> its latest frames, one after the other, without any guess
        self._n_tokens, self._rewind_rows = n_tokens, rewind_rows
        self._offers = Offers()
        self._followed: dict[int, tuple[Session, int]] = {}  # session id -> whose next guesses may follow, and how many

    def begin(self, session: Session) -> None:
        """A session begins to read its prompt, which prediction layers hear if there are any in this epoch."""
        if session.acceptance is not None:
            session.acceptance.has_predictions = self.predicts

    def forget(self, session_id: int) -> None:
        """No row of the session is under way any more, or its rows under way were guessed wrong."""
        self._followed.pop(session_id, None)

    def ended(self, session_id: int) -> None:
        """The session ended, however."""
        self.forget(session_id)
        self._n_vain.pop(session_id, None)
        self._offers.put(session_id, ())

    @property
    def may_draft(self) -> bool:
        """Whether guesses may leave at all."""
        return self._n_tokens != 0

    @property
    def may_follow(self) -> bool:
        """Whether there are streams whose guesses may follow in separate flights."""
        return bool(self._followed)

    def are_of(self, frames: Sequence[OutFrame], n_streams: int) -> bool:
        """Return whether any of these frames may take guesses along. n_streams: those that decode."""
        if self._n_tokens == 0 or (self._rewind_rows and n_streams > STATE_STREAMS_MAX):
            return False
        return any(frame.session.acceptance is not None for frame in frames)

    def extend(self, frames: Sequence[OutFrame], planner: GroupPlanner, traffic: Traffic, n_streams: int = 1) -> None:
        """Let guesses go along with the rows of a decode flight, and ask for further ones. n_streams: that decode."""
        self._extend(frames, planner, traffic)
        if self.predicts and n_streams <= PREDICTED_STREAMS_MAX:
            for frame in frames:
                self._ask(frame)

    def _ask(self, frame: OutFrame) -> None:
        """Ask the last stage for guesses behind a frame. If none were worth a row for a while, it is asked rarely."""
        session = frame.session
        if not may_predict(session):
            return
        n_vain = 0 if len(frame.tokens) > 1 else self._n_vain.get(session.session_id, 0) + 1
        self._n_vain[session.session_id] = n_vain
        if n_vain <= VAIN_MAX or n_vain % ASK_AGAIN < ASK_AGAIN_FRAMES:
            frame.flags |= Flag.WANTS_GUESSES

    def _extend(self, frames: Sequence[OutFrame], planner: GroupPlanner, traffic: Traffic) -> None:
        if self._n_tokens != DRAFT_AUTO:
            room = planner.draft_room(len(frames))
            for frame in frames:
                frame.session.extend(frame, max(0, min(self._n_tokens, room, self._longest)))
                room -= len(frame.tokens) - 1
            return
        if not planner.is_known:
            return
        n_asked = min(self._longest, SHARE_MAX * DRAFTED_ROWS_MAX // len(frames))
        chances = [offered(frame.session, n_asked) for frame in frames]
        for frame in frames:
            self._offers.put(frame.session.session_id, ())
        if not any(chances):
            for frame in frames:
                self._expect(frame.session)
            return
        counts = best_counts(planner, chances, traffic, self._offers)
        for frame, count, each in zip(frames, counts, chances, strict=True):
            if count:
                frame.session.extend(frame, count)
            self._offers.put(frame.session.session_id, each[:-1])
            if not self._rewind_rows:
                self._followed[frame.session.session_id] = (frame.session, 1 + count)

    def _expect(self, session: Session) -> None:
        """Guesses of a session may come while its row is under way."""
        if session.guesses is not None and session.guesses.told is not None and not self._rewind_rows:
            self._followed[session.session_id] = session, 1

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
        found = best.guess(n_best) if best is not None else None
        if found is not None and may_predict(found.session):
            found.flags |= Flag.WANTS_GUESSES
        return found
