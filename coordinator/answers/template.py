"""Chats with tools as prompts, by the model's own template where that knows tools, and how the model answers.

Which syntax of calls a model has is found by letting its template write a turn in which tools were called. If it writes
no known syntax, or does not show tools, the tools are explained in words, with calls and results as text. This works
with any model, and a model that has learnt the most common syntax answers in it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from relayline.coordinator.answers.harmony import HARMONY, HARMONY_EFFORTS, THOUGHT, cleaned, is_harmony, with_thoughts
from relayline.coordinator.answers.marks import control_marks
from relayline.coordinator.answers.reader import AnswerReader, CallReading
from relayline.coordinator.answers.syntax import HERMES, SYNTAXES, THINKING, Syntax, Thinking, write_calls
from relayline.coordinator.text.chat import USUAL_FORM, CallForm, ChatTemplate, Message, content_text, object_arguments
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import InvalidRequestError

Tool = Mapping[str, Any]  # as clients send it: {"type": "function", "function": {"name": ..., ...}}

# The turn that templates are asked to write. Ids as the most demanding of them want.
_USER = {"role": "user", "content": "weather?"}
_CALLS = (("get_weather", {"city": "Paris", "days": 3}), ("get_time", {"zone": "CET"}))
_TYPES = {
    "get_weather": {"city": frozenset({"string"}), "days": frozenset({"integer"})},
    "get_time": {"zone": frozenset({"string"})},
}
_IDS = ("abcdefgh1", "abcdefgh2")
_TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": name,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": min(of), "description": key} for key, of in types.items()},
                "required": [*types],
            },
        },
    }
    for name, types in _TYPES.items()
]

_INTRODUCTION = (
    "You may call one or more functions to help with what the user asks. These are the functions, one JSON object a "
    "line:\n<tools>\n{tools}\n</tools>\n\nTo call a function, answer with its name and its arguments like this:\n{call}"
    "\nCall no function if none helps."
)
_EXAMPLE = ("NAME", {"ARGUMENT": "VALUE"})


@dataclasses.dataclass(frozen=True, slots=True)
class ToolStyle:
    """How a model's template writes tools and calls."""

    syntax: Syntax  # of calls; where the template writes none, the style described to the model in its prompt
    writes_calls: bool = False
    shows_tools: bool = False
    form: CallForm = USUAL_FORM
    is_parallel: bool = True  # it writes several calls in one turn


class Conversation:
    """One model's way of having tools and thoughts. Made once."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, style: ToolStyle | None = None) -> None:
        """`style` is how the template writes tools; without one, the template is rendered to find out."""
        self._template, self._tool_template = template, template.for_tools
        self.template_text = template.source
        source = template.source or ""
        self.is_harmony = is_harmony(source)
        known = (THOUGHT,) if self.is_harmony else THINKING
        self.thinking: Thinking | None = next((each for each in known if each.close in source), None)
        find_out = _harmony_style if self.is_harmony else _style_of
        self.style = style or find_out(self._tool_template)
        self.marks = control_marks(tokenizer, self.style.syntax, self.thinking)
        self._tokenizer, self._shown = tokenizer, frozenset(self.marks.values())

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token of an answer; of control tokens those that mark calls and thoughts have some."""
        return self._tokenizer.piece(token, special=token in self._shown)

    def variables(self, effort: str | None, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a template's variables for how much to think; those that a client gives itself count more."""
        source = f"{self._template.source} {self._tool_template.source}"
        if effort is None:
            return given
        if "reasoning_effort" in source:
            return {"reasoning_effort": HARMONY_EFFORTS.get(effort, effort) if self.is_harmony else effort, **given}
        return {"enable_thinking": False, **given} if effort == "none" and "enable_thinking" in source else given

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], variables: Mapping[str, Any]) -> str:
        """Return the prompt. Raises InvalidRequestError (param `messages`) where the template refuses the chat."""
        style = self.style
        if self.is_harmony:
            messages = [cleaned(message) for message in messages]
        if not tools and not any(_is_of_tools(message) for message in messages):
            return self._template.render(messages, variables)
        if not style.writes_calls:
            messages = [_in_words(message) for message in _merged(messages)]
        elif not style.is_parallel:
            messages = _one_call_a_turn(messages)
        if self.is_harmony:
            messages = [with_thoughts(message) for message in messages]
        if tools and style.shows_tools:
            variables = {**variables, "tools": list(tools)}
        elif tools:
            return self._explained(messages, tools, variables)
        return self._tool_template.render(messages, variables, style.form)

    def is_thinking(self, prompt: str, begun: str = "") -> bool:
        """Return whether a rendered prompt ends inside the model's thoughts. `begun`: the turn that it lets go on."""
        if self.thinking is None:
            return False
        opened = begun.rfind(self.thinking.open)
        is_within = opened >= 0 and self.thinking.close not in begun[opened:]
        return is_within or prompt.rstrip().endswith(self.thinking.open)

    def _explained(self, messages: Sequence[Message], tools: Sequence[Tool], variables: Mapping[str, Any]) -> str:
        style = self.style
        try:
            lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        except RecursionError:
            raise InvalidRequestError.of_field("tools", "a schema is nested too deeply") from None
        words = _INTRODUCTION.format(tools=lines, call=write_calls(style.syntax, [_EXAMPLE]))
        try:
            return self._tool_template.render(_with_words(messages, words, "system"), variables, style.form)
        except InvalidRequestError:  # it may know no system turns
            return self._tool_template.render(_with_words(messages, words, "user"), variables, style.form)


def _style_of(template: ChatTemplate) -> ToolStyle:
    try:
        asked = template.render([_USER], {"tools": _TOOLS})
    except InvalidRequestError:
        return ToolStyle(HERMES)
    shows_tools = all(name in asked for name in _TYPES)
    for content_is_none, arguments_as_text, n_calls in itertools.product((False, True), (False, True), (2, 1)):
        form = CallForm(arguments_as_text, content_is_none)
        written = _written(template, asked, n_calls, form)
        syntax = _syntax_of(written, n_calls) if written else None
        if syntax:
            return ToolStyle(syntax, True, shows_tools, form, is_parallel=n_calls > 1)
    return ToolStyle(HERMES)


def _harmony_style(template: ChatTemplate) -> ToolStyle:
    try:
        asked = template.render([_USER], {"tools": _TOOLS})
    except InvalidRequestError:
        asked = ""
    return ToolStyle(HARMONY, True, all(name in asked for name in _TYPES), is_parallel=False)


def _written(template: ChatTemplate, asked: str, n_calls: int, form: CallForm) -> str:
    """Return a template's text for a turn with calls, from the start of the assistant's turn; "" if it refuses."""
    calls = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for (name, arguments), id_ in zip(_CALLS[:n_calls], _IDS, strict=False)
    ]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        whole = template.render([_USER, turn], {"tools": _TOOLS, "add_generation_prompt": False}, form)
    except InvalidRequestError:
        return ""
    # A prompt may open thoughts that the turn has not, with a mark that begins like that of a call.
    n_alike = next((at for at, (one, other) in enumerate(zip(asked, whole, strict=False)) if one != other), len(asked))
    last = max(whole.rfind("<", 0, n_alike), whole.rfind("[", 0, n_alike))
    is_cut = last >= 0 and not {">", "]"} & {*whole[last:n_alike]}
    return whole[last if is_cut else n_alike :]


def _syntax_of(written: str, n_calls: int) -> Syntax | None:
    """Return the syntax in which a turn's calls are written: blank by blank if there is one, else any that reads it."""
    exact = [syntax for syntax in SYNTAXES if syntax.trigger and write_calls(syntax, _CALLS[:n_calls]) in written]
    return next((syntax for syntax in (*exact, *SYNTAXES) if _reads(syntax, written, n_calls)), None)


def _reads(syntax: Syntax, written: str, n_calls: int) -> bool:
    reader = AnswerReader(None, is_thinking=False, calls=CallReading(syntax=syntax, types=_TYPES))
    parts = (*reader.push(written).calls, *reader.finish().calls)
    try:
        found = [(part.name, json.loads(part.arguments)) for part in parts]
    except ValueError:
        return False
    return found == [*_CALLS[:n_calls]]


def _is_of_tools(message: Message) -> bool:
    return message.get("role") == "tool" or bool(message.get("tool_calls"))


def _one_call_a_turn(messages: Sequence[Message]) -> list[Message]:
    """Return the chat with a turn for each call, its result behind it: as a model that calls one by one knows it."""
    turns: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            turns.append(message)
            continue
        n_results = next((n for n, each in enumerate(messages[at:]) if each.get("role") != "tool"), len(messages) - at)
        results, at = list(messages[at : at + n_results]), at + n_results
        for number, call in enumerate(calls):
            plain = {key: value for key, value in message.items() if key not in ("content", "reasoning_content")}
            turns.append({**(plain if number else message), "tool_calls": [call]})
            own = next((each for each in results if each.get("tool_call_id") == call.get("id")), None)
            own = own or (results[0] if results and not any(_names_a_call(each, calls) for each in results) else None)
            if own is not None:
                results.remove(own)
                turns.append(own)
        turns += results
    return turns


def _names_a_call(result: Message, calls: Sequence[Mapping[str, Any]]) -> bool:
    return any(result.get("tool_call_id") == call.get("id") for call in calls)


def _in_words(message: Message) -> Message:
    """Return a message with its calls, or a tool's result, as text."""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text(message)}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [(call["function"]["name"], object_arguments(call["function"])) for call in message["tool_calls"]]
    try:
        texts = [text for text in (_text(message), write_calls(HERMES, calls)) if text]
    except RecursionError:
        raise InvalidRequestError.of_field("messages", "arguments are nested too deeply") from None
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**plain, "content": "\n".join(texts)}


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Join results that follow one another: many templates want user and assistant in turns."""
    merged: list[Message] = []
    for is_result, some in itertools.groupby(messages, lambda message: message.get("role") == "tool"):
        if is_result:
            between = "\n</tool_response>\n<tool_response>\n"  # see _in_words
            merged.append({"role": "tool", "content": between.join(_text(message) for message in some)})
        else:
            merged += some
    return merged


def _with_words(messages: Sequence[Message], words: str, role: str) -> list[Message]:
    first = messages[0]
    if role == "user" and first.get("role") == "user":
        return [{**first, "content": f"{words}\n\n{_text(first)}"}, *messages[1:]]
    if role == "system" and first.get("role") in ("system", "developer"):
        return [{**first, "content": f"{_text(first)}\n\n{words}"}, *messages[1:]]
    return [{"role": role, "content": words}, *messages]


def _text(message: Message) -> str:
    return content_text(message.get("content"), "messages")
