"""A stage and its callers on one machine: messages go by shortcuts, and mean what they mean on a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from relayline.coordinator.engine.stage_client import StageClient
from relayline.stage.routes import Listener, Route
from relayline.wire.common.errors import ProtocolError, RelaylineError, StageLostError, StaleEpochError
from relayline.wire.envelopes.returns import ReturnReader
from relayline.wire.links.relay_link import RelayLink
from relayline.wire.links.shortcut import SWITCH
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.fakes import EPOCH
from tests.support.served_stage import Coordinator, StageUnderTest, envelope_of, served
from tests.support.stage_links import prompt


@contextlib.asynccontextmanager
async def linked(stage: StageUnderTest, one: Coordinator) -> AsyncIterator[tuple[RelayLink, list[RelaylineError]]]:
    """The upstream link of a coordinator, as it makes it itself, and how it was lost."""
    await one.configure()
    await one.listen()
    lost: list[RelaylineError] = []
    link = await RelayLink.open(stage.address, one.hello(), lost.append, is_watched=False)
    try:
        yield link, lost
    finally:
        await link.close()


async def send(link: RelayLink, sequence: int, session_id: int) -> None:
    """Send an open and a prompt of this session."""
    frames = prompt(session_id)
    buffer = link.pool.lease(len(frames), sum(frame.n_rows for frame in frames))
    await link.send(buffer, envelope_of(*frames, sequence=sequence))


@pytest.mark.parametrize("has_shortcuts", [True, False])
async def test_tokens_come_the_same_by_shortcuts_and_by_streams(has_shortcuts: bool) -> None:
    async with served(has_shortcuts=has_shortcuts) as stage, Coordinator(stage) as one, linked(stage, one) as (link, _):
        assert (link._pipe is not None) is has_shortcuts
        assert (one.client._pipe is not None) is has_shortcuts
        for sequence in (1, 2):
            await send(link, sequence, session_id=sequence)
            (sample,) = (await one.reply()).samples
            assert (sample.session_id, sample.position) == (sequence, 3)
        (route,) = stage.service.epochs.routes.values()
        assert (route.envelopes_in, route.n_returned) == (2, one.client.returns.n_messages)


async def test_the_last_words_of_a_stage_are_heard_before_the_end_of_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[str] = []
    async with served() as stage, Coordinator(stage) as one:
        await one.configure()
        monkeypatch.setattr(one.returned, "put_nowait", lambda message: heard.append(message.faults[0].message))
        monkeypatch.setattr(one.lost, "set_result", lambda error: heard.append(error.message))
        await one.listen()
        assert one.client._pipe is not None
        one.client._pipe.pause()  # as while the event loop is busy
        (route,) = stage.service.epochs.routes.values()
        route.report_lost(StageLostError("the link downstream broke"))
        route.end(StaleEpochError("over"))
        assert one.client._reader is not None
        async with asyncio.timeout(20):
            await asyncio.wait({one.client._reader})
    assert heard == ["the link downstream broke", "over"]


async def test_a_message_that_is_lost_on_a_shortcut_loses_the_stage() -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.configure()
        await one.listen()
        (route,) = stage.service.epochs.routes.values()
        (listener,) = route._listeners
        listener._writer.n_messages += 1
        route.report_lost(StageLostError("never read"))
        async with asyncio.timeout(20):
            assert isinstance(await one.lost, ProtocolError)


async def test_an_end_of_the_epoch_ends_the_upstream_link_with_its_reason() -> None:
    async with served() as stage, Coordinator(stage) as one, linked(stage, one) as (link, lost):
        await send(link, 1, session_id=5)
        await one.reply()
        await one.configure(epoch=EPOCH + 1)
        async with asyncio.timeout(20):
            await asyncio.wait({link._reader})
        assert [type(error) for error in lost] == [StaleEpochError]
        with pytest.raises(StaleEpochError):
            await send(link, 2, session_id=5)


async def test_a_broken_envelope_on_a_shortcut_ends_the_link() -> None:
    async with served() as stage, Coordinator(stage) as one, linked(stage, one) as (link, lost):
        assert link._pipe is not None
        link._pipe.send(b"garbage")
        async with asyncio.timeout(20):
            await asyncio.wait({link._reader})
        assert [type(error) for error in lost] == [ProtocolError]


async def test_an_empty_message_without_a_shortcut_is_no_envelope() -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        await one.call.write(SWITCH)
        assert isinstance(await one.refusal(), ProtocolError)


async def test_an_upstream_that_leaves_ends_its_epoch() -> None:
    async with served() as stage, Coordinator(stage) as one:
        async with linked(stage, one) as (link, _):
            await send(link, 1, session_id=5)
            await one.reply()
        async with asyncio.timeout(20):
            (fault,) = (await one.reply()).faults
            assert "closed" in fault.message
            await one.lost
            await asyncio.gather(*stage.service.epochs._tasks)
        assert stage.service.epochs.routes == {}


class _Full:
    """A pipe that takes what the test allows."""

    def __init__(self) -> None:
        self.free, self.sent = asyncio.Event(), list[bytes]()
        self.free.set()

    @property
    def is_free(self) -> bool:
        return self.free.is_set()

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    async def write(self, data: bytes) -> None:
        await self.free.wait()
        self.send(data)


async def test_messages_stay_in_order_where_the_socket_is_full() -> None:
    listener = Listener(Route(1, EPOCH, 0, None))
    pipe, by_stream = _Full(), list[bytes]()
    listener._pipe = pipe  # type: ignore[assignment]

    async def write(data: bytes) -> None:
        by_stream.append(data)

    def put(epoch: int) -> None:
        listener.put(pb.ReturnResponse(epoch=epoch))

    carrying = asyncio.create_task(listener.carry(write))
    put(1)
    pipe.free.clear()
    put(2)
    for _ in range(3):  # the task has taken it, and waits
        await asyncio.sleep(0)
    pipe.free.set()
    put(3)
    assert not listener.is_idle
    listener.queue.put_nowait(None)
    async with asyncio.timeout(20):
        await carrying
    reader = ReturnReader("the stage")
    assert [reader.read(data).epoch for data in pipe.sent] == [1, 2, 3]
    assert not by_stream


async def test_a_coordinator_that_has_left_ends_its_stream() -> None:
    listener = Listener(Route(1, EPOCH, 0, None))
    pipe: Any = _Full()

    def fail(data: bytes) -> None:
        raise BrokenPipeError

    pipe.send = fail
    listener._pipe = pipe
    listener.put(pb.ReturnResponse(epoch=1))
    async with asyncio.timeout(20):
        await listener.carry(pipe.write)


async def test_a_loss_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[RelaylineError] = []

    def stumble(message: pb.ReturnResponse) -> None:
        raise ZeroDivisionError

    async with served() as stage, Coordinator(stage) as one:
        await one.configure()
        client: StageClient = one.client
        take: Callable[[pb.ReturnResponse], None] = stumble
        request = pb.ReturnRequest(route_id=one.route_id, epoch=one.epoch)
        await client.listen(request, take, told.append)
        (route,) = stage.service.epochs.routes.values()
        route.report_lost(StageLostError("first"))
        route.end(StaleEpochError("over"))
        assert client._reader is not None
        async with asyncio.timeout(20):
            await asyncio.wait({client._reader})
    assert [error.label for error in told] == ["internal"], "a bug of ours, and then the end of the stream"


async def test_a_full_queue_is_not_fed_by_shortcuts_until_a_step_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as stage, Coordinator(stage) as one, linked(stage, one) as (link, _):
        intake = stage.service.intake
        monkeypatch.setattr(type(intake), "is_full", True)
        await send(link, 1, session_id=5)
        (sample,) = (await one.reply()).samples
        assert sample.session_id == 5
        (pipe,) = intake._paused
        assert not pipe._is_reading
        await send(link, 2, session_id=6)
        monkeypatch.setattr(type(intake), "is_full", False)
        intake.stepped()
        (sample,) = (await one.reply()).samples
        assert (sample.session_id, intake._paused) == (6, set())


async def test_a_bug_in_taking_an_envelope_ends_its_link(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stumble(frames: object, *, opens: bool) -> None:
        raise ZeroDivisionError

    async with served() as stage, Coordinator(stage) as one, linked(stage, one) as (link, lost):
        monkeypatch.setattr(stage.service.intake._gate, "sift", stumble)
        await send(link, 1, session_id=5)
        async with asyncio.timeout(20):
            await asyncio.wait({link._reader})
        assert len(lost) == 1
