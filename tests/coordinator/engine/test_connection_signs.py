"""While the coordinator waits for one stage, the others count as alive: none may be reported as silent."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from relayline.coordinator.engine.connection import Connection, EpochEvents, EpochTerms, Peers
from relayline.coordinator.engine.heartbeat import Heartbeat
from relayline.coordinator.engine.stage_client import StageClient
from relayline.wire.common import bounds
from relayline.wire.common.errors import StageLostError
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.fakes import WIDTH, pipeline_file
from tests.support.served_stage import served

WAIT_S = 60


async def opened(addresses: list[str], heard: Any) -> None:
    unread: Any = None  # the pipeline is not looked at before every stage has answered
    events = EpochEvents(lambda message: None, lambda error: None, heard)
    await Connection.open(Peers(addresses), unread, EpochTerms(1, 1, pb.DTYPE_F32), events)


async def test_a_stage_that_is_gone_silences_no_other() -> None:
    heard: list[int] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nothing listens
        async with served() as stage:
            with pytest.raises(StageLostError) as raised:
                await opened([f"127.0.0.1:{taken.getsockname()[1]}", stage.address], heard.append)
    assert heard == [1]
    assert raised.value.__cause__ is not raised.value, "a chain of causes without an end"


async def test_a_stage_that_hangs_silences_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "BEAT_EVERY_S", 0.0)
    heard: list[int] = []
    thrice = asyncio.Event()

    def note(index: int) -> None:
        heard.append(index)
        if len(heard) == 3:
            thrice.set()

    with socket.create_server(("127.0.0.1", 0)) as hung:  # its connections are taken by the kernel, and no more
        async with served() as stage, asyncio.timeout(WAIT_S):
            opening = asyncio.create_task(opened([f"127.0.0.1:{hung.getsockname()[1]}", stage.address], note))
            await thrice.wait()
            assert not opening.done(), "it keeps asking the one that hangs"
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
    assert set(heard) == {1}


async def test_an_epoch_given_up_at_its_first_beats_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link stands by then, and what lasts as long as the link runs."""
    beating = asyncio.Event()

    async def beat(_: Heartbeat) -> None:
        beating.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Heartbeat, "first", beat)
    async with served(0, 1) as stage, asyncio.timeout(WAIT_S):
        file = pipeline_file(1, pipeline_id=stage.artifact.pipeline_id, n_embd=WIDTH, n_vocab=stage.artifact.n_vocab)
        events = EpochEvents(lambda message: None, lambda error: None)
        peers, terms = Peers([stage.address]), EpochTerms(1, 1, pb.DTYPE_F32)
        opening = asyncio.create_task(Connection.open(peers, file, terms, events))
        await asyncio.wait({opening, asyncio.ensure_future(beating.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            opening.result()
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        running: list[Any] = [task.get_coro() for task in asyncio.all_tasks()]
        names = [coroutine.__qualname__ for coroutine in running]
        assert not [name for name in names if name.startswith(("Noting", "RelayLink"))], names


async def test_a_return_stream_that_does_not_open_ends_the_opening_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, ended = asyncio.Event(), asyncio.Event()

    async def listen(*_: object) -> None:
        if waits.is_set():
            raise StageLostError("it did not open its return stream")
        waits.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(StageClient, "listen", listen)
    async with served(0, 2) as first, served(1, 2) as last, asyncio.timeout(WAIT_S):
        known = first.artifact
        file = pipeline_file(2, pipeline_id=known.pipeline_id, n_embd=WIDTH, n_vocab=known.n_vocab)
        events = EpochEvents(lambda message: None, lambda error: None)
        with pytest.raises(StageLostError, match="return stream"):
            await Connection.open(Peers([first.address, last.address]), file, EpochTerms(1, 1, pb.DTYPE_F32), events)
    assert ended.is_set()
