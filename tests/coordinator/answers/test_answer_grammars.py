"""Grammars of tool calls in every syntax, with marks as text and as control tokens: accepted texts, refused texts,
schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from relayline.coordinator.answers.grammar import (
    CALLS_MAX,
    Schema,
    Wanted,
    after_thoughts,
    calls_grammar,
    closed,
    lean,
    resolved,
)
from relayline.coordinator.answers.reader import AnswerReader, CallReading, Parts
from relayline.coordinator.answers.syntax import HERMES, SYNTAXES, THINKING, Syntax, Thinking, write_calls
from relayline.coordinator.http.requests.structure import Shape, grammar_of
from relayline.coordinator.http.requests.tools import _types
from relayline.wire.common.bounds import GRAMMAR_ITEMS_MAX

THINK = THINKING[0]
CONTROLS = (
    *("[TOOL_CALLS]", "[ARGS]", "<|START_ACTION|>", "<|END_ACTION|>", "<think>", "</think>", "<|tool_call_begin|>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
)
MARKS = {mark: 257 + at for at, mark in enumerate(CONTROLS)}
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "which"},
            "days": {"$ref": "#/$defs/Days"},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city", "days"],
        "$defs": {"Days": {"type": "integer"}},
    },
    "none": {"type": "object", "properties": {}},
}
GOOD = (
    ("get_weather", {"city": 'Par"is\n<x', "days": 3}),
    ("none", {}),
    ("get_weather", {"city": "", "days": -3, "unit": "F"}),
)
BAD = (
    ("get_weather", {"days": 3}),
    ("get_weather", {"city": "x", "days": "three"}),
    ("get_weather", {"city": "x", "days": 3, "unit": "K"}),
    ("unknown", {}),
    ("none", {"a": 1}),
)


class Bytes:
    """The vocabulary of single bytes, an end, and control tokens."""

    eos_token_id, bos_token_id = 256, None
    special_token_ids = (256, *MARKS.values())
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>", *(mark.encode() for mark in CONTROLS))

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


VOCABULARY = LLTokenizer(TokenizerWrapper(Bytes()))


def ids_of(text: str, marks: Mapping[str, int]) -> list[int]:
    parts = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    return [token for part in parts for token in ([marks[part]] if part in marks else part.encode())]


class Fits:
    """Which texts are whole answers by a grammar."""

    def __init__(self, grammar: str, marks: Mapping[str, int]) -> None:
        self._grammar, self._marks = grammar, marks
        self._limits = LLParserLimits(max_items_in_row=GRAMMAR_ITEMS_MAX, verbose_errors=False)
        assert not LLMatcher.validate_grammar(grammar, limits=self._limits)

    def __call__(self, text: str) -> bool:
        matcher = LLMatcher(VOCABULARY, self._grammar, log_level=0, limits=self._limits)
        assert not matcher.is_error(), matcher.get_error()
        ids = ids_of(text, self._marks)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def fits(syntax: Syntax, marks: Mapping[str, int] = MARKS, **options: Any) -> Fits:
    options = {"is_required": True, "is_parallel": True, **options}
    tools = {name: lean(schema) for name, schema in TOOLS.items()}
    return Fits(calls_grammar(Wanted(syntax=syntax, tools=tools, marks=marks, **options)), marks)


every_syntax = pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.label)
either_marks = pytest.mark.parametrize("marks", [{}, MARKS], ids=["text", "tokens"])


@every_syntax
@either_marks
def test_required_calls(syntax: Syntax, marks: Mapping[str, int]) -> None:
    is_answer = fits(syntax, marks)
    assert all(is_answer(write_calls(syntax, GOOD[:n])) for n in range(1, len(GOOD) + 1))
    assert not any(is_answer(write_calls(syntax, [bad])) for bad in BAD)
    assert not is_answer("")
    assert not is_answer("some text")
    assert is_answer(write_calls(syntax, [GOOD[1]] * CALLS_MAX))
    assert not is_answer(write_calls(syntax, [GOOD[1]] * (CALLS_MAX + 1)))


@every_syntax
@either_marks
def test_calls_that_may_come(syntax: Syntax, marks: Mapping[str, int]) -> None:
    is_answer = fits(syntax, marks, is_required=False)
    assert is_answer("")
    assert is_answer("some text <tool_")
    assert is_answer(write_calls(syntax, GOOD))
    if syntax.trigger:
        assert is_answer(f"some text\n\n{write_calls(syntax, GOOD)}")
        assert not is_answer(f"some text\n\n{write_calls(syntax, [BAD[0]])}")
    assert not any(is_answer(write_calls(syntax, [bad])) for bad in BAD)


@every_syntax
@pytest.mark.parametrize("is_required", [False, True])
def test_one_call_where_no_more_are_wanted(syntax: Syntax, is_required: bool) -> None:
    is_answer = fits(syntax, is_required=is_required, is_parallel=False)
    assert is_answer(write_calls(syntax, GOOD[:1]))
    assert not is_answer(write_calls(syntax, GOOD[:2]))


@pytest.mark.parametrize("thinking", THINKING[:2], ids=lambda thinking: thinking.open)
@either_marks
def test_a_thought_may_come_first_and_one_begun_must_end(thinking: Thinking, marks: Mapping[str, int]) -> None:
    call = write_calls(HERMES, GOOD[:1])
    is_answer = fits(HERMES, marks, thinking=thinking)
    assert is_answer(call)
    assert is_answer(f"{thinking.open}so <tool_call> {{{thinking.close}\n\n{call}")
    assert not is_answer(f"so {call}")
    is_answer = fits(HERMES, marks, thinking=thinking, is_thinking=True)
    assert is_answer(f"so\n{thinking.close}\n\n{call}")
    assert not is_answer(call)


SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)
SHAPES = {
    '{"a": 5}': Shape("response_format", "json", (SCHEMA,)),
    "123": Shape("guided_regex", "regex", ("[0-9]{3}",)),
    "yes": Shape("guided_choice", "choice", ("yes", "no")),
    "aab": Shape("grammar", "grammar", ('root ::= "a"+ "b"',)),
}


@pytest.mark.sampled(60)
@every_syntax
@pytest.mark.parametrize("example", SHAPES)
@pytest.mark.parametrize("is_thinking", [False, True])
def test_an_answer_of_a_shape_or_a_call(syntax: Syntax, example: str, is_thinking: bool) -> None:
    if SHAPES[example].is_json and not syntax.trigger:
        pytest.skip("refused: nothing tells one JSON from the other")
    thought = "hm</think>\n" if is_thinking else ""
    options = {"is_required": False, "thinking": THINK, "is_thinking": is_thinking}
    is_answer = fits(syntax, answer=grammar_of(SHAPES[example]), **options)
    assert is_answer(thought + example)
    assert is_answer(thought + write_calls(syntax, GOOD[:2]))
    assert not is_answer(thought + "other text")
    assert not is_answer(thought)
    assert not is_answer(thought + write_calls(syntax, [BAD[0]]))


@pytest.mark.parametrize("example", SHAPES)
@either_marks
def test_a_shape_holds_from_where_the_thought_ends(example: str, marks: Mapping[str, int]) -> None:
    is_answer = Fits(after_thoughts(grammar_of(SHAPES[example]), THINK, marks), marks)
    assert is_answer(f"so {{ it is\n</think>\n\n{example}")
    assert not is_answer(example)
    assert not is_answer(f"so</think>{example} more")


@pytest.mark.parametrize("is_required", [False, True])
@every_syntax
def test_a_tool_whose_arguments_nobody_has_named_takes_any(syntax: Syntax, is_required: bool) -> None:
    tools = {"loose": {"type": "object"}, "none": {"type": "object", "additionalProperties": False}}
    wanted = Wanted(syntax=syntax, tools=tools, marks={}, is_required=is_required, is_parallel=True)
    is_answer = Fits(calls_grammar(wanted), {})
    assert is_answer(write_calls(syntax, [("loose", {"a": "x\ny", "b-c": "1"}), ("loose", {})]))
    assert not is_answer(write_calls(syntax, [("none", {"a": "x"})]))


@every_syntax
def test_a_root_reference_is_followed(syntax: Syntax) -> None:
    held = {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"]}
    schema = {"$ref": "#/$defs/Held", "$defs": {"Held": held, "N": {"type": "integer"}}}
    wanted = Wanted(syntax=syntax, tools={"f": lean(schema)}, marks={}, is_required=True, is_parallel=True)
    is_answer = Fits(calls_grammar(wanted), {})
    assert is_answer(write_calls(syntax, [("f", {"n": 5})]))
    assert not is_answer(write_calls(syntax, [("f", {"n": "x"})]))
    assert not is_answer(write_calls(syntax, [("f", {})]))


@every_syntax
def test_properties_that_are_none_are_no_fault_of_the_server(syntax: Syntax) -> None:
    for properties in ([1], None, "x"):
        schema = lean({"$ref": "#/$defs/A", "$defs": {"A": {"properties": properties}}})
        calls_grammar(Wanted(syntax=syntax, tools={"f": schema}, marks={}, is_required=True, is_parallel=True))
        assert _types(schema) == {}


def test_references_that_lead_nowhere_end() -> None:
    for schema in (
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}},
        {"$ref": "#/$defs/B"},
        {"$ref": "http://x"},
    ):
        assert resolved(schema).get("$ref") == schema["$ref"]


@either_marks
def test_a_thought_that_was_begun_may_name_calls(marks: Mapping[str, int]) -> None:
    is_answer = fits(HERMES, marks, thinking=THINK, is_thinking=True, is_required=False)
    assert is_answer("no <tool_call> is needed</think>hello")
    assert is_answer(f"a <tool_call> it is</think>\n\n{write_calls(HERMES, GOOD[:1])}")
    assert not is_answer(f"a <tool_call> it is</think>\n\n{write_calls(HERMES, BAD[:1])}")
    assert not is_answer("no end")


@every_syntax
def test_text_that_a_grammar_allows_is_read_as_a_call(syntax: Syntax) -> None:
    """On any path through it: here with the highest allowed byte at each point."""
    schema = {"properties": {"n": {"enum": [1, 22, 333]}, "on": {"type": "boolean"}}, "required": ["n", "on"]}
    parts = read_by(syntax, schema, led_by(syntax, schema))
    assert parts.text == ""
    assert {part.name for part in parts.calls} == {"pick"}


def led_by(syntax: Syntax, schema: Schema) -> str:
    """A call of `pick` that its grammar allows."""
    wanted = Wanted(syntax=syntax, tools={"pick": lean(schema)}, marks={}, is_required=True, is_parallel=False)
    grammar = calls_grammar(wanted)
    matcher = LLMatcher(VOCABULARY, grammar, log_level=0)
    taken: list[int] = []
    while 256 not in taken:
        assert len(taken) < 2_000
        bits = matcher.compute_bitmask()
        fitting = [token for token in range(257) if bits[token // 8] >> token % 8 & 1]
        taken.append(256 if 256 in fitting else max(fitting))
        matcher.consume_token(taken[-1])
    return bytes(taken[:-1]).decode()


def read_by(syntax: Syntax, schema: Schema, text: str) -> Parts:
    reading = CallReading(syntax=syntax, types={"pick": _types(schema)})
    reader = AnswerReader(None, is_thinking=False, calls=reading)
    parts = reader.push(text).with_more(reader.finish())
    assert reader.n_calls == 1
    return parts


ZIP: Schema = {"enum": ["90210"]}
STRINGS: Mapping[str, tuple[Schema, set[str]]] = {
    "enum": ({"enum": ["Paris", "Rome"]}, {"Paris", "Rome"}),
    "typed enum": ({"type": "string", "enum": ["Paris", "Rome"]}, {"Paris", "Rome"}),
    "list of types": ({"type": ["string"], "enum": ["5"]}, {"5"}),
    "const": ({"const": "true"}, {"true"}),
    "one of": ({"oneOf": [{"const": "a"}, {"const": "b"}]}, {"a", "b"}),
    "reference": ({"$ref": "#/$defs/Zip"}, {"90210"}),
    "all of": ({"allOf": [{"$ref": "#/$defs/Zip"}]}, {"90210"}),
}


@pytest.mark.sampled(100)
@every_syntax
@pytest.mark.parametrize("is_root", [True, False], ids=["root", "referred"])
@pytest.mark.parametrize("kind", STRINGS)
def test_strings_are_read_as_strings_led_or_not(syntax: Syntax, kind: str, is_root: bool) -> None:
    """A grammar may require quotes where an unconstrained model writes none: both mean the same."""
    schema, values = STRINGS[kind]
    of_object = {"type": "object", "properties": {"value": schema}, "required": ["value"]}
    whole = {**of_object, "$defs": {"Zip": ZIP}} if is_root else {
        "$ref": "#/$defs/Held", "$defs": {"Zip": ZIP, "Held": of_object}
    }  # fmt: skip
    bare = write_calls(syntax, [("pick", {"value": min(values)})])
    for example in (led_by(syntax, whole), bare):
        written = "".join(part.arguments for part in read_by(syntax, whole, example).calls)
        assert json.loads(written)["value"] in values, example


# --- schemas ----------------------------------------------------------------------------------------------------------


def test_a_lean_schema_keeps_the_deciding_keywords() -> None:
    schema = {
        "title": "T",
        "description": "what",
        "type": "object",
        "properties": {
            "description": {"type": "string", "description": "of a property of that name", "default": "x"},
            "items": {"type": "array", "items": {"title": "I", "properties": {"a": {"examples": [1]}}}},
            "either": {"anyOf": [{"title": "A", "type": "null"}, {"$ref": "#/$defs/D"}]},
        },
        "required": ["description"],
        "$defs": {"D": {"title": "D", "enum": ["title", "description"]}},
    }
    assert lean(schema) == {
        "type": "object",
        "properties": {
            "description": {"type": "string"},
            "items": {"type": "array", "items": {"properties": {"a": {}}, "additionalProperties": False}},
            "either": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/D"}]},
        },
        "required": ["description"],
        "$defs": {"D": {"enum": ["title", "description"]}},
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {}}, "additionalProperties": True},
        {"properties": {"a": {}}, "additionalProperties": {"type": "string"}},
        {"properties": {"a": {}}, "patternProperties": {"^x": {"type": "string"}}},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"allOf": [{"anyOf": [{"properties": {"a": {}}}]}, {"properties": {"b": {}}}]},
        {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {}}}], "$defs": {"A": {"properties": {"a": {}}}}},
        {"properties": {"b": {}}, "allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": {"properties": {"a": {}}}}},
        {"type": "object"},
        {"const": {"title": "kept"}},
        {"enum": [{"description": "kept"}]},
    ],
)
def test_schemas_that_are_as_they_should_be(schema: Mapping[str, Any]) -> None:
    assert lean(schema) == schema


def test_one_schema_in_all_of_stands_for_itself() -> None:
    schema = {"properties": {"in": {"allOf": [{"$ref": "#/$defs/A"}]}}, "$defs": {"A": {"properties": {"a": {}}}}}
    shut = {"additionalProperties": False}
    assert lean(schema) == schema | shut | {"$defs": {"A": {"properties": {"a": {}}} | shut}}


def test_annotations_of_other_kinds_are_no_schemas() -> None:
    odd: Sequence[Any] = [True, False, 5, None, {"properties": 5}, {"anyOf": 5}, {"items": [True]}]
    assert [lean(schema) for schema in odd[:4]] == odd[:4]
    assert lean({"items": [True]}) == {"items": [True]}
    assert lean({"anyOf": 5}) == {"anyOf": 5}


def test_a_closed_schema_has_no_properties_but_those_that_it_names() -> None:
    inner = {"type": "object", "properties": {"b": {}}, "required": ["b"]}
    schema = {
        "type": "object",
        "properties": {"a": {"items": inner}, "c": {"$ref": "#/$defs/C"}},
        "$defs": {"C": inner},
    }
    ends = {"additionalProperties": False}
    assert closed(schema) == {
        **ends,
        **schema,
        "properties": {"a": {"items": {**ends, **inner}}, "c": {"$ref": "#/$defs/C"}},
        "$defs": {"C": {**ends, **inner}},
    }


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {"properties": {}},
        {"properties": {"a": {}}, "additionalProperties": {"type": "string"}},
        {"properties": {"a": {}}, "required": ["b"]},
        {"properties": {"a": {}}, "required": [[]]},
        {"properties": {"a": {}}, "minProperties": 2},
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {"required": ["a"]}]},
        {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {}}}], "$defs": {"A": {"properties": {"a": {}}}}},
        {"$ref": "#/$defs/A", "properties": {"b": {}}, "$defs": {"A": {"properties": {"a": {}}}}},
    ],
)
def test_schemas_that_closing_leaves_as_they_are(schema: Any) -> None:
    assert closed(schema) == schema
