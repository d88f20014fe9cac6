"""Behaviour that all routes share: ids, error bodies, limits; and the small routes apart from generation."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from relayline.coordinator.http.edge.errors import error_body, retry_headers
from relayline.coordinator.http.edge.server import start_http
from relayline.coordinator.http.replies import reply as replies
from relayline.coordinator.http.replies.openai_dialects import CompletionDialect
from relayline.coordinator.http.requests.tokenizing import TOKENS_PER_PART
from relayline.coordinator.http.workers.body_pool import INLINE_BYTES_MAX
from relayline.coordinator.sessions.generation import GenerationRequest, TokenEvent
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import write_no_tokenizer
from relayline.wire.common import logs
from relayline.wire.common.errors import (
    HandshakeError,
    LaneLimitError,
    ModelNotFoundError,
    NativeError,
    NotReadyError,
    NotServedError,
    OverloadedError,
    RateLimitError,
    RelaylineError,
    RequestCancelledError,
    StageLostError,
    StartError,
    http_status,
)
from relayline.wire.common.phase import Phase
from tests.support.http_support import CREATED, MODEL, WAIT_S, FakeGenerator, Served, serving, tokens


@contextlib.asynccontextmanager
async def session_of(
    tokenizer: Tokenizer, generator: FakeGenerator | None = None, **options: object
) -> AsyncIterator[tuple[aiohttp.ClientSession, Served]]:
    async with serving(tokenizer, generator, **options) as served, aiohttp.ClientSession(served.url) as session:
        yield session, served


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
async def test_health_follows_the_generator(tokenizer: Tokenizer, path: str) -> None:
    async with session_of(tokenizer) as (session, served):
        async with session.get(path) as reply:
            assert (reply.status, await reply.json()) == (200, {"status": "ok"})
        served.generator.ready = False
        async with session.get(path) as reply:
            assert (reply.status, await reply.json()) == (503, {"status": "loading"})
            assert reply.headers["Retry-After"] == "1"
        for phase in (Phase.RECOVERING, Phase.UNREACHABLE, Phase.DRAINING):
            served.generator.otherwise = phase
            async with session.get(path) as reply:
                assert (reply.status, await reply.json()) == (503, {"status": phase.value})


async def test_models_and_pipeline(tokenizer: Tokenizer) -> None:
    entry = {
        "id": MODEL, "created": CREATED, "owned_by": "relayline", "object": "model", "root": MODEL,
        "max_model_len": 512, "meta": {"n_ctx": 512, "n_vocab": tokenizer.n_vocab},
        "type": "model", "display_name": MODEL, "created_at": "2026-09-21T14:13:20+00:00", "lifecycle": "active",
        "capabilities": None, "max_input_tokens": 512, "max_tokens": 512,
    }  # fmt: skip
    gpt, tiny = (entry | {"id": name, "display_name": name} for name in ("gpt-4o", "tiny"))
    page = {"has_more": False, "first_id": MODEL, "last_id": "tiny"}
    async with session_of(tokenizer, model_aliases=("gpt-4o", "tiny")) as (session, served):
        async with session.get("/v1/models") as reply:
            assert await reply.json() == {"data": [entry, gpt, tiny], "object": "list", **page}
        async with session.get("/v1/models/tiny") as reply:
            assert await reply.json() == tiny
        async with session.post("/v1/completions", json={"prompt": "x", "model": "gpt-4o"}) as reply:
            assert (await reply.json())["model"] == "gpt-4o"
        async with session.post("/v1/completions", json={"prompt": "x", "model": "gpt-4"}) as reply:
            assert reply.status == 404
        async with session.get("/v1/models/org%2Ftiny") as reply:
            assert await reply.json() == entry
        async with session.get("/v1/pipeline") as reply:
            assert await reply.json() == await served.generator.describe()
        async with session.get("/v1/pipeline/targets") as reply:
            (own,) = await reply.json()
            assert own["targets"] == [f"127.0.0.1:{served.port}"]
            assert own["labels"]["role"] == "coordinator"


async def test_overlap_since_a_moment_is_asked_for_in_whole_nanoseconds(tokenizer: Tokenizer) -> None:
    async with session_of(tokenizer) as (session, _):
        async with session.get("/v1/pipeline?since_ns=12345678901234567") as reply:
            assert (await reply.json())["asked_since_ns"] == 12345678901234567
        for wrong in ("", "soon", "1.5", "-1", "1_0", "%D9%A1", "9" * 20):
            async with session.get(f"/v1/pipeline?since_ns={wrong}") as reply:
                error = (await reply.json())["error"]
                assert (reply.status, error["param"]) == (400, "since_ns"), wrong
                assert error["message"] == "since_ns: must be whole nanoseconds, like now_ns of an earlier answer"


async def test_tokenize_and_back(tokenizer: Tokenizer) -> None:
    async with session_of(tokenizer) as (session, _):
        async with session.post("/tokenize", json={"content": "hello é<|im_end|>"}) as reply:
            ids = (await reply.json())["tokens"]
        assert ids == tokenizer.encode("hello é<|im_end|>")
        async with session.post("/detokenize", json={"tokens": ids}) as reply:
            assert await reply.json() == dict.fromkeys(("content", "prompt"), "hello é<|im_end|>")
        async with session.post("/tokenize", json={"content": "hello é", "with_pieces": True}) as reply:
            pieces = [entry["piece"] for entry in (await reply.json())["tokens"]]
        assert pieces == ["hello", " ", [0xC3], [0xA9]]
        async with session.post("/detokenize", json={"tokens": [1, -1]}) as reply:
            assert (reply.status, (await reply.json())["error"]["param"]) == (400, "tokens")


GENERATING = [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 4}),
    ("/v1/completions", {"prompt": [1, 2], "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
]


@pytest.mark.parametrize("ctx_tokens", [0, 512], ids=["never connected", "recovering"])
@pytest.mark.parametrize(("path", "body"), GENERATING)
async def test_nothing_is_generated_before_the_pipeline_is_ready(
    tokenizer: Tokenizer, path: str, body: dict[str, object], ctx_tokens: int
) -> None:
    async with session_of(tokenizer, FakeGenerator(ctx_tokens=ctx_tokens)) as (session, served):
        served.generator.ready = False
        async with session.post(path, json=body) as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (503, "not_ready")
            assert reply.headers["Retry-After"] == "2"
        async with session.post(path, json=body | {"temperature": 3}) as reply:
            assert (reply.status, (await reply.json())["error"]["param"]) == (400, "temperature")


async def test_a_request_that_never_fits_is_refused_during_a_recovery(tokenizer: Tokenizer) -> None:
    async with session_of(tokenizer, FakeGenerator(ctx_tokens=4)) as (session, served):
        served.generator.ready = False
        async with session.post("/v1/completions", json={"prompt": [1, 2, 3, 4], "max_tokens": 3}) as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "route_not_found"),
        ("GET", "/v1/nothing", 404, "route_not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_wrong_routes(tokenizer: Tokenizer, method: str, path: str, status: int, code: str) -> None:
    async with session_of(tokenizer) as (session, _), session.request(method, path) as reply:
        assert reply.status == status
        error = (await reply.json())["error"]
        assert sorted(error) == ["code", "message", "param", "type"]
        assert (error["code"], error["type"]) == (code, "invalid_request_error")
        assert path in error["message"]
        assert ("Allow" in reply.headers) == (status == 405)


@pytest.mark.parametrize(
    ("path", "says_what"),
    [
        ("/api/create", "of Ollama's API, chat, generate, embed"),
        ("/v1/", "it is where OpenAI's API begins, as in /v1/models"),
        ("/apis", "no route /apis"),
    ],
)
async def test_who_comes_from_elsewhere_is_told_the_way(tokenizer: Tokenizer, path: str, says_what: str) -> None:
    async with session_of(tokenizer) as (session, _), session.get(path) as reply:
        assert reply.status == 404
        error = (await reply.json())["error"]
    text = error["message"] if isinstance(error, dict) else error  # in the form of who asks
    assert says_what in text
    assert text.startswith(f"no route {path}")


@pytest.mark.parametrize(
    ("path", "status", "methods"),
    [
        ("/v1/models", 204, "GET,HEAD,OPTIONS"),
        ("/v1/chat/completions", 204, "POST,OPTIONS"),
        ("/v1/responses/resp_1", 204, "DELETE,GET,HEAD,OPTIONS"),
        ("/v1/nothing", 404, None),
    ],
)
async def test_a_route_tells_its_methods(tokenizer: Tokenizer, path: str, status: int, methods: str | None) -> None:
    async with session_of(tokenizer) as (session, _), session.options(path) as reply:
        assert (reply.status, reply.headers.get("Allow")) == (status, methods)
        assert bool(await reply.read()) == (status == 404)


async def test_anthropics_clients_read_errors_about_models_in_their_form(tokenizer: Tokenizer) -> None:
    async with session_of(tokenizer) as (session, _):
        async with session.get("/v1/models/x", headers={"anthropic-version": "2023-06-01"}) as reply:
            found = await reply.json()
            assert (reply.status, found["type"], found["error"]["type"]) == (404, "error", "not_found_error")
        async with session.get("/v1/models/x") as reply:
            assert (await reply.json())["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("sent", "kept"), [("abc-1.2:3_4", True), ("bad id", False), ("x" * 129, False), ("<script>", False)]
)
async def test_every_reply_has_a_request_id(tokenizer: Tokenizer, sent: str, kept: bool) -> None:
    stream = {"prompt": "x", "stream": True}
    async with session_of(tokenizer) as (session, _):
        for method, path, body in [
            ("GET", "/health", None),
            ("GET", "/nothing", None),
            ("POST", "/v1/completions", {}),
            ("POST", "/v1/completions", stream),
        ]:
            async with session.request(method, path, json=body, headers={"x-request-id": sent}) as reply:
                assert (reply.headers["x-request-id"] == sent) == kept
                assert reply.headers["x-request-id"]


async def test_body_limits_and_encodings(tokenizer: Tokenizer) -> None:
    async with session_of(tokenizer, body_bytes_max=1000) as (session, _):
        async with session.post("/v1/completions", data=b'{"prompt":"' + b"x" * 2000 + b'"}') as reply:
            assert reply.status == 413
            error = (await reply.json())["error"]
            assert (error["code"], error["message"]) == ("body_too_large", "the body is larger than 1000 bytes")
        headers = {"Content-Encoding": "gzip"}
        async with session.post("/v1/completions", data=b"not gzip at all", headers=headers) as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (400, "bad_body")
            assert reply.headers["Connection"] == "close"


@pytest.mark.parametrize(
    ("request_head", "problem"),
    [
        (b"Content-Length: 3\r\nContent-Encoding: gzip\r\n\r\nabc", "Can not decode content-encoding: gzip"),
        (b"Content-Length: x\r\n\r\n", "Invalid character in Content-Length"),
        (b"Content-Length: " + b"x" * 4_000 + b"\r\n\r\n", "Invalid character in Content-Length"),
        (b"Authorization : Bearer sk-secret\r\n\r\n", "Invalid header token: ..."),
        (b"Authorization : \"Bearer' 'sk-secret\r\n\r\n", "Invalid header token: ..."),
    ],
)
async def test_malformed_http_is_logged_in_one_line(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, request_head: bytes, problem: str
) -> None:
    logged = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    monkeypatch.setattr(sys, "stderr", logged)
    logs.setup("coordinator", as_json=False)
    async with session_of(tokenizer) as (_, served), asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + request_head)
        assert b" 400 " in await reader.readline()
        await reader.read()
        writer.close()
    (line,) = logged.getvalue().splitlines()
    assert "warning" in line
    assert len(line) < 400
    assert line.isprintable()
    assert f"request cannot be read: {problem}" in line
    assert "secret" not in line
    assert "secret" not in logs.recent_lines(1)[0].text


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "headers"),
    [
        (OverloadedError("x", 7), 429, "rate_limit_error", "rate_limit_exceeded", {"Retry-After": "7"}),
        (OverloadedError("x", 0), 429, "rate_limit_error", "rate_limit_exceeded", {"Retry-After": "1"}),
        (RateLimitError("x", 9), 429, "rate_limit_error", "rate_limit_exceeded", {"Retry-After": "9"}),
        (LaneLimitError("x"), 429, "rate_limit_error", "rate_limit_exceeded", {"Retry-After": "1"}),
        (NotReadyError("x"), 503, "service_unavailable_error", "not_ready", {"Retry-After": "2"}),
        (StageLostError("x"), 503, "service_unavailable_error", "stage_lost", {"Retry-After": "1"}),
        (ModelNotFoundError("x", "model"), 404, "invalid_request_error", "model_not_found", {}),
        (NotServedError("x"), 501, "server_error", "not_implemented", {"x-should-retry": "false"}),
        (RequestCancelledError("x"), 499, "server_error", "request_cancelled", {}),
        (NativeError("x"), 500, "server_error", "native", {"x-should-retry": "false"}),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, RelaylineError) else "",
)
def test_errors_have_openais_form(
    error: RelaylineError, status: int, kind: str, code: str, headers: dict[str, str]
) -> None:
    found, after = error_body(error).error, headers.get("Retry-After")
    assert (http_status(error), found.type, found.code, retry_headers(error)) == (status, kind, code, headers)
    assert found.param == getattr(error, "param", None)
    assert found.retry_after_s == (msgspec.UNSET if after is None else int(after))


async def test_an_error_that_retrying_cannot_mend_says_so(tokenizer: Tokenizer) -> None:
    async with session_of(tokenizer) as (session, served):
        served.generator.refusals = [HandshakeError("stage 1 has another model")]
        async with session.post("/v1/completions", json={"prompt": "x"}) as reply:
            assert (reply.status, reply.headers["x-should-retry"]) == (503, "false")
            assert "Retry-After" not in reply.headers
            assert (await reply.json())["error"]["code"] == "handshake"


async def test_a_model_without_a_tokenizer_takes_and_gives_token_ids(tmp_path_factory: pytest.TempPathFactory) -> None:
    textless = Tokenizer.load(write_no_tokenizer(tmp_path_factory.mktemp("tok") / "none.gguf", n_vocab=300))
    async with session_of(textless) as (session, _):
        for path, body in [
            ("/v1/completions", {"prompt": "text"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ("/tokenize", {"content": "text"}),
        ]:
            async with session.post(path, json=body) as reply:
                assert reply.status == 400
                assert "no tokenizer; send token ids" in (await reply.json())["error"]["message"]
        ids = {"prompt": [1, 2], "return_token_ids": True, "logprobs": 0}
        async with session.post("/v1/completions", json=ids) as reply:
            choice = (await reply.json())["choices"][0]
        assert choice["text"] == ""
        assert choice["token_ids"] == [*b"hello", 257]
        assert choice["logprobs"]["tokens"][0] == "token_id:104"
        async with session.post("/v1/completions", json={"prompt": [300]}) as reply:
            assert reply.status == 400
        for content, param in (("text", "prediction"), ("", None)):
            body = ids | {"prediction": {"type": "content", "content": content}}
            async with session.post("/v1/completions", json=body) as reply:
                assert (await reply.json()).get("error", {}).get("param") == param


async def test_no_template_points_at_completions(tokenizer: Tokenizer) -> None:
    async with session_of(tokenizer, template=None) as (session, _):
        body = {"messages": [{"role": "user", "content": "hi"}]}
        async with session.post("/v1/chat/completions", json=body) as reply:
            assert reply.status == 400
            assert "use /v1/completions" in (await reply.json())["error"]["message"]


async def test_template_variables_reach_the_template(tokenizer: Tokenizer) -> None:
    async with session_of(tokenizer, template="{{ mood }}{{ messages|length }}") as (session, served):
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "chat_template_kwargs": {"mood": "calm", "messages": [], "self": 1, "variables": 2},
        }
        async with session.post("/v1/chat/completions", json=body) as reply:
            assert reply.status == 200
        assert served.generator.requests[0].prompt_tokens == tuple(tokenizer.encode("calm1"))


class Untouched:
    """A tokenizer that fails where texts are worked on; what answers are spelt with is left."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.is_serving = False

    def __getattr__(self, name: str) -> Any:
        assert not self.is_serving or name not in ("encode", "encode_chat", "decode"), "of a worker's process"
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["hello world"] * 3}),
        ("/v1/completions", {"prompt": [104, 101] * 20, "echo": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "x", "prediction": {"type": "content", "content": "hi"}}),
        ("/tokenize", {"content": "hello "}),
        ("/tokenize", {"content": "é", "with_pieces": True}),
        ("/detokenize", {"tokens": [104, 101]}),
    ],
)
async def test_no_text_of_a_body_is_worked_on_in_the_process_of_the_event_loop(
    tokenizer: Tokenizer, path: str, body: dict[str, object]
) -> None:
    untouched = Untouched(tokenizer)
    async with session_of(untouched, template="{{ messages[0].content }}") as (session, _):  # type: ignore[arg-type]
        untouched.is_serving = True
        async with session.post(path, json={**body, "user": "x" * INLINE_BYTES_MAX}) as reply:
            assert reply.status == 200


@pytest.mark.parametrize("with_pieces", [False, True])
@pytest.mark.parametrize("n_tokens", [0, TOKENS_PER_PART - 1, TOKENS_PER_PART, 2 * TOKENS_PER_PART + 1])
async def test_a_long_answer_to_tokenize_is_whole(tokenizer: Tokenizer, n_tokens: int, with_pieces: bool) -> None:
    text = "az" * (n_tokens // 2) + "a" * (n_tokens % 2)
    ids = tokenizer.encode(text)
    assert len(ids) == n_tokens
    body = {"content": text, "with_pieces": with_pieces}
    async with session_of(tokenizer) as (session, _), session.post("/tokenize", json=body) as reply:
        found = (await reply.json())["tokens"]
    assert found == ([{"id": token, "piece": chr(token)} for token in ids] if with_pieces else ids)


async def test_usage_counts_cached_tokens_of_each_prompt(tokenizer: Tokenizer) -> None:
    def script(request: GenerationRequest) -> Iterator[TokenEvent]:
        n_cached = len(request.prompt_tokens) - 1 if request.cache_prompt else 0
        return (TokenEvent(104, None, (), reason, n_cached=n) for reason, n in ((None, n_cached), ("length", 0)))

    async with session_of(tokenizer, FakeGenerator(script)) as (session, served):
        for cache_prompt, n_cached in ((None, 4 + 6), (True, 4 + 6), (False, 0)):
            asked = {"prompt": [[1] * 5, [2] * 7], "n": 2, "max_tokens": 2, "cache_prompt": cache_prompt}
            async with session.post("/v1/completions", json=asked) as reply:
                usage = (await reply.json())["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": n_cached}
            assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (12, 8, 20)
        assert len(served.generator.requests) == 12


@pytest.mark.parametrize("is_strict", [False, True])
async def test_max_tokens_beyond_the_context(tokenizer: Tokenizer, is_strict: bool) -> None:
    async with (
        session_of(tokenizer, FakeGenerator(ctx_tokens=8), strict_max_tokens=is_strict) as (session, served),
        session.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 6}) as reply,
    ):
        if is_strict:
            assert (reply.status, (await reply.json())["error"]["code"]) == (400, "context_length_exceeded")
        else:
            assert (reply.status, served.generator.requests[0].max_tokens) == (200, 5)


async def test_any_model_name_may_be_allowed(tokenizer: Tokenizer) -> None:
    async with (
        session_of(tokenizer, any_model_name=True) as (session, _),
        session.post("/v1/completions", json={"prompt": "x", "model": "gpt-6-astra"}) as reply,
    ):
        assert (await reply.json())["model"] == "gpt-6-astra"


async def test_start_errors_are_one_line() -> None:
    holder = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    async with holder:
        port = holder.sockets[0].getsockname()[1]
        with pytest.raises(StartError, match=f"port 127.0.0.1:{port} is taken"):
            await start_http(web.Application(), "127.0.0.1", port)
    with pytest.raises(StartError, match=r"cannot listen on 203\.0\.113\.1:0"):
        await start_http(web.Application(), "203.0.113.1", 0)
    with pytest.raises(StartError, match="65536 is not a port"):
        await start_http(web.Application(), "127.0.0.1", 65536)


@pytest.mark.parametrize(("n_tokens", "elsewhere"), [(replies.WRITTEN_INLINE_TOKENS_MAX, False), (600, True)])
async def test_a_long_answer_is_not_written_on_the_event_loop(
    tokenizer: Tokenizer, n_tokens: int, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[int] = []
    written = CompletionDialect.reply

    def noted(*arguments: Any) -> bytes:
        writers.append(threading.get_ident())
        return written(*arguments)

    monkeypatch.setattr(CompletionDialect, "reply", noted)
    generator = FakeGenerator(lambda request: tokens(request, b"a" * n_tokens), ctx_tokens=1024)
    asked = {"prompt": "x", "max_tokens": n_tokens, "logprobs": 5}
    async with session_of(tokenizer, generator) as (session, _), session.post("/v1/completions", json=asked) as answer:
        assert len((await answer.json())["choices"][0]["text"]) == n_tokens
    assert (writers != [threading.get_ident()]) == elsewhere
