"""Notes on stored prefixes, on their way to stage 0: each call takes all that wait. Event loop only.

They are of use to coordinators that come later. So nothing waits for them, and what does not arrive is not sent again.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Mapping

from relayline.coordinator.engine.stage_client import StageClient
from relayline.wire.common.bounds import NOTE_BYTES_MAX, STORED_STATES_MAX, UNARY_BYTES_MAX

_HEAD_BYTES = 32  # of one note in a message
CALL_NOTES_BYTES = (
    UNARY_BYTES_MAX - NOTE_BYTES_MAX - _HEAD_BYTES
)  # a call that has reached so many takes no further one


class Noting:
    """The notes of one epoch."""

    def __init__(self, stage: StageClient) -> None:
        self._stage = stage
        self._waiting: collections.OrderedDict[int, bytes] = collections.OrderedDict()
        self._wake, self._calling = asyncio.Event(), asyncio.Lock()

    def push(self, notes: Mapping[int, bytes]) -> None:
        """Send notes, by key, when those before them have gone."""
        self._waiting.update(notes)
        while len(self._waiting) > STORED_STATES_MAX:
            self._waiting.popitem(last=False)
        self._wake.set()

    async def keep(self) -> None:
        """Send, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._send()

    async def flush(self, timeout_s: float) -> None:
        """Wait until what was pushed has arrived, so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._send()

    async def _send(self) -> None:
        async with self._calling:
            while self._waiting:
                call: dict[int, bytes] = {}
                n_bytes = 0
                while self._waiting and n_bytes < CALL_NOTES_BYTES:
                    key, note = self._waiting.popitem(last=False)
                    call[key] = note
                    n_bytes += len(note) + _HEAD_BYTES
                await self._stage.note(call)
