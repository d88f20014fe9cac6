"""Streams of a pipeline over a model of its stages: each ends once, with its tokens in order, whatever happens."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.coordinator.schedule.draft_flights import DRAFT_AUTO
from relayline.coordinator.sessions import prefixes
from relayline.coordinator.sessions.generation import TokenEvent
from relayline.coordinator.sessions.session import OutFrame, Session
from relayline.wire.common.errors import (
    HandshakeError,
    InternalError,
    NotReadyError,
    ProtocolError,
    RelaylineError,
    StageLostError,
)
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.examples import thinned
from tests.support.session_world import EVENTS, ORACLE_VOCAB, World, oracle, play
from tests.support.sessions import SAMPLE


@settings(max_examples=thinned(200))
@given(
    EVENTS,
    st.integers(1, 3),
    st.sampled_from(["auto", "drain", "fixed"]),
    st.booleans(),
    st.integers(0, 2),
    st.sampled_from([0, DRAFT_AUTO, 1, 4]),
)
def test_every_request_ends_once_with_its_tokens_in_order(
    events: list[tuple[object, ...]], n_lanes: int, mode: str, share: bool, prefix_lanes: int, draft: int
) -> None:
    async def scenario() -> None:
        world = World(n_lanes, mode, share, prefix_lanes, draft)
        for event in events:
            await play(world, event)
            world.pipeline.dispatch()  # as at the end of the event loop's turn
            world.check()
        world.finish()

    with mock.patch.object(prefixes, "PREFIX_TOKENS_MIN", 2):
        asyncio.run(scenario())


async def test_giving_up_ends_running_and_waiting_requests_once() -> None:
    world = World(n_lanes=1)
    for _ in range(3):
        world.open(4, 4)
    for _ in range(3):
        world.pipeline.dispatch()
        world.stages.step()
    world.deliver()
    world.disconnect()
    world.fail_all(NotReadyError("gone"))
    world.check()
    assert [client.ends for client in world.clients] == [["not_ready"]] * 3
    world.finish()


async def test_an_error_that_cannot_be_retried_reaches_clients_as_a_lost_stage() -> None:
    world = World(n_lanes=1)
    world.open(4, 4)
    world.fail_all(HandshakeError("a handshake that no longer fits"))
    world.check()
    assert world.clients[0].ends == [StageLostError.label]
    world.finish()


async def test_a_token_outside_the_vocabulary_ends_the_epoch_and_no_request() -> None:
    world = World(n_lanes=1)
    world.open(1, 4)
    wrong = pb.Sampled(session_id=world.clients[0].session.session_id, position=1, token=ORACLE_VOCAB)
    world.pipeline.on_return(pb.ReturnResponse(epoch=world.pipeline.epoch, samples=[wrong]))
    assert isinstance(world.pipeline.epochs._lost.result(), ProtocolError)
    assert not world.clients[0].ends
    world.connect()
    world.finish()


async def test_the_next_rows_leave_before_the_answer_is_written() -> None:
    """Stages wait for them, whereas writing takes the longer the more streams a step had."""
    world = World(n_lanes=1)
    world.open(1, 3)
    stream, in_flight = world.clients[0].stream, []
    put = stream.put

    def look(event: TokenEvent | RelaylineError) -> None:
        in_flight.append([frame.flags for frame in world.stages.frames])
        put(event)

    with mock.patch.object(stream, "put", look):
        world.finish()
    assert in_flight == [[SAMPLE], [SAMPLE], [Flag.CLOSE]]


async def test_a_sample_that_meets_a_bug_costs_no_other_stream_its_token() -> None:
    """A noted token is delivered, even if the rest of the message fails: a replay does not deliver it again."""
    world = World(n_lanes=2)
    for n_prompt in (1, 2):
        world.open(n_prompt, 3)
    first, second = (client.session for client in world.clients)
    samples = [
        pb.Sampled(session_id=session.session_id, position=n, token=oracle(session.session_id, n))
        for session, n in ((first, 1), (second, 2))
    ]
    sampled = Session.sampled

    def stumble(session: Session, *arguments: Any) -> tuple[TokenEvent | None, list[OutFrame]]:
        if session is second:
            raise ZeroDivisionError("a bug of ours")
        return sampled(session, *arguments)

    with mock.patch.object(Session, "sampled", stumble):
        world.pipeline.on_return(pb.ReturnResponse(epoch=world.pipeline.epoch, samples=samples))
    world.check()
    assert [len(client.tokens) for client in world.clients] == [1, 0]
    assert isinstance(world.pipeline.epochs._lost.result(), InternalError)
    world.connect()
    world.finish()


async def test_a_bug_in_scheduling_ends_the_epoch_and_no_request() -> None:
    world = World(n_lanes=2)
    world.open(4, max_tokens=3)
    with mock.patch.object(world.pipeline.conductor.scheduler, "take", side_effect=ZeroDivisionError("a bug")):
        world.pipeline.dispatch()
    assert "a bug" in str(world.pipeline.epochs._lost.result())
    world.disconnect()
    world.finish()
    assert world.clients[0].ends == ["length"]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_a_cancelled_streams_lane_is_closed_in_the_next_epoch(when: str) -> None:
    world = World(3)
    world.open(4, 6)
    for _ in range(6):
        world.turn()
    if when == "before":
        await play(world, ("leave", 0))
    await play(world, ("lose", 0))
    if when == "meanwhile":
        await play(world, ("leave", 0))
    await play(world, ("recover", 3))
    world.finish()


@pytest.mark.parametrize("error", [StageLostError("the link broke"), InternalError("a handler failed")])
async def test_a_stream_accused_twice_without_a_token_is_replayed_from_the_start(error: RelaylineError) -> None:
    world = World(3)
    world.open(9, 2)
    (client,) = world.clients
    there = []
    for _ in range(2):
        world.pipeline.dispatch()
        for _ in range(3):
            world.stages.step()
        world.stages.replies.clear()
        world.stages.n_behind = 0
        world.disconnect(error)
        world.connect()
        there.append(client.session.n_kept)
    assert there[0] > 0
    assert (there[1] == 0) == isinstance(error, InternalError)
    world.finish()
