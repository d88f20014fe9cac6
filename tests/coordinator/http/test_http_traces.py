"""HTTP side of telemetry: a request's server span, the routes for traces and levels, and what is never exported."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from opentelemetry.trace import SpanKind, StatusCode

from relayline.coordinator.engine.stage_client import StageClient
from relayline.coordinator.engine.telemetry_control import TelemetryControl, greet
from relayline.coordinator.http.edge.body import SMALL_BYTES_MAX
from relayline.coordinator.http.replies.job import Job
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.sessions.request_log import RequestRecord, SessionRecord, StreamRecord
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import OverloadedError, StageLostError
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry import names
from relayline.wire.telemetry.config import Level
from tests.support.http_support import WAIT_S, FakeGenerator, Gate, Served, serving, tokens
from tests.support.spans import Kept, attributes_of

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "hello world"


class FakeStage(StageClient):
    """A stage that answers at once, or not at all."""

    def __init__(self, *, is_up: bool = True) -> None:
        self.level, self.is_up = Level.SUMMARY, is_up
        self.asked: list[list[int]] = []

    async def set_telemetry(self, wanted: pb.SetTelemetryRequest) -> pb.SetTelemetryResponse | None:
        if not self.is_up:
            return None
        self.level = Level.from_wire(wanted.level) or self.level
        return pb.SetTelemetryResponse(level=self.level.to_wire())

    async def batches(self, session_ids: Sequence[int]) -> pb.BatchesResponse | None:
        self.asked.append(list(session_ids))
        return pb.BatchesResponse() if self.is_up else None


class World:
    def __init__(self, kept: Kept, stages: Sequence[FakeStage] = ()) -> None:
        self.kept, self.stages = kept, stages
        self.observer = Observer(kept.telemetry)
        self.control = TelemetryControl(self.observer, lambda: stages)


@contextlib.asynccontextmanager
async def session_of(
    tokenizer: Tokenizer, world: World, generator: FakeGenerator | None = None, **limits: object
) -> AsyncIterator[tuple[aiohttp.ClientSession, Served]]:
    async with (
        serving(tokenizer, generator, control=world.control, **limits) as served,
        aiohttp.ClientSession(served.url) as session,
    ):
        yield session, served


@pytest.mark.parametrize(
    ("route", "body", "operation"),
    [
        ("/v1/completions", {"prompt": SECRET, "n": 2}, "text_completion"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}], "n": 2}, "chat"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_has_one_server_span_by_convention(
    tokenizer: Tokenizer, route: str, body: dict[str, object], operation: str, stream: bool
) -> None:
    world = World(Kept())
    sent = body | {"stream": stream, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 11}
    headers = {"traceparent": PARENT, "x-request-id": "mine"}
    async with (
        session_of(tokenizer, world) as (session, served),
        session.post(route, json=sent, headers=headers) as reply,
    ):
        assert reply.status == 200
        await reply.read()
    span = world.kept.one(f"POST {route}")
    assert span.kind is SpanKind.SERVER
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" == PARENT[3:-3]
    attributes = attributes_of(span)
    assert attributes.pop(names.CLIENT_ADDRESS) == "127.0.0.1"
    assert attributes.pop(names.SERVER_PORT) == served.port
    answer_id = attributes.pop(names.GEN_AI_RESPONSE_ID)
    assert attributes.pop(names.ATTR_REQUEST_ID) == answer_id
    assert attributes.pop(names.GEN_AI_USAGE_INPUT_TOKENS) == len(served.generator.requests[0].prompt_tokens)
    for left_out in (names.GEN_AI_USAGE_OUTPUT_TOKENS, names.GEN_AI_RESPONSE_FINISH_REASONS):
        attributes.pop(left_out)  # sent by the pipeline, which is a fake here
    assert attributes.pop("http.request.header.x-request-id") == "mine", "as the caller sent it"
    assert attributes == {
        "http.request.method": "POST", "http.route": route, "url.path": route, "url.scheme": "http",
        "http.response.status_code": 200, "server.address": "127.0.0.1",
        "gen_ai.operation.name": operation, "gen_ai.provider.name": "relayline",
        "gen_ai.request.model": "org/tiny", "gen_ai.response.model": "org/tiny",
        "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.9, "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 11, "gen_ai.request.max_tokens": 5, "gen_ai.request.stream": stream,
        "gen_ai.request.choice.count": 2, "gen_ai.output.type": "text",
        "http.response.header.x-request-id": "mine",
    }  # fmt: skip
    assert world.kept.one(names.SPAN_TOKENIZE).parent is not None
    assert set(served.generator.records) == {world.observer.log.find("mine")}


def test_copied_tokens_of_a_prompt_count_once_for_all_its_choices() -> None:
    record = RequestRecord("r", "POST", "/v1/completions", 0)
    record.streams += [StreamRecord(f"r-{choice}", SessionRecord(), 0) for choice in range(4)]
    job: Any = SimpleNamespace(record=record, plan=SimpleNamespace(n=2))
    for choice in range(4):
        state: Any = SimpleNamespace(n_tokens=1, n_thought=0, finish_reason=None, n_cached=8 + choice)
        Job.note(job, choice, state)
    assert [stream.n_cached for stream in record.streams] == [8, 0, 10, 0]


async def test_making_a_grammar_is_a_span(tokenizer: Tokenizer) -> None:
    world = World(Kept())
    async with session_of(tokenizer, world) as (session, _):
        for more in ({}, {"response_format": {"type": "json_object"}}):
            async with session.post("/v1/completions", json={"prompt": "x"} | more) as reply:
                assert reply.status == 200
    grammar, roots = world.kept.one(names.SPAN_GRAMMAR), world.kept.spans("POST /v1/completions")
    assert grammar.parent is not None
    assert grammar.parent.span_id == roots[1].context.span_id
    assert grammar.start_time < grammar.end_time


async def test_a_request_for_embeddings_says_what_it_is(tokenizer: Tokenizer) -> None:
    world = World(Kept())
    async with (
        session_of(tokenizer, world) as (session, _),
        session.post("/v1/embeddings", json={"input": "x"}) as reply,
    ):
        await reply.read()
    attributes = attributes_of(world.kept.one("POST /v1/embeddings"))
    assert attributes[names.GEN_AI_OPERATION_NAME] == "embeddings"
    assert attributes[names.GEN_AI_REQUEST_MODEL] == attributes[names.GEN_AI_RESPONSE_MODEL] == "org/tiny"
    assert attributes[names.SERVER_ADDRESS] == "127.0.0.1"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("content", [False, True])
async def test_prompts_and_answers_are_exported_only_on_request(
    tokenizer: Tokenizer, stream: bool, content: bool
) -> None:
    world = World(Kept(level=Level.FRAMES, content=content))
    async with session_of(tokenizer, world) as (session, _):
        for route, asked in (
            ("/v1/completions", {"prompt": SECRET}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": SECRET}]}]}),
        ):
            async with session.post(route, json=asked | {"stream": stream}) as reply:
                await reply.read()
        async with session.get("/v1/traces/last") as reply:
            assert SECRET not in await reply.text()
    exported = "".join(span.to_json() for span in world.kept.spans())
    assert (SECRET in exported) is content
    for span in [span for span in world.kept.spans() if span.kind is SpanKind.SERVER] if content else []:
        attributes = attributes_of(span)
        part = {"type": "text", "content": SECRET}
        assert json.loads(str(attributes[names.GEN_AI_INPUT_MESSAGES])) == [{"role": "user", "parts": [part]}]
        answer = {"type": "text", "content": "hello"}
        assert json.loads(str(attributes[names.GEN_AI_OUTPUT_MESSAGES])) == [{"role": "assistant", "parts": [answer]}]


async def test_refusals_name_their_error(tokenizer: Tokenizer) -> None:
    world, generator = World(Kept()), FakeGenerator()
    generator.refusals = [OverloadedError("full")]
    async with session_of(tokenizer, world, generator) as (session, _):
        for body, status in (({"prompt": "x"}, 429), ({"prompt": 5}, 400), ({"prompt": "x", "model": "other"}, 404)):
            async with session.post("/v1/completions", json=body) as reply:
                assert reply.status == status
    found = [attributes_of(span) for span in world.kept.spans("POST /v1/completions")]
    assert [(attributes[names.HTTP_RESPONSE_STATUS_CODE], attributes[names.ERROR_TYPE]) for attributes in found] == [
        (429, "overloaded"), (400, "invalid_request"), (404, "model_not_found"),
    ]  # fmt: skip


async def test_numbers_that_no_attribute_holds_are_left_out(tokenizer: Tokenizer) -> None:
    world = World(Kept())
    body = {"prompt": "x", "seed": (1 << 64) - 1, "max_tokens": 1 << 70, "top_k": 1 << 70}
    async with (
        session_of(tokenizer, world) as (session, _),
        session.post("/v1/completions", json=body) as reply,
    ):
        assert reply.status == 200, "max_tokens is cut to the room there is"
    attributes = attributes_of(world.kept.one("POST /v1/completions"))
    assert names.GEN_AI_REQUEST_SEED not in attributes
    assert names.GEN_AI_REQUEST_MAX_TOKENS not in attributes
    assert all(value < 1 << 63 for value in attributes.values() if isinstance(value, int))


async def test_an_error_in_the_middle_of_a_stream_is_the_requests(tokenizer: Tokenizer) -> None:
    world = World(Kept())
    generator = FakeGenerator(lambda request: [*tokens(request, b"he", ends=False), StageLostError("gone")])
    async with (
        session_of(tokenizer, world, generator) as (session, _),
        session.post("/v1/completions", json={"prompt": "x", "stream": True}) as reply,
    ):
        assert b"stage_lost" in await reply.content.readuntil(b"stage_lost")
        with pytest.raises(aiohttp.ClientPayloadError):
            await reply.read()
    span = world.kept.one("POST /v1/completions")
    assert span.status.status_code is StatusCode.ERROR
    assert attributes_of(span)[names.ERROR_TYPE] == "stage_lost"
    assert attributes_of(span)[names.HTTP_RESPONSE_STATUS_CODE] == 200


async def test_a_client_that_leaves_ends_the_span(tokenizer: Tokenizer) -> None:
    world, gate = World(Kept()), Gate()
    generator = FakeGenerator(lambda _: [gate])
    async with session_of(tokenizer, world, generator) as (session, served):
        asking = asyncio.create_task(session.post("/v1/completions", json={"prompt": "x"}))
        async with asyncio.timeout(WAIT_S):
            await gate.reached.wait()
            asking.cancel()
            await served.generator.streams[0].closed.wait()
    span = world.kept.one("POST /v1/completions")
    assert attributes_of(span)[names.ERROR_TYPE] == "client_gone"
    assert names.HTTP_RESPONSE_STATUS_CODE not in attributes_of(span), "nothing was sent"
    assert span.status.status_code is StatusCode.ERROR


async def test_a_client_that_leaves_a_stream_has_had_its_status(tokenizer: Tokenizer) -> None:
    world, gate = World(Kept()), Gate()
    generator = FakeGenerator(lambda _: [gate])
    async with session_of(tokenizer, world, generator, ping_interval_s=0.5) as (session, served):
        async with asyncio.timeout(WAIT_S):
            reply = await session.post("/v1/completions", json={"prompt": "x", "stream": True})
            await gate.reached.wait()
            reply.close()
            await served.generator.streams[0].closed.wait()
    attributes = attributes_of(world.kept.one("POST /v1/completions"))
    assert (attributes[names.HTTP_RESPONSE_STATUS_CODE], attributes[names.ERROR_TYPE]) == (200, "client_gone")


async def test_a_client_that_leaves_with_the_last_event_has_had_its_answer(tokenizer: Tokenizer) -> None:
    """OpenAI's clients close the connection at [DONE]; the handler may still have the stream to close by then."""
    world, generator = World(Kept()), FakeGenerator()
    gate = generator.closing = Gate()
    async with session_of(tokenizer, world, generator) as (session, _), asyncio.timeout(WAIT_S):
        reply = await session.post("/v1/completions", json={"prompt": "x", "stream": True})
        while b"[DONE]" not in await reply.content.readline():
            pass
        await gate.reached.wait()
        await session.close()  # while the server still closes the stream, and has nothing more to send
        gate.opened.set()
        (record,) = world.observer.log
        while not record.ended_ns:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
    span = world.kept.one("POST /v1/completions")
    assert attributes_of(span)[names.HTTP_RESPONSE_STATUS_CODE] == 200
    assert names.ERROR_TYPE not in attributes_of(span)
    assert span.status.status_code is not StatusCode.ERROR


async def test_only_generation_is_traced(tokenizer: Tokenizer) -> None:
    world = World(Kept())
    async with session_of(tokenizer, world) as (session, _):
        for path in ("/health", "/v1/models", "/v1/traces/last", "/v1/telemetry"):
            async with session.get(path) as reply:
                await reply.read()
        async with session.post("/tokenize", json={"content": "x"}) as reply:
            assert reply.status == 200
    assert world.kept.spans() == []
    assert len(world.observer.log) == 0


async def test_a_trace_is_found_by_every_id_that_a_client_sees(tokenizer: Tokenizer) -> None:
    world = World(Kept())
    async with session_of(tokenizer, world) as (session, _):
        async with session.post("/v1/completions", json={"prompt": "x"}) as reply:
            header, answer = reply.headers["x-request-id"], (await reply.json())["id"]
        for wanted in (header, answer, "last"):
            async with session.get(f"/v1/traces/{wanted}") as reply:
                assert reply.status == 200
                found = await reply.json()
                assert (found["request_id"], found["id"], found["status"]) == (header, answer, 200)
                assert found["trace_id"] == world.observer.log.find(answer).trace_id  # type: ignore[union-attr]
        async with session.get("/v1/traces/none-such") as reply:
            error = (await reply.json())["error"]
            assert (reply.status, error["code"]) == (404, "trace_not_found")
            assert "none-such" in error["message"]


async def test_nothing_is_remembered_at_level_off(tokenizer: Tokenizer) -> None:
    world = World(Kept(level=Level.OFF))
    async with session_of(tokenizer, world) as (session, _):
        async with session.post("/v1/completions", json={"prompt": "x"}) as reply:
            await reply.read()
        async with session.get("/v1/traces/last") as reply:
            assert reply.status == 404
            assert "trace level is off" in (await reply.json())["error"]["message"]
    assert world.kept.spans() == []


async def test_the_level_is_changed_here_and_at_every_stage(tokenizer: Tokenizer) -> None:
    stages = [FakeStage(), FakeStage(is_up=False), FakeStage()]
    world = World(Kept(level=Level.SUMMARY), stages)
    async with session_of(tokenizer, world) as (session, _):
        async with session.get("/v1/telemetry") as reply:
            assert await reply.json() == {
                "level": "summary", "back_to": None, "back_in_s": None, "sample_ratio": 1.0,
                "exporting": True, "exported_spans": 0, "dropped_spans": 0,
                "remembered_requests": 0, "stages": ["summary", None, "summary"],
            }  # fmt: skip
        async with session.put("/v1/telemetry", json={"level": "frames", "sample_ratio": 0.25}) as reply:
            found = await reply.json()
            assert (found["level"], found["sample_ratio"]) == ("frames", 0.25)
            assert found["stages"] == ["frames", None, "frames"]
        async with session.put("/v1/telemetry", json={"sample_ratio": 1}) as reply:
            assert (await reply.json())["level"] == "frames"
        for wrong in ({"level": "loud"}, {"sample_ratio": 2}, {"levle": "off"}, {"level": 5}):
            async with session.put("/v1/telemetry", json=wrong) as reply:
                assert reply.status == 400, wrong
                assert "\n" not in (await reply.json())["error"]["message"]
        async with session.put("/v1/telemetry", json={"level": "x" * 10_000}) as reply:
            assert len((await reply.json())["error"]["message"]) < 200, (
                "the error does not repeat the value at its length"
            )
        long = {"level": "off", "more": "x" * SMALL_BYTES_MAX}
        async with session.put("/v1/telemetry", json=long) as reply:
            assert reply.status == 413, "it is decoded on the event loop, so it has its own bound"
        packed, gzipped = gzip.compress(json.dumps(long).encode()), {"Content-Encoding": "gzip"}
        async with session.put("/v1/telemetry", data=packed, headers=gzipped) as reply:
            assert reply.status == 413
            assert str(SMALL_BYTES_MAX) in (await reply.json())["error"]["message"]
    assert world.kept.telemetry.level is Level.FRAMES
    assert world.observer.tracing.sampler_ratio == 1.0
    late = FakeStage()
    await greet([late], world.observer.pushed_level)
    assert late.level is Level.FRAMES  # a stage that connects later gets the present level


async def test_stages_keep_their_own_level_until_somebody_says_otherwise() -> None:
    stage = FakeStage()
    stage.level = Level.BATCHES
    await greet([stage], Observer().pushed_level)
    assert stage.level is Level.BATCHES
