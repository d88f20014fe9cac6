"""A stream that forwards its events needs no task in between: a published event is read at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from relayline.coordinator.engine.instructions import Tell
from relayline.coordinator.http.replies.merge import Arrival, Merge
from relayline.coordinator.sessions.generation import TokenEvent
from relayline.coordinator.sessions.streams import Audience, SessionStream
from relayline.wire.common.errors import InternalError, RelaylineError


def event(token: int, *, is_last: bool = False) -> TokenEvent:
    return TokenEvent(token, None, (), "length" if is_last else None)


def stream_of(audience: Audience) -> SessionStream:
    def leave(stream: SessionStream) -> None:
        if stream in audience.streams:
            audience.streams.remove(stream)

    stream = SessionStream(leave)
    audience.join(stream)
    return stream


async def test_events_of_all_streams_are_handed_over_together_and_in_order() -> None:
    audiences = [Audience(1), Audience(2)]
    audiences[0].put(event(1))  # before it has joined
    streams = [stream_of(audience) for audience in audiences]
    audiences[0].put(event(2))  # before it forwards
    async with Merge(streams, backlog_events_max=4) as merge:
        n_tasks = len(asyncio.all_tasks())
        assert n_tasks == 1, "no task is in between"
        audiences[1].put(event(3))
        audiences[0].put(event(4, is_last=True))
        found = await merge.next(None)
    tokens = [(one.stream, one.event.token if one.event else None) for one in found]
    assert tokens == [(0, 1), (0, 2), (1, 3), (0, 4), (0, None)]


async def test_a_reader_that_waits_is_woken_by_an_event_by_an_error_and_by_time() -> None:
    audience = Audience(1)
    async with Merge([stream_of(audience)], backlog_events_max=4) as merge:
        asyncio.get_running_loop().call_soon(audience.put, event(5))
        assert [one.event.token for one in await merge.next(60) if one.event] == [5]
        assert await merge.next(0) == []
        asyncio.get_running_loop().call_soon(audience.put, InternalError("lost"))
        (last,) = await merge.next(60)
        assert isinstance(last.error, InternalError)


@pytest.mark.parametrize("drops", [True, False])
async def test_a_dropped_stream_leaves_its_session_at_once_and_others_when_the_block_ends(drops: bool) -> None:
    audience = Audience(1)
    async with Merge([stream_of(audience)], backlog_events_max=4) as merge:
        if drops:
            merge.drop(0)
        assert bool(audience.streams) is not drops
    assert not audience.streams


async def test_a_function_gets_what_comes_in_one_turn_together_until_it_stops() -> None:
    audience, given = Audience(1), list[list[int]]()
    loop = asyncio.get_running_loop()

    def take(arrivals: list[Arrival]) -> bool:
        given.append([one.event.token for one in arrivals if one.event])
        if len(given) == 2:
            loop.call_soon(audience.put, event(4))
        return len(given) < 3

    def step() -> None:
        audience.put(event(2))
        audience.put(event(3))

    async with Merge([stream_of(audience)], backlog_events_max=4) as merge:
        audience.put(event(1))
        loop.call_soon(step)
        await merge.pass_on(take, 60)
        audience.put(event(5))
        assert given == [[1], [2, 3], [4]], "events after its stop wait"
        await merge.pass_on(take, 60)
        assert given[3:] == [[5]]


async def test_an_error_of_the_function_reaches_who_waits() -> None:
    audience = Audience(1)

    def take(arrivals: list[Arrival]) -> bool:
        raise LookupError("a bug")

    async with Merge([stream_of(audience)], backlog_events_max=4) as merge:
        asyncio.get_running_loop().call_soon(audience.put, event(1))
        with pytest.raises(LookupError):
            await merge.pass_on(take, 60)


async def test_what_comes_while_ready_events_are_taken_is_passed_on_too() -> None:
    """To drop one stream can start another one, which says at once how far its prompt has been read."""
    audience, found = Audience(1), list[int]()

    def take(arrivals: list[Arrival]) -> bool:
        found.extend(one.event.token for one in arrivals if one.event)
        if found == [1]:
            audience.put(event(2))
        return len(found) < 2

    async with Merge([stream_of(audience)], backlog_events_max=4) as merge:
        audience.put(event(1))
        async with asyncio.timeout(60):
            await merge.pass_on(take, None)
    assert found == [1, 2]


@pytest.mark.parametrize("make", [lambda error: Arrival(0, error=error), lambda error: Tell(1, error)])
async def test_an_error_that_was_raised_is_freed_with_the_frames_that_knew_it(
    make: Callable[[RelaylineError], Any],
) -> None:
    """An error holds the frame that raises it, with all locals of a request. These hold what the error came in."""

    def fails() -> None:
        came = make(InternalError("lost"))
        held.append(weakref.ref(of_request := Merge([], 1)))
        assert of_request
        raise getattr(came, "error", None) or came.event

    held: list[weakref.ref[Merge]] = []
    with contextlib.suppress(InternalError):
        fails()
    gc.collect()
    assert held[0]() is None


async def test_a_stream_that_cannot_be_left_keeps_no_other_open() -> None:
    audience = Audience(2)

    def fails(_: SessionStream) -> None:
        raise RuntimeError("a bug")

    async with Merge([SessionStream(fails), stream_of(audience)], backlog_events_max=4):
        assert audience.streams
    assert not audience.streams
