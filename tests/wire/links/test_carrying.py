"""Goal: whatever ends a tunnel's connection, nothing of it is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import types

from relayline.wire.links.carrying import Carried, End, carry
from relayline.wire.pb.relayline.v1 import tunnel_pb2 as pb
from tests.support.polling import pause


class StuckCall:
    """A call whose reads and writes end some time after they were cancelled, as gRPC's do."""

    def __init__(self) -> None:
        self.n_inside = 0
        self.may_end = asyncio.Event()

    async def read(self) -> object:
        return await self._stay()

    async def write(self, _: bytes) -> None:
        await self._stay()

    async def _stay(self) -> None:
        self.n_inside += 1
        try:
            await asyncio.Event().wait()
        finally:
            await self.may_end.wait()
            self.n_inside -= 1


async def test_one_that_is_cancelled_twice_ends_both_its_ways() -> None:
    call, reader = StuckCall(), asyncio.StreamReader()
    reader.feed_data(b"x")
    end = End(pb.CarryResponse, pb.CarryRequest, "to_stage_bytes", "from_stage_bytes")
    carrying = asyncio.create_task(carry(call, end, reader, types.SimpleNamespace(), Carried()))  # type: ignore[arg-type]
    while call.n_inside < 2:
        await pause()
    for _ in range(2):
        carrying.cancel()
        await pause()
    call.may_end.set()
    with contextlib.suppress(asyncio.CancelledError):
        await carrying
    assert call.n_inside == 0
