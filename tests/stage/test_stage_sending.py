"""The order in which a stage's results leave it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from relayline.stage.routes import Route
from relayline.stage.steps.step_types import RouteOutput, StepResult
from relayline.wire.common.errors import StageLostError
from relayline.wire.envelopes.buffers import Buffer
from relayline.wire.envelopes.dtypes import DTYPE_F32
from relayline.wire.links.relay_link import RelayLink
from tests.support.fakes import EPOCH, ROUTE, step_of
from tests.support.served_stage import served


class SlowLink:
    """A fake RelayLink: takes each envelope when the test allows it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.lets: asyncio.Queue[None] = asyncio.Queue()
        self.refuses = False

    async def send(self, buffer: Buffer, message: bytes) -> None:
        self.log.append(f"begin {message.decode()}")
        if self.refuses:
            raise StageLostError("gone")
        await self.lets.get()
        self.log.append(f"end {message.decode()}")

    def figures(self) -> dict[str, int]:
        return {"in_flight_bytes": 0, "window_bytes": 0}

    async def close(self) -> None:
        """Nothing to close."""


def result_with(name: str) -> StepResult:
    output = RouteOutput(ROUTE, EPOCH, Buffer(DTYPE_F32, 4, 1, 1), name.encode())
    return StepResult(step_of(), [output], [], [])


async def test_an_envelope_is_on_its_way_before_the_loop_turns_and_the_next_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(0, 2) as stage:
        link, sent = SlowLink(), asyncio.Queue[None]()
        monkeypatch.setattr(stage.service.runner, "sent", lambda: sent.put_nowait(None))
        stage.service.epochs.routes[ROUTE] = Route(ROUTE, EPOCH, 0, cast(RelayLink, link))
        stage.service.outbound.deliver(result_with("a"))
        assert link.log == ["begin a"]
        stage.service.outbound.deliver(result_with("b"))
        stage.service.outbound.deliver(result_with("c"))
        for _ in range(3):
            await asyncio.sleep(0)
        assert (link.log, sent.qsize()) == (["begin a"], 0)
        for n_sent, let in enumerate(("a", "b", "c"), start=1):
            link.lets.put_nowait(None)
            async with asyncio.timeout(20):
                await sent.get()
            assert link.log[2 * n_sent - 2 : 2 * n_sent] == [f"begin {let}", f"end {let}"]
        stage.service.outbound.deliver(result_with("d"))
        assert link.log[-1] == "begin d", "the way is free again"
        link.lets.put_nowait(None)
        async with asyncio.timeout(20):
            await sent.get()
        stats = stage.service.outbound._stats
        assert (stats.envelopes["out"], stats.payload_bytes["out"]) == (4, 4 * 16)


async def test_a_link_lost_at_once_is_reported_and_blocks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(0, 2) as stage:
        link, sent = SlowLink(), asyncio.Queue[None]()
        link.refuses = True
        monkeypatch.setattr(stage.service.runner, "sent", lambda: sent.put_nowait(None))
        lost: list[Any] = []
        monkeypatch.setattr(Route, "report_lost", lambda route, error: lost.append(error.message))
        stage.service.epochs.routes[ROUTE] = Route(ROUTE, EPOCH, 0, cast(RelayLink, link))
        for name in ("a", "b"):
            stage.service.outbound.deliver(result_with(name))
            async with asyncio.timeout(20):
                await sent.get()
        assert lost == ["gone", "gone"]
        assert stage.service.outbound._stats.envelopes["out"] == 0
