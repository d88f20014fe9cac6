"""/v1/responses: the official client's own types, the order of events, and stored responses."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
import openai
import pytest

from relayline.coordinator.http.responses.asking import REFERENCES_MAX, references
from relayline.coordinator.http.responses.context import LOOKED_AT_BYTES, may_refer
from relayline.coordinator.http.responses.recording import Recording
from relayline.coordinator.http.responses.store import ITEM_BYTES, ResponseStore, Stored
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import CHATML
from relayline.wire.common.errors import InvalidRequestError, OverloadedError, StageLostError
from tests.support.http_support import MODEL, WAIT_S, FakeGenerator, Gate, says, serving, tokens
from tests.support.openai_client import client_of, leave, prompt_of
from tests.support.polling import pause

# A template that has thoughts, and calls as Hermes writes them.
TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }}{% endif %}"
    + CHATML
    + "{# <think></think> #}{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endfor %}"
)
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CALL = b'<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


async def test_a_whole_response_has_the_requested_parts(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(says(b"hello"))) as (client, served):
        response = await client.responses.create(
            model=MODEL, input="hi", instructions="be brief", temperature=0.5, metadata={"a": "b"}
        )
        assert prompt_of(tokenizer, served) == tokenizer.decode(served.generator.requests[0].prompt_tokens)
        assert "be brief" in prompt_of(tokenizer, served)
        assert served.generator.requests[0].sampling.temperature == 0.5
        assert response.output_text == "hello"
        assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
        assert (response.instructions, response.metadata, response.temperature) == ("be brief", {"a": "b"}, 0.5)
        assert response.usage is not None
        assert response.usage.output_tokens == 6
        assert response.usage.input_tokens_details.cached_tokens == 0
        assert response.output[0].type == "message"


async def test_the_events_of_text_in_their_documented_order(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(says(b"hey"))) as (client, _):
        events = [event async for event in await client.responses.create(model=MODEL, input="hi", stream=True)]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert events[-1].response.output_text == "hey"  # type: ignore[union-attr]
    assert events[-1].response.id == events[0].response.id  # type: ignore[union-attr]


async def test_absent_fields_are_left_out_of_a_response(tokenizer: Tokenizer) -> None:
    """As in OpenAI's description: these fields cannot be null, so they are absent."""
    async with client_of(tokenizer, FakeGenerator(says(b"hey"))) as (client, _):
        events = [event async for event in await client.responses.create(model=MODEL, input="hi", stream=True)]
        named = await client.responses.create(model=MODEL, input="hi", user="u", safety_identifier="s")
    first, last = (event.response.to_dict() for event in (events[0], events[-1]))  # type: ignore[union-attr]
    assert not {"user", "safety_identifier", "prompt_cache_key", "usage"} & {*first}
    assert "usage" in last
    assert (named.user, named.safety_identifier) == ("u", "s")


async def test_reasoning_and_a_call_are_separate_items(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(says(b"<think>hm</think>" + CALL))
    asked: dict[str, Any] = {"model": MODEL, "input": "weather?", "tools": [TOOL]}
    async with client_of(tokenizer, generator, TEMPLATE) as (client, served):
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        whole = await client.responses.create(**asked)
        assert "get_weather" in prompt_of(tokenizer, served)
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    ]
    for response in (events[-1].response, whole):  # type: ignore[union-attr]
        thought, call = response.output
        assert thought.type == "reasoning"
        assert thought.content is not None
        assert thought.content[0].text == "hm"
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments), call.status) == ("get_weather", {"city": "Paris"}, "completed")
        assert call.call_id


async def test_a_result_goes_back_with_its_call(tokenizer: Tokenizer) -> None:
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    async with client_of(tokenizer, FakeGenerator(says(b"ok")), TEMPLATE) as (client, served):
        await client.responses.create(model=MODEL, input=items, tools=[TOOL])  # type: ignore[list-item]
        prompt = prompt_of(tokenizer, served)
    assert prompt.index("weather?") < prompt.index("sunny")
    assert '<tool_call>\n{"name": "get_weather"' in prompt


@pytest.mark.parametrize("is_background", [False, True])
async def test_a_call_that_the_limit_cuts_is_not_continued(tokenizer: Tokenizer, is_background: bool) -> None:
    """Nobody can answer it: OpenAI refuses a next input without the result of each call."""
    async with client_of(tokenizer, FakeGenerator(says(CALL)), TEMPLATE) as (client, served):
        asked: dict[str, Any] = {"model": MODEL, "input": "weather?", "tools": [TOOL], "background": is_background}
        cut = await client.responses.create(max_output_tokens=len(CALL) - 20, **asked)
        async with asyncio.timeout(WAIT_S):
            while cut.status != "incomplete":
                await pause()
                cut = await client.responses.retrieve(cut.id)
        assert [(item.type, item.status) for item in cut.output] == [("function_call", "incomplete")]  # type: ignore[union-attr]
        await client.responses.create(model=MODEL, input="and?", previous_response_id=cut.id)
        prompt = prompt_of(tokenizer, served)
        assert "weather?" in prompt
        assert "<tool_call>" not in prompt


class Body(bytes):
    """One that must not be looked at as a whole."""

    def __contains__(self, _word: object) -> bool:
        raise AssertionError("all of it at once")


async def test_a_long_body_is_looked_at_in_pieces() -> None:
    before = b" " * LOOKED_AT_BYTES
    assert not await may_refer(Body(3 * before))
    for word in (b"previous_response_id", b"item_reference", b'"conversation"'):
        for n_before in range(len(word) + 1):
            assert await may_refer(Body(before + before[n_before:] + word + before)), (word, n_before)


SPACED = {"type": "namespace", "name": "agents", "description": "of agents", "tools": [TOOL]}
SPACED_CALL = CALL.replace(b"get_weather", b"agents.get_weather")


async def test_a_tool_in_a_name_space_is_called_by_both_names(tokenizer: Tokenizer) -> None:
    """Codex has such tools: it finds them by `namespace` and `name`, and sends the call back with both."""
    async with client_of(tokenizer, FakeGenerator(says(SPACED_CALL)), TEMPLATE) as (client, served):
        async with client.responses.stream(model=MODEL, input="hi", tools=[SPACED]) as stream:
            added = [event.item async for event in stream if event.type == "response.output_item.added"]
            reply = await stream.get_final_response()
        (call,) = reply.output
        assert isinstance(call, openai.types.responses.ResponseFunctionToolCall)
        assert (call.namespace, call.name, call.arguments) == ("agents", "get_weather", '{"city": "Paris"}')
        assert [(item.namespace, item.name) for item in added] == [("agents", "get_weather")]
        assert "parameters" not in reply.tools[0].model_dump(exclude_unset=True), "as it was sent"
        assert '"agents.get_weather"' in prompt_of(tokenizer, served)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 C"}
        await client.responses.create(model=MODEL, input=[{"role": "user", "content": "hi"}, call, result])
        assert '"name": "agents.get_weather"' in prompt_of(tokenizer, served)


async def test_a_tool_in_a_name_space_is_chosen_by_its_name(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(says(SPACED_CALL)), TEMPLATE) as (client, served):
        choice = {"type": "function", "name": "get_weather"}
        await client.responses.create(model=MODEL, input="hi", tools=[SPACED], tool_choice=choice)
        assert "agents.get_weather" in served.generator.requests[-1].sampling.grammar


CUSTOM = {
    "type": "custom",
    "name": "patch",
    "description": "patches a file",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+\n.*"},
}
CUSTOM_CALL = b'<tool_call>\n{"name": "patch", "arguments": {"input": "a\\n\\"b\\""}}\n</tool_call>'


async def test_a_custom_tool_takes_and_gives_text(tokenizer: Tokenizer) -> None:
    """To the model it is a function with one text; clients of OpenAI's get an item and events of its own kind."""
    asked: dict[str, Any] = {
        "model": MODEL,
        "input": "hi",
        "tools": [CUSTOM],
        "tool_choice": {"type": "custom", "name": "patch"},
    }
    async with client_of(tokenizer, FakeGenerator(says(CUSTOM_CALL)), TEMPLATE) as (client, served):
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        reply = await client.responses.create(**asked)
        assert "[a-z]+" in served.generator.requests[-1].sampling.grammar
        (call,) = reply.output
        assert isinstance(call, openai.types.responses.ResponseCustomToolCall)
        assert (call.name, call.input) == ("patch", 'a\n"b"')
        deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == call.input
        assert len(deltas) > 1
        assert [event.input for event in events if event.type == "response.custom_tool_call_input.done"] == [call.input]
        assert not any("function_call_arguments" in event.type for event in events)
        result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "18 C"}
        await client.responses.create(model=MODEL, input=[{"role": "user", "content": "hi"}, call, result])  # type: ignore[list-item]
        prompt = prompt_of(tokenizer, served)
    assert '"name": "patch", "arguments": {"input": "a\\n\\"b\\""}' in prompt
    assert "18 C" in prompt


async def test_tools_that_nobody_can_run_are_left_out_beside_others(tokenizer: Tokenizer) -> None:
    """Codex offers a web search with every request."""
    hosted: list[Any] = [
        {"type": "web_search"},
        {"type": "web_search_preview_2025_03_11"},
        {"type": "mcp"},
        {"type": "mcp"},
    ]
    async with client_of(tokenizer, FakeGenerator(says(CALL)), TEMPLATE) as (client, served):
        reply = await client.responses.create(model=MODEL, input="hi", tools=[*hosted, TOOL])  # type: ignore[list-item]
        assert "web_search" not in prompt_of(tokenizer, served)
    assert [each.type for each in reply.output] == ["function_call"]
    assert [each.type for each in reply.tools] == ["function"]
    assert reply.model_dump()["tools_left_out"] == ["web_search", "web_search_preview_2025_03_11", "mcp"]


async def test_allowed_tools_that_nobody_can_run_are_left_out_too(tokenizer: Tokenizer) -> None:
    def allowed(*tools: Any) -> Any:
        return {"type": "allowed_tools", "mode": "auto", "tools": list(tools)}

    named, search = {"type": "function", "name": TOOL["name"]}, {"type": "web_search"}
    async with client_of(tokenizer, FakeGenerator(says(CALL)), TEMPLATE) as (client, _):
        asked: dict[str, Any] = {"model": MODEL, "input": "hi", "tools": [search, TOOL]}
        reply = await client.responses.create(**asked, tool_choice=allowed(search, named))
        assert [each.type for each in reply.output] == ["function_call"]
        with pytest.raises(openai.BadRequestError, match="none of the allowed tools can run here"):
            await client.responses.create(**asked, tool_choice=allowed(search))


async def test_max_output_tokens_leaves_a_response_incomplete(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(says(b"hello"))) as (client, _):
        whole = await client.responses.create(model=MODEL, input="hi", max_output_tokens=2)
        stream = await client.responses.create(model=MODEL, input="hi", max_output_tokens=2, stream=True)
        last = [event async for event in stream][-1]
    assert last.type == "response.incomplete"
    for response in (whole, last.response):
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
        assert response.output_text == "he"


async def test_a_schema_becomes_the_grammar(tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    text: Any = {"format": {"type": "json_schema", "name": "place", "schema": schema, "strict": True}}
    async with client_of(tokenizer, FakeGenerator(says(b'{"city":"x"}'))) as (client, served):
        response = await client.responses.create(model=MODEL, input="hi", text=text)
        assert "city" in served.generator.requests[0].sampling.grammar
        assert response.text is not None
        assert response.text.format is not None
        assert response.text.format.type == "json_schema"
        with pytest.raises(openai.BadRequestError, match="must be one of text, json_object, json_schema") as caught:
            await client.responses.create(model=MODEL, input="hi", text={"format": {"type": "yaml"}})  # type: ignore[typeddict-item]
        assert caught.value.param == "text.format.type"


async def test_log_probabilities_where_they_are_included(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(lambda request: tokens(request, b"h", top=((104, -0.5), (105, -1.5))))
    async with client_of(tokenizer, generator) as (client, _):
        response = await client.responses.create(
            model=MODEL, input="hi", include=["message.output_text.logprobs"], top_logprobs=1
        )
    part = response.output[0].content[0]  # type: ignore[union-attr,index]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [(each.token, each.logprob, len(each.top_logprobs)) for each in part.logprobs] == [("h", -0.5, 1)]


async def test_a_conversation_continues_from_a_stored_response(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(says(b"blue"))) as (client, served):
        first = await client.responses.create(model=MODEL, input="one", instructions="be brief")
        stream = await client.responses.create(model=MODEL, input="two", previous_response_id=first.id, stream=True)
        second = [event async for event in stream][-1].response  # type: ignore[union-attr]
        third = await client.responses.create(model=MODEL, input="three", previous_response_id=second.id)
        prompt = prompt_of(tokenizer, served)
        places = [prompt.index(word) for word in ("one", "blue", "two", "three")]
        assert places == sorted(places)
        assert prompt.count("blue") == 2
        assert "be brief" not in prompt  # instructions are of one response
        assert (await client.responses.retrieve(third.id)).output_text == "blue"
        listed = [item async for item in client.responses.input_items.list(third.id)]
        assert [item.content[0].text for item in listed] == ["three"]  # type: ignore[union-attr]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError) as gone:
            await client.responses.retrieve(first.id)
        assert gone.value.code == "response_not_found"
        with pytest.raises(openai.NotFoundError, match=f"{first.id}.* is not stored here") as broken:
            await client.responses.create(model=MODEL, input="four", previous_response_id=third.id)
        assert broken.value.param == "previous_response_id"


async def test_a_response_with_store_false_is_not_stored(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(says(b"x"))) as (client, _):
        response = await client.responses.create(model=MODEL, input="one", store=False)
        assert response.model_dump()["store"] is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)


async def test_an_item_may_be_sent_by_its_id(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(says(b"blue"))) as (client, served):
        first = await client.responses.create(model=MODEL, input="one")
        reference: Any = {"type": "item_reference", "id": first.output[0].id}
        await client.responses.create(model=MODEL, input=[{"role": "user", "content": "one"}, reference])
        assert "blue" in prompt_of(tokenizer, served)
        with pytest.raises(openai.BadRequestError, match="no item 'msg_other' is stored here"):
            await client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_other"}])


@pytest.mark.parametrize(
    ("more", "param", "text"),
    [
        ({"background": True, "store": False}, "store", "has to be stored"),
        ({"conversation": 5}, "conversation", "expected str | object | null"),
        ({"conversation": {}}, "conversation.id", "required field is missing"),
        (
            {"conversation": "conv_1", "previous_response_id": "resp_1"},
            "previous_response_id",
            "send one of conversation and previous_response_id",
        ),
        ({"prompt": {"id": "p"}}, "prompt", "send instructions and input"),
        ({"truncation": "middle"}, "truncation", "send disabled or auto"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]},
            "tools[0].tools[0]",
            "'mcp'",
        ),
        ({"tools": [{"type": "custom"}]}, "tools[0].name", "must be text"),
        ({"tools": [{"type": "browser"}]}, "tools[0]", "'browser'; leave it out"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", "'web_search' cannot run here"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools", "must be a list"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search' cannot run here, and no other"),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "'computer_call' are not served"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]", "'input_file'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
            "send the image itself",
        ),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role", "must be one of user"),
        ({"input": []}, "input", "at least one item"),
        ({"input": None}, "input", "required field is missing"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort", "reasoning.effort: "),
        ({"temperature": 3}, "temperature", "<= 2"),
        ({"metadata": {str(at): "" for at in range(17)}}, "metadata", "length <= 16"),
        ({"metadata": {"a": "x" * 513}}, "metadata[...]", "length <= 512"),
        ({"metadata": {"x" * 65: ""}}, "metadata", "expected str of length <= 64 in each key"),
        ({"model": "other"}, "model", "does not exist"),
    ],
)
async def test_unsupported_fields_are_refused_in_one_line(
    tokenizer: Tokenizer, more: dict[str, Any], param: str, text: str
) -> None:
    async with serving(tokenizer) as served, aiohttp.ClientSession() as session:
        async with session.post(f"{served.url}/v1/responses", json={"model": MODEL, "input": "hi", **more}) as reply:
            error = (await reply.json())["error"]
            assert reply.status == (404 if param == "model" else 400)
        assert error["param"] == param
        assert text in error["message"]
        assert "\n" not in error["message"]
        assert not served.generator.requests


async def test_an_error_before_and_amid_an_answer(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(lambda request: [*tokens(request, b"he", ends=False), StageLostError("stage 1 is lost")])
    generator.refusals = [OverloadedError("all lanes are taken", retry_after_s=3)]
    async with client_of(tokenizer, generator) as (client, _):
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(model=MODEL, input="hi", stream=True)
        events = []
        with contextlib.suppress(Exception):  # the connection is cut: the client chooses the error
            async for event in await client.responses.create(model=MODEL, input="hi", stream=True):
                events.append(event)
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "stage 1 is lost"
    assert events[-1].response.status == "failed"


async def test_a_client_that_leaves_frees_its_stream(tokenizer: Tokenizer) -> None:
    gate = Gate()
    generator = FakeGenerator(lambda request: [*tokens(request, b"he", ends=False), gate])
    async with client_of(tokenizer, generator) as (client, served):
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        async with asyncio.timeout(WAIT_S):
            await gate.reached.wait()
        await leave(stream)
        async with asyncio.timeout(WAIT_S):
            await served.generator.streams[0].closed.wait()


async def test_input_tokens_are_counted_without_an_answer(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(says(b"x"))) as (client, served):
        counted = await client.responses.input_tokens.count(model=MODEL, input="hello")
        response = await client.responses.create(model=MODEL, input="hello")
        assert len(served.generator.requests) == 1
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens


def stored(name: str, n_bytes: int = 10, previous: str | None = None, owner: str = "") -> Stored:
    return Stored(name, owner, b"x" * n_bytes, (), [(f"msg_{name}", b"")], previous)


def test_the_store_keeps_its_bounds_and_a_conversation_together() -> None:
    store = ResponseStore(n_max=3, bytes_max=2_000)
    for each in (stored("a"), stored("b"), stored("a2", previous="a")):
        assert store.put(each)
    chain = store.chain("a2", "")
    assert [each.id for each in chain if isinstance(each, Stored)] == ["a", "a2"]
    store.put(stored("c"))  # b was used longest ago
    assert store.get("b", "") is None
    assert store.items(["msg_b", "msg_a"], "") == {"msg_a": b""}
    store.put(stored("d", 1_000))
    assert (len(store), store.get("a2", "")) == (3, None)
    assert not store.put(stored("e", 3_000))
    assert store.n_bytes <= 2_000
    assert store.chain("a2", "") == "a2"


def test_all_of_a_response_counts_for_the_bound_of_bytes() -> None:
    recording = Recording()
    recording.add(b"data: 1\n\n")
    items = [("item_1", b"x" * 70), ("item_2", b"")]
    whole = Stored("a", "", b"{}", items, [("msg_1", b"y" * 30)], None, True, recording)
    assert whole.items_bytes == 100 + 3 * ITEM_BYTES
    assert whole.n_bytes == 2 + whole.items_bytes + recording.n_bytes
    assert recording.n_bytes > 0
    exact = ResponseStore(bytes_max=whole.n_bytes)
    assert exact.put(whole)
    assert exact.put(stored("b"))
    assert (len(exact), exact.get("a", ""), exact.n_bytes) == (1, None, stored("b").n_bytes)
    assert not ResponseStore(bytes_max=whole.n_bytes - 1).put(whole)


def test_the_store_shows_a_response_to_its_owner_only() -> None:
    store = ResponseStore()
    store.put(stored("a", owner="me"))
    assert store.get("a", "you") is None
    assert store.chain("a", "you") == "a"
    assert store.items(["msg_a"], "you") == {}
    assert not store.delete("a", "you")
    assert store.delete("a", "me")
    assert (len(store), store.n_bytes, store._holder_of) == (0, 0, {})


def test_the_items_that_a_body_refers_to_are_bounded() -> None:
    """Each is looked up on the event loop."""
    item = {"type": "item_reference", "id": "msg_1"}
    assert references(json.dumps({"input": [item] * REFERENCES_MAX}).encode())
    with pytest.raises(InvalidRequestError, match=f"{REFERENCES_MAX + 1} item references, at most {REFERENCES_MAX}"):
        references(json.dumps({"input": [item] * (REFERENCES_MAX + 1)}).encode())
