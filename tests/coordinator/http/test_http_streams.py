"""The bytes of a stream, and its fate when its reader waits, leaves or stops reading."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import AsyncIterator, Iterable

import aiohttp
import pytest

from relayline.coordinator.http.edge.sse import EventWriter
from relayline.coordinator.http.replies.merge import Merge
from relayline.coordinator.sessions.generation import GenerationRequest, TokenEvent
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import NotReadyError, StageLostError
from tests.support.http_support import FakeGenerator, Gate, Script, Served, Step, says, serving, tokens


def endless(_request: GenerationRequest) -> Iterable[Step]:
    return itertools.repeat(TokenEvent(120, None, ()))


@contextlib.asynccontextmanager
async def streaming(served: Served, **body: object) -> AsyncIterator[aiohttp.ClientResponse]:
    async with (
        aiohttp.ClientSession(served.url) as session,
        session.post("/v1/completions", json={"prompt": "x", "stream": True, **body}) as reply,
    ):
        yield reply


async def test_every_byte_of_a_chat_stream(tokenizer: Tokenizer) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "max_completion_tokens": 2,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    async with (
        serving(tokenizer) as served,
        aiohttp.ClientSession(served.url) as session,
        session.post("/v1/chat/completions", json=body) as reply,
    ):
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        assert reply.headers["Cache-Control"] == "no-cache"
        assert reply.headers["X-Accel-Buffering"] == "no"
        assert "Content-Encoding" not in reply.headers
        *events, end = (await reply.read()).split(b"\n\n")
    assert end == b""
    assert all(event.startswith(b"data: ") for event in events)
    *chunks, done = [event.removeprefix(b"data: ") for event in events]
    assert done == b"[DONE]"
    bodies = [json.loads(chunk) for chunk in chunks]
    same = {key: bodies[0][key] for key in ("id", "created", "model", "system_fingerprint", "object")}
    assert same["object"] == "chat.completion.chunk"
    assert all(body.items() >= same.items() for body in bodies)

    def choice(delta: dict[str, str], reason: str | None = None, **more: object) -> list[dict[str, object]]:
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, **more}]

    assert [body["choices"] for body in bodies] == [
        choice({"role": "assistant", "content": ""}),
        choice({"content": "h"}, token_ids=[104]),
        choice({"content": "e"}, token_ids=[101]),
        choice({}, "length"),
        [],
    ]
    assert not any("usage" in body for body in bodies[:-1])  # clients of llama-server drop an event that has it
    assert bodies[-1]["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("options", [None, {"include_usage": False, "continuous_usage_stats": True}])
async def test_usage_is_absent_unless_asked_for(tokenizer: Tokenizer, path: str, options: object) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "hi"}], "stream": True, "stream_options": options}
    async with (
        serving(tokenizer) as served,
        aiohttp.ClientSession(served.url) as session,
        session.post(path, json=body) as reply,
    ):
        raw = await reply.read()
        assert b"[DONE]" in raw
        assert b"usage" not in raw


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_usage_stands_in_the_last_event_alone(tokenizer: Tokenizer, path: str) -> None:
    """As llama-server and vLLM have it. A client of theirs takes an event that has the key for the one with figures."""
    body = {
        "prompt": "x",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
    }
    async with (
        serving(tokenizer) as served,
        aiohttp.ClientSession(served.url) as session,
        session.post(path, json=body) as reply,
    ):
        lines = (await reply.text()).split("\n\n")
    *others, last = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert others
    assert not any("usage" in event for event in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0


async def test_events_ready_together_are_one_write(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []
    framed = EventWriter._framed

    def recorded(self: EventWriter, events: Iterable[bytes]) -> bytes:
        writes.append(framed(self, events))
        return writes[-1]

    monkeypatch.setattr(EventWriter, "_framed", recorded)
    gate = Gate()
    generator = FakeGenerator(lambda request: [*tokens(request, b"abc", ends=False), gate, *tokens(request, b"de")])
    async with serving(tokenizer, generator) as served, streaming(served) as reply:
        await gate.reached.wait()
        gate.opened.set()
        await reply.read()
    assert [payload.count(b"data: ") for payload in writes if payload] == [
        3,
        4,
    ]  # d, e, finish, [DONE] and the end together
    assert writes[-1].endswith(b"data: [DONE]\n\n")


async def test_headers_and_role_come_before_the_first_token(tokenizer: Tokenizer) -> None:
    gate = Gate()
    generator = FakeGenerator(lambda request: [gate, *tokens(request, b"hi")])
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with (
        serving(tokenizer, generator, ping_interval_s=0.5) as served,
        aiohttp.ClientSession(served.url) as session,
        session.post("/v1/chat/completions", json=body) as reply,
    ):
        assert b'"role":"assistant"' in await reply.content.readline()
        assert not gate.opened.is_set()
        gate.opened.set()
        assert b"[DONE]" in await reply.read()


async def test_a_stream_in_http_1_0_is_never_in_chunks(tokenizer: Tokenizer) -> None:
    gates = [Gate(), Gate()]  # so that the events between them are written by themselves

    def script(request: GenerationRequest) -> Iterable[Step]:
        yield from (*tokens(request, b"a", ends=False), gates[0])
        yield from (*tokens(request, b"b", ends=False), gates[1])
        yield from tokens(request, b"c")

    async with serving(tokenizer, FakeGenerator(script)) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        body = b'{"prompt":"x","stream":true}'
        writer.write(b"POST /v1/completions HTTP/1.0\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        head = await reader.readuntil(b"\r\n\r\n")
        received = b""
        for gate in gates:
            received += await reader.readuntil(b"\n\n")
            gate.opened.set()
        received += await reader.read()
        writer.close()
    assert b"chunked" not in head.lower()
    *events, end = received.split(b"\n\n")
    assert all(event.startswith(b"data: ") for event in events), received
    assert end == b""
    bodies = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
    assert "".join(choice["text"] for each in bodies for choice in each["choices"]) == "abc"
    assert events[-1] == b"data: [DONE]"


async def test_a_silent_stream_is_kept_alive(tokenizer: Tokenizer) -> None:
    gate = Gate()
    generator = Asked(lambda request: [gate, *tokens(request, b"hi")])
    async with serving(tokenizer, generator, ping_interval_s=0.01) as served, streaming(served) as reply:
        assert [await reply.content.readline() for _ in range(4)] == [b": ping\n", b"\n"] * 2
        gate.opened.set()
        assert (await reply.read()).endswith(b"data: [DONE]\n\n")


async def test_a_broken_stream_ends_with_its_error_and_no_done_and_does_not_look_whole(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(lambda request: [*tokens(request, b"h", ends=False), StageLostError("stage 1 is gone")])
    async with serving(tokenizer, generator) as served, streaming(served) as reply:
        assert reply.status == 200
        _, failure = [(await reply.content.readuntil(b"\n\n")).removesuffix(b"\n\n") for _ in range(2)]
        with pytest.raises(aiohttp.ClientPayloadError, match="not completed"):
            await reply.read()
    body = json.loads(failure.removeprefix(b"data: "))
    assert body["error"].pop("retry_after_s") >= 1, "as the header of an answer that is refused"
    assert body == {
        "error": {
            "message": "stage 1 is gone",
            "type": "service_unavailable_error",
            "param": None,
            "code": "stage_lost",
        }
    }


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_while_waiting_frees_its_stream(tokenizer: Tokenizer, stream: bool) -> None:
    gate = Gate()  # never opened
    generator = FakeGenerator(lambda request: [*tokens(request, b"h", ends=False), gate])
    async with serving(tokenizer, generator) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        body = json.dumps({"prompt": "x", "stream": stream, "n": 2}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await gate.reached.wait()
        if stream:
            await reader.readuntil(b"data: ")
        writer.close()
        await writer.wait_closed()
        for opened in generator.streams:
            await opened.closed.wait()
        assert len(generator.streams) == 2


async def test_a_client_that_leaves_in_the_middle_of_writing_frees_its_stream(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(endless)
    async with serving(tokenizer, generator) as served:
        async with streaming(served) as reply:
            await reply.content.readline()
        await generator.streams[0].closed.wait()


async def test_a_client_that_stops_reading_is_cut_off(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(endless)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        async with serving(tokenizer, generator, write_timeout_s=0.2) as served:
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", served.port))
            body = b'{"prompt":"x","stream":true}'
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            await loop.sock_sendall(client, head + body)
            await generator.streams_opened.wait()
            await generator.streams[0].closed.wait()
            # Other clients are served as ever.
            generator.script = says(b"ok")
            async with streaming(served) as reply:
                assert b"[DONE]" in await reply.read()


async def test_unread_events_hold_their_stream_back() -> None:
    stream = FakeGenerator(endless).open(GenerationRequest("r", (1,), 1, sampling=None))  # type: ignore[arg-type]
    async with Merge([stream], backlog_events_max=8) as merge:
        assert len(await merge.next(None)) == 8
        assert stream.n_taken <= 9
    assert stream.closed.is_set()


async def test_leaving_a_merge_before_it_ran_closes_its_streams() -> None:
    stream = FakeGenerator(lambda _: [Gate()]).open(GenerationRequest("r", (1,), 1, sampling=None))  # type: ignore[arg-type]
    async with Merge([stream], backlog_events_max=8):
        pass
    assert stream.closed.is_set()


# --- the status waits until it is known ------------------------------------------------------------------------------


class Asked(FakeGenerator):
    """Says when it has been asked three times whether it is ready, and was not."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.asked_in_vain, self.n_vain = asyncio.Event(), 0

    def is_ready(self) -> bool:
        self.n_vain += not self.ready
        if self.n_vain >= 3:
            self.asked_in_vain.set()
        return self.ready


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_fails_before_its_first_token_has_the_status_of_that(
    tokenizer: Tokenizer, stream: bool
) -> None:
    generator = FakeGenerator(lambda _: [NotReadyError("the pipeline is unreachable")])
    async with serving(tokenizer, generator) as served, streaming(served, stream=stream) as reply:
        assert (reply.status, (await reply.json())["error"]["code"]) == (503, "not_ready")
        assert int(reply.headers["Retry-After"]) >= 1


async def test_no_status_is_sent_while_a_stage_is_lost_and_pings_are_once_it_is_there(tokenizer: Tokenizer) -> None:
    gate = Gate()
    generator = Asked(lambda request: [gate, *tokens(request, b"hi")])
    async with serving(tokenizer, generator, ping_interval_s=0.01) as served, aiohttp.ClientSession() as session:
        body = {"prompt": "x", "stream": True}
        asking = asyncio.create_task(session.post(f"{served.url}/v1/completions", json=body))
        await generator.streams_opened.wait()
        generator.ready = False  # the stage is lost as the request has just been admitted
        await generator.asked_in_vain.wait()  # whether the stage is there, for three pings' time
        assert not asking.done()
        generator.ready = True  # under way, and its prompt is long
        async with await asking as reply:
            assert reply.status == 200
            assert await reply.content.readline() == b": ping\n"
            gate.opened.set()
            assert (await reply.content.read()).endswith(b"data: [DONE]\n\n")


async def test_a_client_that_leaves_before_there_is_a_status_frees_its_stream(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(lambda _: [Gate()])
    async with serving(tokenizer, generator) as served, aiohttp.ClientSession() as session:
        body = {"prompt": "x", "stream": True}
        asking = asyncio.create_task(session.post(f"{served.url}/v1/completions", json=body))
        await generator.streams_opened.wait()
        asking.cancel()
        await generator.streams[0].closed.wait()
