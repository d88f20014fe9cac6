"""A dialect's reader turns any body into a chat, or names the mistake in one line."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relayline.coordinator.http.messages import asking as messages
from relayline.coordinator.http.requests.bodies import ChatBody
from relayline.coordinator.http.requests.inner_form import Inner
from relayline.coordinator.http.responses import asking as responses
from relayline.wire.common.errors import InvalidRequestError
from tests.support.examples import thinned

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
ITEM_KINDS = ("message", "reasoning", "function_call", "function_call_output", "item_reference")
PART_KINDS = ("text", "input_text", "output_text", "refusal", "input_image", "image", "document", "function")
BLOCK_KINDS = ("tool_use", "tool_result", "thinking", "redacted_thinking")
KINDS = st.sampled_from((*ITEM_KINDS, *PART_KINDS, *BLOCK_KINDS))
TEXTS = ("text", "id", "name", "input", "content", "source", "thinking")
PART = st.fixed_dictionaries(
    {"type": KINDS},
    optional={
        key: st.text(max_size=5) | JSON
        for key in ("text", "id", "name", "input", "content", "source", "thinking", "image_url")
    },
)
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": KINDS,
        "role": st.sampled_from(["user", "assistant", "system", "developer", "king"]),
        "content": st.text(max_size=5) | st.lists(PART, max_size=3) | JSON,
        **{key: st.text(max_size=5) | JSON for key in ("call_id", "name", "arguments", "output", "summary", "id")},
    },
)
KEYS = sorted({*responses.ResponsesBody.__struct_fields__, *messages.MessagesBody.__struct_fields__, "top_k", "seed"})
BODY = st.fixed_dictionaries(
    {"max_tokens": st.just(9)},
    optional={
        "input": st.text(max_size=5) | st.lists(ITEM, max_size=4),
        "messages": st.lists(ITEM, min_size=1, max_size=4),
    },
).flatmap(lambda base: st.dictionaries(st.sampled_from(KEYS), JSON, max_size=2).map(lambda more: more | base))


def read_response(raw: bytes) -> Inner:
    return responses.read(raw, 0)


def check(read: Any, raw: bytes) -> None:
    problem = ""
    try:
        inner = read(raw)
    except InvalidRequestError as error:
        problem = error.message or "\n"
    assert "\n" not in problem
    if problem:
        return
    assert isinstance(inner, Inner)
    assert isinstance(inner.chat, ChatBody)
    if inner.answer_options:
        answer_options = msgspec.msgpack.decode(inner.answer_options, type=responses.AnswerOptions)
        assert json.loads(answer_options.echo)["truncation"] == "disabled"
        assert all(json.loads(item)["id"] == item_id for item_id, item in answer_options.input_items)


@settings(max_examples=thinned(60))
@example(body={"input": [{"role": "user", "content": "a", "id": None}]})
@given(body=BODY | JSON)
@pytest.mark.parametrize("read", [read_response, messages.read, messages.read_counted])
def test_no_json_body_is_an_unforeseen_error(read: Any, body: object) -> None:
    check(read, json.dumps(body).encode())


@pytest.mark.parametrize("read", [read_response, messages.read])
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b'{"input":' + b"[" * 400 + b"]" * 400 + b"}",
        b'{"input":"x","max_tokens":3,"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"input":"x","messages":[{"role":"user","content":"x"}],"max_tokens":3,"top_k":' + b"9" * 5_000 + b"}",
        b'{"input":"x","messages":[{"role":"user","content":"x"}],"max_tokens":3,"tools":'
        + b"[" * 900
        + b"]" * 900
        + b"}",
    ],
)
def test_odd_bytes_are_refused_or_read(read: Any, raw: bytes) -> None:
    check(read, raw)
