"""What real programs send, recorded from them: their long texts are cut to "x", their tools to a few."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relayline.coordinator.text.tokenizer import Tokenizer
from tests.support.http_support import FakeGenerator, says, serving

RECORDED = json.loads(Path(__file__).with_name("bodies_of_clients.json").read_text())
GUIDED = ("guidance", "Outlines")


@pytest.mark.parametrize("sent", RECORDED, ids=lambda sent: sent["client"])
async def test_a_recorded_request_is_answered(tokenizer: Tokenizer, sent: dict[str, Any]) -> None:
    generator = FakeGenerator(says(b"hello"), ctx_tokens=1 << 15)
    async with (
        serving(tokenizer, generator) as served,
        aiohttp.ClientSession(headers=sent["headers"]) as session,
        session.post(served.url + sent["path"], json=sent["body"]) as reply,
    ):
        text = await reply.text()
        assert reply.status == 200, text
    (request,) = generator.requests
    assert bool(request.sampling.grammar) == sent["client"].startswith(GUIDED)
    if not sent["body"].get("stream"):
        assert json.loads(text)["choices"][0]["message"]["content"] == "hello"
        return
    ends = {
        "/v1/chat/completions": "data: [DONE]",
        "/v1/responses": "response.completed",
        "/v1/messages": "message_stop",
    }
    assert ends[sent["path"].partition("?")[0]] in text


@pytest.mark.parametrize("sent", RECORDED[:4], ids=lambda sent: sent["client"])
async def test_the_tools_of_an_agent_can_all_be_required(tokenizer: Tokenizer, sent: dict[str, Any]) -> None:
    """Their schemas become a grammar: `$schema`, `propertyNames`, unions, bounds, open objects."""
    choice: Any = {"type": "any"} if sent["path"].startswith("/v1/messages") else "required"
    generator = FakeGenerator(says(b"hello"), ctx_tokens=1 << 15)
    async with (
        serving(tokenizer, generator) as served,
        aiohttp.ClientSession(headers=sent["headers"]) as session,
        session.post(served.url + sent["path"], json={**sent["body"], "tool_choice": choice}) as reply,
    ):
        assert reply.status == 200, await reply.text()
        await reply.read()
    (request,) = generator.requests
    names = [tool.get("name") or tool["function"]["name"] for tool in sent["body"]["tools"]]
    assert all(name in request.sampling.grammar for name in names)
