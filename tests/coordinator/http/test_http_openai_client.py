"""The official `openai` client against the server. Half of each test is the client's own validation of replies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import msgspec
import openai
import pydantic
import pytest

from relayline.coordinator.sessions.generation import GenerationRequest
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import EOS, N_VOCAB, write_tokenizer
from relayline.wire.common.errors import InternalError, NotReadyError, OverloadedError, StageLostError
from tests.support.http_support import MODEL, WAIT_S, FakeGenerator, Gate, Script, Step, says, tokens
from tests.support.openai_client import client_of

USER = {"role": "user", "content": "hi"}


async def test_models(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer) as (client, _):
        assert [model.id async for model in client.models.list()] == [MODEL]
        model = await client.models.retrieve(MODEL)
        assert (model.object, model.owned_by) == ("model", "relayline")
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("other")
        assert caught.value.code == "model_not_found"


async def test_completion(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(says("größe".encode()))) as (client, served):
        reply = await client.completions.create(model=MODEL, prompt="hello world", temperature=0, seed=7)
        assert reply.id.startswith("cmpl-")
        assert reply.object == "text_completion"
        assert reply.choices[0].text == "größe"
        assert reply.choices[0].finish_reason == "stop"
        assert reply.usage is not None
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (2, 8, 10)
        assert reply.system_fingerprint
        request = served.generator.requests[0]
        assert request.prompt_tokens == tuple(tokenizer.encode("hello world"))
        assert (request.max_tokens, request.sampling.temperature, request.sampling.seed) == (16, 0, 7)


class Person(pydantic.BaseModel):
    name: str
    age: int


async def test_answers_of_a_shape(tokenizer: Tokenizer) -> None:
    """`parse` sends the schema of a type and reads the answer back into it."""
    async with client_of(tokenizer, FakeGenerator(says(b'{"name": "Ada", "age": 36}'))) as (client, served):
        reply = await client.chat.completions.parse(model=MODEL, messages=[USER], response_format=Person)
        assert reply.choices[0].message.parsed == Person(name="Ada", age=36)
        grammar = served.generator.requests[0].sampling.grammar
        assert '"age"' in grammar
        await client.chat.completions.create(model=MODEL, messages=[USER], response_format={"type": "json_object"}, n=2)
        assert len({request.sampling.grammar for request in served.generator.requests[1:]} - {"", grammar}) == 1
        assert not served.generator.requests[1].sampling.is_penalised
        asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "number or so"}}}
        with pytest.raises(openai.BadRequestError, match="Invalid type: number or so") as caught:
            await client.chat.completions.create(model=MODEL, messages=[USER], response_format=asked)  # type: ignore[call-overload]
        assert caught.value.param == "response_format.json_schema.schema"


async def test_penalties_and_biases(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer) as (client, served):
        asked = {"frequency_penalty": 0.5, "presence_penalty": -0.5}
        await client.chat.completions.create(model=MODEL, messages=[USER], logit_bias={"5": 7}, **asked)
        sampling = served.generator.requests[0].sampling
        assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.logit_bias) == (0.5, -0.5, ((5, 7),))
        with pytest.raises(openai.BadRequestError, match=f"logit_bias: token {N_VOCAB} at index 0 is not in") as caught:
            await client.completions.create(model=MODEL, prompt="x", logit_bias={str(N_VOCAB): 1})
        assert caught.value.param == "logit_bias"
        assert len(served.generator.requests) == 1


def follows(text: bytes) -> Script:
    """Gives its script for any prediction, and marks predicted tokens as the pipeline does."""

    def script(request: GenerationRequest) -> Iterable[Step]:
        at = 0
        for event in tokens(request, text):
            is_predicted = event.token in request.prediction[at : at + 1]
            at += is_predicted
            yield msgspec.structs.replace(event, is_predicted=is_predicted)

    return script


def predicting(content: object) -> dict[str, object]:
    return {"type": "content", "content": content}


@pytest.mark.parametrize("content", ["abxd", [{"type": "text", "text": "ab"}, {"type": "text", "text": "xd"}]])
async def test_a_prediction_reaches_every_choice_and_is_counted(tokenizer: Tokenizer, content: object) -> None:
    async with client_of(tokenizer, FakeGenerator(follows(b"abcd"))) as (client, served):
        asked = {"model": MODEL, "prediction": predicting(content)}
        for n in (1, 3):
            reply = await client.chat.completions.create(**asked, messages=[USER], n=n)
            assert [choice.message.content for choice in reply.choices] == ["abcd"] * n
            assert {request.prediction for request in served.generator.requests[-n:]} == {tuple(b"abxd")}
            details = reply.usage.completion_tokens_details
            assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (2 * n, 2 * n)
            assert reply.usage.completion_tokens == 5 * n, "rejected tokens are no part of the answer"
            stream = await client.chat.completions.create(
                **asked, messages=[USER], n=n, stream=True, stream_options={"include_usage": True}
            )
            *_, last = [chunk async for chunk in stream]
            assert last.usage == reply.usage
        body = {"prediction": asked["prediction"]}
        whole = await client.completions.create(model=MODEL, prompt=["x", "y"], n=2, extra_body=body)
        details = whole.usage.completion_tokens_details
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (8, 8)
        assert {request.prediction for request in served.generator.requests} == {tuple(b"abxd")}


async def test_without_a_prediction_none_is_counted(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(follows(b"abcd"))) as (client, served):
        for none in ({}, {"prediction": None}, {"prediction": predicting("")}, {"prediction": predicting([])}):
            reply = await client.chat.completions.create(model=MODEL, messages=[USER], **none)
            details = reply.usage.completion_tokens_details
            assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
        assert {request.prediction for request in served.generator.requests} == {()}


async def test_predicted_tokens_count_up_to_a_stop_string(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(follows(b"abcdef"))) as (client, _):
        reply = await client.chat.completions.create(
            model=MODEL, messages=[USER], prediction=predicting("abcdef"), stop="bc"
        )
        assert reply.choices[0].message.content == "a"
        details = reply.usage.completion_tokens_details
        assert reply.usage.completion_tokens == 3
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (3, 3)


async def test_a_choice_that_says_more_than_was_predicted_takes_nothing_from_others(tokenizer: Tokenizer) -> None:
    def script(request: GenerationRequest) -> Iterable[Step]:
        is_predicted = request.sampling.seed == 0  # all that one choice says, nothing of the other
        return (msgspec.structs.replace(event, is_predicted=is_predicted) for event in tokens(request, b"aaaa"))

    async with client_of(tokenizer, FakeGenerator(script)) as (client, _):
        reply = await client.chat.completions.create(
            model=MODEL, messages=[USER], prediction=predicting("aa"), n=2, seed=0, max_completion_tokens=4
        )
        details = reply.usage.completion_tokens_details
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 2)


async def test_a_prediction_is_text_and_no_longer_than_a_stream(tmp_path: Path) -> None:
    adding = Tokenizer.load(write_tokenizer(tmp_path / "tokenizer.gguf", add_bos=True))
    async with client_of(adding, FakeGenerator(ctx_tokens=64)) as (client, served):
        for content in ("<|im_end|>hello", "z" * 64, "z" * 65):
            await client.chat.completions.create(model=MODEL, messages=[USER], prediction=predicting(content))
        special, *long = [request.prediction for request in served.generator.requests]
        assert special == (*b"<|im_end|>", adding.encode("hello", add_special=False)[0])
        assert long == [tuple(b"z" * 64)] * 2
        with pytest.raises(openai.BadRequestError, match='prediction: type must be "content"') as caught:
            await client.chat.completions.create(model=MODEL, messages=[USER], prediction={"type": "x", "content": "y"})
        assert caught.value.param == "prediction"


async def test_completion_stream(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(says(b"hello there"))) as (client, _):
        stream = await client.completions.create(model=MODEL, prompt="x", max_tokens=5, stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "hello"
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 5 + ["length"]
        assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


async def test_chat(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer) as (client, served):
        reply = await client.chat.completions.create(model=MODEL, messages=[USER])
        assert reply.id.startswith("chatcmpl-")
        assert reply.choices[0].message.content == "hello"
        assert reply.choices[0].message.role == "assistant"
        assert reply.choices[0].finish_reason == "stop"
        request = served.generator.requests[0]
        prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert request.prompt_tokens == tuple(tokenizer.encode(prompt))
        assert request.max_tokens == served.generator.ctx_tokens - len(request.prompt_tokens)


async def test_chat_stream_with_usage(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(says("hé".encode()))) as (client, _):
        stream = await client.chat.completions.create(
            model=MODEL, messages=[USER], stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[0].choices[0].delta.content == ""
        assert [chunk.choices[0].delta.content for chunk in chunks[1:]] == ["h", "é", None]
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
        assert all(chunk.usage is None for chunk in chunks)
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == 4
        assert last.usage.total_tokens == last.usage.prompt_tokens + 4
        assert len({(chunk.id, chunk.created) for chunk in [*chunks, last]}) == 1


async def test_several_prompts_and_choices(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(
        lambda request: tokens(request, bytes([*request.prompt_tokens, 48 + request.sampling.seed]))
    )
    async with client_of(tokenizer, generator) as (client, _):
        reply = await client.completions.create(model=MODEL, prompt=["a", "b"], n=2, seed=3)
        assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in reply.choices] == ["a3", "a4", "b3", "b4"]
        assert reply.usage is not None
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (2, 12)
        stream = await client.completions.create(model=MODEL, prompt=[[97], [98]], seed=3, stream=True)
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == ["a3", "b3"]
    assert len({request.request_id for request in generator.requests}) == 6


async def test_token_id_prompt_and_echo(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer) as (client, served):
        reply = await client.completions.create(model=MODEL, prompt=[104, 105], echo=True)
        assert reply.choices[0].text == "hihello"
        assert served.generator.requests[0].prompt_tokens == (104, 105)
        stream = await client.completions.create(model=MODEL, prompt="hi", echo=True, stream=True)
        assert [chunk.choices[0].text async for chunk in stream][:2] == ["hi", "h"]
        with pytest.raises(openai.BadRequestError, match=f"token {N_VOCAB} at index 1"):
            await client.completions.create(model=MODEL, prompt=[1, N_VOCAB])


async def test_stop_across_tokens(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(says(b"one two STOP three"))
    async with client_of(tokenizer, generator) as (client, _):
        reply = await client.completions.create(model=MODEL, prompt="x", max_tokens=50, stop=["STOP", "never"])
        assert reply.choices[0].text == "one two "
        assert reply.choices[0].finish_reason == "stop"
        assert reply.usage is not None
        assert reply.usage.completion_tokens == len(b"one two STOP")
        stream = await client.chat.completions.create(model=MODEL, messages=[USER], stop="STOP", stream=True)
        shown = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(shown) == "one two "


async def test_one_choice_may_stop_before_the_other(tokenizer: Tokenizer) -> None:
    gates = [Gate(), Gate()]

    def script(request: GenerationRequest) -> Iterable[Step]:
        head = tokens(request, b"aX" if request.sampling.seed == 0 else b"a", ends=False)
        return [*head, gates[request.sampling.seed], *tokens(request, b"b")]

    generator = FakeGenerator(script)
    async with client_of(tokenizer, generator) as (client, _):
        asked = asyncio.create_task(client.completions.create(model=MODEL, prompt="x", n=2, seed=0, stop="X"))
        async with asyncio.timeout(WAIT_S):
            await gates[1].reached.wait()
            await generator.streams[0].closed.wait()  # its lane is free while the other choice continues
        gates[1].opened.set()
        assert [choice.text for choice in (await asked).choices] == ["a", "ab"]


async def test_completion_logprobs(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(lambda request: tokens(request, "aé".encode(), top=((97, -0.2), (98, float("-inf")))))
    async with client_of(tokenizer, generator) as (client, _):
        reply = await client.completions.create(model=MODEL, prompt="x", logprobs=2)
        found = reply.choices[0].logprobs
        assert found is not None
        assert found.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9"]
        assert found.token_logprobs == [-0.5] * 3
        assert found.text_offset == [0, 1, 1]
        assert found.top_logprobs is not None
        assert found.top_logprobs[1] == {"a": -0.2, "b": -9999.0, "bytes:\\xc3": -0.5}
        assert generator.requests[0].sampling.n_logprobs == 2
        chosen = (await client.completions.create(model=MODEL, prompt="x", logprobs=0)).choices[0].logprobs
        assert chosen is not None
        assert chosen.top_logprobs == [{"a": -0.5}, {"bytes:\\xc3": -0.5}, {"bytes:\\xa9": -0.5}]


async def test_chat_logprobs(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(lambda request: tokens(request, b"ab", top=((97, -0.2), (EOS, -1.5))))
    async with client_of(tokenizer, generator) as (client, _):
        create = client.chat.completions.create
        reply = await create(model=MODEL, messages=[USER], logprobs=True, top_logprobs=2)
        assert reply.choices[0].logprobs is not None
        assert reply.choices[0].logprobs.content is not None
        first = reply.choices[0].logprobs.content[0]
        assert (first.token, first.logprob, first.bytes) == ("a", -0.5, [97])
        assert [(top.token, top.logprob) for top in first.top_logprobs] == [("a", -0.2), ("<|eos|>", -1.5)]
        assert len(reply.choices[0].logprobs.content) == 2
        stream = await create(model=MODEL, messages=[USER], logprobs=True, stop="b", stream=True)
        scored = [chunk.choices[0].logprobs async for chunk in stream if chunk.choices[0].logprobs]
        assert [entry.token for part in scored for entry in part.content or []] == ["a", "b"]
        assert not any(entry.top_logprobs for part in scored for entry in part.content or [])


async def test_client_errors(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(ctx_tokens=64)) as (client, served):
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-9", messages=[USER])
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.completions.create(model=MODEL, prompt=[1] * 64, max_tokens=1)
        assert too_long.value.code == "context_length_exceeded"
        assert "maximum context length is 64 tokens. However, you requested 65 tokens" in str(too_long.value)
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(model=MODEL, messages=[USER], temperature=3)
        assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
        assert wrong.value.request_id
        assert served.generator.requests == []


@pytest.mark.parametrize(
    ("refusal", "kind", "headers"),
    [
        (OverloadedError("all lanes are taken", 3), openai.RateLimitError, {"retry-after": "3"}),
        (NotReadyError("still loading"), openai.InternalServerError, {"retry-after": "2"}),
        (StageLostError("stage 1 is gone"), openai.InternalServerError, {"retry-after": "1"}),
        (InternalError("broken"), openai.InternalServerError, {"x-should-retry": "false"}),
        (RuntimeError("a bug"), openai.InternalServerError, {"x-should-retry": "false"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals(
    tokenizer: Tokenizer, refusal: Exception, kind: type[openai.APIStatusError], headers: dict[str, str], stream: bool
) -> None:
    async with client_of(tokenizer) as (client, served):
        served.generator.refusals = [None, refusal]
        with pytest.raises(kind) as caught:
            await client.chat.completions.create(model=MODEL, messages=[USER], n=2, stream=stream)
        assert {name: caught.value.response.headers.get(name) for name in headers} == headers
        assert "a bug" not in str(caught.value)
        assert served.generator.streams[0].closed.is_set()  # all or nothing


async def test_failure_in_the_middle(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(lambda request: [*tokens(request, b"he", ends=False), StageLostError("stage 1 is gone")])
    async with client_of(tokenizer, generator) as (client, _):
        with pytest.raises(openai.InternalServerError, match="stage 1 is gone"):
            await client.completions.create(model=MODEL, prompt="x")
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        assert [(await anext(stream)).choices[0].text for _ in "he"] == ["h", "e"]
        with pytest.raises(openai.APIError, match="stage 1 is gone") as caught:
            await anext(stream)
        assert caught.value.code == "stage_lost"


async def test_a_stream_that_ends_without_a_reason_is_an_error(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(lambda request: tokens(request, b"he", ends=False))
    async with client_of(tokenizer, generator) as (client, _):
        with pytest.raises(openai.InternalServerError, match="ended without a reason"):
            await client.completions.create(model=MODEL, prompt="x")
