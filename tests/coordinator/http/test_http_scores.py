"""Log probabilities and ids of a prompt's own tokens, and the running figures in events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from relayline.coordinator.http.replies.choice import Speller
from relayline.coordinator.sessions.generation import GenerationRequest, PromptScore, TokenEvent
from relayline.coordinator.text.tokenizer import Tokenizer
from tests.support.http_support import FakeGenerator, serving, tokens


def scoring(request: GenerationRequest) -> Iterator[TokenEvent]:
    """Says "ok"; of a prompt's token t at place p it thinks -p, and that 120 is likelier."""
    for at, event in enumerate(tokens(request, b"ok", top=((111, -0.5),))):
        scores = ()
        if not at and request.scores_prompt:
            prompt = request.prompt_tokens
            scores = tuple(
                PromptScore(prompt[place], -float(place), ((120, -0.25), (122, -0.75)))
                for place in range(1, len(prompt))
            )
        yield TokenEvent(event.token, event.logprob, event.top_logprobs, event.finish_reason, event.is_end_token,
                         prompt_scores=scores)  # fmt: skip


async def asked(tokenizer: Tokenizer, path: str, **body: object) -> tuple[Any, GenerationRequest]:
    async with (
        serving(tokenizer, FakeGenerator(scoring)) as served,
        aiohttp.ClientSession(served.url) as session,
        session.post(path, json=body) as reply,
    ):
        assert reply.status == 200, await reply.text()
        return await reply.json(), served.generator.requests[0]


async def test_an_echo_with_logprobs_has_those_of_the_prompt_too(tokenizer: Tokenizer) -> None:
    found, request = await asked(tokenizer, "/v1/completions", prompt="hey", max_tokens=2, echo=True, logprobs=1)
    assert (request.scores_prompt, request.cache_prompt, request.sampling.n_logprobs) == (True, False, 1)
    (choice,) = found["choices"]
    n_prompt = len(request.prompt_tokens)
    logprobs = choice["logprobs"]
    assert choice["text"] == "heyok"
    assert logprobs["token_logprobs"] == [None, *(-float(place) for place in range(1, n_prompt)), -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"x": -0.25, logprobs["tokens"][1]: -1.0}
    shown = [choice["text"][at:] for at in logprobs["text_offset"]]
    texts = [name for name in logprobs["tokens"] if not name.startswith("<")]
    assert "".join(texts) == "heyok"
    assert all(rest.startswith(name) for rest, name in zip(shown, logprobs["tokens"], strict=True) if name in texts)


async def test_an_echo_without_an_answer_is_the_prompt_alone(tokenizer: Tokenizer) -> None:
    """As programs ask that score texts."""
    scored: dict[str, object] = {"max_tokens": 0, "echo": True, "logprobs": 1, "return_token_ids": True}
    found, request = await asked(tokenizer, "/v1/completions", prompt=["hey", "he"], **scored)
    first, second = found["choices"]
    n_prompt = len(request.prompt_tokens)
    assert (request.max_tokens, first["text"], second["text"]) == (1, "hey", "he")
    assert first["finish_reason"] == "length"
    assert first["token_ids"] == []
    assert first["logprobs"]["token_logprobs"] == [None, *(-float(place) for place in range(1, n_prompt))]
    assert {len(first["logprobs"][name]) for name in ("tokens", "top_logprobs", "text_offset")} == {n_prompt}
    assert found["usage"]["completion_tokens"] == 0
    async with (
        serving(tokenizer, FakeGenerator(scoring)) as served,
        aiohttp.ClientSession(served.url) as session,
        session.post("/v1/completions", json={"prompt": "hey", "max_tokens": 0, "echo": True, "stream": True}) as reply,
    ):
        lines = [line for line in (await reply.text()).split("\n\n") if line]
    events = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
    assert "".join(event["text"] for event in events) == "hey"
    assert (events[-1]["finish_reason"], lines[-1]) == ("length", "data: [DONE]")


async def test_prompt_logprobs_and_ids_as_vllm_shows_them(tokenizer: Tokenizer) -> None:
    body: dict[str, object] = {"prompt_logprobs": 1, "return_token_ids": True, "max_tokens": 2}
    found, request = await asked(tokenizer, "/v1/completions", prompt="hey", **body)
    (choice,) = found["choices"]
    assert choice["logprobs"] is None
    assert choice["prompt_token_ids"] == list(request.prompt_tokens)
    first, second, *_ = choice["prompt_logprobs"]
    token = request.prompt_tokens[1]
    assert first is None
    assert second["120"] == {"logprob": -0.25, "rank": 1, "decoded_token": "x"}
    assert second[str(token)]["logprob"] == -1.0
    assert second[str(token)]["rank"] is None
    assert len(second) == 2
    chat, request = await asked(tokenizer, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], **body)
    assert chat["prompt_token_ids"] == list(request.prompt_tokens)
    assert len(chat["prompt_logprobs"]) == len(request.prompt_tokens)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
async def test_events_say_how_far_the_answer_is(tokenizer: Tokenizer, route: str) -> None:
    body = {
        "prompt": "hey",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "max_tokens": 2,
        "return_token_ids": True,
        "timings_per_token": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    async with serving(tokenizer, FakeGenerator(scoring)) as served, aiohttp.ClientSession(served.url) as session:
        async with session.post(route, json=body) as reply:
            lines = (await reply.text()).split("\n\n")
        prompt = list(served.generator.requests[0].prompt_tokens)
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert (events[0].get("prompt_token_ids") or events[0]["choices"][0].get("prompt_token_ids")) == prompt
    assert not any("prompt_token_ids" in json.dumps(event) for event in events[1:])
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 2)
    assert all(event["timings"]["prompt_n"] == len(prompt) for event in events)
    assert events[-1]["timings"]["predicted_n"] == 2


def test_offsets_leave_out_tokens_outside_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("aé b", add_special=False)
    found = Speller(tokenizer).offsets([tokenizer.eos or 0, *ids], "aé b")
    assert found[:2] == [0, 0]
    assert found[-1] == 3
