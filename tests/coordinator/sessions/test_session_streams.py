"""Streams of one session: every reader gets every event once, in order, whenever it comes."""

from __future__ import annotations

import asyncio

import pytest

from relayline.coordinator.sessions.generation import PromptProgress, TokenEvent
from relayline.coordinator.sessions.streams import Audience, SessionStream
from relayline.wire.common.errors import RelaylineError, RequestCancelledError, StageLostError

FIRST, SECOND, LAST = TokenEvent(1, None, ()), TokenEvent(2, None, ()), TokenEvent(3, None, (), "stop")


def new_stream() -> tuple[SessionStream, list[SessionStream]]:
    left: list[SessionStream] = []
    return SessionStream(left.append), left


async def test_it_ends_with_its_last_event_or_with_an_error() -> None:
    stream, left = new_stream()
    for event in (FIRST, LAST, SECOND):
        stream.put(event)
    assert [event async for event in stream] == [FIRST, LAST], "nothing follows the end"
    await stream.aclose()
    assert left == [stream]
    broken, _ = new_stream()
    broken.put(FIRST)
    broken.put(StageLostError("gone"))
    assert await anext(broken) == FIRST
    with pytest.raises(StageLostError):
        await anext(broken)
    with pytest.raises(StopAsyncIteration):
        await anext(broken)


async def test_one_that_somebody_else_ends_says_so_to_its_reader_and_leaves() -> None:
    stream, left = new_stream()
    reading = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream.stop(RequestCancelledError("by hand"))
    with pytest.raises(RequestCancelledError):
        await reading
    assert left == [stream]
    gone, _ = new_stream()
    gone.put(FIRST)
    gone.leave()
    assert [event async for event in gone] == []


def test_events_are_passed_on_in_order_with_those_that_waited() -> None:
    stream, _ = new_stream()
    taken: list[TokenEvent | RelaylineError] = []
    stream.put(FIRST)
    stream.put(SECOND)
    stream.forward(taken.append)
    assert taken == [FIRST, SECOND]
    stream.put(LAST)
    assert taken == [FIRST, SECOND, LAST]


def test_who_follows_a_prompt_hears_where_it_is_and_how_it_goes_on() -> None:
    stream, _ = new_stream()
    heard: list[int] = []
    for n_read in (4, 8):
        stream.progressed(PromptProgress(20, 0, n_read))
    stream.follow(lambda progress: heard.append(progress.n_read))
    assert heard == [8], "the latest"
    stream.progressed(PromptProgress(20, 0, 12))
    assert heard == [8, 12]
    quiet, _ = new_stream()
    quiet.follow(lambda progress: heard.append(progress.n_read))
    assert heard == [8, 12], "there is nothing to say yet"


def test_a_late_reader_gets_all_tokens_so_far_and_each_gets_all_that_follow() -> None:
    audience, got = Audience(7), {"early": list[object](), "late": list[object]()}
    early, late = new_stream()[0], new_stream()[0]
    for name, stream in (("early", early), ("late", late)):
        stream.forward(got[name].append)
    read: list[int] = []
    early.follow(lambda progress: read.append(progress.n_read))
    audience.join(early)
    audience.progressed(PromptProgress(20, 0, 4))
    audience.put(FIRST)
    audience.join(late)
    error = StageLostError("gone")
    for event in (SECOND, error):
        audience.put(event)
    assert got == {"early": [FIRST, SECOND, error], "late": [FIRST, SECOND, error]}
    assert read == [4]
