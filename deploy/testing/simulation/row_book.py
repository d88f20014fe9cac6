"""The book of rows: which tokens of each session have left, so that none is left out and none is sent twice."""

from __future__ import annotations

from relayline.coordinator.sessions.session import OutFrame
from relayline.deploy.testing.simulation.flight_book import DECODE, GUESS, is_guess
from relayline.deploy.testing.simulation.stage import Violation


class RowBook:
    """The sent tokens of each session."""

    def __init__(self) -> None:
        self.n_drafted = 0  # guesses so far
        self._sent: dict[int, list[int]] = {}  # session id -> its sent tokens

    def left(self, frame: OutFrame, kind: int, *, has_frames: bool) -> None:
        """A frame left in a flight of this kind; `has_frames`: its session has others under way.

        Raises Violation if its rows do not follow the session's others, or repeat where no guess was wrong.
        """
        key, sent = frame.session.session_id, self._sent.setdefault(frame.session.session_id, [])
        is_new = frame.position == len(sent)
        if frame.position > len(sent) or not (is_new or sent[frame.position] != frame.tokens[0]):
            raise Violation(f"session {key} sends position {frame.position}, {len(sent)} rows have left")
        if not is_new and (frame.session.acceptance is None or kind != DECODE):
            raise Violation(f"session {key} sends position {frame.position} twice")
        if kind == GUESS and not (is_guess(frame) and has_frames):
            raise Violation(f"session {key} guesses at position {frame.position} without a row to follow")
        sent[frame.position :] = frame.tokens
        self.n_drafted += frame.n_drafted
