"""instructor: a typed answer by tools and by a schema, with OpenAI's and Anthropic's clients."""

# mypy: ignore-errors
from __future__ import annotations

import os
from typing import Literal

import anthropic
import instructor
import openai
import pytest
from pydantic import BaseModel

URL, MODEL = os.environ["CONFORMANCE_URL"], os.environ["CONFORMANCE_MODEL"]
ASK = {"model": MODEL, "max_tokens": 256, "messages": [{"role": "user", "content": "count"}]}


class Answer(BaseModel):
    """The requested type."""

    count: Literal[1, 2]
    is_good: bool


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_openai(mode):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none"), mode=mode)
    assert isinstance(
        client.chat.completions.create(response_model=Answer, max_retries=0, temperature=0, **ASK), Answer
    )


def test_anthropic():
    client = instructor.from_anthropic(anthropic.Anthropic(base_url=URL, api_key="none"))
    assert isinstance(client.messages.create(response_model=Answer, max_retries=0, **ASK), Answer)
