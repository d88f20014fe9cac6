"""Several pipelines behind one address: models, streams, losses, keys, stored responses."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from relayline.coordinator.gateway import forward, links
from relayline.coordinator.gateway.forward import PIPELINE_HEADER
from relayline.coordinator.http.edge.server import start_http
from relayline.coordinator.http.responses.handlers import ResponseHandlers
from relayline.coordinator.sessions.generation import GenerationRequest, TokenEvent
from relayline.coordinator.sessions.tenants import Tenant
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.cli.console_http import Coordinator
from relayline.wire.common.errors import OverloadedError, UsageError
from relayline.wire.common.phase import Phase
from tests.support.gateway_world import Pipeline, gateway, pipelines, until
from tests.support.http_support import Gate, Step, says, tokens
from tests.support.polling import pause

LOOKS = 15  # in which nothing is taken, before a stream counts as held back

KEY, OTHER_KEY = "gateway-key-0123456789", "pipeline-key-0123456789"


pytestmark = pytest.mark.usefixtures("quick")


def chat(text: str = "hi", model: str | None = "chat", **more: Any) -> dict[str, Any]:
    named = {"model": model} if model is not None else {}
    return named | {"messages": [{"role": "user", "content": text}], "max_completion_tokens": 5} | more


async def asked(session: aiohttp.ClientSession, path: str, body: Any, **more: Any) -> tuple[int, str, dict[str, Any]]:
    """Status, the pipeline that answered, and the answer."""
    async with session.post(path, json=body, **more) as answer:
        return answer.status, answer.headers.get(PIPELINE_HEADER, ""), await answer.json()


WAIT_S = 60


def held(gate: Gate, before: bytes = b"he", after: bytes = b"llo") -> Any:
    """A script that stops in the middle of its answer."""

    def script(request: GenerationRequest) -> Iterable[Step]:
        yield from tokens(request, before, ends=False)
        yield gate
        yield from tokens(request, after)

    return script


async def test_the_model_chooses_the_pipeline_and_all_models_are_listed(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "org/small") as served, gateway(served) as session:
        served[1].generator.script = says(b"small")
        async with session.get("/v1/models") as answer:
            listed = await answer.json()
        cards = listed["data"]
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("chat", "org/small", False)
        assert [card["id"] for card in cards] == ["chat", "org/small"]
        assert cards[0]["max_model_len"] == 512, "each as its pipeline describes it"
        status, name, found = await asked(session, "/v1/chat/completions", chat(model="org/small"))
        assert (status, name, found["choices"][0]["message"]["content"]) == (200, "b", "small")
        assert (await asked(session, "/v1/chat/completions", chat(model=None)))[1] == "a"
        status, _, found = await asked(session, "/v1/chat/completions", chat(model="huge"))
        assert (status, found["error"]["code"], found["error"]["param"]) == (404, "model_not_found", "model")
        assert "chat, org/small" in found["error"]["message"]
        status, _, found = await asked(session, "/v1/messages", chat(model="huge", max_tokens=5))
        assert (status, found["error"]["type"]) == (404, "not_found_error"), "as Anthropic's clients read it"
        for path, expected in (("/v1/models/org/small", 200), ("/v1/models/huge", 404), ("/v1/models/chat", 200)):
            async with session.get(path) as answer:
                assert answer.status == expected


async def test_a_pipeline_that_sleeps_gets_requests(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat") as served:
        generator = served[0].generator
        generator.ready, generator.otherwise = False, Phase.SLEEPING
        async with gateway(served) as session:
            await until(session, a="sleeping")
            generator.ready = True
            assert (await asked(session, "/v1/chat/completions", chat()))[:2] == (200, "a")


async def test_the_clients_of_ollama_find_all_models(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "org/small") as served, gateway(served) as session:
        async with session.get("/api/tags") as answer:
            listed = (await answer.json())["models"]
        assert [(each["name"], each["context_length"]) for each in listed] == [("chat", 512), ("org/small", 512)]
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": False}
        status, name, found = await asked(session, "/api/chat", body | {"model": "org/small:latest"})
        assert (status, name, found["done"]) == (200, "b", True)
        status, _, found = await asked(session, "/api/chat", body | {"model": "huge"})
        assert (status, list(found)) == (404, ["error"])


async def test_a_stream_is_passed_on_as_it_is_made(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat") as served, gateway(served) as session:
        (pipeline,) = served
        gate = Gate()
        pipeline.generator.script = held(gate)
        async with session.post("/v1/chat/completions", json=chat(stream=True)) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            raw = b""
            while b'e"' not in raw.rpartition(b"content")[2]:  # here while the next token has not been made
                raw += await answer.content.readany()
            assert gate.reached.is_set()
            gate.opened.set()
            raw += await answer.content.read()
        contents = [event["choices"][0]["delta"].get("content", "") for event in _events(raw)]
        assert "".join(contents) == "hello"
        assert raw.endswith(b"data: [DONE]\n\n")


async def test_every_byte_and_header_of_an_answer_is_the_pipelines(tokenizer: Tokenizer) -> None:
    pieces = [b"data: {", b'"a":1}\n\n', bytes(range(256)) * 600, b": ping\n\n", b"data: [DONE]\n\n"]
    seen: list[tuple[str, bytes, CIMultiDict[str]]] = []

    async def echoed(request: web.Request) -> web.StreamResponse:
        seen.append((request.raw_path, await request.read(), CIMultiDict(request.headers)))
        reply = web.StreamResponse(status=207, headers={"Content-Type": "text/event-stream", "X-Own": "yes"})
        await reply.prepare(request)
        for piece in pieces:
            await reply.write(piece)
        return reply

    async def models(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": "chat"}]})

    async def described(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"phase": "ready"})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.get("/v1/pipeline", described), web.post("/v1/what", echoed)])
    runner, port = await start_http(app, "127.0.0.1", 0)
    one = Pipeline(tokenizer, "a", "chat")
    one.port = port
    path_with_query = URL("/v1/what?b=%2F", encoded=True)
    body = b'{ "model":"chat",  "messages":[ ] }'
    headers = {"X-Given": "1", "Authorization": "Bearer abc", "x-request-id": "my-id", "Origin": "http://localhost"}
    try:
        async with gateway([one]) as session, session.post(path_with_query, data=body, headers=headers) as answer:
            assert (answer.status, answer.headers["X-Own"]) == (207, "yes")
            assert answer.headers.getall("x-request-id") == ["my-id"]
            assert await answer.content.read() == b"".join(pieces)
    finally:
        await runner.cleanup()
    ((path, raw, given),) = seen
    assert (path, raw) == ("/v1/what?b=%2F", body)
    expected = {"X-Given": "1", "Authorization": "Bearer abc", "x-request-id": "my-id"}
    assert {name: given[name] for name in expected} == expected
    assert given["X-Forwarded-For"] == "127.0.0.1"
    assert "Origin" not in given


def _events(raw: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in raw.split(b"\n\n") if line.startswith(b"data: {")]


async def test_a_client_that_leaves_ends_its_stream_at_the_pipeline(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat") as served, gateway(served) as session:
        (pipeline,) = served
        gate = Gate()
        pipeline.generator.script = held(gate)
        async with session.post("/v1/chat/completions", json=chat(stream=True)) as answer:
            await gate.reached.wait()
            answer.close()
        async with asyncio.timeout(WAIT_S):
            await pipeline.generator.streams[0].closed.wait()
        async with session.get("/v1/pipeline") as answer:
            assert (await answer.json())["pipelines"][0]["running"] == 0


async def test_a_client_that_sends_no_more_reads_on_with_a_comment_between_events(tokenizer: Tokenizer) -> None:
    """It may have gone, which a byte sent to it reveals."""
    async with pipelines(tokenizer, "chat") as served, gateway(served) as session, asyncio.timeout(WAIT_S):
        gate = Gate()
        served[0].generator.script = held(gate)
        url, body = URL(str(session._base_url)), json.dumps(chat(stream=True))
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n{body}".encode())
        found = await reader.readuntil(b'"e"')
        writer.write_eof()
        found += await reader.readuntil(b"\r\n8\r\n: ping\n\n\r\n")
        gate.opened.set()
        found += await reader.read()
        writer.close()
    events = [json.loads(line) for line in re.findall(rb"data: (\{.*)\n\n", found)]
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in events) == "hello"
    assert found.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_reader_that_waits_holds_its_pipeline_back(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat") as served, gateway(served) as session:
        (pipeline,) = served
        endless = itertools.repeat(TokenEvent(120, None, ()))
        pipeline.generator.script = lambda _: endless
        async with session.post("/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            n_before, n_same = -1, 0
            (stream,) = pipeline.generator.streams
            while n_same < LOOKS:  # until all buffers on the way are full
                n_same = n_same + 1 if stream.n_taken == n_before else 0
                n_before = stream.n_taken
                await pause()
            assert n_before > 0
            answer.close()
        await stream.closed.wait()


async def test_replicas_share_the_load_and_a_dead_one_is_left_out_and_comes_back(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "chat") as served, gateway(served) as session:
        gates = [Gate(), Gate()]
        for pipeline, gate in zip(served, gates, strict=True):
            pipeline.generator.script = held(gate)
        both = [asyncio.create_task(asked(session, "/v1/chat/completions", chat(text))) for text in ("one", "two")]
        await asyncio.gather(*(gate.reached.wait() for gate in gates))
        for gate in gates:
            gate.opened.set()
        assert {name for _, name, _ in await asyncio.gather(*both)} == {"a", "b"}
        await served[0].kill()
        for _ in range(3):  # even before its death was noticed
            assert (await asked(session, "/v1/chat/completions", chat("three")))[:2] == (200, "b")
        await until(session, a="dead")
        await served[1].kill()
        status, _, found = await asked(session, "/v1/chat/completions", chat())
        assert (status, found["error"]["code"]) == (503, "not_ready")
        assert "no replica of chat answers" in found["error"]["message"]
        async with session.get("/health") as answer:
            assert answer.status == 503
        async with session.post("/v1/chat/completions", json=chat()) as answer:
            assert int(answer.headers["Retry-After"]) >= 1
        await served[0].start()
        await until(session, a="ready")
        assert (await asked(session, "/v1/chat/completions", chat()))[:2] == (200, "a")


async def test_streams_of_a_replica_that_dies_end_with_an_error_and_others_go_on(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "chat") as served, gateway(served) as session:
        gates = [Gate(), Gate()]
        for pipeline, gate in zip(served, gates, strict=True):
            pipeline.generator.script = held(gate)

        async def streamed(text: str) -> tuple[str, bytes, bool]:
            raw = b""
            async with session.post("/v1/chat/completions", json=chat(text, stream=True)) as answer:
                try:
                    async for piece in answer.content.iter_any():
                        raw += piece
                except aiohttp.ClientPayloadError:
                    return answer.headers[PIPELINE_HEADER], raw, False
                return answer.headers[PIPELINE_HEADER], raw, True

        running = [asyncio.create_task(streamed(text)) for text in ("one", "two")]
        await asyncio.gather(*(gate.reached.wait() for gate in gates))
        await served[0].kill()
        gates[1].opened.set()
        found = {name: (raw, is_whole) for name, raw, is_whole in await asyncio.gather(*running)}
        raw, is_whole = found["b"]
        assert is_whole
        assert raw.endswith(b"data: [DONE]\n\n")
        raw, is_whole = found["a"]
        assert not is_whole, "no client takes it for complete"
        error = _events(raw)[-1]["error"]
        assert error["code"] == "stage_lost"
        assert b"[DONE]" not in raw


async def test_the_last_event_of_a_response_whose_replica_dies_has_the_next_number(tokenizer: Tokenizer) -> None:
    """OpenAI's clients number an error as every other event."""
    async with pipelines(tokenizer, "chat") as served, gateway(served) as session:
        served[0].generator.script = held(Gate())
        pieces: list[bytes] = []
        has_text = asyncio.Event()

        async def read() -> None:
            body = {"model": "chat", "input": "Hello", "stream": True}
            async with session.post("/v1/responses", json=body) as answer:
                async for piece in answer.content.iter_any():
                    pieces.append(piece)
                    if b"output_text.delta" in b"".join(pieces):
                        has_text.set()

        reading = asyncio.create_task(read())
        await has_text.wait()
        await served[0].kill()
        with pytest.raises(aiohttp.ClientPayloadError):
            await reading
    raw = b"".join(pieces)
    *before, last = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]
    assert [event["sequence_number"] for event in before] == list(range(len(before)))
    assert len(before) > 1
    assert last["type"] == "error"
    assert last["sequence_number"] == len(before)
    assert last["param"] is None


async def test_lines_of_a_replica_that_dies_end_with_one_that_says_why(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat") as served, gateway(served) as session:
        served[0].generator.script = held(Gate())
        pieces: list[bytes] = []
        has_text = asyncio.Event()

        async def read() -> None:
            body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
            async with session.post("/api/chat", json=body) as answer:
                async for piece in answer.content.iter_any():
                    pieces.append(piece)
                    has_text.set()

        reading = asyncio.create_task(read())
        await has_text.wait()
        await served[0].kill()
        with pytest.raises(aiohttp.ClientPayloadError):
            await reading
    *before, last = [json.loads(line) for line in b"".join(pieces).splitlines()]
    assert all("message" in each for each in before)
    assert list(last) == ["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
        ("/v1/responses", {"input": "hi"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_a_stream_that_its_pipeline_ends_with_an_error_has_no_other(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    """The pipeline breaks the connection behind it, and knows the reason better than the gateway."""
    failing = OverloadedError("no lane is left")
    async with pipelines(tokenizer, "chat") as served, gateway(served) as session:
        served[0].generator.script = lambda request: itertools.chain(tokens(request, b"he", ends=False), [failing])
        raws = []
        for url in (served[0].url, ""):
            raw, is_whole = b"", True
            async with session.post(f"{url}{path}", json={"model": "chat", "stream": True, **body}) as answer:
                try:
                    async for piece in answer.content.iter_any():
                        raw += piece
                except aiohttp.ClientPayloadError:
                    is_whole = False
            assert not is_whole, "no client takes it for complete"
            raws.append(raw)
        direct, passed_on = raws
        assert direct.count(b"no lane is left") == passed_on.count(b"no lane is left") >= 1
        assert b"was lost" not in passed_on
        assert passed_on.count(b"\n") == direct.count(b"\n")
        async with session.get("/metrics") as answer:
            assert 'relayline_gateway_broken_answers_total{pipeline="a"} 0.0' in await answer.text()


async def test_a_replica_that_dies_before_its_first_byte_is_replaced_by_another(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "chat") as served, gateway(served) as session:
        gate = Gate()
        served[0].generator.script = held(gate)
        asking = asyncio.create_task(asked(session, "/v1/chat/completions", chat()))  # not streamed: nothing is sent
        await gate.reached.wait()
        await served[0].kill()
        assert (await asking)[:2] == (200, "b")
        async with session.get("/metrics") as answer:
            assert 'relayline_gateway_retries_total{pipeline="a"} 1.0' in await answer.text()


async def test_a_replica_without_room_sends_its_request_to_another(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "chat") as served, gateway(served) as session:
        served[0].generator.refusals = [OverloadedError("full", 7)]
        assert (await asked(session, "/v1/chat/completions", chat()))[:2] == (200, "b")
        for pipeline in served:
            pipeline.generator.refusals = [OverloadedError("full", 7)]
        async with session.post("/v1/chat/completions", json=chat("new")) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (429, "7"), "the pipeline's own words"
            assert (await answer.json())["error"]["code"] == "rate_limit_exceeded"


async def test_a_replica_that_answers_no_more_is_given_up(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pipelines(tokenizer, "chat", "chat") as served, gateway(served) as session:
        gate, silent = Gate(), Gate()
        served[0].generator.script = held(gate)
        asking = asyncio.create_task(asked(session, "/v1/chat/completions", chat()))
        await gate.reached.wait()

        async def silence(*_: Any, **__: Any) -> dict[str, object]:
            await silent.pass_through()
            return {}

        ask = links.Links.ask

        async def with_silence(self: links.Links, link: links.Link) -> None:
            """The one that is silent has little time to answer. The other one has much: it is slow on a busy host."""
            is_silent = link.backend.name == "a"
            if is_silent:
                monkeypatch.setattr(served[0].generator, "describe", silence)
            monkeypatch.setattr(links, "POLL_TIMEOUT_S", 0.1 if is_silent else WAIT_S)
            await ask(self, link)  # it reads the bound before anything else runs

        monkeypatch.setattr(links, "LOST_AFTER_S", 0.1)
        monkeypatch.setattr(links.Links, "ask", with_silence)
        assert (await asking)[:2] == (200, "b")
        await until(session, a="dead")


async def test_stored_responses_are_found_where_they_are(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "chat") as served:
        async with gateway(served) as session:
            body = {"model": "chat", "input": "hi", "max_output_tokens": 5}
            _, first, response = await asked(session, "/v1/responses", body)
            other = next(each for each in served if each.name != first)
            path = f"/v1/responses/{response['id']}"
            for _ in range(3):
                more = body | {"previous_response_id": response["id"]}
                assert (await asked(session, "/v1/responses", more))[:2] == (200, first)
            async with session.get(f"{path}/input_items") as answer:
                assert answer.status == 200
            assert (await asked(session, f"{path}/cancel", {}))[:2] == (400, first)
            _, first, response = await asked(session, "/v1/responses", body | {"background": True, "stream": False})
            path = f"/v1/responses/{response['id']}"
            assert response["status"] == "queued"
            assert (await asked(session, f"{path}/cancel", {}))[:2] == (200, first)
            other = next(each for each in served if each.name != first)
        async with gateway([other, *(each for each in served if each is not other)]) as session:  # it knows nothing
            async with session.get(path) as answer:
                assert (answer.status, answer.headers[PIPELINE_HEADER]) == (200, first)
            assert (await asked(session, "/v1/responses", more))[:2] == (200, first)
            async with session.delete(path) as answer:
                assert answer.status == 200
            async with session.get(path) as answer:
                assert answer.status == 404
            assert (await asked(session, f"{path}/cancel", {}))[0] == 404


async def test_a_pipeline_that_is_lost_while_a_response_is_looked_for_there_is_given_up(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host has stopped, say: the connection stands, and nothing comes."""
    stuck, retrieve, polled = Gate(), ResponseHandlers.retrieve, links.Links._get
    served: list[Pipeline] = []

    async def retrieved(self: ResponseHandlers, request: web.Request) -> web.StreamResponse:
        if self._service.generator is served[0].generator:
            await stuck.pass_through()
        return await retrieve(self, request)

    async def get(self: links.Links, link: links.Link, path: str) -> bytes:
        if link.backend.name == "a" and stuck.reached.is_set():
            raise TimeoutError
        return await polled(self, link, path)

    monkeypatch.setattr(ResponseHandlers, "retrieve", retrieved)
    monkeypatch.setattr(links.Links, "_get", get)
    monkeypatch.setattr(links, "LOST_AFTER_S", 0.1)
    async with pipelines(tokenizer, "chat", "chat") as found, gateway(found) as session, asyncio.timeout(WAIT_S):
        served += found
        body = {"model": "chat", "input": "hi", "previous_response_id": "resp_1"}
        assert (await asked(session, "/v1/responses", body))[:2] == (503, ""), "it may have it"


async def test_every_route_of_one_pipeline_is_below_its_name(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "chat") as served, gateway(served) as session:
        for path, status in (
            ("/pipelines/b/v1/pipeline", 200),
            ("/pipelines/b/version", 200),
            ("/pipelines/c/version", 404),
            ("/v1/telemetry", 400),
            ("/is_sleeping", 400),
            ("/v1/pipeline/live", 400),
            ("/v1/files", 400),
            ("/v1/files/file-1/content", 400),
            ("/v1/batches/batch_1", 400),
            ("/v1/messages/batches", 400),
            ("/v1/messages/batches/msgbatch_1/results", 400),
            ("/pipelines/b/v1/batches", 501),
            ("/pipelines/b/v1/messages/batches", 501),
            ("/props?model=chat", 200),
            ("/props?model=huge", 404),
            ("/nothing", 404),
            ("/live", 200),
            ("/", 200),
        ):
            async with session.get(path) as answer:
                assert answer.status == status, path
                if path.startswith("/pipelines/b"):
                    assert answer.headers[PIPELINE_HEADER] == "b"
        browser = {"Accept": "text/html"}
        async with session.get("/", headers=browser) as answer:
            html = await answer.text()
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
        paths = re.findall(r'(?:href|src)="([^"#/][^"]*)"', html)
        assert {"pipelines/a/", "pipelines/b/", "page/gateway.js", "page/style.css"} <= set(paths)
        for path in paths:
            async with session.get(f"/{path}", headers=browser) as answer:
                assert answer.status == 200, path
        async with session.get("/pipelines/b", headers=browser) as answer:
            assert (answer.url.path, answer.headers[PIPELINE_HEADER]) == ("/pipelines/b/", "b")
            inner = re.findall(r'(?:href|src)="(page/[^"]*)"', await answer.text())
        assert len(inner) == 3
        for path in inner:
            async with session.get(f"/pipelines/b/{path}") as answer:
                assert (answer.status, answer.headers[PIPELINE_HEADER]) == (200, "b"), path
        status, _, _ = await asked(session, "/tokenize", {"prompt": "hi", "model": "chat"})
        assert status == 200
        async with session.get("/v1/pipeline/targets") as answer:
            own, a, _ = await answer.json()
        assert own["labels"]["role"] == "gateway"
        assert (a["targets"], a["labels"]["pipeline"]) == (own["targets"], "a")
        assert a["labels"]["__metrics_path__"] == "/pipelines/a/metrics"
        async with session.get("/v1/pipeline") as answer:
            found = (await answer.json())["pipelines"]
        assert [each["name"] for each in found] == ["a", "b"]
        assert {each["phase"] for each in found} == {"ready"}


async def test_a_command_about_one_pipeline_says_how_to_name_it(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "chat") as served, gateway(served) as session:
        url = str(session._base_url).rstrip("/")
        async with Coordinator(url) as front:
            for ask in (front.get("/v1/pipeline/layers"), front.put("/v1/pipeline/stages/laptop", {"drained": True})):
                with pytest.raises(UsageError) as refused:
                    await ask
                assert refused.value.message == (
                    f"{url} is a gateway; name one of its pipelines (a, b): --url {url}/pipelines/NAME"
                )
        async with Coordinator(f"{url}/pipelines/b") as one:
            assert "stages" in await one.get("/v1/pipeline")


async def test_keys_are_passed_on_and_checked(tokenizer: Tokenizer, tmp_path: Path) -> None:
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    for path, key in ((own, KEY), (theirs, OTHER_KEY)):
        path.write_text(key)
        path.chmod(0o600)
    bearer = {"Authorization": f"Bearer {KEY}"}
    async with pipelines(tokenizer, "chat", keys=theirs) as served:
        async with gateway(served, key=OTHER_KEY, api_keys_file=own, protect_metrics=True) as session:
            assert (await asked(session, "/v1/chat/completions", chat()))[0] == 401
            for path, expected in (("/metrics", 401), ("/pipelines/a/v1/models", 401), ("/", 200),
                                   ("/pipelines/a/", 200), ("/pipelines/a/page/main.js", 200)):  # fmt: skip
                async with session.get(path, headers={"Accept": "text/html"}) as answer:
                    assert answer.status == expected, path
            async with session.post("/pipelines/a/") as answer:
                assert answer.status == 401
            assert (await asked(session, "/v1/chat/completions", chat(), headers=bearer))[0] == 200
            assert (await asked(session, "/v1/chat/completions", chat(), headers={"X-Api-Key": KEY}))[0] == 200
        async with gateway(served, key=OTHER_KEY) as session:  # open itself: it sends its key for no client
            assert (await asked(session, "/v1/chat/completions", chat()))[0] == 401
            theirs_given = {"Authorization": f"Bearer {OTHER_KEY}"}
            assert (await asked(session, "/v1/chat/completions", chat(), headers=theirs_given))[0] == 200
        async with gateway(served) as session, session.get("/v1/pipeline") as answer:
            assert (await answer.json())["pipelines"][0]["problem"] == "it requires an API key"


async def test_a_pipeline_learns_whose_request_it_is_from_a_gateway_that_it_trusts(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    bearer = {"Authorization": f"Bearer {KEY}"}
    for options, expected in (("gateway=yes", Tenant("house/alice")), ("share=2", Tenant("house"))):
        for path, text in ((own, f"alice: {KEY} share=3 priority=low\n"), (theirs, f"house: {OTHER_KEY} {options}\n")):
            path.write_text(text)
            path.chmod(0o600)
        async with (
            pipelines(tokenizer, "chat", keys=theirs) as served,
            gateway(served, key=OTHER_KEY, api_keys_file=own) as session,
        ):
            forged = bearer | {"X-Relayline-On-Behalf": "%7B%22name%22:%22boss%22%7D"}
            for headers in (bearer, forged):
                assert (await asked(session, "/v1/chat/completions", chat(), headers=headers))[0] == 200
            tenants = [request.tenant for request in served[0].generator.requests]
            assert tenants == [expected, expected]
            assert {tenant.share for tenant in tenants} == {3 if options == "gateway=yes" else 2}


async def test_a_key_that_does_not_steer_changes_no_pipeline_behind_a_gateway(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    for path, text in ((own, f"guest: {KEY} steers=no\nowner: {KEY[::-1]}\n"), (theirs, OTHER_KEY)):
        path.write_text(text)
        path.chmod(0o600)
    async with (
        pipelines(tokenizer, "chat", keys=theirs) as served,
        gateway(served, key=OTHER_KEY, api_keys_file=own) as session,
    ):
        for key, expected in ((KEY, 403), (KEY[::-1], 200)):  # the pipeline knows the gateway's key alone
            bearer = {"Authorization": f"Bearer {key}"}
            for path in ("/pipelines/a/v1/telemetry", "/pipelines/a//v1/telemetry"):
                async with session.put(path, json={"level": "off"}, headers=bearer) as answer:
                    assert answer.status == expected, path
            async with session.get("/pipelines/a/v1/telemetry", headers=bearer) as answer:
                assert answer.status == 200
        guest, owner = ({"Authorization": f"Bearer {key}"} for key in (KEY, KEY[::-1]))
        async with session.post("/v1/requests/x/cancel", headers=guest) as answer:
            assert answer.status == 403
        for path in ("/pipelines/a/sleep", "/pipelines/a/wake_up", "/sleep/", "/v1/wake_up"):
            assert (await asked(session, path, {}, headers=guest))[:2] == (403, ""), path
        for path in ("/sleep", "/wake_up"):
            for headers in (guest, owner):
                status, name, found = await asked(session, path, {}, headers=headers)
                assert (status, name) == (400, ""), "of one pipeline, which must be named"
                assert f"/pipelines/NAME{path}" in found["error"]["message"]


async def test_a_gateway_heeds_which_models_a_key_may_use(tokenizer: Tokenizer, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text(f"alice: {KEY} models=small\n")
    own.chmod(0o600)
    bearer = {"Authorization": f"Bearer {KEY}"}
    async with (
        pipelines(tokenizer, "chat", "small") as served,
        gateway(served, api_keys_file=own) as session,
    ):
        assert (await asked(session, "/v1/chat/completions", chat(model="small"), headers=bearer))[:2] == (200, "b")
        for path, body in (
            ("/v1/chat/completions", chat(model="chat")),
            ("/v1/chat/completions", chat()),
            ("/pipelines/a/v1/chat/completions", chat(model="chat")),
            ("/pipelines/a/v1/chat/completions", {"messages": []}),
        ):
            assert (await asked(session, path, body, headers=bearer))[0] == 404
        for path in ("/v1/chat/completions", "/pipelines/b/v1/chat/completions"):
            for lora, expected in (([{"id": 1}], 400), ([], 200), (None, 200)):
                body = chat(model="small", lora=lora)
                status, _, answered = await asked(session, path, body, headers=bearer)
                assert status == expected, lora
                assert ("a gateway cannot tell" in str(answered)) is (expected == 400)
        async with session.get("/v1/models", headers=bearer) as answer:
            assert [card["id"] for card in (await answer.json())["data"]] == ["small"]
        async with session.get("/v1/models/chat", headers=bearer) as answer:
            assert answer.status == 404
        for query, status in (("", 200), ("?model=small", 200), ("?model=chat", 404)):
            async with session.get(f"/props{query}", headers=bearer) as answer:
                assert answer.status == status, query


async def test_large_bodies_are_read_by_a_separate_process(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relayline.coordinator.gateway.app.PARSED_INLINE_BYTES", 100)
    monkeypatch.setattr("relayline.coordinator.gateway.app.peek", forward.Asked)  # would fail here
    async with pipelines(tokenizer, "chat", "small") as served, gateway(served) as session:
        monkeypatch.undo()
        monkeypatch.setattr("relayline.coordinator.gateway.app.PARSED_INLINE_BYTES", 100)
        found = await asked(session, "/v1/chat/completions", chat("x" * 300, model="small"))
        assert found[:2] == (200, "b")


async def test_a_gateway_that_ends_lets_running_requests_finish(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat") as served:
        gate = Gate()
        served[0].generator.script = held(gate)
        async with aiohttp.ClientSession() as outer:
            async with gateway(served) as session:
                url = str(session._base_url).rstrip("/")
                asking = asyncio.create_task(asked(outer, f"{url}/v1/chat/completions", chat()))
                await gate.reached.wait()
                asyncio.get_running_loop().call_later(0.05, gate.opened.set)
            assert (await asking)[0] == 200


def test_pipelines_need_unique_names(tokenizer: Tokenizer) -> None:
    one = Pipeline(tokenizer, "a", "chat")
    with pytest.raises(Exception, match="two pipelines are named 'a'"):
        gateway([one, one]).__aenter__().send(None)
