"""Tools over HTTP with the official `openai` client: requests and answers, whole and as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest import mock

import aiohttp
import msgspec
import openai
import pytest
from aiohttp.test_utils import make_mocked_request

from relayline.coordinator.answers.grammar import weaker
from relayline.coordinator.answers.reader import CALL_ID_CHARS, AnswerReader
from relayline.coordinator.answers.tagged_calls import QUOTED
from relayline.coordinator.http.edge.sse import EventWriter
from relayline.coordinator.http.requests.bodies import ChatBody, decode_body
from relayline.coordinator.http.requests.structure import fault_of
from relayline.coordinator.http.requests.tools import TOOLS_MAX, Offered, check_calls, offered_by
from relayline.coordinator.sessions.generation import GenerationRequest
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import CHATML
from relayline.wire.common.bounds import GRAMMAR_BYTES_MAX
from relayline.wire.common.errors import InvalidRequestError
from tests.support.http_support import MODEL, WAIT_S, FakeGenerator, Gate, Served, says, serving, tokens
from tests.support.openai_client import openai_client

USER = {"role": "user", "content": "hi"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NOT_FOLLOWED = {"type": "object", "properties": {"a": {"type": 5}}}
NO_TEXT = {"name": "x", "arguments": 5}
THINKS = CHATML + "{# </think> #}"
OPENS_THOUGHTS = THINKS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'

LARK = {"syntax": "lark", "definition": "start: /x/"}
DIGITS = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]+"}}
CUSTOM: Any = {"type": "custom", "custom": {"name": "patch", "description": "patches", "format": DIGITS}}
PATCH_CALL = '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\n\\"b\\""}}\n</tool_call>'

ONE_A_TURN = """{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.tool_calls %}{% if m.tool_calls[1] %}
{{- raise_exception("one at a time") }}{% endif %}{% set f = m.tool_calls[0].function %}<tool_call>
{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}
</tool_call>{% endif %}{% endfor %}{{ tools | tojson }}assistant:"""


def tool(name: str = "weather", parameters: Any = CITY, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "what", "parameters": parameters, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def body_of(**fields: Any) -> ChatBody:
    return decode_body(json.dumps({"messages": [USER], **fields}).encode(), ChatBody)


def offered(**fields: Any) -> Offered | None:
    return offered_by(body_of(**fields))


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_request_offers_its_tools() -> None:
    tools = [tool(), tool("other", None, strict=True)]
    found = offered(tools=tools)
    assert found is not None
    assert found.shown == tuple(tools)
    assert found.schemas == {"weather": CITY, "other": {"type": "object", "properties": {}}}
    assert (found.strict, found.is_required, found.is_parallel) == (frozenset({"other"}), False, True)
    assert found.types == {"weather": {"city": frozenset({"string"})}, "other": {}}


@pytest.mark.parametrize(
    ("fields", "names", "is_required"),
    [
        ({}, ["a", "b"], False),
        ({"tool_choice": "auto"}, ["a", "b"], False),
        ({"tool_choice": "required"}, ["a", "b"], True),
        ({"tool_choice": named("b")}, ["b"], True),
        ({"tool_choice": {"type": "function", "name": "b"}}, ["b"], True),
        ({"tool_choice": allowed("auto", "b")}, ["b"], False),
        ({"tool_choice": {"type": "allowed_tools", **allowed("required", "a")["allowed_tools"]}}, ["a"], True),
    ],
)  # fmt: skip
def test_tool_choice_selects_allowed_and_required_calls(
    fields: dict[str, Any], names: list[str], is_required: bool
) -> None:
    found = offered(tools=[tool("a"), tool("b")], **fields)
    assert found is not None
    assert ([*found.schemas], found.is_required, len(found.shown)) == (names, is_required, 2)


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [tool()], "tool_choice": "none"}, {"tools": None}])
def test_nothing_is_offered(fields: dict[str, Any]) -> None:
    assert offered(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {"name": "x", "description": 5}}]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {"name": "x", "format": {}}}]}, "tools[0].custom.format"),
        ({"tools": [{"type": "custom", "custom": {"name": "x", "format": 5}}]}, "tools[0].custom.format"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}, tool("x")]}, "tools"),
        ({"tools": [tool(), "x"]}, "tools[1]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": "x"}]}, "tools[0]"),
        ({"tools": [tool("")]}, "tools[0]"),
        ({"tools": [tool("a b")]}, "tools[0]"),
        ({"tools": [tool("x" * 129)]}, "tools[0]"),
        ({"tools": [tool(parameters=[5])]}, "tools[0]"),
        ({"tools": [tool(parameters={"properties": []})]}, "tools[0]"),
        ({"tools": [tool(parameters={"required": [5]})]}, "tools[0]"),
        ({"tools": [tool(description=5)]}, "tools[0]"),
        ({"tools": [tool(), tool()]}, "tools"),
        ({"tools": [tool(f"t{number}") for number in range(TOOLS_MAX + 1)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": named("x")}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": named("x")}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": 5}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools", "tools": [5]}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools": 5}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": 5}}}, "tool_choice"),
    ],
)
def test_refusals_name_the_mistake(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        offered(**fields)
    assert caught.value.param == param
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "call", ["x", {}, {"function": {}}, {"function": {"name": 5}}, {"function": {"name": "x", "arguments": 5}}]
)
def test_calls_of_earlier_turns_have_a_name(call: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_calls(body_of(messages=[USER, {"role": "assistant", "tool_calls": [call]}]).messages)
    assert caught.value.param == "messages[1].tool_calls[0]"
    check_calls(body_of(messages=[USER, {"role": "assistant", "tool_calls": [named("x")]}]).messages)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"type": "integer"}, {"$ref": "#/x"}]}, set()),
        ({"enum": ["a", 5]}, {"string", "integer"}),
        ({"const": True}, {"boolean"}),
        ({"const": "a"}, {"string", QUOTED}),
        ({"type": ["string"]}, {"string", QUOTED}),
        ({"allOf": [{"description": "any"}, {"type": "integer"}]}, {"integer"}),
        ({"allOf": 5}, None),
        ({"$ref": "#/x"}, set()),
        ({}, set()),
        (True, set()),
        ({"type": 5}, None),
        ({"type": [5]}, set()),
        ({"anyOf": 5}, None),
    ],
)
def test_types_of_arguments(schema: Any, types: set[str] | None) -> None:
    found = offered(tools=[tool(parameters={"type": "object", "properties": {"a": schema}})])
    assert found is not None
    assert found.types == {"weather": {"a": frozenset(types or ())}}


def test_schemas_that_refer_to_each_other_many_times_are_looked_at_once() -> None:
    """Each of nine refers to the next a hundred times: following every path would take 100 ** 8 steps."""
    many = {f"D{n}": {"anyOf": [{"$ref": f"#/$defs/D{n + 1}"}] * 100} for n in range(8)} | {"D8": {"type": "integer"}}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/D5"}, "b": {"$ref": "#/$defs/D0"}}, "$defs": many}
    many["Self"] = {"anyOf": [{"$ref": "#/$defs/Self"}] * 100}
    schema["properties"]["c"] = {"$ref": "#/$defs/Self"}
    found = offered(tools=[tool(parameters=schema)])
    assert found is not None
    types = found.types["weather"]
    assert (types["a"], types["c"]) == (frozenset({"integer"}), frozenset())


# --- answers ----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def client_of(
    tokenizer: Tokenizer, text: str, template: str = CHATML, **limits: Any
) -> AsyncIterator[tuple[Callable[..., Any], Served]]:
    """A model that answers `text`, and a function that asks it."""
    generator = FakeGenerator(says(text.encode()), ctx_tokens=limits.pop("ctx_tokens", 4_096))
    async with (
        serving(tokenizer, generator, template=template, **limits) as served,
        openai_client(served.url) as client,
    ):

        async def ask(**fields: Any) -> Any:
            given = {"tools": [tool()], "messages": [USER], **fields}
            kept = {key: value for key, value in given.items() if value is not None}
            return await client.chat.completions.create(model=MODEL, **kept)

        yield ask, served


async def test_a_call(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, CALL) as (ask, served):
        (choice,) = (await ask()).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", '{"city": "Rome"}')
        assert len(call.id) == CALL_ID_CHARS
        (request,) = served.generator.requests
        assert '"name": "weather"' in tokenizer.decode(request.prompt_tokens)
        assert request.sampling.grammar == ""


async def test_a_call_of_a_custom_tool(tokenizer: Tokenizer) -> None:
    """The model sees a function whose one argument is a text; the client gets that text, whole or as it is written."""
    asked: dict[str, Any] = {"tools": [CUSTOM, tool()], "tool_choice": {"type": "custom", "custom": {"name": "patch"}}}
    async with client_of(tokenizer, PATCH_CALL) as (ask, served):
        (choice,) = (await ask(**asked)).choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or ()
        assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", 'a\n"b"')
        grammar = served.generator.requests[-1].sampling.grammar
        assert "[0-9]+" in grammar
        chunks = [chunk async for chunk in await ask(stream=True, **asked)]
        parts = [part for chunk in chunks for one in chunk.choices for part in one.delta.tool_calls or ()]
        written = [part.model_dump(exclude_unset=True) for part in parts]
        assert written[0] | {"id": ""} == {
            "index": 0, "id": "", "type": "custom", "custom": {"name": "patch", "input": written[0]["custom"]["input"]}
        }  # fmt: skip
        assert "".join(part["custom"]["input"] for part in written) == 'a\n"b"'
        result = {"role": "tool", "tool_call_id": call.id, "content": "patched"}
        await ask(messages=[USER, choice.message.model_dump(exclude_none=True), result], tools=[CUSTOM])
    assert offered(tools=[CUSTOM]).strict == {"patch"}  # type: ignore[union-attr]
    assert offered(tools=[CUSTOM, tool()]).custom == {"patch"}  # type: ignore[union-attr]


async def test_a_call_as_it_is_written(tokenizer: Tokenizer) -> None:
    text = f"Let me see.\n\n{CALL}\n{CALL.replace('Rome', 'Oslo')}"
    async with client_of(tokenizer, text) as (ask, _):
        chunks = [chunk.choices[0] async for chunk in await ask(stream=True)]
    deltas = [chunk.delta for chunk in chunks]
    assert (deltas[0].role, chunks[-1].finish_reason) == ("assistant", "tool_calls")
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    assert len(parts) > 20, "arguments come in pieces"
    for index, city in enumerate(("Rome", "Oslo")):
        first, *others = [part for part in parts if part.index == index]
        assert (first.type, first.function.name, bool(first.id)) == ("function", "weather", True)
        assert {(part.id, part.type, part.function.name) for part in others} == {(None, None, None)}
        assert "".join(part.function.arguments for part in (first, *others)) == json.dumps({"city": city})


async def test_no_call_is_an_answer_like_any_other(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, "Sunny, I <tool_think>.\n") as (ask, _):
        (choice,) = (await ask()).choices
        assert (choice.finish_reason, choice.message.content) == ("stop", "Sunny, I <tool_think>.\n")
        assert choice.message.tool_calls is None


async def test_a_call_that_is_cut_off_says_so(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, CALL) as (ask, _):
        (choice,) = (await ask(max_tokens=CALL.index("ome"))).choices
        assert choice.finish_reason == "length"
        assert choice.message.tool_calls[0].function.arguments == '{"city": "R'


async def test_a_call_that_a_stop_string_cuts_is_not_to_be_run(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, CALL) as (ask, _):
        assert (await ask(stop=["Rome"])).choices[0].finish_reason == "stop"
        assert (await ask(stop=["\n</tool_call>"])).choices[0].finish_reason == "tool_calls"


async def test_one_call_a_turn_where_the_template_takes_no_more(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, f"{CALL}\n{CALL}", ONE_A_TURN) as (ask, _):
        assert len((await ask()).choices[0].message.tool_calls) == 1


async def test_an_answer_that_cannot_be_encoded_ends_the_stream_with_an_error(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_of(tokenizer, CALL) as (ask, _):
        monkeypatch.setattr(AnswerReader, "push", None)
        chunks = await ask(stream=True)
        with pytest.raises(openai.APIError, match="internal error; the server's log"):
            async for _ in chunks:
                pass


async def test_a_stream_that_fails_is_cut_off_and_not_answered_twice(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EventWriter, "finish", None)
    gate = Gate()
    generator = FakeGenerator(lambda request: [*tokens(request, b"h", ends=False), gate, *tokens(request, b"i")])
    async with serving(tokenizer, generator) as served, aiohttp.ClientSession() as session:
        body = {"messages": [USER], "stream": True}
        async with session.post(f"{served.url}/v1/chat/completions", json=body) as response:
            gate.opened.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()


async def test_one_call_is_the_end_where_no_more_are_wanted(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, f"{CALL}\n{CALL}" + "x" * 2_000, backlog_events_max=1) as (ask, served):
        (choice,) = (await ask(parallel_tool_calls=False)).choices
        assert (choice.finish_reason, len(choice.message.tool_calls)) == ("tool_calls", 1)
        chunks = [chunk.choices[0] async for chunk in await ask(parallel_tool_calls=False, stream=True)]
        assert chunks[-1].finish_reason == "tool_calls"
        assert {part.index for chunk in chunks for part in chunk.delta.tool_calls or ()} == {0}
        assert all(stream.n_taken < 2 * len(CALL) for stream in served.generator.streams)


async def test_an_answer_is_text_where_calls_are_forbidden(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, CALL) as (ask, served):
        (choice,) = (await ask(tool_choice="none")).choices
        assert (choice.finish_reason, choice.message.content) == ("stop", CALL)
        assert "weather" not in tokenizer.decode(served.generator.requests[0].prompt_tokens)


async def test_choices_have_separate_calls(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, CALL) as (ask, _):
        choices = (await ask(n=3)).choices
        assert len({choice.message.tool_calls[0].id for choice in choices}) == 3


async def test_the_next_turn_holds_call_and_result(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, CALL) as (ask, served):
        message = (await ask()).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
        await ask(messages=[USER, message.model_dump(exclude_none=True), result])
        prompt = tokenizer.decode(served.generator.requests[1].prompt_tokens)
        assert CALL in prompt
        assert "<tool_response>\nsunny\n</tool_response>" in prompt


# --- grammars ---------------------------------------------------------------------------------------------------------


async def requested(tokenizer: Tokenizer, template: str = CHATML, **fields: Any) -> GenerationRequest:
    async with client_of(tokenizer, "x", template, ctx_tokens=200_000) as (ask, served):
        await ask(**fields)
        return served.generator.requests[0]


@pytest.mark.parametrize(
    ("fields", "has_grammar"),
    [
        ({}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": named("weather")}, True),
        ({"tools": [tool(strict=True)]}, True),
        ({"tools": [tool(strict=True)], "tool_choice": "none"}, False),
        ({"tools": [tool(), tool("b")], "tool_choice": allowed("auto", "weather")}, True),
        ({"tools": [tool(), tool("b")], "tool_choice": allowed("auto", "weather", "b")}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"tools": [tool(parameters=NOT_FOLLOWED)], "tool_choice": "required"}, True),
    ],
)  # fmt: skip
async def test_a_grammar_leads_where_a_call_must_come_or_must_fit(
    fields: dict[str, Any], has_grammar: bool, tokenizer: Tokenizer
) -> None:
    grammar = (await requested(tokenizer, **fields)).sampling.grammar
    assert bool(grammar) == has_grammar
    assert ("<tool_call>" in grammar) == has_grammar


async def test_only_strict_tools_are_held_to_their_schema_where_none_is_required(tokenizer: Tokenizer) -> None:
    tools = [
        tool("loose", {"properties": {"loosely": {}}}),
        tool("strictly", {"properties": {"held": {}}}, strict=True),
    ]
    grammar = (await requested(tokenizer, tools=tools)).sampling.grammar
    assert "held" in grammar
    assert "loosely" not in grammar
    grammar = (await requested(tokenizer, tools=tools, tool_choice="required")).sampling.grammar
    assert "loosely" in grammar


async def test_schemas_too_large_for_a_grammar_hold_only_strict_tools(tokenizer: Tokenizer) -> None:
    large = {"type": "object", "properties": {f"key_{number}": {"type": "string"} for number in range(3_000)}}
    tools = [tool("large", large), tool("small", strict=True)]
    grammar = (await requested(tokenizer, tools=tools, tool_choice="required")).sampling.grammar
    assert len(grammar) < GRAMMAR_BYTES_MAX
    assert "city" in grammar


@pytest.mark.parametrize(
    ("fields", "param", "says_what"),
    [
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "no response_format"),
        ({"tools": [tool("bad", NOT_FOLLOWED, strict=True)]}, "tools", "'bad'"),
        ({"extra_body": {"ignore_eos": True}}, "ignore_eos", "not together with tools"),
        ({"extra_body": {"reasoning_format": "raw"}}, "reasoning_format", "one of auto, deepseek, none"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls[0]", "a name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]", "only tools of types"),
        ({"tools": [{"type": "custom", "custom": {"name": "n", "format": {"type": "grammar", "grammar": LARK}}}]},
         "tools[0].custom.format", "cannot follow a Lark grammar here"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"type": "custom", "id": "a"}]}]},
         "messages[1].tool_calls[0].custom", "a name and input"),
    ],
)  # fmt: skip
async def test_bad_tools_are_refused_in_one_line(
    fields: dict[str, Any], param: str, says_what: str, tokenizer: Tokenizer
) -> None:
    async with client_of(tokenizer, "x", ctx_tokens=100_000) as (ask, _):
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(**fields)
    assert caught.value.param == param
    assert says_what in caught.value.message
    assert "\n" not in caught.value.message


async def test_plain_json_is_not_distinguished_from_calls(tokenizer: Tokenizer) -> None:
    """A model that writes calls as Llama does."""
    template = CHATML.replace(
        "{{ message['content'] }}",
        "{{ message['content'] }}{% for c in message.tool_calls %}"
        '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
        "{% if not loop.last %}; {% endif %}{% endfor %}",
    )
    async with client_of(tokenizer, '{"name": "weather", "parameters": {"city": "Rome"}}', template) as (ask, _):
        (choice,) = (await ask()).choices
        assert choice.message.tool_calls[0].function.arguments == '{"city": "Rome"}'
        with pytest.raises(openai.BadRequestError, match="not together with tools"):
            await ask(response_format={"type": "json_object"})


@pytest.mark.parametrize("depth", [50, 300, 900, 5_000])
@pytest.mark.parametrize("strict", [False, True])
async def test_nested_schemas(depth: int, strict: bool, tokenizer: Tokenizer) -> None:
    schema = '{"type": "array", "items": ' * depth + "{}" + "}" * depth
    function = f'{{"name": "x", "strict": {json.dumps(strict)}, "parameters": {{"properties": {{"a": {schema}}}}}}}'
    raw = f'{{"messages": [{json.dumps(USER)}], "tools": [{{"type": "function", "function": {function}}}]}}'
    generator = FakeGenerator(says(b"x"), ctx_tokens=1_000_000)
    async with serving(tokenizer, generator) as served, aiohttp.ClientSession() as http:
        timeout = aiohttp.ClientTimeout(WAIT_S)
        async with http.post(f"{served.url}/v1/chat/completions", data=raw, timeout=timeout) as response:
            assert response.status in ((200, 400) if depth > 50 else (200,))


async def test_completions_take_no_tools(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as served, aiohttp.ClientSession() as http:
        body = {"prompt": "x", "tools": [tool()]}
        timeout = aiohttp.ClientTimeout(WAIT_S)
        async with http.post(f"{served.url}/v1/completions", json=body, timeout=timeout) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "tools"


# --- thoughts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("template", "opening"), [(THINKS, "<think>\n"), (OPENS_THOUGHTS, "")], ids=["own", "opened"])
async def test_reasoning_is_a_field_next_to_the_answer(template: str, opening: str, tokenizer: Tokenizer) -> None:
    text = f"{opening}so <tool_call> it is\n</think>\n\nHello. {CALL}"
    async with client_of(tokenizer, text, template) as (ask, _):
        message = (await ask()).choices[0].message
        assert (message.reasoning_content, message.content) == ("so <tool_call> it is", "Hello.")
        assert len(message.tool_calls) == 1
        deltas = [chunk.choices[0].delta async for chunk in await ask(stream=True, tools=None)]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "so <tool_call> it is"
        assert "".join(delta.content or "" for delta in deltas) == f"Hello. {CALL}"
        message = (await ask(tools=None, extra_body={"reasoning_format": "none"})).choices[0].message
        assert message.content == text
        assert not hasattr(message, "reasoning_content")


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ({"reasoning": "a"}, {"reasoning_content": "a"}),
        ({"reasoning": "a", "reasoning_content": "b"}, {"reasoning_content": "b"}),
        ({"reasoning": {"text": "a"}}, {}),
    ],
)
def test_thoughts_of_earlier_turns_may_have_another_name(sent: dict[str, Any], read: dict[str, Any]) -> None:
    turn = {"role": "assistant", "content": "x"}
    messages = body_of(messages=[USER, turn | sent, USER]).messages
    assert msgspec.to_builtins(messages[1]) == turn | read  # which templates get


async def test_a_model_that_marks_no_thoughts_keeps_its_text(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, "<think>a</think>b") as (ask, _):
        assert (await ask(tools=None)).choices[0].message.content == "<think>a</think>b"


async def test_a_shape_begins_where_the_thought_ends(tokenizer: Tokenizer) -> None:
    shape = {"response_format": {"type": "json_object"}, "tools": None}
    opened = (await requested(tokenizer, OPENS_THOUGHTS, **shape)).sampling.grammar
    own = (await requested(tokenizer, THINKS, **shape)).sampling.grammar
    assert "</think>" in opened
    assert "</think>" not in own


@pytest.mark.parametrize(
    ("template", "fields", "budget"),
    [
        (THINKS, {}, None),
        (THINKS, {"thinking_token_budget": 20}, 20),
        (OPENS_THOUGHTS, {"reasoning_budget_tokens": 0, "reasoning_budget_message": "So:"}, 0),
        (OPENS_THOUGHTS, {"thinking_budget_tokens": 20, "thinking_token_budget": 20, "max_tokens": 21}, 20),
        (THINKS, {"thinking_token_budget": 20, "max_tokens": 20}, None),
        (THINKS, {"thinking_token_budget": -1}, None),
        (THINKS, {"thinking_token_budget": 200_000}, None),
        (CHATML, {"thinking_token_budget": 20}, None),
    ],
)
async def test_thoughts_have_the_budget_of_the_request(
    tokenizer: Tokenizer, template: str, fields: dict[str, Any], budget: int | None
) -> None:
    extra = {"tools": None, "extra_body": {key: value for key, value in fields.items() if key != "max_tokens"}}
    if "max_tokens" in fields:
        extra["max_tokens"] = fields["max_tokens"]
    asked = await requested(tokenizer, template, **extra)
    if budget is None:
        assert (asked.sampling.thought_marks, asked.sampling.number("thought_tokens_max")) == (None, -1.0)
        return
    marks = asked.sampling.thought_marks
    assert marks is not None
    assert [tokenizer.decode(part) for part in marks] == [
        "<think>",
        "</think>",
        fields.get("reasoning_budget_message", ""),
        "",
        "",
    ]
    assert asked.sampling.number("thought_tokens_max") == budget
    begun_at = len(asked.prompt_tokens) if template is OPENS_THOUGHTS else -1
    assert asked.sampling.number("thoughts_begun_at") == begun_at


@pytest.mark.parametrize(
    ("begun", "is_within"), [("<think>One", True), ("<think>One</think>Two", False), ("One", False)]
)
async def test_thoughts_that_a_client_lets_go_on_have_a_budget_too(
    tokenizer: Tokenizer, begun: str, is_within: bool
) -> None:
    async with client_of(tokenizer, "x</think>y", THINKS) as (ask, served):
        extra = {"thinking_token_budget": 9, "continue_final_message": True}
        reply = await ask(tools=None, messages=[USER, {"role": "assistant", "content": begun}], extra_body=extra)
    (asked,) = served.generator.requests
    assert asked.sampling.number("thoughts_begun_at") == (len(asked.prompt_tokens) if is_within else -1)
    message = reply.choices[0].message
    assert (message.content, getattr(message, "reasoning_content", None)) == (
        ("y", "x") if is_within else ("x</think>y", None)
    )


async def test_each_choice_has_the_budget(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, "x", OPENS_THOUGHTS, ctx_tokens=200_000) as (ask, served):
        await ask(tools=None, n=2, extra_body={"thinking_token_budget": 9, "min_tokens": 3})
    for asked in served.generator.requests:
        n_prompt = len(asked.prompt_tokens)
        numbers = dict(asked.sampling.numbers)
        assert (numbers["thoughts_begun_at"], numbers["held_back_until"]) == (n_prompt, n_prompt + 3)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        (
            {"thinking_token_budget": 5, "reasoning_budget_tokens": 6},
            "thinking_token_budget and reasoning_budget_tokens",
        ),
        ({"reasoning_budget_message": "x" * 193}, "a text of at most 192 bytes"),
    ],
)
async def test_a_wrong_budget_is_refused(tokenizer: Tokenizer, fields: dict[str, Any], says: str) -> None:
    async with client_of(tokenizer, "x", THINKS) as (ask, _):
        with pytest.raises(openai.BadRequestError, match=says):
            await ask(tools=None, extra_body=fields)


async def test_the_server_has_a_budget_for_requests_that_name_none(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(says(b"x"), ctx_tokens=1_000)
    limits = {"reasoning_budget": 7, "reasoning_budget_message": "Enough."}
    async with (
        serving(tokenizer, generator, template=THINKS, **limits) as served,
        openai_client(served.url) as client,
    ):
        for extra in ({}, {"thinking_token_budget": 9, "reasoning_budget_message": ""}, {"thinking_token_budget": -1}):
            await client.chat.completions.create(model=MODEL, messages=[USER], extra_body=extra)
        await client.responses.create(model=MODEL, input="x")
    found = [
        (request.sampling.number("thought_tokens_max"), tokenizer.decode(request.sampling.thought_marks.last_words))
        if request.sampling.thought_marks
        else None
        for request in generator.requests
    ]
    assert found == [(7.0, "Enough."), (9.0, ""), None, (7.0, "Enough.")]


async def test_a_stream_that_holds_text_back_for_long_shows_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments between tags that are no text come as a whole, minutes later perhaps."""
    now_s, transport = [100.0], mock.Mock()
    transport.is_closing.return_value, transport.get_write_buffer_size.return_value = False, 0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s[0], raising=False)
    writer = EventWriter(make_mocked_request("POST", "/", transport=transport), 30.0, 15.0)
    left_s = []
    for seconds, events in ((14.9, []), (0.1, []), (0.0, [b"{}"]), (14.9, []), (0.1, [])):
        now_s[0] += seconds
        assert writer.send_at_once(events)
        left_s.append(round(writer.silent_in_s(), 1))
    assert left_s == [0.1, 0.0, 15.0, 0.1, 0.0], "only the written text counts"
    assert transport.write.mock_calls == [mock.call(b"a\r\ndata: {}\n\n\r\n")]


UNFOLLOWED = {
    "names of properties": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": True},
    "not": {"type": "integer", "not": {"const": 3}},
    "look-ahead": {"type": "string", "pattern": "^(?!x)a$"},
    "unique items": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
    "one of": {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 5}]},
}


@pytest.mark.parametrize("part", UNFOLLOWED.values(), ids=UNFOLLOWED)
def test_one_rule_that_cannot_be_followed_leaves_the_others(part: dict[str, Any]) -> None:
    schema = {"type": "object", "required": ["n", "city"], "properties": {"n": part, "city": {"enum": ["Rome"]}}}
    for each in weaker(schema, is_strict=False):
        if not fault_of(f"start: %json {json.dumps(each)}"):
            break
    else:
        pytest.fail("none of the weaker schemas can be followed")
    assert each["properties"]["city"] == {"enum": ["Rome"]}
    assert each["properties"]["n"].get("type") == part.get("type")
    assert [*weaker(schema, is_strict=True)] == [schema], "to the letter or not at all"


@pytest.mark.parametrize("kind", ["password", {"is": "odd"}, ["date"]])
def test_a_format_that_nobody_has_to_know_is_an_annotation(kind: Any) -> None:
    schema = {"properties": {"format": {"type": "string", "format": kind}, "at": {"format": "date"}}}
    (strictly,) = weaker(schema, is_strict=True)
    assert strictly == {"properties": {"format": {"type": "string"}, "at": {"format": "date"}}}
    assert not fault_of(f"start: %json {json.dumps(strictly)}")


@pytest.mark.parametrize(
    ("fields", "is_parallel"),
    [
        ({}, True),
        ({"tool_choice": "required"}, False),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, False),
        ({"tool_choice": "required", "parallel_tool_calls": True}, True),
        ({"parallel_tool_calls": False}, False),
    ],
)
def test_a_tool_that_must_be_called_is_called_once(fields: dict[str, Any], is_parallel: bool) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, **fields}
    offered = offered_by(decode_body(json.dumps(body).encode(), ChatBody))
    assert offered is not None
    assert offered.is_parallel is is_parallel
