"""The format of gpt-oss: answers are parsed at every cut, grammars constrain them, and chats are rendered."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayline.coordinator.answers.grammar import Wanted
from relayline.coordinator.answers.harmony import (
    HARMONY,
    HEADER_CHARS_MAX,
    HarmonyReader,
    cleaned,
    harmony_answer_grammar,
    harmony_calls_grammar,
    with_thoughts,
)
from relayline.coordinator.answers.reader import CallReading
from relayline.coordinator.answers.template import Conversation, _one_call_a_turn
from relayline.coordinator.http.requests.structure import Shape, grammar_of
from relayline.coordinator.sessions.generation import GenerationRequest, TokenEvent
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import EOS, write_no_tokenizer, write_tokenizer
from tests.coordinator.answers.test_answer_grammars import MARKS, Fits
from tests.coordinator.answers.test_answer_templates import CALL, WEATHER
from tests.support.http_support import MODEL, FakeGenerator, Served, serving
from tests.support.openai_client import openai_client

THOUGHT = "<|channel|>analysis<|message|>They ask for Rome.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
WORDS = "<|channel|>commentary<|message|>Let me look.<|end|>"
ARGUMENTS = '{"city": "Ro<m>e"}'
AFTER = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}"
AHEAD = f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}"

# The reader's result for an answer: text, reasoning, calls.
Read = tuple[str, str, list[tuple[str, str]]]


def read(answer: str, size: int = 10_000, *, tools: tuple[str, ...] = ("weather",), **options: Any) -> Read:
    """Read an answer in pieces of a size."""
    types = {name: {"city": frozenset({"string"})} for name in tools}
    reading = CallReading(syntax=HARMONY, types=types, is_parallel=options.pop("is_parallel", True))
    reader = HarmonyReader(reading if tools else None, **{"splits_reasoning": True, **options})
    parts = []
    for at in range(0, len(answer), size):
        parts.append(reader.push(answer[at : at + size]))
        if reader.is_over:
            break
    else:
        parts.append(reader.finish())
    calls: dict[int, tuple[str, str]] = {}
    for part in (call for each in parts for call in each.calls):
        name, arguments = calls.get(part.index, ("", ""))
        calls[part.index] = (name + part.name, arguments + part.arguments)
    return "".join(part.text for part in parts), "".join(part.reasoning for part in parts), list(calls.values())


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (f"{THOUGHT}{NEXT}{FINAL}Sunny, a<b.", ("Sunny, a<b.", "They ask for Rome.", [])),
        (f"{FINAL}Sunny.<|return|>", ("Sunny.", "", [])),
        (f"{THOUGHT}{NEXT}{AFTER}", ("", "They ask for Rome.", [("weather", ARGUMENTS)])),
        (f"{THOUGHT}{NEXT}{AHEAD}<|call|>", ("", "They ask for Rome.", [("weather", ARGUMENTS)])),
        (f"{WORDS}{NEXT}{AFTER}<|call|>", ("Let me look.", "", [("weather", ARGUMENTS)])),
        (f"{WORDS}{NEXT}{FINAL}Done.", ("Let me look.\n\nDone.", "", [])),
        (f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{FINAL}x", ("x", "They ask for Rome.\n\nThey ask for Rome.", [])),
        ("plain words", ("plain words", "", [])),
        ("x<|end|>y", ("x\n\ny", "", [])),
        ("<b>to=you</b>", ("<b>to=you</b>", "", [])),
        ("assume so", ("assume so", "", [])),
        (AFTER.replace(ARGUMENTS, "") + "<|call|>", ("", "", [("weather", "{}")])),
        (AFTER.replace(ARGUMENTS, "  "), ("", "", [("weather", "{}")])),
        (AFTER.replace(ARGUMENTS, " Rome"), (" Rome", "", [])),
        (AFTER.replace("functions.", ""), ("", "", [("weather", ARGUMENTS)])),
        (AFTER.replace("functions.weather", "browser.search"), ("", ARGUMENTS, [])),
        (AFTER.replace("weather", "another"), ("", "", [("another", ARGUMENTS)])),
        (f"{THOUGHT.removesuffix('<|end|>')}{FINAL}forgotten end", ("forgotten end", "They ask for Rome.", [])),
        (THOUGHT.removesuffix("me.<|end|>"), ("", "They ask for Ro", [])),
        (f"{FINAL}Sunny.<|en", ("Sunny.<|en", "", [])),
        (f"{THOUGHT}{NEXT}<|chan", ("", "They ask for Rome.", [])),
    ],
)
def test_an_answer_is_taken_apart(answer: str, expected: Read, size: int) -> None:
    assert read(answer, size) == expected


PIECES = (
    *("<|start|>", "assistant", "<|channel|>", "analysis", "commentary", "final", "to=functions.weather", "to=browser"),
    *("<|constrain|>json", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "{", "}", '"', "\\", "x", "<", "|", " "),
    *(THOUGHT, f"{NEXT}{FINAL}", AFTER, AHEAD, WORDS),
)


@given(
    st.lists(st.sampled_from(PIECES), min_size=1).map("".join), st.booleans(), st.booleans(), st.sampled_from((1, 3))
)
def test_cuts_change_nothing(answer: str, is_parallel: bool, splits_reasoning: bool, size: int) -> None:
    options = {"is_parallel": is_parallel, "splits_reasoning": splits_reasoning}
    assert read(answer, size, **options) == read(answer, len(answer), **options)


@pytest.mark.parametrize("size", [1, 10_000])
def test_thoughts_stay_where_nobody_wants_them_apart(size: int) -> None:
    assert read(f"{THOUGHT}{NEXT}{FINAL}Sunny.", size, splits_reasoning=False) == (f"{THOUGHT}\n\nSunny.", "", [])


@pytest.mark.parametrize("size", [1, 10_000])
def test_a_prompt_may_have_begun_the_thought(size: int) -> None:
    assert read(f"so.<|end|>{NEXT}{FINAL}x", size, is_thinking=True) == ("x", "so.", [])


def test_without_tools_nothing_is_a_call() -> None:
    assert read(f"{THOUGHT}{NEXT}{AFTER}", tools=()) == ("", f"They ask for Rome.\n\n{ARGUMENTS}", [])


def test_a_call_ends_the_turn() -> None:
    reader = HarmonyReader(CallReading(syntax=HARMONY, types={"weather": {}}), splits_reasoning=True)
    parts = reader.push(f"{AFTER}<|call|>{NEXT}{FINAL}more")
    assert (reader.is_over, reader.n_calls, reader.has_cut_call, parts.text) == (True, 1, False, "")
    single = HarmonyReader(CallReading(syntax=HARMONY, types={"weather": {}}, is_parallel=False), splits_reasoning=True)
    single.push(AFTER)
    assert single.is_over, "anything that followed would be another call"


def test_a_call_that_was_cut_is_known_as_such() -> None:
    reader = HarmonyReader(CallReading(syntax=HARMONY, types={"weather": {}}), splits_reasoning=True)
    reader.push(AFTER[:-3])
    assert reader.has_cut_call
    reader.finish()
    assert (reader.has_cut_call, reader.n_calls) == (True, 1)


def test_a_header_without_end_is_no_header() -> None:
    long = "<|channel|>" + "x" * HEADER_CHARS_MAX
    assert read(long)[0].endswith("x" * HEADER_CHARS_MAX)
    assert read(f"<|channel|>commentary to=functions.{'n' * 300}<|message|>{{}}") == ("", "{}", [])


# --- grammars ---------------------------------------------------------------------------------------------------------

HARMONY_MARKS = dict(zip(("<|end|>", "<|message|>", "<|start|>"), MARKS.values(), strict=False))
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
either_marks = pytest.mark.parametrize("marks", [{}, HARMONY_MARKS], ids=["text", "tokens"])


def calls_fit(marks: dict[str, int], **options: Any) -> Callable[[str], bool]:
    options = {"is_required": True, "is_parallel": False, **options}
    return Fits(harmony_calls_grammar(Wanted(syntax=HARMONY, tools={"weather": SCHEMA}, marks=marks, **options)), marks)


@either_marks
def test_a_call_that_must_come(marks: dict[str, int]) -> None:
    fits = calls_fit(marks)
    assert fits(AFTER)
    assert fits(f"{THOUGHT}{NEXT}{AFTER}")
    assert fits(f"{THOUGHT}{NEXT}{WORDS}{NEXT}{AFTER}")
    assert not fits(f"{THOUGHT}{NEXT}{FINAL}Sunny.")
    assert not fits(AFTER.replace("city", "town"))
    assert not fits(AFTER.replace("weather", "another"))
    assert calls_fit(marks, is_thinking=True)(f"so.<|end|>{NEXT}{AFTER}")


@either_marks
def test_a_call_that_may_come(marks: dict[str, int]) -> None:
    fits = calls_fit(marks, is_required=False)
    assert fits(AFTER)
    assert fits(f"{THOUGHT}{NEXT}{FINAL}Sunny.")
    assert not fits(AFTER.replace("city", "town"))
    shaped = calls_fit(marks, is_required=False, answer=grammar_of(Shape("guided_regex", "regex", ("yes|no",))))
    assert shaped(AFTER)
    assert shaped(f"{THOUGHT}{NEXT}{FINAL}yes")
    assert not shaped(f"{FINAL}perhaps")


@either_marks
def test_an_answer_of_a_shape_comes_behind_the_thoughts(marks: dict[str, int]) -> None:
    answer = grammar_of(Shape("guided_regex", "regex", ("yes|no",)))
    fits = Fits(harmony_answer_grammar(answer, marks, is_thinking=False), marks)
    assert fits(f"{FINAL}no")
    assert fits(f"{THOUGHT}{NEXT}{FINAL}yes")
    assert not fits("yes")
    assert not fits(f"{FINAL}perhaps")
    assert Fits(harmony_answer_grammar(answer, marks, is_thinking=True), marks)(f"so.<|end|>{NEXT}{FINAL}yes")


# --- chats ------------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
    "{% if m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('one of the two') }}{% endif %}"
    "{% if m.content or m.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@pytest.fixture(scope="module")
def conversation(tmp_path_factory: pytest.TempPathFactory) -> Conversation:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tok") / "tokenizer.gguf"))
    return Conversation(ChatTemplate(TEMPLATE), tokenizer)


def test_the_format_is_known_by_its_template(conversation: Conversation) -> None:
    style = conversation.style
    assert (conversation.is_harmony, style.syntax, style.writes_calls, style.shows_tools) == (True, HARMONY, True, True)
    assert not style.is_parallel
    assert not conversation.is_thinking("<|start|>assistant")


def test_thoughts_and_several_calls_of_earlier_turns_are_shown_as_the_model_knows_them(
    conversation: Conversation,
) -> None:
    other = {**CALL, "id": "second", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    chat = [
        {"role": "user", "content": "Rome and Oslo?"},
        {"role": "assistant", "content": "Look.", "reasoning_content": "Two.", "tool_calls": [CALL, other]},
        {"role": "tool", "tool_call_id": "second", "content": "rain"},
        {"role": "tool", "tool_call_id": CALL["id"], "content": "sun"},
    ]
    call = "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
    assert conversation.render(chat, [], {}) == (
        "<|start|>user<|message|>Rome and Oslo?<|end|><|start|>assistant<|channel|>analysis<|message|>Two.\n\nLook."
        f'<|end|>{call}{{"city": "Rome"}}<|call|><|start|>tool<|message|>sun<|end|>'
        f'{call}{{"city": "Oslo"}}<|call|><|start|>tool<|message|>rain<|end|><|start|>assistant'
    )
    assert json.dumps(WEATHER) in conversation.render(chat[:1], [WEATHER], {})


def test_results_without_ids_belong_to_calls_in_their_order() -> None:
    calls = [{"id": name, "function": {"name": name}} for name in "ab"]
    turn = {"role": "assistant", "content": "x", "tool_calls": calls}
    one, two, three = ({"role": "tool", "content": text} for text in ("1", "2", "3"))
    assert _one_call_a_turn([turn, one, two, three, {"role": "user", "content": "y"}]) == [
        {**turn, "tool_calls": calls[:1]}, one, {"role": "assistant", "tool_calls": calls[1:]}, two, three,
        {"role": "user", "content": "y"},
    ]  # fmt: skip
    named = {"role": "tool", "tool_call_id": "b", "content": "of b"}
    assert _one_call_a_turn([turn, named]) == [
        {**turn, "tool_calls": calls[:1]}, {"role": "assistant", "tool_calls": calls[1:]}, named,
    ]  # fmt: skip
    single = {**turn, "tool_calls": calls[:1]}
    assert _one_call_a_turn([single, one]) == [single, one]


def test_a_turn_without_calls_keeps_its_words() -> None:
    turn = {"role": "assistant", "content": "x", "reasoning_content": "y"}
    assert with_thoughts(turn) == turn


@pytest.fixture(scope="module")
def no_text(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_no_tokenizer(tmp_path_factory.mktemp("tok") / "tokenizer.gguf"))


@pytest.mark.parametrize(
    ("effort", "given", "expected"),
    [
        (None, {}, {}),
        ("high", {}, {"reasoning_effort": "high"}),
        ("minimal", {}, {"reasoning_effort": "low"}),
        ("xhigh", {"x": 1}, {"reasoning_effort": "high", "x": 1}),
        ("high", {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
    ],
)
def test_the_effort_is_passed_in_the_models_own_words(
    effort: str | None, given: Any, expected: Any, no_text: Tokenizer
) -> None:
    template = ChatTemplate(TEMPLATE + "{{ reasoning_effort }}")
    assert Conversation(template, no_text).variables(effort, given) == expected


def test_other_templates_know_other_efforts_or_none(no_text: Tokenizer) -> None:
    knows_some = Conversation(ChatTemplate("{{ reasoning_effort }}"), no_text)
    assert knows_some.variables("max", {}) == {"reasoning_effort": "max"}
    may_think = Conversation(ChatTemplate("{{ enable_thinking }}"), no_text)
    assert may_think.variables("none", {}) == {"enable_thinking": False}
    assert may_think.variables("low", {"enable_thinking": True}) == {"enable_thinking": True}
    assert Conversation(ChatTemplate("x"), no_text).variables("none", {}) == {}


# --- over HTTP --------------------------------------------------------------------------------------------------------

CONTROLS = ["<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|return|>", "<|call|>"]
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER]}


@contextlib.asynccontextmanager
async def client_of(answer: str, path: Path) -> AsyncIterator[tuple[openai.AsyncOpenAI, Served, Callable[[str], int]]]:
    """A model of this format that answers so, its marks being tokens, and what counts the tokens of a text."""
    tokenizer = Tokenizer.load(write_tokenizer(path / "tokenizer.gguf", controls=CONTROLS))
    tokens = tokenizer.encode(answer, add_special=False)

    def script(_: GenerationRequest) -> Iterator[TokenEvent]:
        yield from (TokenEvent(token, None, ()) for token in tokens)
        yield TokenEvent(EOS, None, (), "stop", is_end_token=True)

    template = TEMPLATE + "{# {{ reasoning_effort }} #}"
    async with (
        serving(tokenizer, FakeGenerator(script, ctx_tokens=4_096), template=template) as served,
        openai_client(served.url) as client,
    ):
        yield client, served, lambda text: len(tokenizer.encode(text, add_special=False))


async def test_a_call_and_the_reasoning_before_it(tmp_path: Path) -> None:
    answer, thought = f"{THOUGHT}{NEXT}{AFTER}", "They ask for Rome."
    async with client_of(answer, tmp_path) as (client, _, count):
        reply = await client.chat.completions.create(**ASKED, reasoning_effort="low")
        (choice,) = reply.choices
        assert choice.finish_reason == "tool_calls"
        assert (choice.message.content, choice.message.reasoning_content) == (None, thought)
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
        assert reply.usage.completion_tokens == count(answer), "over with the call's last bracket"
        assert reply.usage.completion_tokens_details.reasoning_tokens == count(thought) + 2
        stream = await client.chat.completions.create(**ASKED, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        parts = [part for delta in deltas for part in delta.tool_calls or []]
        assert "".join(part.function.arguments for part in parts) == ARGUMENTS
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == thought
        assert not any(delta.content for delta in deltas)


async def test_an_answer_has_content_reasoning_and_its_required_shape(tmp_path: Path) -> None:
    async with client_of(f"{THOUGHT}{NEXT}{FINAL}yes", tmp_path) as (client, served, _):
        plain = {key: value for key, value in ASKED.items() if key != "tools"}
        reply = await client.chat.completions.create(**plain, extra_body={"guided_choice": ["yes", "no"]})
        message = reply.choices[0].message
        assert (message.content, message.reasoning_content, message.tool_calls) == ("yes", "They ask for Rome.", None)
        (request,) = served.generator.requests
        assert "final" in request.sampling.grammar
        with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
            await client.chat.completions.create(**plain, reasoning_effort="a lot")


def test_raw_turns_come_back_clean(conversation: Conversation) -> None:
    """As sent by a client that kept a completion's text; the makers' template refuses marks in a turn's text."""
    raw = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Rome.<|return|>"
    chat = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": raw}]
    rendered = conversation.render([*chat, {"role": "user", "content": "And?"}], [], {})
    assert "<|start|>assistant<|channel|>final<|message|>Rome.<|end|><|start|>user" in rendered
    assert "Think." not in rendered  # of a finished turn
    found = cleaned(chat[1])
    assert (found["content"], found["reasoning_content"]) == ("Rome.", "Think.")
    assert cleaned({**chat[1], "reasoning_content": "Mine."})["reasoning_content"] == "Mine."
    assert "reasoning_content" not in cleaned({"role": "assistant", "content": f"{FINAL}Rome."})
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
    (tool_call,) = cleaned({"role": "assistant", "content": call})["tool_calls"]
    assert tool_call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    for untouched in ({"role": "user", "content": raw}, {"role": "assistant", "content": "Rome."}):
        assert cleaned(untouched) is untouched
