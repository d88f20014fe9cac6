"""LlamaIndex's clients for OpenAI-like servers: text, chats, streams, tools, typed answers and embeddings."""

# mypy: ignore-errors
from __future__ import annotations

import os
from typing import Literal

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL, MODEL = os.environ["CONFORMANCE_URL"], os.environ["CONFORMANCE_MODEL"]
COMMON = {"model": MODEL, "api_base": f"{URL}/v1", "api_key": "none", "temperature": 0, "context_window": 1024}
MESSAGES = [ChatMessage(role="user", content="def f(")]


class Answer(BaseModel):
    """A typed answer."""

    count: Literal[1, 2]
    is_good: bool


def level(is_high: bool) -> str:
    """Set a level."""
    return f"done: {is_high}"


@pytest.fixture
def chat():
    return OpenAILike(is_chat_model=True, is_function_calling_model=True, max_tokens=200, **COMMON)


def test_complete():
    text = OpenAILike(is_chat_model=False, max_tokens=16, **COMMON)
    whole = text.complete("import ").text
    assert "".join(part.delta or "" for part in text.stream_complete("import ")) == whole


def test_chat_and_stream(chat):
    whole = chat.chat(MESSAGES, max_tokens=16).message.content
    assert "".join(part.delta or "" for part in chat.stream_chat(MESSAGES, max_tokens=16)) == whole


async def test_async_stream(chat):
    stream = await chat.astream_chat(MESSAGES, max_tokens=16)
    assert [part async for part in stream]


def test_tool(chat):
    tool = FunctionTool.from_defaults(level)
    answer = chat.chat_with_tools([tool], user_msg="set it", tool_required=True)
    assert chat.get_tool_calls_from_response(answer)[0].tool_name == "level"
    assert "done" in str(chat.predict_and_call([tool], user_msg="set it", tool_required=True))


def test_typed_answer(chat):
    assert isinstance(chat.as_structured_llm(Answer).complete("count").raw, Answer)


def test_embeddings():
    model = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{URL}/v1", api_key="none")
    first, second = model.get_text_embedding_batch(["import os", "a fox"])
    assert len(first) == len(second)
    assert first != second
