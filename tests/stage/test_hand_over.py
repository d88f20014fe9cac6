"""Lanes are handed over through a real port: whole, from several stages, and only to authorised receivers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from relayline.deploy.testing.cluster.model import CELLS, ModelEngine
from relayline.stage import hand_over as module
from relayline.stage.hand_over import Engine, HandOver, pieces
from relayline.stage.steps.handing import HandedLane, Handing, joined
from relayline.stage.steps.lane_states import LaneStates
from relayline.stage.steps.lanes import LaneTable
from relayline.stage.steps.step import StepExecutor
from relayline.wire.common import bounds
from relayline.wire.common.errors import (
    NotReadyError,
    ProtocolError,
    RelaylineError,
    StageLostError,
    UnauthenticatedError,
)
from relayline.wire.links import rpc
from relayline.wire.links.security import PLAINTEXT
from relayline.wire.pb.relayline.v1 import join_pb2 as pb
from relayline.wire.pb.relayline.v1 import relayline_pb2

N_LANES, CTX_TOKENS, N_LAYERS, PASS = 4, 64, 6, "a-pass"
ROUTE = 9


class OneEngine:
    """Some layers of the model, with lanes."""

    def __init__(self, layers: range) -> None:
        self.engine = ModelEngine(layers, N_LANES, is_last=layers.stop == N_LAYERS)
        self.lanes = LaneTable(N_LANES, CTX_TOKENS)
        self.handing = Handing(self.lanes, self.engine)
        self.side = Engine(self.call, self.handing, layers.start)
        self.n_calls = 0

    async def call(self, function: Callable[[], Any]) -> Any:
        self.n_calls += 1
        return function()

    def hold(self, session_id: int, n_tokens: int, *, is_left: bool = True) -> None:
        """Give a session a lane; a cell encodes layer, session and position."""
        lane = self.lanes.open(session_id, ROUTE)
        layers = self.engine._layers
        rows = [tuple(10_000 * layer + 100 * session_id + at for layer in layers) for at in range(n_tokens)]
        self.engine.lanes[lane.index] = rows
        lane.next_position, lane.is_left = n_tokens, is_left

    def held(self) -> dict[int, list[tuple[int, ...]]]:
        return {lane.session_id: self.engine.lanes[lane.index] for lane in self.lanes if lane.is_left}


def rows(layers: range, session_id: int, n_tokens: int) -> list[tuple[int, ...]]:
    return [tuple(10_000 * layer + 100 * session_id + at for layer in layers) for at in range(n_tokens)]


class Port:
    """The port of a stage that gives: what its calls meet."""

    def __init__(self) -> None:
        self.hand_over: HandOver
        self.address, self.came = "", asyncio.Event()

    async def answer(self, request: Any, context: Any) -> None:
        self.came.set()
        try:
            await self.hand_over.give(context)
        except RelaylineError as error:
            await rpc.abort(context, error)


@contextlib.asynccontextmanager
async def port(answer: Any = None) -> AsyncIterator[Port]:
    made = Port()
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    parse = rpc.parser(relayline_pb2.HandOverRequest)
    handler = grpc.unary_stream_rpc_method_handler(answer or made.answer, parse, None)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(rpc.SERVICE, {"HandOver": handler}),))
    made.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield made
    finally:
        await server.stop(None)


def gives(start: int, end: int) -> HandOver:
    return HandOver(1, pb.HandOver(gives=[pb.GivenLayers(layer_start=start, layer_end=end, shown_pass=PASS)]))


def takes(*layers: tuple[int, int, str], shown_pass: str = PASS) -> HandOver:
    wanted = [
        pb.TakenLayers(layer_start=start, layer_end=end, address=address, shown_pass=shown_pass)
        for start, end, address in layers
    ]
    return HandOver(1, pb.HandOver(takes=wanted))


async def test_layers_of_another_stage_and_of_the_old_engine_become_one_lane() -> None:
    """If one holds fewer tokens, the shorter number counts; a session that only one has is read again."""
    first, own, new = OneEngine(range(3)), OneEngine(range(3, 6)), OneEngine(range(2, 6))
    first.hold(1, 10), first.hold(2, 7), first.hold(3, 5), first.hold(5, 4, is_left=False)
    own.hold(2, 9), own.hold(3, 5), own.hold(4, 6), own.hold(5, 4)
    async with asyncio.timeout(20), port() as giver:
        giver.hand_over, taking = gives(2, 3), takes((2, 3, giver.address), (3, 6, ""))
        giver.hand_over.ended(first.side)
        taking.ended(own.side)
        assert await taking.take(new.side, PLAINTEXT) == 2
        await giver.hand_over.given()
        await taking.given()
    assert new.held() == {2: rows(range(2, 6), 2, 7), 3: rows(range(2, 6), 3, 5)}
    assert [lane.index for lane in new.lanes] == [lane.index for lane in first.lanes if lane.session_id in (2, 3)]
    assert taking.route_ids == {ROUTE}
    new.lanes.check()


async def test_a_lane_of_many_messages_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "HAND_OVER_PART_BYTES", 7)
    first, new = OneEngine(range(3)), OneEngine(range(3))
    first.hold(1, 50)
    async with asyncio.timeout(20), port() as giver:
        giver.hand_over = gives(0, 3)
        giver.hand_over.ended(first.side)
        assert await takes((0, 3, giver.address)).take(new.side, PLAINTEXT) == 1
    assert new.held() == {1: rows(range(3), 1, 50)}


async def test_whoever_asks_early_waits_for_the_end_of_the_epoch() -> None:
    first, new = OneEngine(range(3)), OneEngine(range(3))
    async with asyncio.timeout(20), port() as giver:
        giver.hand_over = gives(0, 3)
        taking = asyncio.create_task(takes((0, 3, giver.address)).take(new.side, PLAINTEXT))
        await giver.came.wait()
        first.hold(1, 10)
        giver.hand_over.ended(first.side)
        assert await taking == 1


@pytest.mark.parametrize("shown_pass", ["", "another"])
async def test_nobody_gets_lanes_without_the_pass_or_twice(shown_pass: str) -> None:
    first, new = OneEngine(range(3)), OneEngine(range(3))
    first.hold(1, 10)
    async with asyncio.timeout(20), port() as giver:
        giver.hand_over = gives(0, 3)
        giver.hand_over.ended(first.side)
        with pytest.raises(UnauthenticatedError, match="pass of the change"):
            await takes((0, 3, giver.address), shown_pass=shown_pass).take(new.side, PLAINTEXT)
        assert first.n_calls == 0
        assert await takes((0, 3, giver.address)).take(new.side, PLAINTEXT) == 1
        with pytest.raises(UnauthenticatedError):
            await takes((0, 3, giver.address)).take(new.side, PLAINTEXT)


async def test_a_finished_hand_over_is_refused_at_once_and_frees_its_engine() -> None:
    first, new = OneEngine(range(3)), OneEngine(range(3))
    async with asyncio.timeout(20), port() as giver:
        giver.hand_over = gives(0, 3)
        giver.hand_over.ended(first.side)
        side = weakref.ref(first)
        giver.hand_over.over()
        with pytest.raises(UnauthenticatedError):
            await takes((0, 3, giver.address)).take(new.side, PLAINTEXT)
        del first
        gc.collect()
        assert side() is None


async def test_a_stage_with_another_name_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "caller", lambda: type("Who", (), {"name": "c"}))
    first, new = OneEngine(range(3)), OneEngine(range(3))
    async with asyncio.timeout(20), port() as giver:
        giver.hand_over = HandOver(1, pb.HandOver(gives=[pb.GivenLayers(layer_end=3, to="b", shown_pass=PASS)]))
        giver.hand_over.ended(first.side)
        with pytest.raises(UnauthenticatedError, match="for stage b"):
            await takes((0, 3, giver.address)).take(new.side, PLAINTEXT)


def lane_of(session_id: int, n_tokens: int = 5, n_layers: int = 3) -> HandedLane:
    one = OneEngine(range(n_layers))
    one.hold(session_id, n_tokens)
    handed = one.handing.give((ROUTE, session_id), 0, n_layers)
    assert handed is not None
    return handed


def head(**changes: Any) -> bytes:
    (first, *_) = pieces(lane_of(2))
    message = relayline_pb2.HandOverResponse.FromString(first)
    for name, value in changes.items():
        if isinstance(value, list):
            del getattr(message, name)[:]
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message.SerializeToString()


GOOD = list(pieces(lane_of(1)))
WRONG: dict[str, list[bytes]] = {
    "no protobuf": [*GOOD, b"\xff"],
    "cells of no lane": [*GOOD, GOOD[1]],
    "an end within a lane": [*GOOD, *list(pieces(lane_of(2)))[:-1]],
    "a head within a lane": [*GOOD, head(), head(session_id=3)],
    "the same lane twice": [*GOOD, *GOOD],
    "another type": [*GOOD, head(forms=[b"\1" * 12] * 3)],
    "other layers": [*GOOD, *pieces(lane_of(2, n_layers=2))],
    "tokens without end": [*GOOD, head(n_tokens=2**32 - 1)],
    "more tokens than a lane has": [*GOOD, head(n_tokens=CTX_TOKENS + 1)],
    "a message that is too long": [*GOOD, head(data=b"x" * (bounds.HAND_OVER_PART_BYTES + 64 * 1024))],
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_bad_part_ends_the_hand_over_and_earlier_lanes_stay(wrong: str) -> None:
    async def answer(request: Any, context: Any) -> None:
        for message in WRONG[wrong]:
            await context.write(message)

    new = OneEngine(range(3))
    async with asyncio.timeout(20), port(answer) as giver:
        with pytest.raises(ProtocolError):
            await takes((0, 3, giver.address)).take(new.side, PLAINTEXT)
    assert new.held() == {1: rows(range(3), 1, 5)}
    new.lanes.check()


async def test_a_giver_that_dies_in_the_middle_costs_the_others_their_lanes_alone() -> None:
    async def answer(request: Any, context: Any) -> None:
        for message in [*GOOD, *list(pieces(lane_of(2)))[:2]]:
            await context.write(message)
        await server.stop(None)

    new = OneEngine(range(3))
    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(answer, None, None)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(rpc.SERVICE, {"HandOver": handler}),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with asyncio.timeout(20):
        with pytest.raises(RelaylineError):
            await takes((0, 3, address)).take(new.side, PLAINTEXT)
    assert new.held() == {1: rows(range(3), 1, 5)}


async def test_a_giver_that_is_away_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_S", 0.05)
    new, own = OneEngine(range(3)), OneEngine(range(2))
    taking = takes((0, 2, ""), (2, 3, "127.0.0.1:1"))
    taking.ended(own.side)
    async with asyncio.timeout(20):
        with pytest.raises(StageLostError, match="cannot be reached"):
            await taking.take(new.side, PLAINTEXT)
        await taking.given()  # so the old engine's memory is given back


async def test_a_giver_that_refuses_ends_the_wait_for_another_one() -> None:
    """It is not left at work, where nothing could close it."""
    new = OneEngine(range(3))
    async with asyncio.timeout(20), port() as giver:
        giver.hand_over, before = gives(0, 2), asyncio.all_tasks()
        taking = takes((0, 2, giver.address), (2, 3, ""), shown_pass="another")
        with pytest.raises(UnauthenticatedError, match="pass of the change"):
            await taking.take(new.side, PLAINTEXT)
        assert not [task for task in asyncio.all_tasks() - before if "anext" in repr(task)]
        await taking.given()


async def test_one_that_never_switches_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "HAND_OVER_S_MAX", 0.05)
    async with asyncio.timeout(20), port() as giver:
        giver.hand_over = gives(0, 3)
        with pytest.raises(NotReadyError, match="did not switch in time"):
            await takes((0, 3, giver.address)).take(OneEngine(range(3)).side, PLAINTEXT)
        await giver.hand_over.given()


async def test_lanes_that_cannot_change_hands_are_asked_of_nobody() -> None:
    """As of models with a recurrent state or sliding windows."""
    engine = ModelEngine(range(3), N_LANES, is_last=False, keeps_state=True)
    new = OneEngine(range(3))
    new.side = Engine(new.call, Handing(new.lanes, engine), 0)
    async with asyncio.timeout(20):
        assert await takes((0, 3, "127.0.0.1:1")).take(new.side, PLAINTEXT) == 0


def test_a_lane_whose_cells_end_elsewhere_is_not_given() -> None:
    """As one with images, whose positions are not those of its rows."""
    old = OneEngine(range(3))
    old.hold(1, 5)
    given = old.handing.give((ROUTE, 1), 0, 3)
    assert given is not None
    assert (given.n_tokens, len(given.layers)) == (5, 3)
    assert old.handing.give((ROUTE, 1), 3, 3) is None, "none of the layers"
    next(lane for lane in old.lanes if lane.session_id == 1).next_position = 4
    assert old.handing.give((ROUTE, 1), 0, 3) is None


def test_a_lane_is_taken_once_and_only_where_there_is_room() -> None:
    new = OneEngine(range(3))
    assert new.handing.take(lane_of(1))
    assert not new.handing.take(lane_of(1)), "it is here already"
    for session_id in range(2, 1 + N_LANES):
        new.hold(session_id, 2)
    assert not new.handing.take(lane_of(9)), "no lane is free"
    assert len(new.held()) == N_LANES
    other = OneEngine(range(2))
    assert not other.handing.take(lane_of(1)), "of other layers"
    assert not other.held()
    other.lanes.check()


def test_joined_parts_have_the_tokens_that_all_of_them_have() -> None:
    parts = joined([lane_of(1, 5), lane_of(1, 3), lane_of(1, 4)])
    assert (parts.n_tokens, len(parts.layers)) == (3, 9)
    assert all(layer.form == CELLS and layer.tensors[0].shape == (1, 3, 4) for layer in parts.layers)
    assert np.array_equal(parts.layers[0].tensors[0], lane_of(1, 5).layers[0].tensors[0][:, :3])


def test_an_engine_that_was_freed_gives_and_takes_nothing() -> None:
    """Its decode thread may still be asked: a stage that takes is slow, and was waited for long enough."""
    engine = ModelEngine(range(3), N_LANES, is_last=False)
    freed: list[str] = []
    executor = StepExecutor(
        engine,
        LaneTable(N_LANES, CTX_TOKENS),
        0,
        None,
        close=lambda: freed.append("engine"),
        states=LaneStates(engine, engine, None),
    )
    handing = executor.sessions.handing
    assert handing.take(lane_of(1))
    assert handing.give((ROUTE, 1), 0, 3) is not None
    executor.close()
    assert freed == ["engine"]
    assert handing.give((ROUTE, 1), 0, 3) is None
    assert not handing.take(lane_of(2))
    assert handing.forms() == ()
