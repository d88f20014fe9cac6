"""Orders of an operator to stages: a stage is freed if others have room, else one line says why and nothing changes."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relayline.coordinator.engine.conductor import Conductor, ConductorConfig
from relayline.coordinator.engine.membership import Introduction, Membership
from relayline.coordinator.engine.moves import Moves
from relayline.coordinator.engine.pipeline import Pipeline
from relayline.coordinator.engine.roster import JoinedRoster
from relayline.coordinator.joining.config import JoiningStage, PoolState
from relayline.coordinator.joining.hosts import Hosts
from relayline.coordinator.joining.service import JoinService
from relayline.coordinator.planner.instance import ModelShape
from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.wire.common import bounds
from relayline.wire.common.errors import InvalidRequestError, NotReadyError
from relayline.wire.common.phase import Phase
from relayline.wire.common.units import GIB
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.settings.table import PREFIX_MEMORY_AUTO, EngineSettings

S = 1_000_000_000
LAYER_BYTES = 2 * GIB


class World:
    """Stages a, b and c of an eight-layer model, of 2 GiB a layer; their hosts have as much memory as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, memory_gib: int, *, spare: bool = False) -> None:
        self.now_ns = S
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now_ns)
        names = ["a", "b", "c", *(["s"] if spare else [])]
        conductor = Conductor(
            ConductorConfig(ScheduleConfig(), ("a", "b", "c"), 100), lambda _: False, itertools.count(1), 0
        )
        conductor.availability.enter(Phase.READY, 0)
        self.moves = Moves(conductor, names, 8, (3, 6), (0, 1, 2))
        membership = Membership(names, "1.0.0", 0, (0, 1, 2))
        self.roster = JoinedRoster(membership)
        self.places = [JoiningStage(name, is_spare=name == "s") for name in names]
        self.begun: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.kept: list[PoolState] = []
        file = SimpleNamespace(n_layers=8)
        self.pipeline = SimpleNamespace(phase=Phase.READY, file=file, stages=(), conductor=conductor)
        service = SimpleNamespace(roster=self.roster, place=lambda at: self.places[at], add=self.add)
        shape = ModelShape((LAYER_BYTES,) * 8, 0, 0, (0,) * 8, 64, 100, 64)
        self.hosts = Hosts(
            cast(Pipeline, self.pipeline),
            cast(Any, self),
            cast(JoinService, service),
            lambda: shape,
            takeover_s=60,
            on_changed=self.kept.append,
        )
        for at, name in enumerate(names):
            facts = ("host", "Linux", 4, memory_gib * GIB)
            membership.join(Introduction(name, name, bounds.PROTOCOL_VERSION, "1.0.0", f"10.0.0.{at}", *facts), 0)
            self.hosts.came(at)

    def add(self, place: JoiningStage) -> None:
        self.places.append(place)
        self.roster.add(place.name)

    def move(self, cuts: tuple[int, ...], holders: tuple[int, ...] = ()) -> None:
        self.moves.begin(cuts, self.now_ns, holders)
        self.begun.append((cuts, holders))


async def test_the_others_share_where_they_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 64)
    await world.hosts.drain("b", is_drained=True)
    assert world.begun == [((4,), (0, 2))]
    assert world.kept[-1] == PoolState((3, 6), ("a", "b", "c"), ("b",))
    with pytest.raises(NotReadyError, match="layers are already being moved"):
        await world.hosts.drain("a", is_drained=True)


async def test_no_takeover_is_promised_before_all_stages_have_been_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world = World(monkeypatch, 64)
    world.pipeline.phase = Phase.LOADING
    world.hosts.left(1)
    assert "take over" not in caplog.text
    assert world.hosts.describe(world.now_ns)["b"]["takeover_in_s"] is None
    world.now_ns += 61 * S
    await world.hosts.look()
    assert world.begun == []
    world.pipeline.phase = Phase.RECOVERING
    assert world.hosts.describe(world.now_ns)["b"]["takeover_in_s"] == 0


class Steps:
    """What a stage's steps cost, in milliseconds."""

    rows_max = 64
    decode = SimpleNamespace(is_known=True)

    def __init__(self, ms: int) -> None:
        self._ms = ms

    def decode_ns(self, _rows: int) -> float:
        return self._ms * 1e6


async def test_others_take_over_from_a_stage_that_is_lost_in_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 64)
    world.moves.begin((3, 5), world.now_ns)
    world.moves.cut(1, (True, False, False), world.now_ns)
    for at in range(3):
        world.moves.prepared(1, at, world.now_ns)
    world.hosts.left(1)
    world.pipeline.conductor.availability.enter(Phase.RECOVERING, world.now_ns)
    world.pipeline.phase = Phase.RECOVERING
    await world.hosts.look()
    assert world.begun == [], "it may come back"
    world.now_ns += 60 * S
    # Measured with two layers on c, which is as fast as a; the switch gave it three.
    planner = SimpleNamespace(stages=[Steps(3), Steps(3), Steps(2)])
    monkeypatch.setattr(world.pipeline.conductor.scheduler, "planner", planner)
    await world.hosts.look()
    assert world.begun == [((4,), (0, 2))], "not by the new layers: c would count as faster, and have more"


async def test_a_change_without_room_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 12)
    with pytest.raises(NotReadyError, match=r"no room for all layers: a would need 8\.\d GiB for layers 0-3 and has"):
        await world.hosts.drain("b", is_drained=True)
    assert (world.begun, world.kept) == ([], [])
    assert world.hosts.describe(S)["b"]["drained"] is False


class TieredStage:
    """A stage whose host has this much free memory, and whose tier holds this much more."""

    def __init__(self, free_gib: int, tier_gib: int) -> None:
        self._status = pb.StatusResponse(memory_free_bytes=free_gib * GIB, tier_memory_bytes=tier_gib * GIB)

    async def status(self, **_: bool) -> pb.StatusResponse:
        return self._status


@pytest.mark.parametrize(("asked", "has_room"), [(PREFIX_MEMORY_AUTO, True), (8 * GIB, False)])
async def test_memory_of_a_tier_that_nobody_asked_for_counts_as_room(
    monkeypatch: pytest.MonkeyPatch, asked: int, *, has_room: bool
) -> None:
    world = World(monkeypatch, 64)
    engine = EngineSettings(prefix_memory_bytes=asked)
    world.places[:] = [dataclasses.replace(place, engine=engine) for place in world.places]
    world.pipeline.stages = tuple(TieredStage(5, 8) for _ in world.places)
    if has_room:
        await world.hosts.drain("b", is_drained=True)
        assert world.begun == [((4,), (0, 2))]
    else:
        with pytest.raises(NotReadyError, match="no room for all layers"):
            await world.hosts.drain("b", is_drained=True)


async def test_a_spare_takes_its_place_and_a_failure_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 12, spare=True)
    await world.hosts.drain("b", is_drained=True)
    assert world.begun == [((3, 6), (0, 3, 2))], "no other stage moves anything"
    world.moves.failed(1, "the disk is full", S)
    assert world.moves.latest is not None
    world.hosts.failed(world.moves.latest)
    assert world.hosts.describe(S)["b"]["drained"] is False


async def test_no_stage_takes_over_layers_that_are_not_known_to_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(monkeypatch, 0)
    world.hosts.left(1)
    world.now_ns += 60 * S
    await world.hosts.look()
    assert world.begun == []
    assert "an unknown amount" in caplog.text
    await world.hosts.drain("b", is_drained=True)
    assert world.begun == [((4,), (0, 2))], "an operator who asks for it decides"


async def test_one_more_spare_stays_a_spare_for_a_restarted_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 64)
    world.hosts.add("d", is_spare=False)
    world.hosts.add("e", is_spare=True)
    assert (world.kept[-1].added, world.kept[-1].added_spares) == (("d", "e"), ("e",))
    assert world.places[-1] == JoiningStage("e", world.places[0].engine, world.places[0].telemetry, is_spare=True)
    assert world.hosts.describe(S)["e"]["spare"] is True


async def test_an_impossible_order_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 64)
    with pytest.raises(InvalidRequestError, match="there is no stage x; the stages are a, b, c"):
        await world.hosts.drain("x", is_drained=True)
    with pytest.raises(InvalidRequestError, match="there already is stage b"):
        world.hosts.add("b", is_spare=False)
    world.hosts.left(2)
    with pytest.raises(NotReadyError, match="c is not here to take layers"):
        await world.hosts.drain("b", is_drained=True)
