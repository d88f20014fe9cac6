"""Splits an answer's text, piece by piece, into reasoning, text and tool calls. Pure. Text that was passed on is never
taken back. The whole output is the same however the input is cut into pieces. Text that may begin a mark is held until
more text decides. So are blanks, which mean nothing between reasoning and calls. Text that only looks like a call is
passed on as text.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from relayline.coordinator.answers.calls import CallReader, NamedCall, NotACallError, ObjectCall
from relayline.coordinator.answers.syntax import NamedBody, ObjectBody, Syntax, Thinking
from relayline.coordinator.answers.tagged_calls import TaggedCall, Types
from relayline.coordinator.text.detokenize import overlap

CALL_ID_CHARS = 9  # what templates of Mistral's models demand; others take any
_SEPARATORS = re.compile(r"[\s,;\[\]]*")  # between calls, by all syntaxes together


def random_call_id() -> str:
    """Return the id of a call: letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(CALL_ID_CHARS))


@dataclasses.dataclass(frozen=True, slots=True)
class CallPart:
    """The part of a call that one piece of text adds. Name and id come with its first part."""

    index: int  # of the call in its answer
    arguments: str = ""  # JSON text
    name: str = ""
    id: str = ""
    is_custom: bool = False  # its tool takes free text: `arguments` are that

    def arguments_object(self) -> Any:
        """Return the arguments of a whole call as an object; those that were cut are none."""
        try:
            return json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return {}


class Parts(NamedTuple):
    """The part of an answer that one piece of text adds."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()

    def with_more(self, more: Parts) -> Parts:
        """Return these parts and then those."""
        return Parts(self.text + more.text, self.reasoning + more.reasoning, self.calls + more.calls)


class Gathered:
    """What has been read of an answer, and not yet passed on."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[CallPart] = []

    def taken(self) -> Parts:
        """Return all of it, and begin anew."""
        parts = Parts("".join(self.text), "".join(self.reasoning), tuple(self.calls))
        self.text, self.reasoning, self.calls = [], [], []
        return parts


class Reader(Protocol):
    """Takes one answer apart, piece by piece."""

    n_calls: int
    is_over: bool  # nothing that may still come belongs to the answer

    @property
    def is_thinking(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""

    @property
    def has_cut_call(self) -> bool:
        """Whether a call has begun whose arguments are not complete."""

    def push(self, text: str) -> Parts:
        """Take the next text."""

    def finish(self, *, is_cut: bool = False) -> Parts:
        """Return the held text, when no more text follows. `is_cut`: the answer ended only for want of room."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallReading:
    """How calls are found."""

    syntax: Syntax
    types: Mapping[str, Types] = dataclasses.field(default_factory=dict)  # of the tools on offer, by their names
    is_parallel: bool = True  # otherwise the answer is over after one call
    is_required: bool = False  # the answer is calls, and nothing else after the thoughts
    new_id: Callable[[], str] = random_call_id


_State = Literal["start", "thinking", "text", "calls", "call", "behind"]


class AnswerReader:
    """Takes one answer apart."""

    def __init__(self, thinking: Thinking | None, *, is_thinking: bool, calls: CallReading | None) -> None:
        """`is_thinking`: the prompt has opened the model's thoughts already. `thinking` None: it marks none."""
        self._thinking, self._reading = thinking, calls
        self._may_think = thinking is not None
        self._state: _State = "thinking" if thinking and is_thinking else "start"
        self._steps: Mapping[_State, Callable[[], bool]] = {
            "start": self._start,
            "thinking": self._read_thoughts,
            "text": self._read_text,
            "calls": self._find_call,
            "call": self._read_call,
            "behind": self._leave_call,
        }
        self._held = ""
        self._mark = ""  # what announced calls, blanks before it included
        self._since = ""  # text since then, until a call's name is known
        self._call: CallReader | None = None
        self._new = Gathered()
        self._has_text = self._has_reasoning = self._has_thought = False
        self._ids: set[str] = set()
        self.n_calls = 0
        self.is_over = False  # nothing that may still come belongs to the answer

    @property
    def is_thinking(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        return self._state == "thinking"

    @property
    def has_cut_call(self) -> bool:
        """Whether a call has begun whose arguments are not complete."""
        return self._state == "call" and self._call is not None and bool(self._call.name) and not self._call.is_whole

    def push(self, text: str) -> Parts:
        """Take the next text."""
        self._held += text
        while self._held and not self.is_over and self._steps[self._state]():
            pass
        return self._new.taken()

    def finish(self, *, is_cut: bool = False) -> Parts:
        """Return the held text, when no more text follows. `is_cut`: the mark of a cut call is not text."""
        if self._state == "thinking":
            self._think(self._held)
        elif is_cut and self._reading and (self._reading.is_required or self._is_in_marked_call()):
            pass
        elif not self.n_calls:
            self._say(f"{self._mark}{self._since}{self._held}")
        elif self._state == "text" or (self._state == "call" and not (self._call and self._call.name)):
            self._say(f"{self._mark}{self._since}{self._held}".rstrip())
        self._held = self._mark = self._since = ""
        return self._new.taken()

    def _is_in_marked_call(self) -> bool:
        return self._state in ("calls", "call") and self._reading is not None and bool(self._reading.syntax.trigger)

    # Each step below reads on in its state. It returns whether another may follow at once; False: more text is needed.

    def _start(self) -> bool:
        begun = self._held.lstrip()
        if self._thinking and self._may_think:
            if begun.startswith(self._thinking.open):
                self._held, self._state = begun[len(self._thinking.open) :], "thinking"
                return True
            if self._thinking.open.startswith(begun):
                return False
        if self._reading and not self._reading.syntax.trigger:
            if not begun:
                return False
            if begun[0] == "{":
                self._announce(self._held[: len(self._held) - len(begun)], begun)
                return True
        self._state = "text"
        return True

    def _read_thoughts(self) -> bool:
        assert self._thinking is not None
        before, mark, behind = self._held.partition(self._thinking.close)
        if mark:
            self._think(before.rstrip())
            self._held, self._state = behind, "start"
            self._may_think, self._has_thought = False, True
            return True
        self._hold_back((self._thinking.close,), self._think)
        return False

    def _read_text(self) -> bool:
        trigger = self._reading.syntax.trigger if self._reading else ""
        if not trigger:
            self._say(self._held)
            self._held = ""
            return False
        bare_open = self._reading.syntax.bare_open if self._reading else ""
        marks = (trigger, bare_open) if bare_open else (trigger,)
        mark = min(marks, key=lambda each: self._held.find(each) % (len(self._held) + 1))
        before, mark, behind = self._held.partition(mark)
        if not mark:
            self._hold_back(marks, self._say)
            return False
        content = before.rstrip()
        self._say(content)
        self._announce(before[len(content) :] + mark, behind, is_bare=mark == bare_open)
        return True

    def _hold_back(self, marks: Sequence[str], tell: Callable[[str], None]) -> None:
        """Pass on all held text except an end that is blank or may begin a mark."""
        n_held = max(overlap(self._held, mark) for mark in marks)
        bare = self._held[: len(self._held) - n_held].rstrip()
        tell(bare)
        self._held = self._held[len(bare) :]

    def _announce(self, mark: str, behind: str, *, is_bare: bool = False) -> None:
        assert self._reading is not None
        self._mark, self._since, self._held = mark, "", behind
        # The mark is a call's own where none announces all of them.
        if mark.strip() and not self._reading.syntax.begin:
            self._call, self._state = _call_reader(self._reading), "call"
            if is_bare:
                self._call.push(mark.strip())
        else:
            self._state = "calls"

    def _find_call(self) -> bool:
        """Find the next call, if there is one."""
        assert self._reading is not None
        syntax = self._reading.syntax
        opening, end = syntax.open.rstrip() or "{", syntax.end.strip(" \n[]")
        text = _SEPARATORS.sub("", self._held, count=1)
        skipped = self._held[: len(self._held) - len(text)]
        if text.startswith(opening):
            behind = text[len(opening) :] if syntax.open else text
            self._since += skipped + text[: len(text) - len(behind)]
            self._held = behind
            self._call, self._state = _call_reader(self._reading), "call"
            return bool(behind)
        if end and text.startswith(end):
            self._held, self._state = text[len(end) :], "text"
            self._forget_mark()
            return True
        if not text:
            self._since, self._held = self._since + skipped, ""
            return False
        if opening.startswith(text) or end.startswith(text):
            return False
        if not self._mark:  # what calls there are have ended
            self._held, self._since = self._since + self._held, ""
            self._held = self._without(syntax.end.strip())
        self._give_up()
        return True

    def _read_call(self) -> bool:
        assert self._call is not None
        text, self._held = self._held, ""
        is_new = not self._call.name
        try:
            arguments = self._call.push(text)
        except NotACallError:
            self._since += text
            self._give_up()
            return True
        if not self._call.name:
            self._since += text
            return False
        if is_new:
            self._forget_mark()
            self._new.calls.append(CallPart(self.n_calls, arguments, self._call.name, self._id_of(self._call)))
            self.n_calls += 1
        elif arguments:
            self._new.calls.append(CallPart(self.n_calls - 1, arguments))
        if self._call.rest is None:
            return False
        self._held, self._state = self._call.rest, "behind"
        self.is_over = self._reading is not None and not self._reading.is_parallel
        return True

    def _id_of(self, call: CallReader) -> str:
        """Return the model's own id if it has given it to no other call, else a new one."""
        assert self._reading is not None
        found = call.id if call.id and call.id not in self._ids else self._reading.new_id()
        self._ids.add(found)
        return found

    def _leave_call(self) -> bool:
        assert self._reading is not None
        close, text = self._reading.syntax.close.strip(), self._held.lstrip()
        if close and close.startswith(text) and text != close:
            return False
        self._held, self._state = self._without(close), "calls"
        return True

    def _without(self, mark: str) -> str:
        """Return the held text without the mark, and without the blanks before it that may begin one."""
        text = self._held.lstrip()
        return text[len(mark) :] if mark and text.startswith(mark) else self._held

    def _give_up(self) -> None:
        """Treat the announcement of calls, and the text since then, as plain text."""
        self._say(self._mark)
        self._held, self._state = self._since + self._held, "text"
        self._forget_mark()

    def _forget_mark(self) -> None:
        self._mark = self._since = ""

    def _say(self, text: str) -> None:
        if not self._has_text and (self.n_calls or self._has_thought):
            text = text.lstrip()
        if text:
            self._new.text.append(text)
            self._has_text = True

    def _think(self, text: str) -> None:
        if not self._has_reasoning:
            text = text.lstrip()
        if text:
            self._new.reasoning.append(text)
            self._has_reasoning = True


def _call_reader(reading: CallReading) -> CallReader:
    """Return a reader of the next call."""
    syntax, types = reading.syntax, reading.types
    if isinstance(syntax.body, ObjectBody):
        # Where no mark announces them, only the names on offer tell calls from other objects.
        return ObjectCall(syntax.body, None if syntax.trigger else frozenset(types), syntax.close)
    if isinstance(syntax.body, NamedBody):
        return NamedCall(syntax.body)
    return TaggedCall(syntax.body, syntax.close, lambda name: types.get(name, {}))
