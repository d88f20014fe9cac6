"""The link over which the last stage sends tokens back to stage 0, for streams under a grant. Event loop only.

Opened in the background once an epoch has begun: stage 0 takes part in it last. The coordinator gives grants only after
it was told that this link stands, so an older stage 0, or one that cannot be reached, costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps.grants import returning
from relayline.wire.common.errors import InternalError, RelaylineError
from relayline.wire.common.tasks import end_task
from relayline.wire.envelopes.buffers import Buffer, with_extras
from relayline.wire.links.eager import Begun
from relayline.wire.links.relay_link import RelayLink

log = logging.getLogger("relayline.stage")

Granted = Sequence[tuple[QueuedFrame, int]]

OPEN_TRIES_MAX = 40  # until stage 0 has taken part in the epoch
OPEN_AGAIN_S = 0.05


def write_back(buffer: Buffer, granted: Granted, epoch: int, sequence: int, now_ns: int) -> bytes:
    """Write the rows that follow frames under a grant into a buffer of tokens, and return the message.

    granted: the frames, each with the token sampled behind it.
    """
    buffer.payload[:, 0] = [token for _, token in granted]
    buffer.seal(epoch, sequence, now_ns, heads=returning(granted, now_ns))
    return with_extras(buffer, None, [])


class SendingBack:
    """Sends tokens to stage 0 in one epoch.

    Bounded: a session waits for its token before it has another, and nothing is kept while no link takes it.
    """

    def __init__(
        self,
        open_link: Callable[[], Awaitable[RelayLink]],
        epoch: int,
        on_open: Callable[[], None],
        on_lost: Callable[[RelaylineError], None],
    ) -> None:
        """`on_open` is called once tokens can be sent, `on_lost` if they no longer can."""
        self._open_link, self._epoch, self._on_open, self._on_lost = open_link, epoch, on_open, on_lost
        self._link: RelayLink | None = None
        self._sequence = 0
        self._waiting: list[tuple[QueuedFrame, int]] = []
        self._begun: Begun[None] | None = None
        self._is_sending = False
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    @property
    def is_open(self) -> bool:
        """Whether tokens can be sent."""
        return self._link is not None

    def push(self, granted: Granted) -> None:
        """Send the tokens of one step. If nothing is being sent, gRPC has them before this returns.

        Without a link they are dropped: streams under a grant are then sent anew in the next epoch.
        """
        if self._link is None or self._task.done():
            return
        self._waiting += granted
        if self._begun is None and not self._is_sending:
            self._begun = Begun(self._send(self._link))
        self._wake.set()

    async def _run(self) -> None:
        try:
            self._link = await self._opened()
            if self._link is None:
                return
            self._on_open()
            while True:
                while self._begun is not None or self._waiting:
                    begun, self._begun = self._begun, None
                    self._is_sending = True
                    await (begun or self._send(self._link))
                    self._is_sending = False
                self._wake.clear()
                await self._wake.wait()
        except RelaylineError as error:
            self._on_lost(error)
        except Exception as error:  # a bug of ours: without a word, streams under grants would wait
            log.exception("sending tokens back to stage 0 failed")
            self._on_lost(InternalError(f"sending tokens back to stage 0 failed: {error}"))

    async def _opened(self) -> RelayLink | None:
        """Open the link; None if stage 0 does not take it."""
        for _ in range(OPEN_TRIES_MAX):
            try:
                return await self._open_link()
            except RelaylineError:
                await asyncio.sleep(OPEN_AGAIN_S)
        return None

    async def _send(self, link: RelayLink) -> None:
        granted, self._waiting = self._waiting, []
        self._sequence += 1
        buffer = link.pool.lease(len(granted), len(granted))
        await link.send(buffer, write_back(buffer, granted, self._epoch, self._sequence, time.monotonic_ns()))

    async def close(self) -> None:
        """Stop sending, close the link, and forget it: its route knows this sender, and this sender its route. Until
        the garbage collector found both, gRPC would keep the connection.
        """
        await end_task(self._task)
        link, self._link = self._link, None
        if link is not None:
            await link.close()
