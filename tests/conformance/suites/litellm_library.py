"""LiteLLM as a library: chats, streams, tools, schemas, text completions, embeddings, responses and messages."""

# mypy: ignore-errors
from __future__ import annotations

import json
import os

import litellm
import pytest

URL, MODEL = os.environ["CONFORMANCE_URL"], os.environ["CONFORMANCE_MODEL"]
OPENAI = {"api_base": f"{URL}/v1", "api_key": "none"}
CHAT = {"model": f"openai/{MODEL}", "temperature": 0, **OPENAI}
MESSAGES = [{"role": "user", "content": "def f("}]
SCHEMA = {
    "type": "object",
    "properties": {"count": {"enum": [1, 2]}, "is_good": {"type": "boolean"}},
    "required": ["count", "is_good"],
    "additionalProperties": False,
}
LEVEL = {"type": "function", "function": {"name": "level", "parameters": SCHEMA}}


def test_chat_and_stream():
    whole = litellm.completion(**CHAT, messages=MESSAGES, max_tokens=16)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 16
    chunks = [*litellm.completion(**CHAT, messages=MESSAGES, max_tokens=16, stream=True)]
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert built.choices[0].message.content == whole.choices[0].message.content


async def test_async_stream():
    stream = await litellm.acompletion(**CHAT, messages=MESSAGES, max_tokens=16, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "level"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_tool(choice, stream):
    answer = litellm.completion(
        **CHAT, messages=MESSAGES, max_tokens=200, tools=[LEVEL], tool_choice=choice, stream=stream
    )
    if stream:
        answer = litellm.stream_chunk_builder([*answer], messages=MESSAGES)
    arguments = json.loads(answer.choices[0].message.tool_calls[0].function.arguments)
    assert arguments["count"] in (1, 2)


def test_schema():
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    answer = litellm.completion(**CHAT, messages=MESSAGES, max_tokens=200, response_format=form)
    assert json.loads(answer.choices[0].message.content)["count"] in (1, 2)


def test_text_completion():
    answer = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="import ", max_tokens=8, **OPENAI)
    assert answer.choices[0].text


def test_embedding():
    answer = litellm.embedding(model=f"openai/{MODEL}", input=["import os", "a fox"], **OPENAI)
    assert len(answer.data) == 2


def test_responses():
    answer = litellm.responses(model=f"openai/{MODEL}", input="def f(", max_output_tokens=16, **OPENAI)
    assert answer.usage.output_tokens == 16
    kinds = {
        event.type
        for event in litellm.responses(
            model=f"openai/{MODEL}", input="def f(", max_output_tokens=16, stream=True, **OPENAI
        )
    }
    assert "response.output_text.delta" in kinds


def test_messages():
    answer = litellm.completion(
        model=f"anthropic/{MODEL}", api_base=URL, api_key="none", messages=MESSAGES, max_tokens=16
    )
    assert answer.usage.completion_tokens == 16


def test_errors_have_their_class():
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**CHAT, messages=[{"role": "user", "content": "word " * 5000}], max_retries=0)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**CHAT, "model": "openai/other"}, messages=MESSAGES, max_retries=0)
