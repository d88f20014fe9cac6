"""The parts of a grammar, packed by the worker that has read the body, for those that make grammars.

To make one may take seconds, so it has bounds and workers of its own.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable

from relayline.coordinator.answers.template import Conversation
from relayline.coordinator.http.requests.chat_form import ChatForm, chat_grammar
from relayline.coordinator.http.requests.plan import Plan
from relayline.coordinator.http.requests.structure import grammar_of
from relayline.wire.common.errors import InvalidRequestError


def task_of_prompt(plan: Plan) -> bytes:
    """Return the task of a prompt's answer; empty where its form is free. Raises InvalidRequestError."""
    return _packed(plan, None) if plan.shape else b""


def task_of_chat(plan: Plan, *, is_thinking: bool) -> bytes:
    """Return the task of a chat's answer; empty where its form is free. Raises InvalidRequestError.

    `is_thinking`: the prompt has begun the model's thoughts.
    """
    has_grammar = plan.shape is not None or (plan.offered is not None and plan.offered.needs_grammar)
    return _packed(plan, is_thinking) if has_grammar else b""


def grammar_from(task: bytes | bytearray, conversation: Callable[[], Conversation]) -> str:
    """Return the grammar of a task. Raises InvalidRequestError.

    `task` comes from a process of this coordinator, through its own pipes: it is unpickled.
    """
    plan, is_thinking = pickle.loads(task)
    if is_thinking is None:
        return grammar_of(plan.shape) if plan.shape else ""
    return chat_grammar(plan, ChatForm(conversation(), plan.offered, plan.splits_reasoning, is_thinking))


def _packed(plan: Plan, is_thinking: bool | None) -> bytes:
    if plan.offered:
        plan = dataclasses.replace(plan, offered=dataclasses.replace(plan.offered, shown=()))
    try:
        return pickle.dumps((plan, is_thinking))
    except RecursionError:
        raise InvalidRequestError.of_field("tools", "a schema is nested too deeply") from None
