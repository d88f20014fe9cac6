"""/v1/messages in the forms of Anthropic's documentation. The official client runs in `make conformance`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relayline.coordinator.http.app import make_app
from relayline.coordinator.http.edge.api_keys import ApiKeys, require_keys
from relayline.coordinator.http.edge.server import start_http
from relayline.coordinator.http.replies.service import ServedModel
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import CHATML
from relayline.wire.common.errors import NotReadyError, OverloadedError, StageLostError
from tests.coordinator.http.dialects.test_responses import CALL, TEMPLATE
from tests.support.http_support import CREATED, MODEL, FakeGenerator, Served, says, serving, tokens

TOOL = {
    "name": "get_weather",
    "description": "the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "cache_control": {"type": "ephemeral"},
}
USER = {"role": "user", "content": "hi"}
UNSAID = {"stop_sequence": None, "stop_details": None, "container": None}


class Asker:
    """Sends bodies to /v1/messages and keeps the prompts."""

    def __init__(self, served: Served, session: aiohttp.ClientSession, tokenizer: Tokenizer) -> None:
        self.served, self._session, self._tokenizer = served, session, tokenizer

    async def __call__(self, path: str = "", **fields: Any) -> tuple[int, Any]:
        body = {"model": MODEL, "max_tokens": 200, "messages": [USER], **fields}
        async with self._session.post(f"{self.served.url}/v1/messages{path}", json=body) as reply:
            return reply.status, await reply.json()

    async def events(self, **fields: Any) -> list[tuple[str, Any]]:
        body = {"model": MODEL, "max_tokens": 200, "messages": [USER], "stream": True, **fields}
        found = []
        async with self._session.post(f"{self.served.url}/v1/messages", json=body) as reply:
            assert reply.status == 200
            with contextlib.suppress(aiohttp.ClientPayloadError):  # of an answer that was cut
                async for line in reply.content:
                    found.append(line)
        lines = b"".join(found).decode().strip().split("\n\n")
        pairs = [each.split("\n") for each in lines]
        return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]

    @property
    def prompt(self) -> str:
        return self._tokenizer.decode(self.served.generator.requests[-1].prompt_tokens)


@contextlib.asynccontextmanager
async def asking(
    tokenizer: Tokenizer, generator: FakeGenerator | None = None, template: str = CHATML
) -> AsyncIterator[Asker]:
    async with serving(tokenizer, generator, template=template) as served, aiohttp.ClientSession() as session:
        yield Asker(served, session, tokenizer)


async def test_a_whole_message(tokenizer: Tokenizer) -> None:
    system = [
        {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "b"},
    ]
    async with asking(tokenizer, FakeGenerator(says(b"hello"))) as ask:
        status, message = await ask(system=system, temperature=0.5, top_k=7, metadata={"user_id": "x"})
        sampling = ask.served.generator.requests[0].sampling
        assert "be brief\nb" in ask.prompt
    assert (status, sampling.temperature, sampling.top_k) == (200, 0.5, 7)
    assert message.pop("id").startswith("msg_")
    n_prompt = len(ask.served.generator.requests[0].prompt_tokens)
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "hello", "citations": None}],
        "container": None,
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "usage": {
            "input_tokens": n_prompt,
            "cache_creation": None,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "inference_geo": None,
            "output_tokens": 6,
            "output_tokens_details": None,
            "server_tool_use": None,
            "service_tier": "standard",
        },
    }


async def test_the_events_of_text(tokenizer: Tokenizer) -> None:
    async with asking(tokenizer, FakeGenerator(says(b"hey"))) as ask:
        events = await ask.events()
    assert [name for name, _ in events] == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(name == data["type"] for name, data in events)
    assert events[0][1]["message"]["content"] == []
    assert "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta") == "hey"
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", **UNSAID}
    assert events[-2][1]["usage"]["output_tokens"] == 4


async def test_reasoning_and_a_call_are_separate_blocks(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(says(b"<think>hm</think>so" + CALL))
    fields: dict[str, Any] = {"tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 16}}
    async with asking(tokenizer, generator, TEMPLATE) as ask:
        _, message = await ask(**fields)
        events = await ask.events(**fields)
    assert {request.sampling.number("thought_tokens_max") for request in generator.requests} == {16.0}
    thought, text, call = message["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "hm")
    assert thought["signature"]
    assert text == {"type": "text", "text": "so", "citations": None}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", {"city": "Paris"})
    assert call["caller"] == {"type": "direct"}
    assert message["stop_reason"] == "tool_use"
    starts = [data["content_block"]["type"] for name, data in events if name == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use"]
    assert [data["index"] for name, data in events if name == "content_block_stop"] == [0, 1, 2]
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert json.loads("".join(each.get("partial_json", "") for each in deltas)) == {"city": "Paris"}
    assert [each["type"] for each in deltas].count("signature_delta") == 1
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


async def test_tool_results_come_before_the_users_text(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look"},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    async with asking(tokenizer, FakeGenerator(ctx_tokens=2_048), TEMPLATE) as ask:
        status, body = await ask(messages=messages, tools=[TOOL])
        assert (status, body["type"]) == (200, "message"), body
        places = [ask.prompt.index(text) for text in ("weather?", "I look", "sunny", "and now?")]
        assert places == sorted(places)
        assert '{"name": "get_weather", "arguments": {"city": "Paris"}}' in ask.prompt


async def test_a_stop_sequence_is_named(tokenizer: Tokenizer) -> None:
    async with asking(tokenizer, FakeGenerator(says(b"one. two"))) as ask:
        _, message = await ask(stop_sequences=["x", ". "])
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", ". ")
        assert message["content"] == [{"type": "text", "text": "one", "citations": None}]
        events = await ask.events(stop_sequences=[". "])
        assert events[-2][1]["delta"] == {"stop_reason": "stop_sequence", **UNSAID, "stop_sequence": ". "}
        _, message = await ask(max_tokens=2)
        assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)


@pytest.mark.parametrize(
    ("choice", "is_required", "is_parallel"),
    [
        ({"type": "auto"}, False, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True, False),
        ({"type": "tool", "name": "get_weather"}, True, True),
    ],
)
async def test_a_tool_choice_leads_the_answer(
    tokenizer: Tokenizer, choice: dict[str, Any], is_required: bool, is_parallel: bool
) -> None:
    async with asking(tokenizer, FakeGenerator(says(CALL)), TEMPLATE) as ask:
        status, message = await ask(tools=[TOOL], tool_choice=choice)
        assert bool(ask.served.generator.requests[0].sampling.grammar) == is_required
    assert (status, message["content"][-1]["type"]) == (200, "tool_use")


async def test_tokens_are_counted_without_an_answer(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(says(b"x"), ctx_tokens=64)
    async with asking(tokenizer, generator) as ask:
        _, counted = await ask("/count_tokens", max_tokens=None)
        assert not generator.requests
        _, message = await ask(max_tokens=5)
        assert counted == {"input_tokens": message["usage"]["input_tokens"]}
        long = [{"role": "user", "content": "ab" * 200}]  # more than a stream holds
        status, counted = await ask("/count_tokens", messages=long)
        assert status == 200
        assert counted["input_tokens"] > 64
        status, refused = await ask(messages=long)
        assert (status, refused["error"]["type"]) == (400, "invalid_request_error")
        assert refused["error"]["message"].startswith("prompt is too long: This model's maximum context length is 64 t")


async def test_thinking_is_off_unless_it_is_asked_for(tokenizer: Tokenizer) -> None:
    template = CHATML + "{% if enable_thinking is defined and not enable_thinking %}QUICK{% endif %}"
    async with asking(tokenizer, template=template) as ask:
        for thinking, is_quick in ((None, True), ({"type": "disabled"}, True), ({"type": "adaptive"}, False)):
            await ask(thinking=thinking)
            assert ("QUICK" in ask.prompt) == is_quick


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"max_tokens": None}, "max_tokens: required field is missing"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: must be one of user, assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0]: blocks of type"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source: must be"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            "'tool_use' are not served here",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0]: only tools with an",
        ),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages: the last message must be"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type: must be one of auto, any, none, tool"),
        ({"mcp_servers": [{}]}, "mcp_servers: not supported"),
        ({"container": "x"}, "container: not supported"),
        ({"temperature": 2}, "temperature"),
        ({"stop_sequences": ["x"] * 100}, "stop_sequences: at most"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type: must be one of json_schema"),
    ],
)
async def test_unsupported_fields_are_refused_in_one_line(
    tokenizer: Tokenizer, more: dict[str, Any], text: str
) -> None:
    async with asking(tokenizer) as ask:
        status, body = await ask(**more)
        assert not ask.served.generator.requests
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert text in body["error"]["message"]
    assert "\n" not in body["error"]["message"]
    assert body["request_id"]


async def test_errors_have_their_own_form(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(lambda request: [*tokens(request, b"he", ends=False), StageLostError("stage 1 is lost")])
    generator.refusals = [OverloadedError("all lanes are taken", retry_after_s=3), NotReadyError("loading")]
    async with asking(tokenizer, generator) as ask:
        status, body = await ask()
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        status, body = await ask()
        assert (status, body["error"]["type"]) == (503, "overloaded_error")
        status, body = await ask(model="other")
        assert (status, body["error"]["type"]) == (404, "not_found_error")
        status, body = await ask("/nothing")
        assert (status, body["error"]["type"]) == (404, "not_found_error")
        events = await ask.events()
        assert events[-1][0] == "error"
        assert events[-1][1]["error"]["message"] == "stage 1 is lost"


async def test_a_key_may_come_in_a_separate_header(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("me: 0123456789abcdef\n")
    keys.chmod(0o600)
    chat = ChatTemplate(CHATML, bos_text=tokenizer.bos_text, eos_text=tokenizer.eos_text)
    app = make_app(FakeGenerator(), ServedModel(MODEL, CREATED, tokenizer, chat))
    require_keys(app, ApiKeys(keys), protect_metrics=False)
    runner, port = await start_http(app, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{port}/v1/messages"
    body = {"model": MODEL, "max_tokens": 9, "messages": [USER]}
    try:
        async with aiohttp.ClientSession() as session:
            async with session.post(url, json=body, headers={"x-api-key": "0123456789abcdef"}) as reply:
                assert reply.status == 200
            async with session.post(url, json=body, headers={"x-api-key": "wrong-wrong-wrong"}) as reply:
                assert reply.status == 401
                assert (await reply.json())["error"] == {"type": "authentication_error", "message": "incorrect API key"}
    finally:
        await runner.cleanup()


async def test_a_last_turn_of_the_assistant_is_gone_on_with(tokenizer: Tokenizer) -> None:
    """As at Anthropic: the answer is the continuation, without the given beginning."""
    async with serving(tokenizer, FakeGenerator(says(b"me."))) as served, aiohttp.ClientSession() as session:
        ask = Asker(served, session, tokenizer)
        status, found = await ask(messages=[USER, {"role": "assistant", "content": [{"type": "text", "text": "Ro"}]}])
        assert status == 200
        assert ask.prompt.endswith("<|im_start|>assistant\nRo")
        assert found["content"] == [{"type": "text", "text": "me.", "citations": None}]
