"""/openapi.json is true: its routes are served, its bounds are checked, and its replies are real ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import msgspec
import pytest

from relayline.coordinator.http import openapi
from relayline.coordinator.http.app import make_app
from relayline.coordinator.http.replies.service import ServedModel
from relayline.coordinator.http.requests.bodies import decode_body
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import CHATML
from relayline.wire.common.errors import InvalidRequestError
from tests.support.http_support import CREATED, MODEL, FakeGenerator, says, serving

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "http-api.md"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
REQUESTS: list[tuple[str, str, Any]] = [
    ("GET", "/v1/models", None),
    ("GET", f"/v1/models/{MODEL}", None),
    ("GET", "/health", None),
    ("POST", "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1}),
    ("POST", "/v1/completions", {"prompt": "hi", "logprobs": 1, "echo": False}),
    ("POST", "/v1/completions", {"prompt": "hi", "logprobs": 1, "echo": True, "timings_per_token": True}),
    ("POST", "/v1/completions", {"prompt": "hi", "prompt_logprobs": 1, "return_token_ids": True}),
    ("POST", "/v1/completions", {"prompt": "hi", "n": 0}),
    ("POST", "/v1/responses", {"input": "hi"}),
    ("POST", "/v1/messages", CHAT | {"max_tokens": 5}),
    ("POST", "/v1/messages", CHAT),
    ("POST", "/tokenize", {"content": "hi"}),
    ("POST", "/detokenize", {"tokens": [1]}),
    ("POST", "/apply-template", CHAT),
    ("POST", "/v1/embeddings", {"input": []}),
    ("POST", "/completion", {"prompt": "hi", "n_probs": 1}),
    ("POST", "/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ("GET", "/slots", None),
    ("GET", "/tokenizer_info", None),
    ("GET", "/props", None),
]


async def test_it_lists_the_served_routes_and_real_replies_fit(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, FakeGenerator(says(b"x"))) as served, aiohttp.ClientSession(served.url) as session:
        async with session.get("/openapi.json") as reply:
            document = await reply.json()
        for method, path, body in REQUESTS:
            template = "/v1/models/{id}" if path.startswith("/v1/models/") else path
            operation = document["paths"][template][method.lower()]
            async with session.request(method, path, json=body) as reply:
                answer = operation["responses"]["200" if reply.status == 200 else "default"]
                schema = answer["content"]["application/json"]["schema"]
                jsonschema.validate(await reply.json(), {**schema, "components": document["components"]})
            if body is not None and reply.status == 200:
                asked = operation["requestBody"]["content"]["application/json"]["schema"]
                jsonschema.validate(body, {**asked, "components": document["components"]})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/responses", {"input": "hi", "stream": True}),
        ("/api/chat", CHAT),
        ("/api/generate", {"model": MODEL, "prompt": "hi"}),
        ("/api/pull", {"model": MODEL}),
        ("/docs", None),
    ],
)
async def test_it_lists_the_kinds_of_content_that_come(tokenizer: Tokenizer, path: str, body: Any) -> None:
    method = "GET" if body is None else "POST"
    async with serving(tokenizer, FakeGenerator(says(b"x"))) as served, aiohttp.ClientSession(served.url) as session:
        async with session.get("/openapi.json") as reply:
            operation = (await reply.json())["paths"][path][method.lower()]
        async with session.request(method, path, json=body) as reply:
            assert reply.status == 200
            assert reply.content_type in operation["responses"]["200"]["content"]


async def test_it_is_written_once_and_only_if_somebody_asks(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[object] = []
    describe = openapi.describe

    def counted(routes: Any) -> dict[str, Any]:
        written.append(routes)
        return describe(routes)

    monkeypatch.setattr(openapi, "describe", counted)
    async with serving(tokenizer, FakeGenerator()) as served, aiohttp.ClientSession(served.url) as session:
        for path, n_written in (("/health", 0), ("/docs", 1), ("/openapi.json", 1), ("/docs", 1)):
            async with session.get(path) as reply:
                assert reply.status == 200
            assert len(written) == n_written


def test_every_route_is_on_the_page_of_the_http_api(tokenizer: Tokenizer) -> None:
    chat = ChatTemplate(CHATML, bos_text=tokenizer.bos_text, eos_text=tokenizer.eos_text)
    app = make_app(FakeGenerator(), ServedModel(MODEL, CREATED, tokenizer, chat))
    paths = {resource.canonical for resource in app.router.resources()}
    written = {re.sub(r"{(\w+)}", lambda name: name[1].upper(), path) for path in paths}
    page = PAGE.read_text()
    missing = {path for path in written if not re.search(rf"{re.escape(path)}(?![\w/])", page)}
    assert {path for path in missing if not path.startswith("/page/")} == set(), "name it in its table"


def test_every_route_of_the_api_is_in_it(tokenizer: Tokenizer) -> None:
    chat = ChatTemplate(CHATML, bos_text=tokenizer.bos_text, eos_text=tokenizer.eos_text)
    app = make_app(FakeGenerator(), ServedModel(MODEL, CREATED, tokenizer, chat))
    document = openapi.describe(app.router.routes())
    served = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    listed = {(method, path) for path, each in document["paths"].items() for method in each}
    assert {path for _, path in served} >= {"/v1/responses", "/v1/messages", "/docs", "/openapi.json"}
    assert {each for each in served - listed if not each[1].startswith("/page/")} == {("get", "/")}
    assert listed <= served
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], path
            has_body = (method.upper(), path) in openapi._BODIES
            is_known_without = path.endswith("/cancel")
            assert has_body == (method in ("post", "put") and not is_known_without), (method, path)


def bounded_fields() -> Iterator[tuple[type[msgspec.Struct], str, Any]]:
    """A value outside of each bound that the description names."""
    for kind in dict.fromkeys(openapi._BODIES.values()):
        _, components = msgspec.json.schema_components([kind])
        for name, field in components[kind.__name__]["properties"].items():
            for each in field.get("anyOf", [field]):
                if "minimum" in each:
                    yield kind, name, each["minimum"] - 1
                if "maximum" in each:
                    yield kind, name, each["maximum"] + 1


def test_every_bound_is_one_that_is_checked() -> None:
    n_bounds = 0
    for kind, name, value in bounded_fields():
        n_bounds += 1
        with pytest.raises(InvalidRequestError) as caught:
            decode_body(msgspec.json.encode({"prompt": "x", **CHAT, "content": "x", "tokens": [], name: value}), kind)
        assert caught.value.param == name
    assert n_bounds > 20


async def test_a_page_for_people_needs_no_other_server(tokenizer: Tokenizer) -> None:
    async with (
        serving(tokenizer) as served,
        aiohttp.ClientSession(served.url) as session,
        session.get("/docs") as reply,
    ):
        text = await reply.text()
        assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
    assert "<code>POST /v1/chat/completions</code>" in text
    assert "<code>max_output_tokens</code><td>integer, at least 1" in text
    assert "://" not in text
