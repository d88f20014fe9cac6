"""Whether a flight that could leave waits for guesses that a model makes at this moment. Pure.

A token that was guessed wrong, or not at all, leaves the model without guesses for what follows. Its next one comes
soon. Where a step costs much more than a guess, the row had better wait for some: they then share its step. The curves
and the model's own pace decide (`draft_plan.waits_for`), anew with each guess that comes. A wait ends by itself after
WAIT_STRETCH times what was expected: the model may be slow, or gone. Then no row waits for it until it is heard again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relayline.coordinator.schedule.draft_plan import WAIT_GUESSES_MAX, Traffic, waits_for
from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.coordinator.sessions.session import OutFrame, Session
from relayline.wire.common.bounds import DRAFT_AHEAD_MAX, DRAFT_STREAMS_MAX

WAIT_STRETCH = 3.0


class GuessWait:
    """Of one epoch."""

    def __init__(self) -> None:
        self._row: tuple[int, int] | None = None  # session and position of the row that waits
        self._asked: tuple[Any, ...] | None = None  # what was decided last, and the answer
        self._n_guesses = 0
        self._n_known = 0  # guesses of its flight, the most that there were
        self._until_ns = 0
        self.left_ns = 0
        """How long the row waits at most from now on, as decided last; 0: none waits."""
        self.longest_ns = 0.0
        """How long a flight of one row waits at most in all, as decided last."""

    def holds(self, frames: Sequence[OutFrame], planner: GroupPlanner, traffic: Traffic, now_ns: int) -> bool:
        """Return whether a flight of these frames waits."""
        if len(frames) > DRAFT_STREAMS_MAX or not planner.is_known:
            return False
        coming = [_coming(frame.session) for frame in frames]
        guess_ns = max(takes_ns for _, takes_ns in coming)
        if not guess_ns:
            return False
        chances = [frame.session.chances(DRAFT_AHEAD_MAX) for frame in frames]
        row, n_known = (frames[0].session.session_id, frames[0].position), sum(map(len, chances))
        asked = (row, planner, traffic, coming, chances)
        if asked != self._asked:  # else the scheduler looks again, and nothing has changed
            self._asked = asked
            self._n_guesses = waits_for(planner, chances, traffic, [chance for chance, _ in coming], guess_ns)
        n_guesses = self._n_guesses
        if not n_guesses:
            return False
        if row != self._row or n_known > self._n_known:
            self._row, self._n_known = row, n_known
            self._until_ns = now_ns + int(WAIT_STRETCH * n_guesses * guess_ns)
        self.longest_ns = WAIT_STRETCH * WAIT_GUESSES_MAX * (WAIT_GUESSES_MAX + 1) / 2 * guess_ns
        self.left_ns = max(0, self._until_ns - now_ns)
        if not self.left_ns:
            _give_up(frames)
        return self.left_ns > 0


def _give_up(frames: Sequence[OutFrame]) -> None:
    for frame in frames:
        if frame.session.guesses is not None and frame.session.guesses.told is not None:
            frame.session.guesses.told.give_up()


def _coming(session: Session) -> tuple[float, float]:
    """Return as `Guesses.coming`."""
    return session.guesses.coming() if session.guesses is not None else (0.0, 0.0)
