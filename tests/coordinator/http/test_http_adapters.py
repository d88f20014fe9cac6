"""LoRA adapters in the API: models of their own, which requests choose by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relayline.coordinator.http.edge.limits import limits_of
from relayline.coordinator.http.requests.lora import listed
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.model_files.adapter_texts import read_adapters
from relayline.wire.settings.table import ServingSettings
from tests.support.http_support import MODEL, FakeGenerator, serving

NAMES = ("sql", "chat")
PROMPT = {"prompt": "hi", "max_tokens": 2}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


async def chosen(tokenizer: Tokenizer, path: str, body: dict[str, Any], **limits: object) -> tuple[list[int], str]:
    """Return the choices of all generation requests that a body makes, and the answer's model."""
    generator = FakeGenerator()
    async with (
        serving(tokenizer, generator, adapters=NAMES, **limits) as served,
        aiohttp.ClientSession(served.url) as session,
        session.post(path, json=body) as reply,
    ):
        assert reply.status == 200, await reply.text()
        return [request.adapter for request in generator.requests], (await reply.json())["model"]


@pytest.mark.parametrize(("model", "adapter"), [(MODEL, 0), ("sql", 1), ("chat", 2)])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**PROMPT, "n": 2, "temperature": 1}),
        ("/v1/chat/completions", MESSAGES),
        ("/v1/messages", MESSAGES),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    ],
)
async def test_the_models_name_chooses_in_every_dialect(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], model: str, adapter: int
) -> None:
    found, named = await chosen(tokenizer, path, {**body, "model": model})
    assert found == [adapter] * body.get("n", 1)
    assert named == model


async def test_a_name_of_nobody_is_the_model_itself_where_any_name_goes(tokenizer: Tokenizer) -> None:
    assert await chosen(tokenizer, "/v1/completions", {**PROMPT, "model": "gpt-4"}, any_model_name=True) == (
        [0],
        "gpt-4",
    )
    assert (await chosen(tokenizer, "/v1/completions", {**PROMPT, "model": "chat"}, any_model_name=True))[0] == [2]


async def test_they_are_listed_with_the_model_that_they_change(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, adapters=NAMES) as served, aiohttp.ClientSession(served.url) as session:
        async with session.get("/v1/models") as reply:
            models = (await reply.json())["data"]
        async with session.get("/v1/models/chat") as reply:
            one = await reply.json()
        async with session.post("/v1/completions", json={**PROMPT, "model": "pirate"}) as reply:
            refusal = await reply.json()
    assert [(each["id"], each.get("parent")) for each in models] == [(MODEL, None), ("sql", MODEL), ("chat", MODEL)]
    assert (one["id"], one["root"]) == ("chat", "chat")
    assert refusal["error"]["message"] == f"the model 'pirate' does not exist; this server has '{MODEL}', 'sql', 'chat'"


def test_the_limits_take_the_names_of_the_setting(tmp_path: Path) -> None:
    limits = limits_of(ServingSettings(lora="always.gguf,sql=a.gguf,chat=b.gguf:0.5"))
    assert limits.adapters == NAMES
    assert [limits.adapter_of(name) for name in ("", "sql", "chat", "always")] == [0, 1, 2, 0]
    assert [each.path for each in limits.lora] == ["always.gguf", "a.gguf", "b.gguf"]


LORA = read_adapters("/files/always.gguf:0.5,sql=a.gguf,chat=b.gguf:-2")
ALWAYS, SQL, CHAT = ({"id": number, "scale": each.scale} for number, each in enumerate(LORA))


@pytest.mark.parametrize(
    ("lora", "adapter", "model"),
    [
        ([], 0, MODEL),
        ([ALWAYS], 0, MODEL),
        ([ALWAYS, SQL], 1, "sql"),
        ([CHAT, {"id": 1}, ALWAYS], 2, "chat"),
        ([{"id": 1, "scale": 0}, ALWAYS], 0, MODEL),
    ],
)
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT), ("/v1/chat/completions", MESSAGES)])
async def test_llama_servers_field_chooses_too(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], lora: list[dict[str, Any]], adapter: int, model: str
) -> None:
    assert await chosen(tokenizer, path, {**body, "lora": lora}, lora=LORA) == ([adapter], model)


async def test_its_own_route_shows_what_was_chosen(tokenizer: Tokenizer) -> None:
    async with (
        serving(tokenizer, generator := FakeGenerator(), adapters=NAMES, lora=LORA) as served,
        aiohttp.ClientSession(served.url) as session,
    ):
        async with session.post("/completion", json={"prompt": "hi", "n_predict": 1, "lora": [ALWAYS, SQL]}) as reply:
            assert (await reply.json())["generation_settings"]["lora"] == [ALWAYS, SQL]
        assert [request.adapter for request in generator.requests] == [1]
        async with session.get("/lora-adapters") as reply:
            listed = await reply.json()
    assert [(each["id"], each["path"], each["scale"], each["name"], each["served_scale"]) for each in listed] == [
        (0, "always.gguf", 0.5, "", 0.5),
        (1, "a.gguf", 0.0, "sql", 1.0),
        (2, "b.gguf", 0.0, "chat", -2.0),
    ]


def test_a_key_sees_the_adapters_that_it_may_use() -> None:
    assert [each["name"] for each in listed(LORA, frozenset({"chat", "other"}))] == ["", "chat"]
    assert [each["id"] for each in listed(LORA, frozenset({MODEL}))] == [0]
    assert [each["name"] for each in listed(LORA, frozenset())] == ["", "sql", "chat"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"lora": [SQL]}, "the scale of id 0 can only be 0.5 here, got 0"),
        ({"lora": [ALWAYS, {"id": 1, "scale": 0.3}]}, "the scale of id 1 can only be 1 or 0 here, got 0.3"),
        ({"lora": [ALWAYS, SQL, CHAT]}, "a request has at most one of sql and chat"),
        ({"lora": [ALWAYS, {"id": 3, "scale": 1}]}, "id 3 is not there; GET /lora-adapters lists 3"),
        ({"lora": [ALWAYS, {"id": -1, "scale": 1}]}, "id -1 is not there; GET /lora-adapters lists 3"),
        ({"lora": [ALWAYS, ALWAYS]}, "has one id twice"),
        ({"lora": [ALWAYS, SQL], "model": "chat"}, "the model 'chat' is an adapter of its own"),
        ({"lora": [ALWAYS], "model": "chat"}, "the model 'chat' is an adapter of its own"),
        ({"lora": [1]}, "lora"),
        ({"lora": {"id": 0}}, "lora"),
    ],
)
async def test_what_a_pipeline_cannot_do_is_refused_in_one_line(
    tokenizer: Tokenizer, body: dict[str, Any], text: str
) -> None:
    async with (
        serving(tokenizer, adapters=NAMES, lora=LORA) as served,
        aiohttp.ClientSession(served.url) as session,
        session.post("/v1/completions", json={**PROMPT, **body}) as reply,
    ):
        error = (await reply.json())["error"]
    assert (reply.status, error["type"]) == (400, "invalid_request_error")
    assert text in error["message"]
    assert "\n" not in error["message"]
