"""Who may run now, who waits, who is told to come back. Pure.

Lanes are counted here exactly as the stages count them: a lane is free again once its close has been sent, because
closes travel in order with the next open on the same stream.
"""

from __future__ import annotations

import collections

from coordinator.session import Session
from wire.errors import ContextLengthError, OverloadedError


class Admission:
    """Lanes of the pipeline and the bounded line before them."""

    def __init__(self, n_lanes: int, ctx_tokens: int, waiting_max: int) -> None:
        self.n_lanes, self.ctx_tokens, self.waiting_max = n_lanes, ctx_tokens, waiting_max
        self.running: dict[int, Session] = {}
        self.waiting: collections.deque[Session] = collections.deque()

    def admit(self, session: Session) -> bool:
        """Take the session in; True when it has a lane, False when it waits for one.

        Raises ContextLengthError (it can never fit) or OverloadedError (no room in the line).
        """
        request = session.request
        n_prompt = len(request.prompt_tokens)
        if n_prompt + request.max_tokens > self.ctx_tokens:
            raise ContextLengthError(
                f"This model's maximum context length is {self.ctx_tokens} tokens, but {n_prompt + request.max_tokens} "
                f"were requested ({n_prompt} in the prompt, {request.max_tokens} for the completion)"
            )
        if len(self.running) < self.n_lanes:
            self.running[session.session_id] = session
            return True
        if len(self.waiting) >= self.waiting_max:
            raise OverloadedError(
                f"all {self.n_lanes} lanes are taken and {len(self.waiting)} requests already wait; try again shortly"
            )
        self.waiting.append(session)
        return False

    def leave(self, session: Session) -> Session | None:
        """Take the session out, wherever it stands. Returns the waiting session that gets its lane, if any."""
        if self.running.pop(session.session_id, None) is None:
            if session in self.waiting:
                self.waiting.remove(session)
            return None
        if not self.waiting or len(self.running) >= self.n_lanes:  # a stage may have come back with fewer lanes
            return None
        following = self.waiting.popleft()
        self.running[following.session_id] = following
        return following
