"""The form of the answers to one chat request: the grammar that they follow, and the reader that takes them apart."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import cast

from relayline.coordinator.answers.custom_calls import CustomCallReader
from relayline.coordinator.answers.grammar import (
    Schema,
    Wanted,
    after_thoughts,
    calls_grammar,
    has_broken_pattern,
    lean,
    weaker,
)
from relayline.coordinator.answers.harmony import HarmonyReader, harmony_answer_grammar, harmony_calls_grammar
from relayline.coordinator.answers.reader import AnswerReader, CallReading, Reader, random_call_id
from relayline.coordinator.answers.syntax import Thinking
from relayline.coordinator.answers.template import Conversation
from relayline.coordinator.http.requests.plan import Plan
from relayline.coordinator.http.requests.structure import check_size, fault_of, grammar_of, in_a_line
from relayline.coordinator.http.requests.tools import Offered
from relayline.wire.common.bounds import GRAMMAR_BYTES_MAX
from relayline.wire.common.errors import InvalidRequestError

_ANY_ARGUMENTS: Schema = {"type": "object"}


@dataclasses.dataclass(frozen=True, slots=True)
class ChatForm:
    """The form of one request's answers."""

    conversation: Conversation
    offered: Offered | None
    splits_reasoning: bool
    is_thinking: bool  # the prompt has begun the model's thoughts
    new_call_id: Callable[[], str] = random_call_id

    @property
    def thinking(self) -> Thinking | None:
        """The marks of reasoning that is shown separately."""
        return self.conversation.thinking if self.splits_reasoning else None

    def is_parallel(self, offered: Offered) -> bool:
        """Return whether an answer may hold several calls; some templates refuse the turn after such a one."""
        return offered.is_parallel and self.conversation.style.is_parallel

    def new_reader(self) -> Reader | None:
        """Return what takes one answer apart, None where there is nothing to find in it."""
        thinking, offered, calls = self.thinking, self.offered, None
        if offered is not None:
            calls = CallReading(
                syntax=self.conversation.style.syntax,
                types=offered.types,
                is_parallel=self.is_parallel(offered),
                is_required=offered.is_required,
                new_id=self.new_call_id,
            )
        reader: Reader
        if self.conversation.is_harmony:
            reader = HarmonyReader(calls, splits_reasoning=self.splits_reasoning, is_thinking=self.is_thinking)
        elif thinking is None and calls is None:
            return None
        else:
            reader = AnswerReader(thinking, is_thinking=self.is_thinking, calls=calls)
        return CustomCallReader(reader, offered.custom) if offered is not None and offered.custom else reader


def chat_grammar(plan: Plan, form: ChatForm) -> str:
    """Return the grammar that leads the answers, "" for none. May take a second: not for the event loop.

    Raises InvalidRequestError for a shape or a tool that llguidance cannot follow.
    """
    try:
        return _chat_grammar(plan, form)
    except RecursionError:
        raise InvalidRequestError.of_field("tools", "a schema is nested too deeply") from None


def _chat_grammar(plan: Plan, form: ChatForm) -> str:
    offered, conversation = plan.offered, form.conversation
    answer = grammar_of(plan.shape) if plan.shape else ""
    if offered is not None and (offered.needs_grammar or answer):
        if plan.shape and plan.shape.is_json and not conversation.style.syntax.trigger:
            text = "this model writes calls as plain JSON, which looks like such an answer; send only one of the two"
            raise InvalidRequestError.of_field(plan.shape.param, f"not together with tools: {text}")
        return _tool_grammar(offered, form, answer)
    if plan.shape and conversation.is_harmony:
        answer = harmony_answer_grammar(answer, conversation.marks, is_thinking=form.is_thinking)
    elif plan.shape and form.is_thinking and conversation.thinking:
        answer = after_thoughts(answer, conversation.thinking, conversation.marks)
    if plan.shape:
        check_size(len(answer.encode()), plan.shape.param)
    return answer


def _tool_grammar(offered: Offered, form: ChatForm, answer: str) -> str:
    # Where other answers are allowed too, arguments follow their schema only for tools that ask for it.
    schemas = {
        name: lean(schema) if offered.is_required or name in offered.strict else _ANY_ARGUMENTS
        for name, schema in offered.schemas.items()
    }
    grammar = _grammar(schemas, offered, form, answer)
    if len(grammar.encode()) > GRAMMAR_BYTES_MAX:
        schemas = {name: schema if name in offered.strict else _ANY_ARGUMENTS for name, schema in schemas.items()}
        grammar = _grammar(schemas, offered, form, answer)
    size_bytes = len(grammar.encode())
    if size_bytes > GRAMMAR_BYTES_MAX:
        text = f"their grammar has {size_bytes} bytes, over the limit of {GRAMMAR_BYTES_MAX}"
        raise InvalidRequestError.of_field("tools", f"{text}; send fewer tools, or fewer strict ones")
    fault = fault_of(grammar)
    if fault:
        schemas = {name: _followed(name, schema, offered) for name, schema in schemas.items()}
        grammar = _grammar(schemas, offered, form, answer)
        fault = fault_of(grammar)
    if fault:
        raise InvalidRequestError.of_field("tools", f"cannot be used: {in_a_line(fault)}")
    return grammar


def _grammar(schemas: dict[str, Schema], offered: Offered, form: ChatForm, answer: str) -> str:
    conversation = form.conversation
    wanted = Wanted(
        syntax=conversation.style.syntax,
        tools=schemas,
        marks=conversation.marks,
        is_required=offered.is_required,
        is_parallel=form.is_parallel(offered),
        thinking=conversation.thinking,
        is_thinking=form.is_thinking,
        answer=answer,
    )
    return harmony_calls_grammar(wanted) if conversation.is_harmony else calls_grammar(wanted)


def _followed(name: str, schema: Schema, offered: Offered) -> Schema:
    """Return a schema if it can be followed, else the first weaker one that can. Raises InvalidRequestError."""
    is_strict = name in offered.strict
    fault = ""
    for each in (schema, *weaker(schema, is_strict=is_strict)):
        found = fault_of(f"start: %json {json.dumps(each)}")
        if not found:
            return cast("Schema", each)
        fault = fault or found
    if is_strict or has_broken_pattern(schema):
        text = f"the parameters of {name!r} are not a JSON schema that can be used: {in_a_line(fault)}"
        raise InvalidRequestError.of_field("tools", text)
    return _ANY_ARGUMENTS
