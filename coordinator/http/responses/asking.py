"""From the body of POST /v1/responses to a chat. Pure, and for a body's worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from relayline.coordinator.http.requests.bodies import decode_body
from relayline.coordinator.http.requests.custom_tools import arguments_of
from relayline.coordinator.http.requests.inner_form import (
    Fields,
    Inner,
    chat_of,
    each_checked,
    json_bytes,
    one_of,
    read_object,
    renamed,
    text_in,
    with_system,
)
from relayline.coordinator.http.responses.bodies import (
    ConversationName,
    ResponsesBody,
    check_served,
    conversation_id,
    is_hosted,
)
from relayline.coordinator.http.responses.items import KeptItem, kept_items
from relayline.coordinator.sessions.tenants import tier_of
from relayline.coordinator.text.places import PLACE
from relayline.wire.common.errors import InvalidRequestError

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_LOGPROBS = "message.output_text.logprobs"
# A chat's fields -> those of this dialect, for errors.
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class Context(Struct):
    """The stored context that a body refers to, as JSON text: it goes before the body."""

    history: list[Any]  # items of the responses before this one, or of the conversation
    items: dict[str, Any]  # by their ids


class References(Struct):
    """The context that a body refers to."""

    previous_response_id: str | None = None
    item_ids: list[str] = []
    conversation_id: str | None = None


class AnswerOptions(Struct):
    """The fields that the answer to a body repeats."""

    echo: bytes  # JSON object
    input_items: list[KeptItem]
    store: bool
    background: bool
    previous_response_id: str | None
    conversation_id: str | None  # to which its items and those of its input are added
    namespaced: dict[str, tuple[str, str]]  # the name that the model sees of a tool in a name space -> both names


REFERENCES_MAX = 4_096  # items of one body, each of which is looked up on the event loop


class _Referring(Struct):
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    input: Any = None


def references(raw: bytes | bytearray) -> bytes:
    """Return msgpack of the References in a body. Raises InvalidRequestError."""
    sent = decode_body(raw, _Referring)
    if sent.conversation is not None and sent.previous_response_id is not None:
        text = "send one of conversation and previous_response_id: each says what goes before the input"
        raise InvalidRequestError.of_field("previous_response_id", text)
    items = sent.input if isinstance(sent.input, list) else []
    ids = [item.get("id") for item in items if isinstance(item, Mapping) and item.get("type") == "item_reference"]
    if len(ids) > REFERENCES_MAX:
        raise InvalidRequestError.of_field(
            "input", f"{len(ids)} item references, at most {REFERENCES_MAX} are looked up"
        )
    named = conversation_id(sent.conversation)
    found = References(sent.previous_response_id, [each for each in ids if isinstance(each, str)], named)
    return msgspec.msgpack.encode(found)


def read(raw: bytes | bytearray, n_context: int) -> Inner:
    """Return a body as a chat; the first `n_context` bytes of `raw` are a Context. Raises InvalidRequestError."""
    context = msgspec.json.decode(raw[:n_context], type=Context) if n_context else Context([], {})
    raw = raw[n_context:]
    body = decode_body(raw, ResponsesBody)
    check_served(body)
    for key in ("previous_response_id", "conversation"):
        if getattr(body, key) is not None and not n_context:
            raise InvalidRequestError.of_field(key, "write this key without escapes")
    items = _input_items(body, context)
    try:
        tools, namespaced, left_out = _tools(body.tools or [])
        before = "history" if body.conversation is None else "conversation.items"
        messages = messages_of(context.history, before) + messages_of(items, "input")
        if not messages:
            raise InvalidRequestError.of_field("input", "needs text, or a list with at least one item")
        chosen = _choice(body.tool_choice, namespaced)
        fields = {**_fields(body, tools, chosen), "messages": with_system([body.instructions or ""], messages)}
        chat = chat_of(fields, read_object(raw))
    except InvalidRequestError as error:
        raise renamed(error, _NAMES) from None
    options = AnswerOptions(
        _echo(body, left_out),
        _named_items(items) if body.conversation is None else kept_items(items),
        body.store is not False,
        body.background is True,
        body.previous_response_id,
        conversation_id(body.conversation),
        namespaced,
    )
    return Inner(chat, msgspec.msgpack.encode(options))


def rename(error: InvalidRequestError) -> InvalidRequestError:
    """Return an error about the chat as one about the body."""
    return renamed(error, _NAMES)


def _input_items(body: ResponsesBody, context: Context) -> list[Fields]:
    if body.input is None:
        raise InvalidRequestError.of_field("input", "required field is missing")
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]

    def found(item: Mapping[str, Any], where: str) -> Fields:
        if item.get("type") != "item_reference":
            return dict(item)
        name = text_in(item, "id", where)
        if name not in context.items:
            text = f"no item {name[:100]!r} is stored here; send the item itself"
            raise InvalidRequestError.of_field(f"{where}.id", text)
        return dict(context.items[name])

    return each_checked(body.input, "input", found)


def _named_items(items: Sequence[Fields]) -> list[KeptItem]:
    """Return items as their ids and their JSON; one without an id is named after its place."""
    named = [
        item if isinstance(item.get("id"), str) else {"id": None, **item} | {"id": f"item_{at}"}
        for at, item in enumerate(items)
    ]
    return [(item["id"], json_bytes(item)) for item in named]


def _fields(body: ResponsesBody, tools: list[Fields], tool_choice: Any) -> Fields:
    fields: Fields = {
        "model": body.model,
        "service_tier": body.service_tier,
        "cache_salt": body.cache_salt,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "max_tokens": body.max_output_tokens,
        "stream": bool(body.stream),
        "stream_options": {"include_usage": True} if body.stream else None,  # the last event carries it
        "tools": tools or None,
        "tool_choice": tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "response_format": _response_format(body.text.format if body.text else None),
    }
    if body.top_logprobs or _LOGPROBS in (body.include or ()):
        fields["logprobs"], fields["top_logprobs"] = True, body.top_logprobs
    return {key: value for key, value in fields.items() if value is not None}


def _tools(tools: list[Any]) -> tuple[list[Fields], dict[str, tuple[str, str]], list[str]]:
    """Return the tools of a chat, by the names that it shows of those in name spaces: (name space, name), and the types
    of those that are left out.

    These run at OpenAI, or in programs that its own models know. Agents such as Codex offer them beside others, and go
    on without them. Alone they are refused: the answer would not be what was asked for. Raises InvalidRequestError.
    """
    found: list[Fields] = []
    namespaced: dict[str, tuple[str, str]] = {}
    left_out: list[str] = []

    def take(tool: Mapping[str, Any], where: str) -> None:
        if is_hosted(tool.get("type")):
            left_out.append(tool["type"])
            return
        if tool.get("type") != "namespace":
            found.append(_function(tool, where))
            return
        space, inner = text_in(tool, "name", where), tool.get("tools")
        if not isinstance(inner, list):
            raise InvalidRequestError.of_field(f"{where}.tools", "must be a list")
        for function in each_checked(inner, f"{where}.tools", _function):
            named = function[function["type"]]
            named["name"], name = _joined(space, text_in(named, "name", where)), named["name"]
            namespaced[named["name"]] = (space, name)
            found.append(function)

    each_checked(tools, "tools", take)
    if left_out and not found:
        text = f"{left_out[0]!r} cannot run here, and no other tool is offered; leave it out"
        raise InvalidRequestError.of_field("tools[0]", text)
    return found, namespaced, list(dict.fromkeys(left_out))


def _joined(space: str, name: str) -> str:
    """Return the name that a model sees of a tool in a name space."""
    return f"{space}.{name}"


def _choice(choice: Any, namespaced: Mapping[str, tuple[str, str]]) -> Any:
    """Return a `tool_choice` whose function has the name that the model sees: clients leave out the name space."""
    if isinstance(choice, Mapping) and is_hosted(choice.get("type")):
        raise InvalidRequestError.of_field("tool_choice", f"{choice['type']!r} cannot run here; leave it out")
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        return {**choice, "tools": _not_hosted(choice["tools"])}
    if not isinstance(choice, Mapping) or choice.get("type") not in ("function", "custom"):
        return choice
    shown = [joined for joined, (_, name) in namespaced.items() if name == choice.get("name")]
    return {**choice, "name": shown[0]} if len(shown) == 1 else choice


def _not_hosted(tools: list[Any]) -> list[Any]:
    """Return allowed tools without those that only run at OpenAI."""
    kept = [each for each in tools if not (isinstance(each, Mapping) and is_hosted(each.get("type")))]
    if tools and not kept:
        raise InvalidRequestError.of_field("tool_choice", "none of the allowed tools can run here; leave it out")
    return kept


def _function(tool: Mapping[str, Any], where: str) -> Fields:
    kind = tool.get("type")
    if kind == "custom":
        custom = {key: tool[key] for key in ("description", "format") if tool.get(key) is not None}
        return {"type": "custom", "custom": {"name": text_in(tool, "name", where), **custom}}
    if kind != "function":
        text = f"only tools of types function and custom are served here, not {str(kind)[:40]!r}; leave it out"
        raise InvalidRequestError.of_field(where, text)
    named = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": named}


def _response_format(sent: Mapping[str, Any] | None) -> Fields | None:
    if sent is None:
        return None
    kind = one_of(sent, "type", ("text", "json_object", "json_schema"), "text.format")
    if kind != "json_schema":
        return {"type": kind}
    if sent.get("schema") is None:
        raise InvalidRequestError.of_field("text.format.schema", "required field is missing")
    return {"type": kind, "json_schema": {key: sent[key] for key in ("name", "schema", "strict") if key in sent}}


def messages_of(items: Sequence[Fields], param: str) -> list[Fields]:
    """Return items as the messages of a chat: one turn's text, reasoning and calls become one message.

    Raises InvalidRequestError about an item of `param`.
    """
    messages: list[Fields] = []
    turn: Fields | None = None  # of the model, not ended yet
    for at, item in enumerate(items):
        where = f"{param}[{at}]"
        kind = item.get("type", "message")
        if kind == "message":
            role = one_of(item, "role", _ROLES, where)
            if role != "assistant":
                turn = None
                messages.append({"role": role, "content": _content(item.get("content"), f"{where}.content")})
                continue
            text = _text(item.get("content"), f"{where}.content")
            if turn is None or turn.get("content") or turn.get("tool_calls"):
                turn = _turn(messages)
            turn["content"] = text
        elif kind == "reasoning":
            if turn is None or len(turn) > 1:
                turn = _turn(messages)
            text = _text(item.get("content") or item.get("summary") or [], f"{where}.content")
            if text:
                turn["reasoning_content"] = text
        elif kind in ("function_call", "custom_tool_call"):
            turn = _turn(messages) if turn is None else turn
            turn.setdefault("tool_calls", []).append(_call(item, where))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            turn = None
            messages.append(_result(item, where))
        else:
            text = f"items of type {str(kind)[:40]!r} are not served here; leave it out"
            raise InvalidRequestError.of_field(where, text)
    return [message for message in messages if "content" in message or "tool_calls" in message]


def _turn(messages: list[Fields]) -> Fields:
    turn: Fields = {"role": "assistant"}
    messages.append(turn)
    return turn


def _call(item: Mapping[str, Any], where: str) -> Fields:
    name, space = text_in(item, "name", where), text_in(item, "namespace", where, default="")
    name = _joined(space, name) if space else name
    if item.get("type") == "custom_tool_call":
        arguments = arguments_of(text_in(item, "input", where, default=""))
    else:
        arguments = text_in(item, "arguments", where, default="{}")
    function = {"name": name, "arguments": arguments}
    return {"id": text_in(item, "call_id", where), "type": "function", "function": function}


def _result(item: Mapping[str, Any], where: str) -> Fields:
    content = _content(item.get("output"), f"{where}.output")
    return {"role": "tool", "tool_call_id": text_in(item, "call_id", where), "content": content}


def _content(content: Any, where: str) -> str | list[Fields]:
    """Return a content as a chat has it: one text, or parts where there is an image or audio among them."""
    if not isinstance(content, list) or not any(_media_kind(part) for part in content):
        return _text(content, where)

    def part_of(part: Mapping[str, Any], at: str) -> Fields:
        if _media_kind(part) == "input_audio":
            return {"type": "input_audio", "input_audio": part.get("input_audio"), PLACE: f"{at}.input_audio"}
        if not _media_kind(part):
            return {"type": "text", "text": _text([part], where)}
        if part.get("image_url") is None:
            raise InvalidRequestError.of_field(at, "send the image itself, as image_url with a data: address")
        return {"type": "image_url", "image_url": {"url": text_in(part, "image_url", at)}, PLACE: f"{at}.image_url"}

    return each_checked(content, where, part_of)


def _media_kind(part: Any) -> str:
    """Return the type of a part that is an image or audio; empty for others."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if kind in ("input_image", "input_audio") else ""


def _text(content: Any, where: str) -> str:
    """Return a content, text or parts, as one text. Raises InvalidRequestError for a part that is none."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError.of_field(where, "must be text, or a list of parts")

    def text_of(part: Mapping[str, Any], at: str) -> str:
        kind = part.get("type")
        if kind == "refusal":
            return text_in(part, "refusal", at)
        if kind not in _TEXT_PARTS:
            text = f"parts of type {str(kind)[:40]!r} are not served by this model; send text"
            raise InvalidRequestError.of_field(at, text)
        return text_in(part, "text", at)

    return "\n".join(each_checked(content, where, text_of))


def _echoed(tool: Fields) -> Fields:
    more: dict[str, Fields] = {"function": {"strict": None, "parameters": None}, "custom": {"format": {"type": "text"}}}
    return {**more.get(tool["type"], {}), **tool}


def _echo(body: ResponsesBody, left_out: Sequence[str]) -> bytes:
    """Return the fields of a response that repeat the request, in the order of OpenAI's API.

    `left_out`: types of tools that the model was not shown; they are named in a field of ours.
    """
    reasoning, text = body.reasoning, body.text
    echo = {
        "background": body.background is True,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "service_tier": tier_of(body.service_tier) or "default",
        "store": body.store is not False,
        "text": {
            "format": (text.format if text else None) or {"type": "text"},
            "verbosity": (text.verbosity if text else None) or "medium",
        },
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_echoed(tool) for tool in body.tools or () if not is_hosted(tool["type"])],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
    }
    named = {"prompt_cache_key": body.prompt_cache_key, "safety_identifier": body.safety_identifier, "user": body.user}
    if body.conversation is not None:
        echo["conversation"] = {"id": conversation_id(body.conversation)}
    if left_out:
        echo["tools_left_out"] = list(left_out)
    return json_bytes(echo | {name: value for name, value in named.items() if value is not None})
