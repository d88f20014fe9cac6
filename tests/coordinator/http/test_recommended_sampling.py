"""What a model's file recommends is what requests get that name no sampling options, in every dialect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from relayline.coordinator.http.edge.limits import HttpLimits, limits_of
from relayline.coordinator.http.requests.bodies import CompletionBody
from relayline.coordinator.http.requests.validation import plan_completion
from relayline.coordinator.sessions.generation import SamplingParams
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import write_tokenizer
from relayline.wire.model_files.gguf_header import KeyValue, Value
from relayline.wire.model_files.recommended import PREFIX, read_recommended
from relayline.wire.settings.table import ServingSettings
from tests.support.http_support import MODEL, FakeGenerator, says, serving

KEYS: dict[str, float | str] = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "penalty_repeat": 1.05, "sequence": "top_k"}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
ASKED = {"input": "hi", "max_output_tokens": 1}
OLLAMA_GREEDY = {"options": {"temperature": 0}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("tok") / "tokenizer.gguf"
    return Tokenizer.load(write_tokenizer(path, sampling=KEYS))


def read(end: str, value: Value | None) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return what a file with one key recommends."""
    entry = KeyValue(PREFIX + end, 0, 0, 1, 0, 0, value)
    found = read_recommended({entry.key: entry})
    return dict(found.options), found.ignored


@pytest.mark.parametrize(
    ("end", "value", "why"),
    [
        ("temp", 2.5, "2.5, not a number between 0 and 2"),
        ("temp", float("nan"), "nan, not a number between 0 and 2"),
        ("temp", "0.6", "'0.6', not a number between 0 and 2"),
        ("temp", True, "True, not a number between 0 and 2"),
        ("temp", None, "a list, not a number between 0 and 2"),
        ("top_k", 2.5, "2.5, not a whole number between -1 and 2.14748e+09"),
        ("top_k", -2, "-2, not a whole number between -1 and 2.14748e+09"),
        ("mirostat", 3, "3, not a whole number between 0 and 2"),
        ("penalty_repeat", 1e9, "1000000000.0, not a number between 0.01 and 100"),
    ],
)
def test_a_value_that_no_request_may_have_is_ignored_and_named(end: str, value: Value | None, why: str) -> None:
    assert read(end, value) == ({}, (f"general.sampling.{end} is {why}; ignored",))


@pytest.mark.parametrize(
    ("end", "value", "expected"),
    [
        ("temp", 0.6000000238418579, {"temperature": 0.6}),
        ("top_k", 20.0, {"top_k": 20}),
        ("penalty_last_n", 1 << 20, {"repeat_last_n": 1_024}),
        ("penalty_last_n", -1, {"repeat_last_n": -1}),
    ],
)
def test_a_value_is_what_a_request_would_say(end: str, value: Value, expected: dict[str, float]) -> None:
    assert read(end, value) == (expected, ())


def test_every_value_that_is_taken_is_one_that_requests_may_have() -> None:
    ends = ("temp", "top_p", "top_k", "min_p", "xtc_probability", "xtc_threshold", "penalty_repeat", "penalty_last_n",
            "mirostat", "mirostat_tau", "mirostat_eta")  # fmt: skip
    taken = [read(end, value)[0] for end in ends for value in (0, 1e-3, 1, 2, 100, -1, (1 << 31) - 1)]
    assert {name for each in taken for name in each} >= {"temperature", "top_k", "repeat_penalty", "mirostat"}
    for each in taken:
        body = msgspec.convert({"prompt": "x", **each}, CompletionBody)
        assert plan_completion(body, HttpLimits(), 0).n == 1


async def answered(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], choice: str = "model"
) -> tuple[SamplingParams, Any]:
    """Return how tokens are picked for a request, and its answer."""
    recommended = limits_of(ServingSettings(sampling_defaults=choice), tokenizer.recommended).recommended
    async with (
        serving(tokenizer, FakeGenerator(says(b"a")), recommended=recommended) as served,
        aiohttp.ClientSession(served.url) as session,
        session.post(path, json={"stream": False, **body}) as reply,
    ):
        assert reply.status == 200, await reply.text()
        (request,) = served.generator.requests
        return request.sampling, await reply.json()


def seen(sampling: SamplingParams) -> tuple[Any, ...]:
    return sampling.temperature, sampling.top_k, sampling.top_p, dict(sampling.numbers)


OF_MODEL = (0.6, 20, 0.95, {"repetition_penalty": 1.05, "repeat_last_n": 64})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", ASKED),
        ("/v1/messages", CHAT),
        ("/completion", {"prompt": "hi"}),
        ("/api/chat", CHAT),
        ("/api/generate", {"prompt": "hi", "raw": True}),
    ],
)
async def test_a_request_that_names_no_options_gets_the_models(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    sampling, answer = await answered(tokenizer, path, body)
    assert seen(sampling) == OF_MODEL
    if path == "/v1/responses":
        assert (answer["temperature"], answer["top_p"]) == (0.6, 0.95)  # that were used


@pytest.mark.parametrize(
    ("path", "body", "choice", "expected"),
    [
        ("/v1/chat/completions", CHAT | {"temperature": 1.5, "top_k": -1}, "model", (1.5, 0, *OF_MODEL[2:])),
        ("/v1/chat/completions", CHAT | {"repetition_penalty": 1}, "model", (*OF_MODEL[:3], {})),
        ("/v1/chat/completions", CHAT | {"temperature": 0}, "model", (0, 0, 1, {})),
        ("/completion", {"prompt": "hi", "temperature": -1}, "model", (0, 40, 0.95, {})),
        ("/completion", {"prompt": "hi", "samplers": ["temperature"]}, "model", (0.6, 0, 1, {})),
        ("/api/chat", CHAT | OLLAMA_GREEDY, "model", (0, 40, 0.9, {})),
        ("/v1/chat/completions", CHAT, "openai", (1, 0, 1, {})),
        ("/api/chat", CHAT, "openai", (0.8, 40, 0.9, {})),
    ],
)
async def test_a_clients_own_values_a_greedy_request_and_the_setting_win(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], choice: str, expected: tuple[Any, ...]
) -> None:
    assert seen((await answered(tokenizer, path, body, choice))[0]) == expected


async def test_clients_are_told_what_a_silent_request_gets(tokenizer: Tokenizer) -> None:
    async with (
        serving(tokenizer, recommended=tokenizer.recommended.options) as served,
        aiohttp.ClientSession(served.url) as session,
    ):
        shown = (await (await session.get("/props")).json())["default_generation_settings"]["params"]
        (model,) = (await (await session.get("/v1/models")).json())["data"]
        of_ollama = await (await session.post("/api/show", json={"model": MODEL})).json()
    assert model["default_parameters"] == dict(tokenizer.recommended.options)
    assert [line.split() for line in of_ollama["parameters"].splitlines()] == [
        ["temperature", "0.6"],
        ["top_p", "0.95"],
        ["top_k", "20"],
        ["repeat_penalty", "1.05"],
    ]
    assert (shown["temperature"], shown["top_k"], shown["min_p"], shown["repeat_penalty"]) == (0.6, 20, 0.05, 1.05)
