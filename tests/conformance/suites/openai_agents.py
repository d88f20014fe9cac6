"""openai-agents: a run with a tool, a stream and a typed output, over Responses and over chats."""

# mypy: ignore-errors
from __future__ import annotations

import os
from typing import Literal

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

URL, MODEL = os.environ["CONFORMANCE_URL"], os.environ["CONFORMANCE_MODEL"]
SETTINGS = ModelSettings(max_tokens=256, temperature=0, extra_body={"stop": ["\n"]})  # the demo model never ends
set_tracing_disabled(True)


class Answer(BaseModel):
    """The result of a typed run."""

    count: Literal[1, 2]
    is_good: bool


@pytest.fixture(params=[OpenAIResponsesModel, OpenAIChatCompletionsModel])
def model(request):
    return request.param(MODEL, AsyncOpenAI(base_url=f"{URL}/v1", api_key="none"))


async def test_run(model):
    result = await Runner.run(Agent(name="a", instructions="be brief", model=model, model_settings=SETTINGS), "hi")
    assert isinstance(result.final_output, str)
    assert result.context_wrapper.usage.output_tokens > 0


async def test_stream(model):
    run = Runner.run_streamed(Agent(name="a", model=model, model_settings=SETTINGS), "def f(")
    kinds = [event.type async for event in run.stream_events()]
    assert "raw_response_event" in kinds
    assert isinstance(run.final_output, str)


async def test_tool(model):
    called = []

    @function_tool
    def level(value: Literal[1, 2], is_high: bool) -> str:
        """Set a level."""
        called.append((value, is_high))
        return "done"

    settings = ModelSettings(max_tokens=256, temperature=0, tool_choice="required")
    agent = Agent(name="a", model=model, tools=[level], model_settings=settings, tool_use_behavior="stop_on_first_tool")
    await Runner.run(agent, "set it")
    assert called


async def test_typed_output(model):
    settings = ModelSettings(max_tokens=256, temperature=0)
    agent = Agent(name="a", model=model, output_type=Answer, model_settings=settings)
    result = await Runner.run(agent, "count")
    assert isinstance(result.final_output, Answer)
