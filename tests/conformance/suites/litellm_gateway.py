"""LiteLLM's proxy in front of this server: official clients call the proxy, which uses three of its dialects."""

# mypy: ignore-errors
from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

URL, MODEL = os.environ["CONFORMANCE_URL"], os.environ["CONFORMANCE_MODEL"]
START_S = 120
V1 = f"{URL}/v1"
ROUTES = {
    "by-openai": {"model": f"openai/{MODEL}", "api_base": V1},
    "by-vllm": {"model": f"hosted_vllm/{MODEL}", "api_base": V1},
    "by-anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL},
    "texts": {"model": f"text-completion-openai/{MODEL}", "api_base": V1},
}
CHATS = pytest.mark.parametrize("route", ["by-openai", "by-vllm", "by-anthropic"])
MESSAGES = [{"role": "user", "content": "def f("}]
SCHEMA = {
    "type": "object",
    "properties": {"count": {"enum": [1, 2]}, "is_good": {"type": "boolean"}},
    "required": ["count", "is_good"],
    "additionalProperties": False,
}
LEVEL = {"type": "function", "function": {"name": "level", "parameters": SCHEMA}}


def _is_up(url):
    try:
        return httpx.get(f"{url}/health/liveliness", timeout=5).is_success
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="session")
def proxy(tmp_path_factory):
    """Start the proxy; yield its address and its key."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place, key = tmp_path_factory.mktemp("proxy"), f"sk-{secrets.token_hex(16)}"
    models = [{"model_name": name, "litellm_params": {"api_key": "none", **route}} for name, route in ROUTES.items()]
    (place / "config.yaml").write_text(json.dumps({"model_list": models, "litellm_settings": {"num_retries": 0}}))
    command = [Path(sys.executable).with_name("litellm"), "--config", place / "config.yaml"]
    settings = {"LITELLM_MASTER_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with (place / "log").open("w") as log:
        process = subprocess.Popen(
            [*map(str, command), "--host", "127.0.0.1", "--port", str(port)],
            env=os.environ | settings, stdout=log, stderr=log,
        )  # fmt: skip
    until, url = time.monotonic() + START_S, f"http://127.0.0.1:{port}"
    try:
        while not _is_up(url):
            assert time.monotonic() < until, "the proxy did not start"
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
                pytest.fail((place / "log").read_text()[-2000:])
        yield url, key
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def client(proxy):
    return openai.OpenAI(base_url=f"{proxy[0]}/v1", api_key=proxy[1], max_retries=0)


@pytest.fixture(scope="session")
def claude(proxy):
    return anthropic.Anthropic(base_url=proxy[0], api_key=proxy[1], max_retries=0)


def test_models(client):
    assert {model.id for model in client.models.list()} == {*ROUTES}


@CHATS
def test_chat_and_stream(client, route):
    fields = {"model": route, "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 16
    chunks = [*client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 16


@CHATS
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "level"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_tool(client, route, choice, stream):
    fields = {"messages": MESSAGES, "max_tokens": 200, "temperature": 0, "tools": [LEVEL], "tool_choice": choice}
    answer = client.chat.completions.create(model=route, stream=stream, **fields)
    if stream:
        deltas = [choice.delta for chunk in answer for choice in chunk.choices]
        calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
        name, arguments = calls[0].name, "".join(call.arguments or "" for call in calls)
    else:
        function = answer.choices[0].message.tool_calls[0].function
        name, arguments = function.name, function.arguments
    assert name == "level"
    assert json.loads(arguments)["count"] in (1, 2)


@CHATS
def test_results_of_tools(client, route):
    call = {"id": "call_1", "type": "function", "function": {"name": "level", "arguments": '{"count": 1}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    answer = client.chat.completions.create(model=route, messages=messages, tools=[LEVEL], max_tokens=8)
    assert answer.choices[0].finish_reason in ("length", "stop", "tool_calls")


@CHATS
def test_schema(client, route):
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(model=route, messages=MESSAGES, max_tokens=200, response_format=form)
    assert json.loads(answer.choices[0].message.content)["count"] in (1, 2)


def test_completion_and_stream(client):
    fields = {"model": "texts", "prompt": "import ", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**fields)
    parts = client.completions.create(**fields, stream=True)
    assert "".join(choice.text or "" for part in parts for choice in part.choices) == whole.choices[0].text


@pytest.mark.parametrize("route", ["by-openai", "by-vllm"])
def test_embeddings(client, route):
    answer = client.embeddings.create(model=route, input=["import os", "a fox"])
    assert len(answer.data) == 2


@CHATS
def test_response_and_stream(client, route):
    fields = {"model": route, "input": "def f(", "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**fields)
    assert whole.usage.output_tokens == 16
    events = [*client.responses.create(**fields, stream=True)]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text


def test_a_response_goes_on(client):
    first = client.responses.create(model="by-openai", input="def f(", max_output_tokens=8)
    second = client.responses.create(model="by-openai", input="x", max_output_tokens=8, previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens


@CHATS
def test_messages_and_stream(claude, route):
    fields = {"model": route, "messages": MESSAGES, "max_tokens": 16, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**fields)
    assert whole.usage.output_tokens == 16
    assert whole.stop_reason == "max_tokens"
    with claude.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text


@CHATS
def test_messages_with_a_tool(claude, route):
    tools = [{"name": "level", "description": "sets it", "input_schema": SCHEMA}]
    fields = {"model": route, "messages": MESSAGES, "max_tokens": 200, "tools": tools}
    answer = claude.messages.create(**fields, tool_choice={"type": "tool", "name": "level"})
    assert [block.input["count"] in (1, 2) for block in answer.content if block.type == "tool_use"] == [True]


@CHATS
def test_errors_keep_their_class(client, route):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=route, messages=[{"role": "user", "content": "word " * 5000}], max_tokens=8
        )
    assert "ContextWindowExceededError" in str(refused.value)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=route, messages=MESSAGES, max_tokens=8, temperature=-3)
