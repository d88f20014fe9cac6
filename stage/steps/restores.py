"""Sessions wait until the lane that they continue from is there; the decode thread never does. Event loop only.

A state may be on the disk alone, or still on its way into the tier: then everything of the session waits in its order
behind the frame that wants it. Or a long lane is filled in pieces, from the tier or from another lane: then that frame
continues, and what comes behind it waits. A session that copies from such a one waits too. Others go on. A close ends
the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future

from relayline.stage.queue_types import QueuedFrame
from relayline.wire.envelopes.frames import Flag

_FILLS = Flag.RESTORE | Flag.COPY_PREFIX
_Key = tuple[int, int]


class Restores:
    """The frames that wait."""

    def __init__(
        self,
        begin: Callable[[int], Future[None] | None],
        push: Callable[[list[QueuedFrame]], None],
        fill: Callable[[QueuedFrame], Future[None] | None] = lambda _: None,
    ) -> None:
        """`begin(key)` begins to read a state, `fill(control)` says when a control will have filled its lane; None
        where nothing need be waited for. `push` takes what waited.
        """
        self._begin, self._push, self._fill = begin, push, fill
        self._waiting: dict[_Key, list[QueuedFrame]] = {}  # who copies from one another share a list

    def sift(self, frames: list[QueuedFrame]) -> list[QueuedFrame]:
        """Return the frames that may continue now, in order; the others follow once they need not wait."""
        if not self._waiting and not any(frame.flags & _FILLS for frame in frames if not frame.n_rows):
            return frames
        going: list[QueuedFrame] = []
        for frame in frames:
            key = frame.session_key
            waiting = self._waiting.get(key)
            if waiting is not None and frame.flags & Flag.CLOSE:
                going += [*self._end(waiting), frame]
                continue
            if waiting is None and frame.flags & Flag.COPY_PREFIX:
                waiting = self._waiting.get((frame.route_id, frame.argument))
                if waiting is not None:
                    self._waiting[key] = waiting
            elif waiting is None and frame.flags & Flag.RESTORE:
                waiting = self._wait(key, self._begin(frame.argument))
            if waiting is not None:
                waiting.append(frame)
                continue
            going.append(frame)
            if frame.flags & _FILLS and not frame.n_rows:
                self._wait(key, self._fill(frame))
        return going

    def session_ids(self, route_id: int) -> set[int]:
        """Return the sessions of a route that wait."""
        return {session_id for route, session_id in self._waiting if route == route_id}

    def drop_route(self, route_id: int) -> None:
        """Drop the waiting frames of a route's sessions."""
        self._waiting = {key: frames for key, frames in self._waiting.items() if key[0] != route_id}

    def _wait(self, key: _Key, future: Future[None] | None) -> list[QueuedFrame] | None:
        if future is None or future.done():
            return None
        frames: list[QueuedFrame] = []
        self._waiting[key] = frames
        loop = asyncio.get_running_loop()

        def came(_: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # the stage has ended meanwhile
                loop.call_soon_threadsafe(self._release, frames)

        future.add_done_callback(came)
        return frames

    def _release(self, frames: list[QueuedFrame]) -> None:
        if any(waiting is frames for waiting in self._waiting.values()):
            going = self.sift(self._end(frames))  # they may have to wait for something else
            if going:
                self._push(going)

    def _end(self, frames: list[QueuedFrame]) -> list[QueuedFrame]:
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if waiting is not frames}
        return frames
