"""Messages to stage 0 in one epoch: the codec of coordinator.engine.token_sender over a simulated link."""

from __future__ import annotations

from collections.abc import Sequence

from relayline.coordinator.engine.token_sender import within_bounds, write_tokens
from relayline.coordinator.sessions.frame import Frame
from relayline.coordinator.sessions.request_log import UNKNOWN
from relayline.deploy.testing.cluster.link import Link
from relayline.deploy.testing.cluster.model import WIDTH
from relayline.wire.envelopes import trace_context
from relayline.wire.envelopes.buffers import BufferPool
from relayline.wire.envelopes.dtypes import DTYPE_F32, DTYPE_TOKENS


class Sender:
    """Numbers and writes the envelopes of one epoch."""

    def __init__(self, link: Link, epoch: int) -> None:
        self.link, self._epoch = link, epoch
        self._pools, self._sequence = (BufferPool(DTYPE_TOKENS, 1), BufferPool(DTYPE_F32, WIDTH)), 0

    def send(self, frames: Sequence[Frame], now_ns: int) -> None:
        """Send frames as one envelope, or as several if they do not fit."""
        for envelope in within_bounds(frames):
            self._sequence += 1
            pool = self._pools[envelope[0].rows is not None]
            buffer = pool.lease(len(envelope), sum(len(frame.tokens) for frame in envelope))
            message = write_tokens(
                buffer, envelope, self._epoch, self._sequence, trace_context.NONE, lambda session_id: UNKNOWN, now_ns
            )
            self.link.send(bytes(bytearray(message)))  # the buffer reuses its bytes
            pool.give_back(buffer)
