"""The book of prompts: which wait at the coordinator, and which of them gives the next chunk."""

from __future__ import annotations

from relayline.coordinator.schedule.prompt_line import OLDEST_EVERY
from relayline.deploy.testing.simulation.stage import Violation


class PromptBook:
    """Sessions with prompt rows that have not left, oldest first."""

    def __init__(self) -> None:
        self._waiting: dict[int, None] = {}  # session ids
        self._chunk_left_ns = 0  # or since the first waiting prompt came
        self._chunks_since_oldest = 0

    def came(self, session_id: int, now_ns: int) -> None:
        """A session's prompt was handed to the scheduler."""
        if not self._waiting:
            self._chunk_left_ns = now_ns
        self._waiting[session_id] = None

    def chunk_left(self, session_id: int, now_ns: int, *, is_last: bool) -> None:
        """A chunk left, the last of its prompt or not. Raises Violation if the oldest prompt is passed over."""
        oldest = next(iter(self._waiting), None)
        self._chunk_left_ns = now_ns
        self._chunks_since_oldest = 0 if session_id == oldest else self._chunks_since_oldest + 1
        if self._chunks_since_oldest > OLDEST_EVERY:
            raise Violation(f"the oldest prompt, session {oldest}, is passed over")
        if is_last:
            self.over(session_id)

    def over(self, session_id: int) -> None:
        """A prompt has left as a whole, or its session has ended."""
        self._waiting.pop(session_id, None)

    def waited_ns(self, now_ns: int) -> int:
        """Return for how long prompts have waited without a chunk that left; 0 if none waits."""
        return now_ns - self._chunk_left_ns if self._waiting else 0
