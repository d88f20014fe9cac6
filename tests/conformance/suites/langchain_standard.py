"""langchain-tests' standard tests of chat models, over all three dialects."""

# mypy: ignore-errors
from __future__ import annotations

import os

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL, MODEL = os.environ["CONFORMANCE_URL"], os.environ["CONFORMANCE_MODEL"]
OPENAI = {
    "base_url": f"{URL}/v1",
    "api_key": "none",
    "model": MODEL,
    "max_tokens": 256,
    "temperature": 0,
    "stream_usage": True,  # off by itself where the address isn't OpenAI's
}


class TestChat(ChatModelIntegrationTests):
    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        return OPENAI


class TestResponses(TestChat):
    @property
    def chat_model_params(self):
        return OPENAI | {"use_responses_api": True}


class TestMessages(ChatModelIntegrationTests):
    @property
    def chat_model_class(self):
        return ChatAnthropic

    @property
    def chat_model_params(self):
        return {"base_url": URL, "api_key": "none", "model": MODEL, "max_tokens": 256, "temperature": 0}
