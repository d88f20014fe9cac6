"""The join port during a survey: orders without artifacts, reports of hosts, and the end of the survey."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from relayline.coordinator.joining.config import JoinConfig, JoiningStage
from relayline.coordinator.joining.port import serve_survey
from relayline.coordinator.joining.survey import LINK_BYTES, SurveyService
from relayline.coordinator.planner.speed import Sample
from relayline.stage.joining.client import Member, introduction
from relayline.wire.common.errors import NotReadyError, ProtocolError, RelaylineError
from relayline.wire.common.phase import HostState
from relayline.wire.links.security import PLAINTEXT
from relayline.wire.pb.relayline.v1 import join_pb2 as pb

SLICES = [pb.SurveySlice(header=b"head", size_bytes=100, layer_bytes=90, budget_ms=10)]


class Port:
    def __init__(self, service: SurveyService, address: str, states: list[tuple[str, HostState]]) -> None:
        self.service, self.address, self.states = service, address, states

    async def join(self, name: str, **changes: object) -> Member:
        hello = introduction(name, f"process of {name}")
        for field, value in changes.items():
            setattr(hello, field, value)
        return await Member.join(self.address, PLAINTEXT, hello)


@contextlib.asynccontextmanager
async def surveyed() -> AsyncIterator[Port]:
    config = JoinConfig((JoiningStage("box1"), JoiningStage("box2"), JoiningStage("spare", is_spare=True)))
    states: list[tuple[str, HostState]] = []
    orders = {"box1": SLICES, "box2": []}  # how fast box2 is, is known
    async with serve_survey(config, orders, PLAINTEXT, lambda place: states.append((place.name, place.state))) as port:
        yield Port(port[0], port[1], states)


def costs(*points: tuple[int, int]) -> pb.SliceCosts:
    found = pb.SliceCosts()
    for rows, ns in points:
        found.decode.add(n_rows=rows, cost_ns=ns)
    return found


async def test_a_survey_is_complete_when_every_host_has_reported() -> None:
    async with surveyed() as port:
        known, unknown = await port.join("box2"), await port.join("box1")
        assert [len(member.order.survey.slices) for member in (known, unknown)] == [0, 1]
        assert not unknown.order.HasField("artifact"), "there is none yet"
        measured = pb.HostMeasured(
            slices=[costs((1, 1_000), (4, 2_000))],
            round_trip_ns=5,
            bytes_per_s=1e6,
            in_service=1.1,
            is_doubtful=True,
            took_ns=7,
        )
        await unknown.report_progress(pb.ARTIFACT_PHASE_MEASURING, 0, 0)
        await unknown.report(measured=measured)
        await asyncio.wait_for(port.service.is_complete.wait(), 60)
        found = port.service.reports["box1"]
        assert found.samples == (Sample(90, 0, ((1, 1_000.0), (4, 2_000.0))),)
        assert found.link is not None
        assert (found.link.round_trip_ns, found.link.bytes_per_s, found.in_service) == (5, 1e6, 1.1)
        assert found.is_doubtful
        assert found.who.n_cores > 0 < found.who.memory_bytes
        assert ("box1", HostState.MEASURING) in port.states
        port.states.clear()
    for member in (known, unknown):
        assert isinstance(await asyncio.wait_for(member.lost, 60), NotReadyError), "they join again, for their layers"
        await member.close()
    assert port.states == [], "no stage is reported as lost"


async def test_a_spare_is_let_in_and_not_waited_for() -> None:
    async with surveyed() as port:
        spare = await port.join("spare")
        assert spare.order.HasField("survey")
        assert not spare.order.stands_by, "it measures its link, and is a spare once there is a plan"
        await spare.report(measured=pb.HostMeasured(round_trip_ns=5, bytes_per_s=1e6))
        unknown = await port.join("box1")
        await unknown.report(measured=pb.HostMeasured(slices=[costs((1, 1_000))]))
        await asyncio.wait_for(port.service.is_complete.wait(), 60)
        await unknown.close()
    assert isinstance(await asyncio.wait_for(spare.lost, 60), NotReadyError), "it joins again, for its order"
    await spare.close()


async def test_a_link_is_measured_with_bytes_that_nobody_keeps() -> None:
    async with surveyed() as port:
        member = await port.join("box1")
        n_bytes = sum([len(piece.data) async for piece in member.fetch(0)])
        assert n_bytes == LINK_BYTES
        assert [piece async for piece in member.fetch(LINK_BYTES)] == [], "a call that takes only its time"
        await member.close()


async def test_a_host_that_cannot_be_measured_is_planned_by_its_own_report() -> None:
    async with surveyed() as port:
        member = await port.join("box1")
        await member.report(measured=pb.HostMeasured(failure=pb.StageFailure(label="native", message="no such type")))
        await asyncio.wait_for(port.service.is_complete.wait(), 60)
        found = port.service.reports["box1"]
        assert (found.samples, found.problem) == ((), "no such type")
        await member.close()


async def test_a_stage_that_knows_no_surveys_is_not_waited_for_and_comes_again() -> None:
    async with surveyed() as port:
        with pytest.raises(NotReadyError, match="no plan yet") as refused:
            await port.join("box1", measures=False)
        assert refused.value.retryable
        await asyncio.wait_for(port.service.is_complete.wait(), 60)
        assert "cannot measure" in port.service.reports["box1"].problem


@pytest.mark.parametrize(
    "measured",
    [
        pb.HostMeasured(),
        pb.HostMeasured(slices=[costs((0, 5))]),
        pb.HostMeasured(slices=[costs((1, 0))]),
        pb.HostMeasured(slices=[costs((1, 5)), costs((1, 5))]),
    ],
)
async def test_an_impossible_measurement_ends_the_membership(measured: pb.HostMeasured) -> None:
    async with surveyed() as port:
        member = await port.join("box1")
        await member.report(measured=measured)
        lost: RelaylineError = await asyncio.wait_for(member.lost, 60)
        assert isinstance(lost, ProtocolError)
        assert port.service.waits_for == ["box1"]
        await member.close()
