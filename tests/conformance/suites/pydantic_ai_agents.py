"""pydantic-ai: text, a stream and a typed output, over all three dialects."""

# mypy: ignore-errors
from __future__ import annotations

import os
from typing import Literal

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = os.environ["CONFORMANCE_URL"], os.environ["CONFORMANCE_MODEL"]
SETTINGS = {"max_tokens": 256, "temperature": 0.0}


class Answer(BaseModel):
    """The result of a typed run."""

    count: Literal[1, 2]
    is_good: bool


@pytest.fixture(params=["chat", "responses", "messages"])
def model(request):
    openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    if request.param == "chat":
        return OpenAIChatModel(MODEL, provider=openai)
    if request.param == "responses":
        return OpenAIResponsesModel(MODEL, provider=openai)
    return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none"))


async def test_text(model):
    result = await Agent(model, instructions="be brief", model_settings=SETTINGS).run("def f(")
    assert isinstance(result.output, str)
    assert result.usage.output_tokens > 0


async def test_stream(model):
    async with Agent(model, model_settings=SETTINGS).run_stream("def f(") as run:
        parts = [part async for part in run.stream_text(delta=True)]
    assert "".join(parts)


async def test_typed_output(model):
    result = await Agent(model, output_type=Answer, model_settings=SETTINGS).run("count")
    assert isinstance(result.output, Answer)
