"""Responses with `background: true`: they go on without a connection, are polled, cancelled and streamed again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import aiohttp
import openai
import pytest
from openai.types.responses import Response

from relayline.coordinator.http.conversations.keeper import Conversations
from relayline.coordinator.http.responses import background, running
from relayline.coordinator.http.responses.recording import EVENT_BYTES, Reader, Recording
from relayline.coordinator.http.responses.store import ResponseStore
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import OverloadedError, StageLostError
from tests.support.http_support import MODEL, WAIT_S, FakeGenerator, Gate, says, tokens
from tests.support.openai_client import client_of, leave
from tests.support.polling import pause


async def ended(client: openai.AsyncOpenAI, id: str) -> Response:
    """Poll a response as OpenAI's guide does, to its end."""
    async with asyncio.timeout(WAIT_S):
        while True:
            found = await client.responses.retrieve(id)
            if found.status not in ("queued", "in_progress"):
                return found
            await pause()


def held(text: bytes, gate: Gate, rest: bytes) -> FakeGenerator:
    """Return a generator whose answers stop at a gate, and go on."""
    return FakeGenerator(
        lambda request: [*tokens(request, text, ends=False), gate, *tokens(request, rest)],
    )


async def test_a_response_is_answered_at_once_and_polled_to_its_end(tokenizer: Tokenizer) -> None:
    gate = Gate()
    async with client_of(tokenizer, held(b"he", gate, b"llo")) as (client, served):
        begun = await client.responses.create(model=MODEL, input="hi", background=True, metadata={"a": "b"})
        assert (begun.status, begun.background, begun.output, begun.usage) == ("queued", True, [], None)
        async with asyncio.timeout(WAIT_S):
            await gate.reached.wait()
        now = await client.responses.retrieve(begun.id)
        assert (now.status, now.output, now.metadata) == ("in_progress", [], {"a": "b"})
        listed = await client.responses.input_items.list(begun.id)
        assert len(listed.data) == 1
        with pytest.raises(openai.BadRequestError, match="still in progress"):
            await client.responses.create(model=MODEL, input="and?", previous_response_id=begun.id)
        gate.opened.set()
        whole = await ended(client, begun.id)
        assert (whole.status, whole.output_text, whole.id) == ("completed", "hello", begun.id)
        assert whole.usage is not None
        assert whole.usage.output_tokens == 6
        served.generator.script = says(b"next")
        more = await client.responses.create(model=MODEL, input="and?", previous_response_id=begun.id)
        assert more.output_text == "next"


async def test_its_record_ends_with_the_answer_and_not_with_the_reply(tokenizer: Tokenizer) -> None:
    gate = Gate()
    async with client_of(tokenizer, held(b"he", gate, b"llo")) as (client, served):
        begun = await client.responses.create(model=MODEL, input="hi", background=True)
        (record,) = served.generator.records
        assert record is not None
        assert record.ended_ns == 0
        gate.opened.set()
        await ended(client, begun.id)
        assert record.ended_ns > 0
        assert (record.status, record.error) == (200, "")


async def test_a_cancelled_response_frees_its_stream_and_keeps_its_text(tokenizer: Tokenizer) -> None:
    gate = Gate()
    async with client_of(tokenizer, held(b"he", gate, b"llo")) as (client, served):
        begun = await client.responses.create(model=MODEL, input="hi", background=True)
        async with asyncio.timeout(WAIT_S):
            await gate.reached.wait()
        cancelled = await client.responses.cancel(begun.id)
        assert (cancelled.status, cancelled.output_text) == ("cancelled", "he")
        async with asyncio.timeout(WAIT_S):
            await served.generator.streams[0].closed.wait()
        again = await client.responses.cancel(begun.id)
        assert again.status == "cancelled"
        assert (await client.responses.retrieve(begun.id)).status == "cancelled"


async def test_a_deleted_response_is_cancelled(tokenizer: Tokenizer) -> None:
    gate = Gate()
    async with client_of(tokenizer, held(b"he", gate, b"llo")) as (client, served):
        begun = await client.responses.create(model=MODEL, input="hi", background=True)
        await client.responses.delete(begun.id)
        async with asyncio.timeout(WAIT_S):
            await served.generator.streams[0].closed.wait()
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(begun.id)


async def test_a_failed_response_says_why(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(lambda request: [*tokens(request, b"he", ends=False), StageLostError("stage 1 is lost")])
    async with client_of(tokenizer, generator) as (client, _):
        begun = await client.responses.create(model=MODEL, input="hi", background=True)
        failed = await ended(client, begun.id)
        assert (failed.status, failed.output_text) == ("failed", "he")
        assert failed.error is not None
        assert failed.error.message == "stage 1 is lost"


async def test_a_response_that_the_limit_cuts_is_incomplete(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(says(b"hello"))) as (client, _):
        begun = await client.responses.create(model=MODEL, input="hi", background=True, max_output_tokens=2)
        cut = await ended(client, begun.id)
        assert (cut.status, cut.output_text) == ("incomplete", "he")


async def test_a_stream_that_breaks_is_taken_up_after_its_last_event(tokenizer: Tokenizer) -> None:
    gate = Gate()
    async with client_of(tokenizer, held(b"he", gate, b"llo")) as (client, served):
        stream = await client.responses.create(model=MODEL, input="hi", background=True, stream=True)
        seen = []
        async for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta" and event.delta == "e":
                break
        await leave(stream)  # the connection ends, the answer goes on
        assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
        id = seen[0].response.id  # type: ignore[union-attr]
        assert seen[0].response.status == "queued"  # type: ignore[union-attr]
        assert not served.generator.streams[0].closed.is_set()
        again = await client.responses.retrieve(id, stream=True, starting_after=seen[-1].sequence_number)
        gate.opened.set()
        seen += [event async for event in again]
        assert [event.sequence_number for event in seen] == [*range(len(seen))]
        assert seen[-1].type == "response.completed"
        assert seen[-1].response.output_text == "hello"
        replayed = [event async for event in await client.responses.retrieve(id, stream=True)]
        assert replayed == seen


async def test_other_responses_are_neither_cancelled_nor_streamed_again(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(says(b"hello"))) as (client, _):
        plain = await client.responses.create(model=MODEL, input="hi")
        with pytest.raises(openai.BadRequestError, match="only a background response can be cancelled"):
            await client.responses.cancel(plain.id)
        with pytest.raises(openai.BadRequestError, match="asked for as a stream"):
            await client.responses.retrieve(plain.id, stream=True)
        begun = await client.responses.create(model=MODEL, input="hi", background=True)
        await ended(client, begun.id)
        with pytest.raises(openai.BadRequestError, match="asked for as a stream"):
            await client.responses.retrieve(begun.id, stream=True)


async def test_events_that_are_no_longer_kept_are_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "Recording", lambda: Recording(3_000, 3_000))
    gate = Gate()
    async with client_of(tokenizer, held(b"", gate, b"hello, you there")) as (client, _):
        stream = await client.responses.create(model=MODEL, input="hi", background=True, stream=True)
        first = await anext(stream)
        await leave(stream)
        id = first.response.id  # type: ignore[union-attr]
        gate.opened.set()
        await ended(client, id)
        with pytest.raises(openai.BadRequestError, match="no longer kept; get the response without"):
            await client.responses.retrieve(id, stream=True, starting_after=0)


async def test_a_full_queue_refuses_and_so_does_the_limit(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    generator = held(b"he", gate, b"llo")
    generator.refusals = [OverloadedError("all lanes are taken", retry_after_s=3)]
    monkeypatch.setattr(background.Background.__init__, "__defaults__", (1,))
    async with client_of(tokenizer, generator) as (client, _):
        with pytest.raises(openai.RateLimitError, match="all lanes are taken"):
            await client.responses.create(model=MODEL, input="hi", background=True)
        begun = await client.responses.create(model=MODEL, input="hi", background=True)
        with pytest.raises(openai.RateLimitError, match="1 background responses wait or run"):
            await client.responses.create(model=MODEL, input="hi", background=True)
        gate.opened.set()
        await ended(client, begun.id)


async def test_the_end_of_the_server_closes_its_streams(tokenizer: Tokenizer) -> None:
    gate = Gate()
    async with client_of(tokenizer, held(b"he", gate, b"llo")) as (client, _):
        await client.responses.create(model=MODEL, input="hi", background=True)
    # `serving` waits for the end of all streams.


def test_a_recording_keeps_the_latest_events() -> None:
    recording = Recording(3 * (6 + EVENT_BYTES))
    for number in range(5):
        recording.add(b"data:%d\n\n" % number)
    recording.add(b"")
    assert recording.since(1, 9) is None
    assert recording.since(2, 2) == [b"data:2\n\n", b"data:3\n\n"]
    assert recording.since(5, 9) == []
    assert (recording.n_dropped, recording.n_events) == (2, 5)
    assert recording.n_bytes == 3 * (6 + EVENT_BYTES)


def test_a_reader_that_keeps_up_loses_no_event() -> None:
    """Also where one token's events, or those of the end, are larger than what is kept of events that were read."""
    told: list[int] = []
    recording = Recording(3 * (6 + EVENT_BYTES), 6 * (6 + EVENT_BYTES))
    reader = Reader(0, lambda: told.append(recording.n_events))
    recording.follow(reader)
    recording.add(b"".join(b"data:%d\n\n" % number for number in range(5)))
    assert recording.since(0, 9) is not None
    reader.number = 4
    recording.add(b"data:5\n\n")
    assert (recording.n_dropped, recording.since(4, 9)) == (3, [b"data:4\n\n", b"data:5\n\n"])
    for number in range(6, 12):  # it reads no more
        recording.add(b"data:%d\n\n" % (number % 10))
    assert recording.since(4, 9) is None
    assert recording.n_events - recording.n_dropped == 6
    recording.leave(reader)
    recording.end()
    assert told == [5, 6, 7, 8, 9, 10, 11, 12]
    assert recording.is_over
    kept = recording.kept()
    assert (kept.n_events, kept.n_dropped, kept.is_over) == (12, 9, True)
    assert kept.since(9, 9) == recording.since(9, 9)


def test_the_last_events_push_out_none_that_somebody_has_still_to_read() -> None:
    recording = Recording(3 * (6 + EVENT_BYTES), 6 * (6 + EVENT_BYTES))
    first, second = Reader(0, lambda: None), Reader(0, lambda: None)
    recording.follow(first)
    recording.follow(second)
    for number in range(3):
        recording.add(b"data:%d\n\n" % number)
    first.number = 3
    recording.closing()
    for number in range(3, 9):
        recording.add(b"data:%d\n\n" % number * 9)
    assert recording.since(0, 9) is not None, "the second reader has read nothing yet"
    for reader in (first, second):
        recording.leave(reader)
    recording.add(b"data:9\n\n")
    assert recording.n_events - recording.n_dropped == 3, "nobody reads: the bounds hold"
    assert recording.kept().n_events == recording.n_events


async def test_the_end_of_an_answer_that_is_larger_than_its_words_is_read(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its words fit what may be unread, and its last events, which repeat them three times and once more, do not."""
    monkeypatch.setattr(running, "Recording", lambda: Recording(3_000, 150_000))
    top = tuple((token, -1.25) for token in range(97, 117))
    generator = FakeGenerator(lambda request: tokens(request, b"hello, you there" * 4, top=top))
    async with client_of(tokenizer, generator) as (client, _):
        stream = await client.responses.create(
            model=MODEL, input="hi", background=True, stream=True, top_logprobs=20,
            include=["message.output_text.logprobs"],
        )  # fmt: skip
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    sizes = {each.type: len(each.to_json(indent=None)) for each in events}
    assert sizes["response.output_text.done"] * 3 > 150_000 > 80 * sizes["response.output_text.delta"]
    assert events[-1].type == "response.completed"


async def test_an_answer_with_many_log_probabilities_is_streamed_to_its_end(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "Recording", lambda: Recording(3_000))
    async with client_of(tokenizer, FakeGenerator(says(b"hello, you there" * 20))) as (client, _):
        stream = await client.responses.create(
            model=MODEL, input="hi", background=True, stream=True, top_logprobs=5, max_output_tokens=300
        )
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert events[-1].type == "response.incomplete"


async def test_an_answer_that_is_too_large_to_be_stored_says_so(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResponseStore.__init__, "__defaults__", (9, 2_000))
    async with client_of(tokenizer, FakeGenerator(says(b"hello" * 60))) as (client, _):
        begun = await client.responses.create(model=MODEL, input="hi", background=True)
        failed = await ended(client, begun.id)
    assert (failed.status, failed.output) == ("failed", [])
    assert failed.error is not None
    assert "larger than what is stored" in failed.error.message


async def test_head_sends_no_events(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(says(b"hello"))) as (client, served):
        begun = await client.responses.create(model=MODEL, input="hi", background=True, stream=True)
        id = (await anext(begun)).response.id  # type: ignore[union-attr]
        await leave(begun)
        async with aiohttp.ClientSession() as session:
            for _ in range(2):  # on one connection
                async with session.head(f"{served.url}/v1/responses/{id}?stream=true") as reply:
                    assert (reply.status, await reply.read()) == (200, b"")


async def test_one_api_key_does_not_take_all_places(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "BACKGROUND_RESPONSES_PER_KEY_MAX", 1)
    gate = Gate()
    async with client_of(tokenizer, held(b"he", gate, b"llo")) as (client, _):
        await client.responses.create(model=MODEL, input="hi", background=True)
        await client.responses.create(model=MODEL, input="hi", background=True)  # without keys there is one bound
        places = background.Background(None, ResponseStore(), Conversations())  # type: ignore[arg-type]
        places._running = {name: SimpleNamespace(owner=name[0]) for name in ("a1", "b1")}  # type: ignore[dict-item,misc]
        places.check_room("c")
        with pytest.raises(OverloadedError, match="1 background responses of this API key"):
            places.check_room("a")
