"""Answers in harmony, the format of gpt-oss: a series of messages, each with a channel and perhaps a recipient.

    <|channel|>analysis<|message|>They ask for the weather.<|end|><|start|>assistant
    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>

The `analysis` channel is reasoning, a message to a function is a call, and everything else is text. The model ends its
turn with `<|call|>` or `<|return|>`, which are end tokens. Its template writes the recipient before the channel, and so
does the model at times. Source: the format's description in OpenAI's cookbook, and llama.cpp's `llama-vocab.cpp` for
its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from relayline.coordinator.answers.calls import NAME_CHARS_MAX, NamedCall, NotACallError
from relayline.coordinator.answers.grammar import ANYTHING, Rules, Wanted, with_answer
from relayline.coordinator.answers.reader import CallPart, CallReading, Gathered, Parts
from relayline.coordinator.answers.syntax import NamedBody, Syntax, Thinking
from relayline.coordinator.text.detokenize import overlap

HARMONY = Syntax(
    label="harmony",
    open="<|start|>assistant<|channel|>commentary to=functions.",
    close="<|call|>",
    body=NamedBody(name_end=" <|constrain|>json<|message|>", prefix="functions."),
)
THOUGHT = Thinking("<|channel|>analysis<|message|>", "<|end|>")
HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # it knows three
HEADER_CHARS_MAX = 512  # of a message; a longer one is none
THOUGHTS_MAX = 4  # messages before an answer that a grammar leads
_CALL = NamedBody(name_end="<|message|>")
_MESSAGE, _CALL_END = "<|message|>", ("<|call|>", "<|return|>")
_NEXT = ("<|start|>", "<|channel|>")  # of another message, where the end of this one was forgotten
_ENDS = ("<|end|>", *_CALL_END, *_NEXT)
# Its first word, or what that may become: a mark, a recipient, or the role behind <|start|>.
_HEADER = re.compile(r"\s*(?:<\||to=|assistant\b)")
_BEGUN_HEADER = re.compile(r"\s*(?:<?|t|to|a(?:s(?:s(?:i(?:s(?:t(?:a(?:n(?:t)?)?)?)?)?)?)?)?)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def is_harmony(template: str) -> bool:
    """Return whether a chat template writes this format."""
    return all(mark in template for mark in ("<|start|>assistant", "<|channel|>", _MESSAGE))


def with_thoughts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a turn with tool calls, with its reasoning where the template looks for it.

    The template also takes text ahead of a call for reasoning, and refuses turns with both.
    """
    thought = message.get("reasoning_content")
    if not message.get("tool_calls") or not thought or message.get("thinking"):
        return message
    content = message.get("content")
    return {
        **message,
        "content": "",
        "thinking": f"{thought}\n\n{content}" if isinstance(content, str) and content else thought,
    }


class HarmonyReader:
    """Takes one answer apart, as `AnswerReader` does those of other models."""

    def __init__(self, reading: CallReading | None, *, splits_reasoning: bool, is_thinking: bool = False) -> None:
        """`reading` None: no tools are on offer. Thoughts stay in the text unless they are to be split off.

        `is_thinking`: the prompt has begun a thought.
        """
        self._reading, self._splits = reading, splits_reasoning
        self._held = ""
        # Of the message that is read: "thought", "text" or "call"; empty: its header comes first.
        self._kind = "thought" if is_thinking else ""
        self._name, self._call = "", NamedCall(_CALL)  # while a call is read
        self._since = ""  # text for the function, until a reader sees the call
        self._is_cut = False
        self._new = Gathered()
        self._is_new = False  # no part of the message has been passed on yet
        self._has_text = self._has_reasoning = False
        self.n_calls = 0
        self.is_over = False

    @property
    def is_thinking(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        return self._kind == "thought"

    @property
    def has_cut_call(self) -> bool:
        """Whether a call has begun whose arguments are not complete."""
        return self._is_cut or (self._kind == "call" and not self._call.is_whole)

    def push(self, text: str) -> Parts:
        """Take the next text."""
        self._held += text
        while self._held and not self.is_over and (self._read_body() if self._kind else self._read_header()):
            pass
        return self._new.taken()

    def finish(self, *, is_cut: bool = False) -> Parts:
        """Return the held text, when no more text follows."""
        if self._kind:
            self._take(self._held)
            self._is_cut = bool(self._call.name) and self.has_cut_call
            self._end_message()
        elif self._held.strip() and not _HEADER.match(self._held):
            self._say(self._held)
        self._held = ""
        return self._new.taken()

    # Each step below reads on. It returns whether another may follow at once; False: more text is needed.

    def _read_header(self) -> bool:
        header, mark, behind = self._held.partition(_MESSAGE)
        if not mark and _BEGUN_HEADER.fullmatch(self._held):
            return False
        is_header = _HEADER.match(header) is not None and len(header) <= HEADER_CHARS_MAX
        if is_header and not mark:
            return False
        if is_header:
            self._begin(header)
            self._held = behind
        else:  # words without a message around them
            self._kind, self._is_new = "text", True
            if self._held.startswith("<|"):  # which would end them, as the beginning of a mark
                self._take("<|")
                self._held = self._held[2:]
        return True

    def _begin(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        full_name = recipient[1] if recipient else ""
        name = full_name.removeprefix("functions.")
        self._is_new = True
        is_offered = self._reading is not None and (name != full_name or name in self._reading.types)
        if is_offered and 0 < len(name) <= NAME_CHARS_MAX:
            self._kind, self._name, self._call, self._since = "call", name, NamedCall(_CALL), ""
            self._call.push(f"{name}{_MESSAGE}")
            return
        # Messages to tools that are not on offer are not meant for the reader of the answer.
        is_thought = name or (channel is not None and channel[1] == "analysis")
        self._kind = "thought" if is_thought else "text"
        if is_thought and not self._splits:
            self._say(f"{header.strip()}{_MESSAGE}")

    def _read_body(self) -> bool:
        found = [(at, mark) for mark in _ENDS if (at := self._held.find(mark)) >= 0]
        if not found:
            n_held = max(overlap(self._held, mark) for mark in _ENDS)
            text = self._held[: len(self._held) - n_held]
            self._held = self._held[len(text) :]
            self._take(text)
            return False
        at, mark = min(found)
        text, self._held = self._held[:at], self._held[at + (0 if mark in _NEXT else len(mark)) :]
        self._take(text)
        was_call = self._kind == "call"
        self._end_message()
        # Calls end a turn, also where the vocabulary does not say so.
        self.is_over = self.is_over or (was_call and mark in _CALL_END)
        return True

    def _take(self, text: str) -> None:
        if self._kind == "call":
            self._take_arguments(text)
        elif self._kind == "thought" and self._splits:
            self._think(text)
        else:
            self._say(text)

    def _take_arguments(self, text: str) -> None:
        call = self._call
        if call.is_whole or not text:
            return
        is_new = not call.name
        try:
            arguments = call.push(text)
        except NotACallError:
            self._kind = "text"
            self._say(self._since + text)
            return
        if not call.name:
            self._since += text
        elif is_new:
            self._tell(arguments)
        elif arguments:
            self._new.calls.append(CallPart(self.n_calls - 1, arguments))
        assert self._reading is not None
        self.is_over = self._call.is_whole and not self._reading.is_parallel

    def _tell(self, arguments: str) -> None:
        assert self._reading is not None
        self._new.calls.append(CallPart(self.n_calls, arguments, self._name, self._reading.new_id()))
        self.n_calls += 1

    def _end_message(self) -> None:
        if self._kind == "thought" and not self._splits:
            self._say("<|end|>")
        elif self._kind == "call" and not self._call.name:
            self._tell("{}")  # nothing was said to it: it takes no arguments
        self._kind, self._call = "", NamedCall(_CALL)

    def _say(self, text: str) -> None:
        if text and self._is_new and self._has_text:
            self._new.text.append("\n\n")  # between earlier text and the text that follows
        self._has_text, self._is_new = self._has_text or bool(text), self._is_new and not text
        self._new.text.append(text)

    def _think(self, text: str) -> None:
        if text and self._is_new and self._has_reasoning:
            self._new.reasoning.append("\n\n")
        self._has_reasoning, self._is_new = self._has_reasoning or bool(text), self._is_new and not text
        self._new.reasoning.append(text)


def harmony_calls_grammar(wanted: Wanted) -> str:
    """Return the grammar of an answer that has to call a tool, or may and then has to do it right."""
    rules = Rules(wanted.marks)
    tools = [
        rules.add(f"tool_{number}: {rules.text(f'{name} <|constrain|>json{_MESSAGE}')} {rules.json(schema)}")
        for number, (name, schema) in enumerate(wanted.tools.items())
    ]
    call = f"{rules.text('<|channel|>commentary to=functions.')} ({' | '.join(tools)})"
    before = _before(rules, wanted.is_thinking)
    if wanted.is_required:
        return rules.whole(f"{before} {call}")
    final = f"{rules.text(f'<|channel|>final{_MESSAGE}')} {'@answer' if wanted.answer else ANYTHING}"
    whole = rules.whole(f"{before} ({call} | {final})")
    return with_answer(whole, wanted.answer) if wanted.answer else whole


def harmony_answer_grammar(grammar: str, marks: Mapping[str, int], *, is_thinking: bool) -> str:
    """Return a grammar for the final message of an answer; the reasoning before it is free."""
    rules = Rules(marks)
    before = _before(rules, is_thinking)
    return with_answer(rules.whole(f"{before} {rules.text(f'<|channel|>final{_MESSAGE}')} @answer"), grammar)


def _before(rules: Rules, is_thinking: bool) -> str:
    """Return the terms of the parts before a call: thoughts, and text."""
    end = f"{rules.until('<|end|>')} {rules.text('<|start|>assistant')}"
    channel = " | ".join(rules.text(f"<|channel|>{name}{_MESSAGE}") for name in ("analysis", "commentary"))
    return f"{end if is_thinking else ''} (({channel}) {end}){{0,{THOUGHTS_MAX}}}"


def cleaned(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an assistant's raw turn, with its channels in the text, as a turn with separate parts.

    Clients keep such turns from completions without a chat. The model's template refuses them.
    """
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str) or "<|channel|>" not in content:
        return message
    reader = HarmonyReader(CallReading(syntax=HARMONY, types={}), splits_reasoning=True)
    parts = (reader.push(content), reader.finish())
    found = {**message, "content": "".join(each.text for each in parts)}
    thought = "".join(each.reasoning for each in parts)
    if thought and not message.get("reasoning_content"):
        found["reasoning_content"] = thought
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for part in (part for each in parts for part in each.calls):
        names[part.index] = names.get(part.index, "") + part.name
        arguments[part.index] = arguments.get(part.index, "") + part.arguments
    if names and not message.get("tool_calls"):
        found["tool_calls"] = [
            {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": arguments[at]}}
            for at, name in names.items()
        ]
    return found
