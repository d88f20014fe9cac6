"""A channel on which gRPC loses the reason of a refusal."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio


class CutShort:
    """A channel whose first calls end while they are written to: grpc.aio says so of a call refused at that moment."""

    def __init__(self, channel: grpc.aio.Channel, n_calls: int) -> None:
        self._channel, self.n_left = channel, n_calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        call = self._channel.stream_stream(*args, **options)
        if self.n_left == 0:
            return call
        self.n_left -= 1
        return lambda **_: self

    def add_done_callback(self, _: Any) -> None:
        """Never end before the message."""

    async def write(self, _: bytes) -> None:
        reason = 'Failed "execute_batch": (<grpc._cython.cygrpc.SendMessageOperation object at 0x7f5b>,)'
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, "Internal error from Core", reason)
