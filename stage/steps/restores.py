"""Sessions whose state is on the disk alone wait until it has been read; the decode thread never does. Event loop only.

Everything of such a session waits in its order behind the frame that wants the state; who copies from it waits too.
Others go on. A close ends the wait: the state is no longer wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future

from relayline.stage.queue_types import QueuedFrame
from relayline.wire.envelopes.frames import Flag


class Restores:
    """The frames that wait for the disk."""

    def __init__(self, begin: Callable[[int], Future[None] | None], push: Callable[[list[QueuedFrame]], None]) -> None:
        """`begin(key)` begins to read a state, None where nothing need be waited for; `push` takes what waited."""
        self._begin, self._push = begin, push
        self._waiting: dict[tuple[int, int], list[QueuedFrame]] = {}  # who copies from one another share a list

    def sift(self, frames: list[QueuedFrame]) -> list[QueuedFrame]:
        """Return the frames that may continue now, in order; the others follow once their states have been read."""
        if not self._waiting and not any(frame.flags & Flag.RESTORE for frame in frames if not frame.n_rows):
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
                waiting = self._opened(key, frame.argument)
            if waiting is None:
                going.append(frame)
            else:
                waiting.append(frame)
        return going

    def drop_route(self, route_id: int) -> None:
        """Drop the waiting restores of a route's sessions."""
        self._waiting = {key: frames for key, frames in self._waiting.items() if key[0] != route_id}

    def _opened(self, key: tuple[int, int], argument: int) -> list[QueuedFrame] | None:
        future = self._begin(argument)
        if future is None:
            return None
        frames: list[QueuedFrame] = []
        self._waiting[key] = frames
        loop = asyncio.get_running_loop()

        def was_read(_: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # the stage has ended meanwhile
                loop.call_soon_threadsafe(self._release, frames)

        future.add_done_callback(was_read)
        return frames

    def _release(self, frames: list[QueuedFrame]) -> None:
        if any(waiting is frames for waiting in self._waiting.values()) and self._end(frames):
            self._push(frames)

    def _end(self, frames: list[QueuedFrame]) -> list[QueuedFrame]:
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if waiting is not frames}
        return frames
