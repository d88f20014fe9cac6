"""One inner request form: other dialects' bodies are written as the body of a chat, which is checked like any other.

Pure, and for a body's worker: its cost grows with the body.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from relayline.coordinator.http.requests.bodies import ChatBody, decode_body
from relayline.wire.common.errors import InvalidRequestError

Fields = dict[str, Any]
Item = TypeVar("Item")

# Fields of a chat that no other dialect may set: each has its own words for them, or nothing for them to mean.
_OF_CHATS = {
    "messages",
    "model",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "response_format",
    "parallel_tool_calls",
    "reasoning_effort",
    "reasoning_format",
    "logprobs",
    "top_logprobs",
    "return_token_ids",
    "ignore_eos",
    "modalities",
    "audio",
    "prediction",
    "prompt_logprobs",
    "timings_per_token",
    "return_progress",
}
_PASSED = frozenset(ChatBody.__struct_encode_fields__) - _OF_CHATS


@dataclasses.dataclass(frozen=True, slots=True)
class Inner:
    """A body of another dialect, as a chat."""

    chat: ChatBody
    answer_options: bytes = b""  # msgpack of the fields that its answer repeats; its dialect knows the type


def chat_of(fields: Fields, sent: Mapping[str, Any]) -> ChatBody:
    """Return the chat that `fields` ask for.

    Sampling fields that the dialect itself does not know, and chats do, are taken from the body as it was `sent`.
    Raises InvalidRequestError.
    """
    passed = {key: value for key, value in sent.items() if key in _PASSED and key not in fields}
    return decode_body(as_json({**passed, **fields}).encode("utf-8", "surrogatepass"), ChatBody)


def as_json(value: Any) -> str:
    """Return compact JSON text. Raises InvalidRequestError for values that are nested too deeply."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (RecursionError, ValueError):
        raise InvalidRequestError("the body is not acceptable JSON: nested too deeply") from None


def json_bytes(value: Any) -> bytes:
    """Return compact JSON with question marks for halves of characters. Raises InvalidRequestError as `as_json`."""
    return as_json(value).encode("utf-8", "replace")


def read_object(raw: bytes | bytearray) -> Fields:
    """Return the fields of a body as plain values. Raises InvalidRequestError. `raw` has been decoded once before."""
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not acceptable JSON: {error}") from None


def renamed(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """Return an error about a chat's field as one about the field that the client sent."""
    param = error.param or ""
    for ours, theirs in names.items():
        if param == ours or param.startswith((f"{ours}.", f"{ours}[")):
            if error.message.startswith(ours):
                error.message = theirs + error.message[len(ours) :]
                error.args = (error.message,)
            error.param = theirs + param[len(ours) :]
            break
    return error


def each_checked(items: list[Any], param: str, take: Callable[[Mapping[str, Any], str], Item]) -> list[Item]:
    """Return the results of `take` for each object of a list; it gets the object's place as well.

    Raises InvalidRequestError for an item that is no object.
    """
    taken = []
    for at, item in enumerate(items):
        where = f"{param}[{at}]"
        if not isinstance(item, Mapping):
            raise InvalidRequestError.of_field(where, "must be an object")
        taken.append(take(item, where))
    return taken


def text_in(item: Mapping[str, Any], key: str, where: str, *, default: str | None = None) -> str:
    """Return a field of an object that must be text. Raises InvalidRequestError naming it."""
    value = item.get(key, default)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise InvalidRequestError.of_field(f"{where}.{key}", "must be text")
    return value


def one_of(item: Mapping[str, Any], key: str, allowed: tuple[str, ...], where: str) -> str:
    """Return a field of an object that must be one of a few words. Raises InvalidRequestError naming it."""
    value = item.get(key)
    if not isinstance(value, str) or value not in allowed:
        raise InvalidRequestError.of_field(f"{where}.{key}", f"must be one of {', '.join(allowed)}")
    return value


def with_system(texts: list[str], messages: list[Fields]) -> list[Fields]:
    """Return the chat with instructions before it, as one system turn with the system turns that it begins with.

    Templates often refuse a second one.
    """
    contents: list[str | list[Fields]] = [text for text in texts if text]
    rest = list(messages)
    while rest and rest[0]["role"] in ("system", "developer"):
        contents.append(rest.pop(0)["content"])
    return [{"role": "system", "content": _joined(contents)}, *rest] if contents else rest


def _joined(contents: Sequence[str | list[Fields]]) -> str | list[Fields]:
    """Return contents as one text, or as parts where there is an image or audio among them."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return "\n\n".join(texts)
    return [
        part
        for content in contents
        for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]


def event_name(event: bytes) -> bytes:
    """Return the `type` of an event whose JSON begins with it."""
    return event[len(b'{"type":"') : event.index(b'"', len(b'{"type":"'))]


def named_frames(events: list[bytes]) -> bytes:
    """Return the lines of events that are named by their types."""
    return b"".join([b"event: " + event_name(event) + b"\ndata: " + event + b"\n\n" for event in events])
