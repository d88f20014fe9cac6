"""A stage over real gRPC with a fake engine, and its downstream neighbour: credits, loss, bounds."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest

from relayline.stage.inbound import CREDIT_REPLY_BYTES, Inbound
from relayline.stage.routes import Route, Upstream
from relayline.stage.steps.runner import OUTBOX_STEPS_MAX
from relayline.wire.common import bounds
from relayline.wire.common.errors import ProtocolError, RelaylineError, StageLostError
from relayline.wire.envelopes import envelope
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.fakes import (
    EPOCH,
    ROUTE,
    WIDTH,
    BlockedDecode,
    control,
    rows_frame,
    tokens_frame,
)
from tests.support.served_stage import Coordinator, served
from tests.support.stage_links import (
    OTHER,
    PREFILL,
    SAMPLE,
    counted,
    counted_steps,
    downstream,
    prompt,
    status_of,
    token_after,
)


async def test_two_stages_pass_rows_and_controls_on() -> None:
    async with served(0, 2) as first, served(1, 2) as last, Coordinator(first) as one, Coordinator(last) as end:
        await end.configure()
        await end.listen()
        await one.configure(next_address=last.address)
        await one.upstream()
        await one.send(control(1, Flag.OPEN), tokens_frame(1, 0, [3, 4, 5], PREFILL | SAMPLE))
        (sample,) = (await end.reply()).samples
        rows = [[token + index + 1.0] * WIDTH for index, token in enumerate((3, 4, 5))]
        assert sample.token == token_after(np.asarray(rows, np.float32))
        await one.send(control(1, Flag.CLOSE), control(2, Flag.OPEN), tokens_frame(2, 0, [9], PREFILL | SAMPLE))
        await end.reply()
        assert ((await first.settled())[0], (await last.settled())[0]) == (1, 1)
        one.call.cancel()
        async with asyncio.timeout(20):
            await end.lost
        assert ((await first.settled())[0], (await last.settled())[0]) == (0, 0)


async def test_a_route_without_credit_downstream_stops_stepping() -> None:
    row_bytes = WIDTH * 4
    async with downstream(credit_bytes=4 * row_bytes) as neighbour, served(0, 2) as stage, Coordinator(stage) as one:
        steps = counted_steps(stage)
        await one.configure(next_address=neighbour.address)
        await one.upstream()
        await one.send(control(1, Flag.OPEN), *(tokens_frame(1, position, [1]) for position in range(30)))
        await counted(steps, 4 + OUTBOX_STEPS_MAX)
        await stage.settled()
        assert steps.empty(), "a step ran although nothing can leave"
        assert stage.service.runner.snapshot.queued_rows == 30 - 4 - OUTBOX_STEPS_MAX
        neighbour.credits.put_nowait(2 * row_bytes)
        await counted(steps, 2)
        await stage.settled()
        assert steps.empty()
        seen = []
        async with asyncio.timeout(20):
            for index in range(30):
                seen += envelope.parse(await neighbour.received.get()).frames["position"][-1:].tolist()
                if index >= 2:
                    neighbour.credits.put_nowait(row_bytes)
        assert seen == list(range(30))


@pytest.mark.parametrize("reads", [True, False], ids=["no credit", "does not read"])
async def test_a_stuck_neighbour_does_not_outlive_its_epoch(reads: bool) -> None:
    """The sender waits for credit, or inside gRPC's own flow control; a new epoch frees it either way."""
    n_embd, credit = 16_384, 1 if reads else bounds.ENVELOPE_BYTES_MAX  # 2 MiB a step: more than gRPC keeps unread
    async with (
        downstream(credit, reads) as stuck,
        downstream(1 << 30) as healthy,
        served(0, 2, n_embd=n_embd) as stage,
        Coordinator(stage) as old,
        Coordinator(stage, epoch=EPOCH + 1) as new,
    ):
        steps = counted_steps(stage)
        await old.configure(next_address=stuck.address)
        await old.upstream()
        # The same chunk again and again is a retry each time, and each takes a separate step.
        await old.send(control(1, Flag.OPEN), *(tokens_frame(1, 0, [1] * 32, PREFILL) for _ in range(40)))
        await counted(steps, OUTBOX_STEPS_MAX)
        sends = stage.service.outbound._sends
        while sends.qsize() < OUTBOX_STEPS_MAX - 1:  # the rest of the outbox is in the sender's hand
            await stage.settled()
        await new.configure(next_address=healthy.address)
        await new.upstream()
        await new.send(control(1, Flag.OPEN, epoch=new.epoch), tokens_frame(1, 0, [1], epoch=new.epoch))
        async with asyncio.timeout(20):
            view = envelope.parse(await healthy.received.get())
        assert view.epoch == new.epoch


async def test_a_route_that_cannot_begin_leaves_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    async with downstream(1) as neighbour, served(0, 2) as stage, Coordinator(stage) as one:
        with monkeypatch.context() as patch:
            patch.setattr(stage.executor, "begin_route", stumble)
            with pytest.raises(RelaylineError):
                await one.configure(next_address=neighbour.address)
        assert not [name for name in running() if name.startswith("RelayLink")]
        await one.configure(next_address=neighbour.address)
        assert [name for name in running() if name.startswith("RelayLink")], "it is what a link leaves running"


def running() -> list[str]:
    """Return the names of what runs."""
    coroutines: list[Any] = [task.get_coro() for task in asyncio.all_tasks()]
    return [coroutine.__qualname__ for coroutine in coroutines]


async def test_credit_comes_back_for_decoded_and_dropped_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    row_bytes = WIDTH * 4
    monkeypatch.setattr("relayline.stage.inbound.CREDIT_REPLY_BYTES", 8 * row_bytes)
    monkeypatch.setattr(bounds, "BYTES_IN_FLIGHT_DEFAULT", 16 * row_bytes)
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        await one.send(*prompt(1, n_rows=8))
        async with asyncio.timeout(20):
            assert pb.RelayResponse.FromString(await one.call.read()).credit_bytes == 8 * row_bytes
            for session_id in (2, 3, 4):
                await one.send(*prompt(session_id, n_rows=4), rows_frame(77, 0, 4))
                assert pb.RelayResponse.FromString(await one.call.read()).credit_bytes == 8 * row_bytes


def test_a_neighbour_that_sends_beyond_its_credit_is_refused() -> None:
    window, route = bounds.BYTES_IN_FLIGHT_DEFAULT, Route(ROUTE, EPOCH, 1, None, Upstream(), None)
    context: Any = None

    def taking(*sizes: int) -> Inbound:
        inbound = Inbound(route, pb.LinkOpen(dtype=pb.DTYPE_F32, n_embd=WIDTH), context, 8)
        for size in sizes:
            inbound._take_credit(size)
        return inbound

    full = taking(CREDIT_REPLY_BYTES + 1, window - CREDIT_REPLY_BYTES - 1)
    large = taking(CREDIT_REPLY_BYTES, window)  # so little is in flight that it may not even come back as credit
    for inbound in (full, large):
        with pytest.raises(ProtocolError, match=f"over the credit of {window}"):
            inbound._take_credit(1)


async def test_a_lost_downstream_is_reported_to_the_coordinator() -> None:
    async with downstream(1 << 20) as neighbour, served(0, 2) as stage, Coordinator(stage) as one:
        await one.configure(next_address=neighbour.address)
        await one.listen()
        await one.upstream()
        neighbour.reads = False
        neighbour.gone.set()
        await one.send(control(1, Flag.OPEN), tokens_frame(1, 0, [1]))
        (fault,) = (await one.reply()).faults
        assert (fault.session_id, fault.label) == (0, StageLostError.label)


@pytest.mark.parametrize("epochs", [1, 2])
async def test_a_coordinator_that_leaves_while_it_configures_leaves_nothing_half_begun(epochs: int) -> None:
    """It dies, or is stopped while it recovers, and a native step takes its time: no link stays, and no route."""
    async with downstream(1 << 20) as neighbour, served(0, 2) as stage, contextlib.AsyncExitStack() as stack:
        first, *others = [
            await stack.enter_async_context(Coordinator(stage, epoch=EPOCH + number)) for number in range(epochs)
        ]
        blocked = BlockedDecode(stage.engine)
        other = await stack.enter_async_context(Coordinator(stage, OTHER))
        await other.configure(next_address=neighbour.address)
        await other.upstream()
        if others:
            await first.configure(next_address=neighbour.address)
            await first.upstream()
        await other.send(control(1, Flag.OPEN, route_id=OTHER), tokens_frame(1, 0, [1], route_id=OTHER))
        await asyncio.to_thread(blocked.entered.wait, 20)
        last = others[-1] if others else first
        configuring = asyncio.create_task(last.configure(next_address=neighbour.address))
        async with asyncio.timeout(20):
            while not stage.service.runner._calls:  # it waits for the decode thread
                await status_of(other)
            configuring.cancel()
            await asyncio.gather(configuring, return_exceptions=True)
            while not stage.service.epochs._tasks:  # the stage has heard of it
                await status_of(other)
            blocked.release()
            while stage.service.epochs._tasks:
                await status_of(other)
            assert list(stage.service.epochs.routes) == [OTHER]
            while neighbour.n_links > 1:
                await status_of(other)


async def test_a_busy_stage_stops_reading_controls_at_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayline.stage.intake.QUEUED_FRAMES_MAX", 8)
    async with served() as stage, Coordinator(stage) as one:
        blocked = BlockedDecode(stage.engine)
        await one.start()
        await one.send(*prompt(1, n_rows=2))
        await asyncio.to_thread(blocked.entered.wait, 20)
        for session_id in range(100, 150):
            await one.send(control(session_id, Flag.CLOSE))
        async with asyncio.timeout(20):
            while stage.service.runner.snapshot.queued_frames <= 8:
                await status_of(one)
        for _ in range(5):  # round trips in which an unbounded reader would have taken the rest
            await status_of(one)
        assert stage.service.runner.snapshot.queued_frames == 9
        blocked.release()
        async with asyncio.timeout(20):
            while (await status_of(one)).envelopes_in < 51:
                pass
            while stage.service.runner.snapshot.queued_frames:
                await status_of(one)


async def test_a_reader_that_waits_for_room_goes_on_when_another_coordinator_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relayline.stage.intake.QUEUED_FRAMES_MAX", 4)
    async with served() as stage, Coordinator(stage) as one, Coordinator(stage, OTHER) as other:
        await one.start()
        await other.start()
        runner = stage.service.runner
        runner._outbox_steps = OUTBOX_STEPS_MAX  # as if downstream gave no credit: no step will wake it
        runner.push([rows_frame(1, position, 1, PREFILL) for position in range(8)])
        await other.send(*prompt(5, OTHER, n_rows=1))
        await other.send(rows_frame(5, 1, 1, SAMPLE, route_id=OTHER))
        async with asyncio.timeout(20):
            while runner.snapshot.queued_frames < 10:
                await status_of(other)
            assert (await status_of(other)).envelopes_in == 1, "no room for the second"
            await one.channel.close()
            while (await status_of(other)).envelopes_in < 2:
                pass
        runner._outbox_steps = OUTBOX_STEPS_MAX + 1
        for _ in range(OUTBOX_STEPS_MAX + 1):
            runner.sent()
        assert (await other.reply()).samples[0].session_id == 5
