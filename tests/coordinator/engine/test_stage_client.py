"""The coordinator's view of a stage: every end of the return stream is reported once, and reported speeds are made
safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grpc
import grpc.aio
import pytest

from relayline.coordinator.engine.connection import Connection, EpochTerms, _costs_now, refresh_costs
from relayline.coordinator.engine.descriptions import device_lines, stage_cost
from relayline.coordinator.engine.stage_client import StageClient
from relayline.coordinator.engine.stage_curves import CurveTelling, StageCurves
from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.coordinator.schedule.overhead import HOST_STEP_NS, Held
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.wire.common.errors import (
    ChecksumError,
    InternalError,
    ModelFileError,
    ProtocolError,
    RelaylineError,
    StageLostError,
)
from relayline.wire.envelopes.returns import ReturnWriter
from relayline.wire.links import rpc
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb


class Call:
    """Gives messages, then the end of the stream."""

    def __init__(self, *messages: bytes) -> None:
        self._messages = list(messages)

    async def read(self) -> Any:
        return self._messages.pop(0) if self._messages else None


def stumble(message: pb.ReturnResponse) -> None:
    raise ZeroDivisionError("a bug of ours")


@pytest.mark.parametrize(
    ("messages", "error", "text"),
    [
        ((), StageLostError, "closed its return stream"),
        ((b"\xff",), ProtocolError, "cannot be read"),
        ((pb.ReturnResponse(epoch=1).SerializeToString() * 5,), ChecksumError, "checksum"),
        (ReturnWriter().write(pb.ReturnResponse(epoch=1)), InternalError, "a bug of ours"),
    ],
)
async def test_every_end_of_the_return_stream_is_reported(
    messages: Sequence[bytes], error: type[RelaylineError], text: str
) -> None:
    client = StageClient("127.0.0.1:1")
    lost: list[RelaylineError] = []
    await client._read(Call(*messages), stumble, lost.append)  # type: ignore[arg-type]
    await client.close()
    (reported,) = lost
    assert type(reported) is error
    assert text in reported.message


@contextlib.asynccontextmanager
async def answering(answer: pb.StatusResponse) -> AsyncIterator[StageClient]:
    """A client of a stage that answers every Status with this."""

    async def status(_request: pb.StatusRequest, _context: Any) -> pb.StatusResponse:
        return answer

    handler = grpc.unary_unary_rpc_method_handler(status, rpc.parser(pb.StatusRequest), rpc.serialize)
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(rpc.SERVICE, {"Status": handler}),))
    client = StageClient(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    try:
        yield client
    finally:
        await client.close()
        await server.stop(None)


async def test_steps_that_our_clock_has_no_time_for_are_left_out() -> None:
    """Another host's clock, 1000 s ahead of ours; its steps reach back to before ours began."""
    base_ns = time.monotonic_ns() + 1_000 * 10**9
    starts = [5, 500 * 10**9, base_ns - 30, base_ns - 10]
    ends = [7, base_ns - 20, base_ns - 25, base_ns - 5]
    response = pb.StatusResponse(now_ns=base_ns, step_start_ns=starts, step_end_ns=ends, n_steps=4)
    async with answering(response) as client:
        status = await client.status(with_recent=True)
    assert status is not None
    assert status.n_steps == 4
    moved = list(zip(status.step_start_ns, status.step_end_ns, strict=True))
    assert [end_ns - start_ns for start_ns, end_ns in moved] == [5, 5], "both ends of a step stay or go"
    assert moved[1][0] - moved[0][0] == 20


class Learning:
    """A connection to one stage that has learned more of its speed at every look; looks at `bad` times are bugs."""

    def __init__(self, bad: set[int]) -> None:
        self.stages, self.n_looks = [self], 0
        self._bad = bad

    def stage_costs(self) -> list[StageCost]:
        return [stage_cost(pb.StatusResponse(), 64)]

    async def status(self, *, with_recent: bool) -> pb.StatusResponse:
        assert not with_recent
        self.n_looks += 1
        if self.n_looks in self._bad:
            raise ZeroDivisionError("a bug of ours")
        return pb.StatusResponse(
            decode_curve=[pb.CostPoint(n_rows=1, cost_ns=self.n_looks)], n_decode_frames=4, decode_held_ns=100
        )


async def test_a_bug_while_speeds_are_read_is_logged_and_the_next_look_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("relayline.coordinator.engine.connection.CURVE_REFRESH_S", 0.0)
    seen: asyncio.Queue[tuple[list[StageCost], list[Held]]] = asyncio.Queue()
    refreshing = asyncio.create_task(
        refresh_costs(Learning({1, 2, 4}), ["somebody"], lambda *change: seen.put(change))  # type: ignore[arg-type]
    )
    async with asyncio.timeout(60):
        for n_looks in (3, 5):
            (cost,), held = await seen.get()
            assert cost.decode_ns(1) == n_looks + HOST_STEP_NS
            assert held == [Held(4, 100 + 4 * HOST_STEP_NS)]
        refreshing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await refreshing
    logged = [record for record in caplog.records if record.exc_info]
    assert len(logged) == 2, "once for each time that it began to fail"
    assert all("measured speeds failed" in record.message for record in logged)


async def test_hold_times_count_only_if_all_stages_report_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayline.coordinator.engine.connection.CURVE_REFRESH_S", 0.0)
    seen: asyncio.Queue[list[Held]] = asyncio.Queue()
    answers, silent = Learning(set()), mock.Mock(status=mock.AsyncMock(return_value=None))
    answers.stages.append(silent)
    answers.stage_costs = lambda: [stage_cost(pb.StatusResponse(), 64)] * 2  # type: ignore[method-assign]
    refreshing = asyncio.create_task(
        refresh_costs(answers, ["somebody"], lambda _, held: seen.put(held))  # type: ignore[arg-type]
    )
    async with asyncio.timeout(60):
        assert await seen.get() == []
    refreshing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await refreshing


@pytest.mark.parametrize(
    ("reported", "taken"), [(13_000.0, 13_000.0), (-1.0, 0.0), (float("nan"), 0.0), (float("inf"), 0.0)]
)
def test_a_stages_reported_speed_is_made_safe_to_plan_with(reported: float, taken: float) -> None:
    point = pb.CostPoint(n_rows=1, cost_ns=7)
    cost = stage_cost(
        pb.StatusResponse(decode_curve=[point], prefill_curve=[point], context_ns=reported, context_tiled_ns=reported),
        64,
    )
    assert (cost.context_ns, cost.context_tiled_ns) == (taken, taken)
    assert cost.decode_ns(1) == 7 + HOST_STEP_NS


@pytest.mark.parametrize(("ids", "n_groups"), [(("bus0", "bus0"), 1), (("bus0", "bus1"), 2)])
async def test_stages_that_name_one_device_are_planned_as_one(ids: tuple[str, str], n_groups: int) -> None:
    """By the identity in the handshake, and still after their curves were asked for again."""
    points = [pb.CostPoint(n_rows=rows, cost_ns=rows * 1_000_000) for rows in (1, 64)]
    facts = [
        pb.DescribeResponse(
            decode_curve=points,
            prefill_curve=points,
            max_rows=64,
            place=pb.Place(host_id="here", devices=[pb.Device(id=device, name="CUDA0")]),
        )
        for device in ids
    ]
    statuses = [pb.StatusResponse(decode_curve=points, prefill_curve=points) for _ in ids]
    stages = [mock.Mock(address="a:1", status=mock.AsyncMock(return_value=status)) for status in statuses]
    unheard: Any = None
    connection = Connection(EpochTerms(1, 1, pb.DTYPE_F16), unheard, stages, facts, [{}, {}])
    again, _ = await _costs_now(connection)
    for costs in (connection.stage_costs(), again):
        assert GroupPlanner(costs).plan(16, n_prompts=0).n_groups == n_groups
    assert len(device_lines(facts, ["first", "second"])) == 2 - n_groups


async def test_batches_are_moved_by_what_the_heartbeats_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """This call's own round trip may take long, and its middle may be far from when the stage read its clock."""
    ahead_ns, sent_ns = 5 * 10**9, 77
    now_ns = time.monotonic_ns()
    batch = pb.BatchRecord(start_ns=now_ns + ahead_ns, taken_ns=now_ns + ahead_ns - 9)
    batch.members.add(sent_ns=sent_ns)
    answer = pb.BatchesResponse(now_ns=now_ns + ahead_ns + 400_000_000, batches=[batch, pb.BatchRecord(start_ns=1)])

    async def call(*_: object) -> pb.BatchesResponse:
        return pb.BatchesResponse.FromString(answer.SerializeToString())

    monkeypatch.setattr(rpc, "call", call)
    client = StageClient("127.0.0.1:1")
    guessed = await client.batches([1])
    client.clock.heard(now_ns - 2, now_ns, now_ns - 1 + ahead_ns)
    known = await client.batches([1])
    await client.close()
    assert guessed is not None
    assert known is not None
    assert abs(guessed.batches[0].start_ns - now_ns) > 10**8
    assert (known.batches[0].start_ns, known.batches[0].taken_ns) == (now_ns, now_ns - 9)
    assert known.batches[0].members[0].sent_ns == sent_ns, "the sender's clock"
    assert known.batches[1].taken_ns == 0, "of an older stage, which does not say"


@pytest.mark.parametrize("error", [OSError("the disk is full"), ModelFileError("no such file"), ZeroDivisionError()])
async def test_measurements_that_cannot_be_kept_are_told(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async def status(*, with_recent: bool) -> pb.StatusResponse:
        return pb.StatusResponse(decode_curve=[pb.CostPoint(n_rows=1, cost_ns=1)])

    def keep(_: Sequence[StageCurves]) -> None:
        raise error

    pipeline: Any = SimpleNamespace(
        config=SimpleNamespace(stage_names=("a",)),
        file=SimpleNamespace(stages=[SimpleNamespace(layer_start=0, layer_end=4)]),
        stages=[SimpleNamespace(status=status)],
    )
    telling = CurveTelling(pipeline, keep)
    telling.begin()
    assert telling._task is not None
    await telling._task
    await telling.close()
    assert "the stages' measurements are not kept for the next plan" in caplog.text
