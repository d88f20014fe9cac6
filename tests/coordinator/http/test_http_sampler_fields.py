"""Sampler fields of other servers, from the body to the pipeline's request and to the end of the answer."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from relayline.coordinator.sessions.generation import GenerationRequest, TokenEvent
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import EOS, write_tokenizer
from tests.support.http_support import FakeGenerator, Served, says, serving


@pytest.fixture(scope="module", name="tokenizer")
def tokenizer_fixture(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(Path(tmp_path_factory.mktemp("tokenizer")) / "tokenizer.gguf"))


@contextlib.asynccontextmanager
async def session_of(
    tokenizer: Tokenizer, generator: FakeGenerator | None = None
) -> AsyncIterator[tuple[aiohttp.ClientSession, Served]]:
    async with serving(tokenizer, generator) as served, aiohttp.ClientSession(served.url) as session:
        yield session, served


def ids(text: str) -> list[int]:
    return list(text.encode())  # the vocabulary's first tokens are bytes


async def test_words_and_ends_become_tokens(tokenizer: Tokenizer) -> None:
    body = {
        "prompt": [ids("ab"), ids("abcd")], "min_tokens": 3, "stop_token_ids": [7, 7], "bad_words": ["no"],
        "allowed_token_ids": [*range(200)], "logit_bias": [["z", False], [5, 2]], "repetition_penalty": 1.5,
    }  # fmt: skip
    async with session_of(tokenizer) as (session, served), session.post("/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        first, second = (request.sampling for request in served.generator.requests)
    assert {EOS, 7} <= set(first.held_back_tokens)
    assert all(tokenizer.is_end(token) or token == 7 for token in first.held_back_tokens)
    assert (first.number("held_back_until"), second.number("held_back_until")) == (2 + 3, 4 + 3)
    assert {tokenizer.decode(word) for word in first.bad_words} == {"no", " no"}
    assert first.allowed_tokens == tuple(range(200))
    assert {tokenizer.decode([token]): bias for token, bias in first.logit_bias if token != 5} == {"z": -100.0}
    assert first.number("repetition_penalty") == 1.5


@pytest.mark.parametrize(
    ("fields", "text", "n_tokens"),
    [
        ({}, "hello", 6),
        ({"stop_token_ids": [ord("l")]}, "he", 3),
        ({"stop_token_ids": [ord("l")], "include_stop_str_in_output": True}, "hel", 3),
        ({"stop_token_ids": [ord("l")], "min_tokens": 3}, "hel", 4),
        ({"stop": "el", "include_stop_str_in_output": True}, "hel", 3),
        ({"stop": ["l"], "min_tokens": 3}, "hel", 4),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_ends_at_each_kind_of_stop(
    tokenizer: Tokenizer, fields: dict[str, object], text: str, n_tokens: int, stream: bool
) -> None:
    body = {"prompt": "x", "max_tokens": 9, **fields}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with session_of(tokenizer) as (session, _), session.post("/v1/completions", json=body) as reply:
        raw = await reply.text()
    found = "".join(part.split('"', 1)[0] for part in raw.split('"text":"')[1:])
    assert (found, '"finish_reason":"stop"' in raw) == (text, True)
    assert f'"completion_tokens":{n_tokens},' in raw


async def test_a_stop_token_frees_its_lane(tokenizer: Tokenizer) -> None:
    def endless(_request: GenerationRequest) -> Iterator[TokenEvent]:
        while True:
            yield TokenEvent(ord("a"), None, ())
            yield TokenEvent(ord("b"), None, ())

    body = {"prompt": "x", "max_tokens": 300, "stop_token_ids": [ord("b")]}
    async with (
        session_of(tokenizer, FakeGenerator(endless)) as (session, served),
        session.post("/v1/completions", json=body) as reply,
    ):
        assert (await reply.json())["choices"][0]["text"] == "a"
        await served.generator.streams[0].closed.wait()


async def test_tokens_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    async with session_of(tokenizer, FakeGenerator(says(b"x"))) as (session, _):
        for param in ("allowed_token_ids", "stop_token_ids"):
            body = {"prompt": "x", param: [tokenizer.n_vocab]}
            async with session.post("/v1/completions", json=body) as reply:
                assert (reply.status, (await reply.json())["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "<|im_start|>assistant\nOnce upon <|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "<|im_start|>assistant\nOnce upon <|im_end|>\n"),
        ({"continue_final_message": True}, "<|im_start|>assistant\nOnce upon "),
    ],
)
async def test_the_last_turn_is_continued_where_that_is_asked_for(
    tokenizer: Tokenizer, fields: dict[str, object], end: str
) -> None:
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "Once upon "}]
    async with session_of(tokenizer) as (session, served):
        async with session.post("/v1/chat/completions", json={"messages": messages, **fields}) as reply:
            assert reply.status == 200, await reply.text()
        sent = tokenizer.decode(served.generator.requests[0].prompt_tokens)
        assert sent == f"<|im_start|>user\ngo<|im_end|>\n{end}"


async def test_a_turn_that_cannot_be_continued_is_refused(tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "go"}], "continue_final_message": True}
    async with session_of(tokenizer) as (session, _), session.post("/v1/chat/completions", json=body) as reply:
        assert (reply.status, (await reply.json())["error"]["param"]) == (400, "continue_final_message")


async def test_a_turn_cannot_go_on_and_a_new_one_begin(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "Once"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    async with session_of(tokenizer) as (session, _), session.post("/v1/chat/completions", json=body) as reply:
        assert (reply.status, (await reply.json())["error"]["param"]) == (400, "add_generation_prompt")


async def test_tokens_in_the_form_of_vllm(tokenizer: Tokenizer) -> None:
    async with session_of(tokenizer) as (session, _):
        async with session.post("/tokenize", json={"prompt": "ab", "return_token_strs": True}) as reply:
            ids = tokenizer.encode("ab")
            expected = {"count": len(ids), "max_model_len": 512, "tokens": ids}
            assert await reply.json() == expected | {"token_strs": [tokenizer.decode([token]) for token in ids]}
        messages = [{"role": "user", "content": "go"}]
        tools = [{"type": "function", "function": {"name": "level", "parameters": {"type": "object"}}}]
        started = [*messages, {"role": "assistant", "content": "So"}]
        for chat in ({"messages": messages, "tools": tools}, {"messages": started, "continue_final_message": True}):
            async with session.post("/tokenize", json=chat) as reply:
                found = (await reply.json())["tokens"]
            chat |= {"return_token_ids": True, "max_tokens": 1}
            async with session.post("/v1/chat/completions", json=chat) as reply:
                assert found == (await reply.json())["prompt_token_ids"], "the prompt that such a chat has"
        async with session.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}) as reply:
            found = await reply.json()
            assert tokenizer.decode(found["tokens"]) == "<|im_start|>user\ngo<|im_end|>\n"
            assert (found["count"], found["token_strs"]) == (len(found["tokens"]), None)
        async with session.post("/detokenize", json={"tokens": ids}) as reply:
            assert (await reply.json())["prompt"] == "ab"
        for wrong in ({}, {"prompt": "a", "content": "b"}):
            async with session.post("/tokenize", json=wrong) as reply:
                assert (reply.status, (await reply.json())["error"]["param"]) == (400, "content")
        calls = {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}
        async with session.post("/tokenize", json=calls) as reply:
            assert (reply.status, (await reply.json())["error"]["param"]) == (400, "messages[0].tool_calls[0]")
        async with session.get("/version") as reply:
            assert [*await reply.json()] == ["version"]
