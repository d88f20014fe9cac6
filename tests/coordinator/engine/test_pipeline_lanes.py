"""Fewer, more or occupied lanes, and requests that crash stages: which streams wait and which go on."""

from __future__ import annotations

import itertools

import pytest

from relayline.coordinator.sessions import admission
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import REPLAYS_MAX, State
from relayline.coordinator.sessions.suspects import LOSSES_ALONE, LOSSES_MAX
from relayline.wire.common.errors import InternalError, OverloadedError
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.session_world import Client, World


def state_of(client: Client) -> State:
    return client.session.state


def states_of(world: World) -> list[State]:
    return [*map(state_of, world.clients)]


async def decoding(n_lanes: int, n_clients: int) -> World:
    """A pipeline that is lost after each stream with a lane has its first token."""
    world = World(n_lanes)
    for n_prompt in range(3, 3 + n_clients):
        world.open(n_prompt, max_tokens=6)
    while any(not client.tokens for client in world.clients[:n_lanes]):
        world.turn()
    world.disconnect()
    return world


async def test_with_fewer_lanes_the_youngest_wait_and_go_on_where_they_were() -> None:
    world = await decoding(n_lanes=3, n_clients=4)
    world.connect(n_lanes=1)
    assert states_of(world) == [State.PREFILL, State.WAITING, State.WAITING, State.WAITING]
    begun = [len(client.tokens) for client in world.clients]
    assert min(begun[:3]) > 0
    fault = pb.SessionFault(session_id=world.clients[1].session.session_id, label="not_finite")
    world.pipeline.on_return(pb.ReturnResponse(epoch=world.pipeline.epoch, faults=[fault]))
    assert not world.clients[1].ends, "it has sent nothing in this epoch"
    world.open(3, 3)
    assert len(world.clients) == 4, "the line is full"
    world.clients[1].left = True
    await world.clients[1].stream.aclose()
    world.check()
    assert states_of(world) == [State.PREFILL, State.DONE, State.WAITING, State.WAITING]
    world.finish()
    assert [client.ends for client in world.clients] == [["length"], [], ["length"], ["length"]]


async def test_with_more_lanes_waiting_sessions_start_at_once() -> None:
    world = await decoding(n_lanes=1, n_clients=3)
    assert states_of(world)[1:] == [State.WAITING] * 2
    world.connect(n_lanes=3)
    assert states_of(world) == [State.PREFILL] * 3
    world.finish()
    assert [client.ends for client in world.clients] == [["length"]] * 3


async def test_a_stream_that_gets_a_lane_during_a_recovery_starts_with_the_next_epoch() -> None:
    world = await decoding(n_lanes=1, n_clients=2)
    await world.clients[0].stream.aclose()
    assert states_of(world) == [State.DONE, State.WAITING]
    assert not world.clients[1].record.started_ns
    world.clients[0].left = True
    world.connect()
    assert states_of(world) == [State.DONE, State.PREFILL]
    world.finish()


async def test_a_stream_whose_lane_another_coordinator_has_waits_for_the_end_of_one_of_ours() -> None:
    world = World(n_lanes=2)
    world.open(3, max_tokens=6)
    world.stages.n_taken = 1
    world.open(4, max_tokens=2)
    while state_of(world.clients[1]) is not State.WAITING:
        world.turn()
    world.open(5, max_tokens=2)
    assert states_of(world)[1:] == [State.WAITING] * 2, "no newcomer overtakes it"
    while not world.clients[0].ends:
        assert not world.clients[1].ends
        world.turn()
    assert states_of(world)[1:] == [State.PREFILL, State.WAITING], "for one lane that is ours"
    world.finish()
    assert [client.ends for client in world.clients] == [["length"]] * 3
    assert [client.session.replays for client in world.clients] == [0, 0, 0]
    assert world.clients[1].record.events[0].name == "replayed"


async def both_open() -> tuple[World, Client]:
    """Two streams whose opens have passed the first stage; the second one."""
    world = World(n_lanes=2)
    for n_prompt in (3, 4):
        world.open(n_prompt, max_tokens=4)
    world.pipeline.dispatch()
    world.stages.step()
    world.stages.step()
    assert [*world.stages.rows] == [client.session.session_id for client in world.clients]
    return world, world.clients[1]


async def test_a_stream_that_a_later_stage_refuses_gives_its_lanes_before_it_back() -> None:
    world, refused = await both_open()
    world.fault(refused, True)
    assert (state_of(refused), refused.session.replays) == (State.WAITING, 0)
    world.pipeline.dispatch()
    while world.stages.frames:
        world.stages.step()
    assert refused.session.session_id not in world.stages.rows
    world.finish()
    assert [client.ends for client in world.clients] == [["length"]] * 2


async def test_a_stream_that_had_its_lane_and_finds_no_room_for_more_is_replayed() -> None:
    world, refused = await both_open()
    world.fault(refused, True, position=3)
    assert (state_of(refused), refused.session.replays) == (State.PREFILL, 1)
    world.finish()


def settle(world: World) -> None:
    world.turn()
    while world.stages.frames or world.stages.replies:
        world.turn()


async def test_a_whole_line_waits_while_another_coordinator_has_all_lanes() -> None:
    world = World(n_lanes=3)
    world.pipeline.conductor.admission.waiting_max = 9
    world.stages.n_taken = 3
    for n_prompt in range(3, 10):
        world.open(n_prompt, max_tokens=3)
    settle(world)
    for _ in range(200):
        world.try_lanes()
        assert states_of(world).count(State.PREFILL) == 1, "it does not ask for all of them repeatedly"
        settle(world)
        assert not any(client.ends for client in world.clients)
    world.pipeline.conductor.admission.waiting_max = 7
    with pytest.raises(OverloadedError):
        world.pipeline.open(GenerationRequest("x", (1, 2), 3, SamplingParams()))
    world.stages.n_taken = 2
    world.finish()
    assert [client.ends for client in world.clients] == [["length"]] * 7
    assert not world.pipeline.conductor.admission.is_short


async def test_lanes_that_another_coordinator_gives_back_are_soon_all_in_use() -> None:
    world = World(n_lanes=8)
    world.pipeline.conductor.admission.waiting_max = 9
    world.stages.n_taken = 8
    for n_prompt in range(3, 11):
        world.open(n_prompt, max_tokens=40)
    settle(world)
    world.stages.n_taken = 0
    for n_running in (1, 3, 7, 8):
        world.try_lanes()
        assert len(world.pipeline.conductor.admission.running) == n_running
        for _ in range(3 * n_running):
            world.turn()
    world.finish()


async def test_a_stream_that_is_refused_a_lane_for_ever_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "LANE_TRIES_MAX", 5)
    world = World(n_lanes=1)
    world.stages.n_taken = 1
    world.open(3, max_tokens=2)
    world.finish()
    assert world.clients[0].ends == ["no_lane"]
    assert (world.clients[0].session.n_refused, world.clients[0].session.replays) == (5, REPLAYS_MAX)
    assert len(world.clients[0].record.events) < 10


async def test_a_suspect_that_gets_no_lane_lets_the_next_one_try() -> None:
    world = World(n_lanes=2)
    for n_prompt in (4, 5):
        world.open(n_prompt, max_tokens=2)
    for _ in range(LOSSES_ALONE):
        world.disconnect()  # before any token
        world.connect()
    first, second = world.clients
    world.stages.n_taken = 2
    while state_of(first) is not State.WAITING:
        world.turn()
    world.stages.n_taken = 1
    world.finish()
    assert [first.ends, second.ends] == [["length"]] * 2


async def test_a_suspect_that_gets_a_lane_when_another_leaves_waits_for_its_turn() -> None:
    world = World(n_lanes=3)
    for n_prompt in (4, 5, 6):
        world.open(n_prompt, max_tokens=2)
    for n_lanes in (3, 2):
        world.disconnect()  # before any token
        world.connect(n_lanes)
    tried, second, third = world.clients
    assert [state_of(client) for client in (tried, third)] == [State.PREFILL, State.WAITING]
    await second.stream.aclose()
    second.left = True
    assert third.session.session_id in world.pipeline.conductor.admission.running
    assert state_of(third) is State.WAITING, "it may be the one that brings the pipeline down"
    while not tried.tokens:
        assert state_of(third) is State.WAITING
        world.turn()
    assert state_of(third) is State.PREFILL
    world.finish()


@pytest.mark.parametrize("lanes", [[4], [2, 4], [1], [3, 1, 2], [4, 2, 1]], ids=str)
async def test_a_request_that_kills_a_stage_each_time_is_given_up_and_the_others_go_on(lanes: list[int]) -> None:
    """Only its rows end the epoch, on any stage. The stages come back with this number of lanes."""
    world, lanes_then = World(n_lanes=4), itertools.cycle(lanes)
    for n_prompt in (4, 5, 6, 7):
        world.open(n_prompt, max_tokens=6)
    poison = world.clients[1]
    n_lost = 0
    for _ in range(500):
        world.pipeline.dispatch()
        if any(frame.session_id == poison.session.session_id and frame.tokens for frame in world.stages.frames):
            world.disconnect()
            n_lost += 1
            world.connect(next(lanes_then))
            continue
        if not (world.stages.frames or world.stages.replies):
            break
        world.stages.step()
        world.deliver()
        world.check()
    assert n_lost == LOSSES_MAX
    assert poison.ends == ["internal"]
    assert [client.ends for client in world.clients if client is not poison] == [["length"]] * 3
    world.finish()


@pytest.mark.parametrize("n_behind", [0, 2])
async def test_bursts_of_broken_connections_give_nobody_up(n_behind: int) -> None:
    """No stage is restarted, and no stream gets a token in between."""
    world = World(n_lanes=3)
    world.stages.n_behind = n_behind
    for n_prompt in (4, 5, 6, 7):
        world.open(n_prompt, max_tokens=6)
    for n_turns in range(4 * LOSSES_MAX):
        for _ in range(n_turns % 3):
            world.turn()
        world.disconnect()
        world.connect()
        world.check()
    world.finish()
    assert [client.ends for client in world.clients] == [["length"]] * 4


@pytest.mark.parametrize("n_starts", [LOSSES_MAX - 1, LOSSES_MAX])
async def test_broken_connections_between_restarts_clear_nobody(n_starts: int) -> None:
    world = World(n_lanes=2)
    world.open(4, max_tokens=6)
    for _ in range(n_starts):
        for n_behind in (0, -1, 0):
            world.stages.n_behind = n_behind
            world.disconnect()
            world.connect()
    world.finish()
    assert [client.ends for client in world.clients] == [["internal"] if n_starts == LOSSES_MAX else ["length"]]


async def test_a_request_that_finds_a_bug_in_a_process_that_lives_on_is_given_up_too() -> None:
    world = World(n_lanes=2)
    world.stages.n_behind = 0
    world.open(4, max_tokens=6)
    for _ in range(LOSSES_MAX):
        assert not world.clients[0].ends
        world.disconnect(InternalError("a handler failed"))
        world.connect()
        world.clients[0].read()
    assert world.clients[0].ends == ["internal"]
