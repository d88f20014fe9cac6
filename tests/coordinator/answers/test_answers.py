"""Parsing of answers: calls in every syntax, reasoning, and text that looks like either, at every cut of the text."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.coordinator.answers.calls import NAME_CHARS_MAX
from relayline.coordinator.answers.reader import AnswerReader, CallReading, Parts, random_call_id
from relayline.coordinator.answers.syntax import (
    HERMES,
    SYNTAXES,
    THINKING,
    ObjectBody,
    Syntax,
    TaggedBody,
    Thinking,
    write_calls,
)
from relayline.coordinator.answers.tagged_calls import Types, json_of, type_of
from tests.support.examples import thinned

BY_LABEL = {syntax.label: syntax for syntax in SYNTAXES}
MARKED = [syntax for syntax in SYNTAXES if syntax.trigger]
LLAMA, QWEN_CODER, MISTRAL, DEEPSEEK = (BY_LABEL[name] for name in ("llama", "qwen3-coder", "mistral", "deepseek"))
GLM, NEMO, KIMI = (BY_LABEL[name] for name in ("glm", "mistral-nemo", "kimi-k2"))
Calls = Sequence[tuple[str, Mapping[str, Any]]]
XY: Calls = [("other", {"x": "y"})]
BARE: Calls = [("other", {})]
CALLS: Calls = (
    ("get_weather", {"city": 'Par"is\n{[ </x> é\\', "days": 3, "deep": {"a": [1, "}"], "b": None}, "on": True}),
    ("none", {}),
    ("other", {"x": "\n y \n"}),
)


@dataclasses.dataclass(frozen=True)
class Read:
    """The whole output."""

    text: str
    reasoning: str
    calls: list[tuple[str, Any]]
    ids: list[str]
    n_pieces: int  # with arguments


def types_of(calls: Calls) -> dict[str, Types]:
    found: dict[str, Types] = {}
    for name, arguments in calls:
        found[name] = {key: frozenset({type_of(value)}) for key, value in arguments.items()}
    return found


def summed(parts: Sequence[Parts]) -> Read:
    calls: dict[int, list[str]] = {}
    pieces = [piece for part in parts for piece in part.calls]
    for piece in pieces:
        call = calls.setdefault(piece.index, ["", "", ""])
        assert bool(piece.name) == bool(piece.id) == (not call[0]), "name and id come once, first"
        call[0], call[2] = call[0] + piece.name, call[2] + piece.id
        call[1] += piece.arguments
    assert [*calls] == [*range(len(calls))]
    return Read(
        "".join(part.text for part in parts),
        "".join(part.reasoning for part in parts),
        [(name, json.loads(arguments)) for name, arguments, _ in calls.values()],
        [call[2] for call in calls.values()],
        len(pieces),
    )


def read(
    text: str,
    syntax: Syntax | None = HERMES,
    *,
    calls: Calls = CALLS,
    cuts: Sequence[int] = (),
    thinking: Thinking | None = None,
    is_thinking: bool = False,
    is_parallel: bool = True,
) -> Read:
    numbers = itertools.count(1)
    reading = None
    if syntax:
        reading = CallReading(
            syntax=syntax, types=types_of(calls), is_parallel=is_parallel, new_id=lambda: f"id{next(numbers)}"
        )
    reader = AnswerReader(thinking, is_thinking=is_thinking, calls=reading)
    parts = [reader.push(text[start:end]) for start, end in itertools.pairwise([0, *cuts, len(text)])]
    return summed([*parts, reader.finish()])


def same_at_every_cut(text: str, syntax: Syntax | None = HERMES, **options: Any) -> Read:
    """The output for the whole text, for two pieces cut anywhere, and letter by letter."""
    whole = read(text, syntax, **options)
    for cuts in [*([at] for at in range(1, len(text))), range(1, len(text))]:
        cut = read(text, syntax, cuts=cuts, **options)
        assert dataclasses.replace(cut, n_pieces=whole.n_pieces) == whole, cuts
    return whole


# --- calls in every syntax --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.label)
def test_calls_are_read_as_they_are_written(syntax: Syntax) -> None:
    found = same_at_every_cut(write_calls(syntax, CALLS), syntax)
    assert found.calls == [*CALLS]
    assert found.text == found.reasoning == ""
    numbered = [f"functions.{name}:{number}" for number, (name, _) in enumerate(CALLS)]
    assert found.ids == (numbered if syntax.label == "kimi-k2" else ["id1", "id2", "id3"])


@pytest.mark.parametrize("syntax", MARKED, ids=lambda syntax: syntax.label)
def test_text_may_stand_before_and_behind(syntax: Syntax) -> None:
    text = f"Let me see <tool [T\n\n{write_calls(syntax, CALLS[:2])}\n\nDone."
    found = same_at_every_cut(text, syntax)
    assert found.calls == [*CALLS[:2]]
    assert found.text == "Let me see <tool [T\n\nDone."


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.label)
def test_arguments_are_handed_on_while_they_are_written(syntax: Syntax) -> None:
    calls = [("write", {"text": "word " * 200})]
    text = write_calls(syntax, calls)
    assert read(text, syntax, calls=calls, cuts=range(5, len(text), 5)).n_pieces > 150


_NAMES = st.text("abcXYZ019_-", min_size=1, max_size=12)
# Templates write strings between tags unescaped, so a string cannot contain its end tag.
_STRINGS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="<"), max_size=20)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=6,
)
_ARGUMENTS = st.dictionaries(_NAMES, _VALUES, max_size=4)


@settings(max_examples=thinned(150))
@given(st.sampled_from(SYNTAXES), st.dictionaries(_NAMES, _ARGUMENTS, min_size=1, max_size=3), st.data())
def test_any_calls_in_any_pieces(syntax: Syntax, tools: dict[str, dict[str, Any]], data: st.DataObject) -> None:
    calls = [*tools.items()]
    text = write_calls(syntax, calls)
    cuts = sorted(data.draw(st.lists(st.integers(1, max(1, len(text) - 1)), max_size=12)))
    found = read(text, syntax, calls=calls, cuts=cuts)
    assert found.calls == calls
    assert found.text == ""


@settings(max_examples=thinned(150))
@given(st.sampled_from(SYNTAXES), st.lists(st.text('<>/{}[]":, \nabtoolcf_=', max_size=12), max_size=8), st.data())
def test_any_text_comes_out_the_same_however_it_is_cut(syntax: Syntax, words: list[str], data: st.DataObject) -> None:
    """Random marks among brackets and letters: mostly no calls. Nothing may be lost, sent twice, or raise."""
    marks = [syntax.trigger, syntax.open, syntax.close, syntax.end, "<think>", "</think>", '{"name": "other", ']
    text = "".join(part for word in words for part in (word, data.draw(st.sampled_from(marks))))
    reader_of = {"thinking": data.draw(st.sampled_from([None, THINKING[0]])), "calls": CALLS}
    whole = _raw(text, syntax, (), **reader_of)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    assert _raw(text, syntax, cuts, **reader_of) == whole
    if not whole[2] and not reader_of["thinking"] and not syntax.begin:
        assert whole[0] == text


def _raw(text: str, syntax: Syntax, cuts: Sequence[int], *, thinking: Thinking | None, calls: Calls) -> Any:
    reading = CallReading(syntax=syntax, types=types_of(calls), new_id=lambda: "id")
    reader = AnswerReader(thinking, is_thinking=False, calls=reading)
    parts = [reader.push(text[start:end]) for start, end in itertools.pairwise([0, *cuts, len(text)])]
    parts.append(reader.finish())
    calls_text: dict[int, str] = {}
    for piece in (piece for part in parts for piece in part.calls):
        calls_text[piece.index] = (
            calls_text.get(piece.index, "") + piece.name + "\0" * bool(piece.name) + piece.arguments
        )
    return "".join(part.text for part in parts), "".join(part.reasoning for part in parts), calls_text


# --- as models write them too -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("syntax", "text", "calls"),
    [
        (HERMES, '<tool_call>{"arguments": {"x": "y"}, "name": "other"}</tool_call>', XY),
        (HERMES, '<tool_call>\n{"name": "other", "arguments": "{\\"x\\": \\"y\\"}"}', XY),
        (HERMES, '<tool_call>{"name": "other"}</tool_call>', BARE),
        (HERMES, '<tool_call>{"name": "other", "arguments": null}</tool_call>', BARE),
        (HERMES, '<tool_call>{"name": "other", "parameters": {}}</tool_call>', BARE),
        (HERMES, '<tool_call>{"name": "ot\\u0068er", "arguments": {}, "more": [{}]}</tool_call>', BARE),
        (HERMES, '<tool_call>{"name":"a","arguments":{}}\n{"name":"b","arguments":{}}</tool_call>', [("a", {})]),
        (HERMES, '<tool_call>{"name": "get\\_weather", "arguments": {}}</tool_call>', [("get_weather", {})]),
        (HERMES, '<tool_call>{"name": "a\\\\b\\"", "arguments": {}}</tool_call>', [('a\\b"', {})]),
        (HERMES, '<tool_call>{"name": "other", "arguments": ""}</tool_call>', BARE),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": "\n\ty\\\n"}}</tool_call>', [("f", {"x": "\n\ty\n"})]),
        (HERMES, '<tool_call>{"arguments": {"x": "\\ud83d"}, "name": "f"}</tool_call>', [("f", {"x": "\ud83d"})]),
        (HERMES, f'<tool_call>{{"name": "a", "arguments": {{}}</tool_call>{write_calls(HERMES, XY)}', [("a", {}), *XY]),
        (MISTRAL, '[TOOL_CALLS]other[ARGS]{"x":\n"a\nb"}', [("other", {"x": "a\nb"})]),
        (QWEN_CODER, "<function=b><parameter=l>[1e999]</parameter></function>", [("b", {"l": "[1e999]"})]),
        (QWEN_CODER, '<function=b><parameter=l>["\\ud83d"]</parameter></function>', [("b", {"l": ["\ud83d"]})]),
        (LLAMA, '{"type": "function", "name": "oth\\er", "parameters": {"x": "y"}}', XY),
        (LLAMA, '{"type": "function", "name": "other", "parameters": {"x": "y"}}', XY),
        (LLAMA, '\n{"function": "other", "parameters": {}}', BARE),
        (LLAMA, '{"name": "none", "parameters": {}}\n{"name": "other", "parameters": {}}', [CALLS[1], *BARE]),
        (NEMO, '[TOOL_CALLS] [{"name": "other", "arguments": {}, "id": "abcdefgh1"}]', BARE),
        (MISTRAL, '[TOOL_CALLS]other[CALL_ID]abcdefgh1[ARGS]{"x": "y"}', XY),
        (MISTRAL, "[TOOL_CALLS]other[ARGS] {}", BARE),
        (QWEN_CODER, "<tool_call><function=other><parameter=x>y</parameter></function></tool_call>", XY),
        (QWEN_CODER, "<tool_call>\n<function=other>\n</function>\n</tool_call>", BARE),
        (QWEN_CODER, "<function=other>\n<parameter=x>\ny\n</parameter>\n</function>\n</tool_call>", XY),
        (QWEN_CODER, f"<function=none></function>{write_calls(QWEN_CODER, XY)}", [CALLS[1], *XY]),
        (GLM, "<tool_call>other<arg_key>x</arg_key><arg_value>y</arg_value></tool_call>", XY),
        (KIMI, f"{KIMI.begin}<|tool_call_begin|>other:0<|tool_call_argument_begin|>{{}}", BARE),
    ],
)  # fmt: skip
def test_calls_that_differ_a_little(syntax: Syntax, text: str, calls: Calls) -> None:
    assert same_at_every_cut(text, syntax).calls == calls


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        (HERMES, "a <tool_call> in words, <tool_call>"),
        (HERMES, "<tool_call>[1, 2]</tool_call> and <tool_call>{}</tool_call>"),
        (HERMES, '<tool_call>{"city": "Paris"}</tool_call>'),
        (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "other", "argum'),
        (HERMES, '<tool_call>{"name": "a\\ud83d", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {}, "name": "a\\ud83d"}</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {"x": 1e999}, "name": "f"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "a\\uzzzz", "arguments": {}}</tool_call>'),
        (HERMES, "  leading and trailing blanks \n\n"),
        (HERMES, ""),
        (LLAMA, '{"city": "Paris"}'),
        (LLAMA, '{"name": "Ada", "age": 36}'),
        (LLAMA, '{"name": "unknown", "parameters": {}}'),
        (LLAMA, 'Well: {"name": "other", "parameters": {}}'),
        (LLAMA, "{ braces }"),
        (LLAMA, " \n"),
        (MISTRAL, "[TOOL_CALLS]" + "x" * (2 * NAME_CHARS_MAX)),
        (MISTRAL, "[TOOL_CALLS]other[ARGS]5"),
        (MISTRAL, "[TOOL_CALLS][ARGS]{}"),
        (QWEN_CODER, "<tool_call>\n<other=x></tool_call>"),
        (QWEN_CODER, "as in <function= name>, <func"),
        (QWEN_CODER, f"<tool_call><function={'x' * (2 * NAME_CHARS_MAX)}></function>"),
        (QWEN_CODER, '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'),
        (DEEPSEEK, "<｜tool▁calls▁begin｜>nothing"),
        (DEEPSEEK, "<｜tool▁calls▁begin｜><｜tool▁calls"),
    ],
)  # fmt: skip
def test_text_that_is_no_call_stays_text(syntax: Syntax, text: str) -> None:
    found = same_at_every_cut(text, syntax)
    assert (found.text, found.calls) == (text, [])


@pytest.mark.parametrize("text", ["<tool_calls>[]</tool_calls>", " <tool_calls>[\n]</tool_calls>\n"])
def test_a_section_without_calls_says_nothing(text: str) -> None:
    found = same_at_every_cut(f"Well.{text}", BY_LABEL["apriel"])
    assert (found.text.strip(), found.calls) == ("Well.", [])


def test_a_call_behind_a_false_start_is_found() -> None:
    text = '<tool_call>oh <tool_call>\n{"name": "none", "arguments": {}}\n</tool_call>'
    found = same_at_every_cut(text)
    assert (found.text, found.calls) == ("<tool_call>oh", [("none", {})])


def test_text_behind_a_call_without_its_last_bracket_is_passed_on() -> None:
    found = same_at_every_cut('<tool_call>{"name": "other", "arguments": {"x": "y"}\n</tool_call>\nDone.')
    assert (found.calls, found.text) == (XY, "Done.")


@pytest.mark.parametrize("blank", ["\u2028", "\u00a0", "\x0b"])
def test_any_blank_may_stand_between_calls_and_before_their_end(blank: str) -> None:
    body = '{"name": "other", "arguments": {"x": "y"}}'
    found = same_at_every_cut(f"[TOOL_CALLS][{body},{blank}{body}{blank}]{blank}Done.", BY_LABEL["mistral-nemo"])
    assert (found.calls, found.text) == ([*XY, *XY], "Done.")


@pytest.mark.parametrize("n_chars", [470, 2 * NAME_CHARS_MAX])
def test_a_key_of_any_length_ends_at_the_same_place_however_it_is_cut(n_chars: int) -> None:
    text = f"<tool_call>\n<function=other>\n<parameter={'k' * n_chars}>\ny\n</parameter>\n</function>\n</tool_call>"
    found = same_at_every_cut(text, QWEN_CODER)
    assert found.calls == ([("other", {"k" * n_chars: "y"})] if n_chars < NAME_CHARS_MAX * 2 else BARE)


def test_no_two_calls_have_one_id() -> None:
    twice = write_calls(KIMI, [*BARE] * 2).replace(":1", ":0")
    assert same_at_every_cut(twice, KIMI).ids == ["functions.other:0", "id1"]


@pytest.mark.parametrize(
    ("syntax", "text", "is_cut"),
    [
        (HERMES, '<tool_call>{"name": "other", "argu', False),
        (HERMES, '<tool_call>{"name": "other", "arguments": {', True),
        (HERMES, '<tool_call>{"name": "other", "arguments": {}', False),
        (HERMES, write_calls(HERMES, XY), False),
        (MISTRAL, "[TOOL_CALLS]other[ARGS]{", True),
        (QWEN_CODER, "<function=other><parameter=x>", True),
        (QWEN_CODER, "<function=other></function>", False),
    ],
)
def test_whether_a_call_was_cut(syntax: Syntax, text: str, is_cut: bool) -> None:
    reader = AnswerReader(None, is_thinking=False, calls=CallReading(syntax=syntax))
    reader.push(text)
    assert reader.has_cut_call is is_cut


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.label)
def test_a_required_call_that_is_cut_leaks_nothing(syntax: Syntax) -> None:
    whole = write_calls(syntax, XY)
    for n_chars in range(1, len(whole)):
        reading = CallReading(syntax=syntax, types=types_of(XY), is_required=True)
        reader = AnswerReader(None, is_thinking=False, calls=reading)
        parts = reader.push(whole[:n_chars]).with_more(reader.finish(is_cut=True))
        assert parts.text == "", whole[:n_chars]


def test_an_answer_that_ends_inside_a_call_has_sent_its_beginning() -> None:
    reader = AnswerReader(None, is_thinking=False, calls=CallReading(syntax=HERMES))
    (call,) = reader.push('<tool_call>\n{"name": "other", "arguments": {"x": "y').calls
    assert (call.name, call.arguments) == ("other", '{"x": "y')
    assert reader.finish() == Parts()


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.label)
def test_one_call_is_all_where_no_more_are_wanted(syntax: Syntax) -> None:
    text = write_calls(syntax, CALLS) + "\nand more"
    found = same_at_every_cut(text, syntax, is_parallel=False)
    assert (found.calls, found.text) == ([CALLS[0]], "")
    reader = AnswerReader(None, is_thinking=False, calls=CallReading(syntax=syntax, is_parallel=False))
    assert not reader.is_over
    reader.push(write_calls(syntax, [("none", {})]) if syntax.trigger else "")
    assert reader.is_over == bool(syntax.trigger)


def test_ids_fit_the_most_demanding_template() -> None:
    ids = {random_call_id() for _ in range(1_000)}
    assert len(ids) == 1_000
    assert all(len(each) == 9 and each.isalnum() and each.isascii() for each in ids)


# --- values between tags ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"integer"}, 5),
        ("5", {"number"}, 5),
        ("5", {"string"}, "5"),
        ("5", {"string", "null"}, "5"),
        ("null", {"string", "null"}, None),
        ("5", set(), 5),
        ("five", {"integer"}, "five"),
        ("five", set(), "five"),
        (" true ", {"boolean"}, True),
        ("True", {"boolean"}, True),
        ("None", {"null"}, None),
        ('{"a": [1.5]}', {"object"}, {"a": [1.5]}),
        ("[1", {"array"}, "[1"),
        ("NaN", {"number"}, "NaN"),
        ("5", {"array"}, 5),
        ("[" * 100_000, set(), "[" * 100_000),
    ],
)
def test_a_value_follows_its_schema(text: str, types: set[str], value: Any) -> None:
    found = json.loads(json_of(text, frozenset(types)))
    assert found == value
    assert type(found) is type(value)


def test_unknown_tools_and_arguments_are_passed_on_unchanged() -> None:
    call = [("unknown", {"a": "text", "b": 5, "c": [1]})]
    assert same_at_every_cut(write_calls(QWEN_CODER, call), QWEN_CODER, calls=()).calls == call


# --- thoughts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thinking", THINKING, ids=lambda thinking: thinking.open)
@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_is_separated_from_the_answer(thinking: Thinking, is_open: bool) -> None:
    call = write_calls(HERMES, CALLS[:1])
    opening = "" if is_open else f"\n{thinking.open}"
    text = f"{opening}\nwell <tool_call> {{\n\n hm </thi \n{thinking.close}\n\nHello.\n{call}"
    found = same_at_every_cut(text, thinking=thinking, is_thinking=is_open)
    assert found.reasoning == "well <tool_call> {\n\n hm </thi"
    assert found.text == "Hello."
    assert found.calls == [CALLS[0]]


def test_thoughts_before_a_call_without_a_mark() -> None:
    text = f"<think>so</think>\n\n{write_calls(LLAMA, CALLS[:1])}"
    found = same_at_every_cut(text, LLAMA, thinking=THINKING[0])
    assert (found.reasoning, found.text, found.calls) == ("so", "", [CALLS[0]])


@pytest.mark.parametrize(
    ("text", "is_open", "answer", "thought"),
    [
        ("<think>endless \n", False, "", "endless \n"),
        ("endless", True, "", "endless"),
        ("no thoughts </think>", False, "no thoughts </think>", ""),
        ("said first <think>x</think>", False, "said first <think>x</think>", ""),
        ("<thin", False, "<thin", ""),
        ("<think></think>hello", False, "hello", ""),
        ("<think>\n\n</think>\n\nhello \n", False, "hello \n", ""),
        ("a</think>b<think>c</think>", True, "b<think>c</think>", "a"),
    ],
)
def test_thoughts_that_do_not_end_or_begin_late(text: str, is_open: bool, answer: str, thought: str) -> None:
    found = same_at_every_cut(text, None, thinking=THINKING[0], is_thinking=is_open)
    assert (found.text, found.reasoning) == (answer, thought)


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_is_sound() -> None:
    assert len(BY_LABEL) == len(SYNTAXES)
    for syntax in SYNTAXES:
        assert syntax.trigger == syntax.trigger.strip()
        assert syntax.trigger or isinstance(syntax.body, ObjectBody), "only objects show without a mark"
        if isinstance(syntax.body, TaggedBody):
            assert syntax.body.value_end.strip()
            assert syntax.body.end or syntax.close, "more text ends the arguments"


@pytest.mark.parametrize("held", ["<tool_", "<tool_call>", '<tool_call>\n{"name": "oth'])
def test_a_call_that_is_cut_leaks_no_markup(held: str) -> None:
    reader = AnswerReader(None, is_thinking=False, calls=CallReading(syntax=HERMES))
    shown = reader.push(f"Let me see. {held}").text
    assert (shown + reader.finish(is_cut=True).text).strip() == "Let me see." + (" <tool_" if held == "<tool_" else "")
    assert reader.n_calls == 0
