"""Holds frames back until their grammars are ready and their stored prefixes were read. Event loop only."""

from __future__ import annotations

from collections.abc import Callable

from relayline.stage.queue_types import QueuedFrame
from relayline.stage.sampling.grammars import Holds
from relayline.stage.steps.restores import Restores
from relayline.stage.steps.sessions import Sessions


class Gate:
    """The frames of a stage that wait before its queue."""

    def __init__(self, sessions: Sessions, push: Callable[[list[QueuedFrame]], None]) -> None:
        """`push` takes frames that have waited."""
        self._restores = Restores(sessions.begin_restore, push, sessions.begin_fill)
        self._holds = Holds(sessions.begin_grammar, lambda frames: push(self._restores.sift(frames)))

    def sift(self, frames: list[QueuedFrame], *, opens: bool) -> list[QueuedFrame]:
        """Return the frames that may continue now, in order. `opens`: whether some bring a session's options."""
        return self._restores.sift(self._holds.sift(frames) if opens or self._holds else frames)

    def session_ids(self, route_id: int) -> set[int]:
        """Return the sessions of a route whose lanes are not filled yet."""
        return self._restores.session_ids(route_id)

    def drop_route(self, route_id: int) -> None:
        """Drop the waiting frames of a route's sessions."""
        self._holds.drop_route(route_id)
        self._restores.drop_route(route_id)
