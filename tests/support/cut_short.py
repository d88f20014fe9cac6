"""A channel on which gRPC loses the reason of a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio


def cut_short() -> grpc.aio.AioRpcError:
    """Return the error of a write to a call that has just been refused."""
    reason = 'Failed "execute_batch": (<grpc._cython.cygrpc.SendMessageOperation object at 0x7f5b>,)'
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, "Internal error from Core", reason)


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
        raise cut_short()


class Crossing:
    """A channel on which each refusal comes just as the first message is written, unless one waits for it before."""

    def __init__(self) -> None:
        self.n_calls, self.has_ended = 0, False

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        self.n_calls, self.has_ended = self.n_calls + 1, False
        return lambda **_: self

    def add_done_callback(self, told: Callable[[Any], None]) -> None:
        self.has_ended = True
        told(self)

    async def write(self, _: bytes) -> None:
        raise asyncio.InvalidStateError if self.has_ended else cut_short()

    async def read(self) -> bytes:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAUTHENTICATED, nothing, nothing, "not you")
