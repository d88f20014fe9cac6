"""From the body of POST /v1/messages to a chat.

Pure, and for a body's worker. `cache_control` and similar fields are annotations: the prefix cache works here without
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from relayline.coordinator.http.requests.bodies import MESSAGES_MAX, Positive, Share, decode_body
from relayline.coordinator.http.requests.inner_form import (
    Fields,
    Inner,
    as_json,
    chat_of,
    each_checked,
    one_of,
    read_object,
    renamed,
    text_in,
    with_system,
)
from relayline.coordinator.text.places import PLACE
from relayline.wire.common.errors import InvalidRequestError

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# A chat's fields -> those of this dialect, for errors.
_NAMES = {
    "response_format.json_schema": "output_config.format",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "continue_final_message": "messages",
}


class Turn(Struct, kw_only=True):
    """One message."""

    role: str
    content: str | list[Any]


class Thinking(Struct, kw_only=True):
    """`thinking`."""

    type: str
    budget_tokens: Positive | None = None


class OutputConfig(Struct, kw_only=True):
    """`output_config`."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesBody(Struct, kw_only=True):
    """POST /v1/messages. None means absent."""

    model: str | None = None
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_tokens: Positive | None = None
    system: str | list[Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    thinking: Thinking | None = None
    tool_choice: dict[str, Any] | None = None
    tools: list[Any] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    top_p: Share | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # as `output_config.format` was called before
    # Not served.
    container: Any = None
    mcp_servers: list[Any] | None = None


def read(raw: bytes | bytearray) -> Inner:
    """Return a body as a chat. Raises InvalidRequestError."""
    body = decode_body(raw, MessagesBody)
    if body.max_tokens is None:
        raise InvalidRequestError.of_field("max_tokens", "required field is missing")
    return _read(body, raw)


def read_counted(raw: bytes | bytearray) -> Inner:
    """Return the body of /v1/messages/count_tokens as a chat. Raises InvalidRequestError."""
    return _read(decode_body(raw, MessagesBody), raw)


def rename(error: InvalidRequestError) -> InvalidRequestError:
    """Return an error about the chat as one about the body."""
    return renamed(error, _NAMES)


def _read(body: MessagesBody, raw: bytes | bytearray) -> Inner:
    if body.container:
        raise InvalidRequestError.of_field("container", "not supported by this server; send none")
    if body.mcp_servers:
        raise InvalidRequestError.of_field("mcp_servers", "not supported by this server; send none")
    system = body.system or ""
    texts = [system] if isinstance(system, str) else [_text(system, "system")]
    messages = [message for at, turn in enumerate(body.messages) for message in _turn(turn, f"messages[{at}]")]
    fields = {**_fields(body), "messages": with_system(texts, messages)}
    if body.messages[-1].role == "assistant":
        fields["continue_final_message"] = True
    try:
        return Inner(chat_of(fields, read_object(raw)))
    except InvalidRequestError as error:
        raise rename(error) from None


def _fields(body: MessagesBody) -> Fields:
    output = body.output_config or OutputConfig()
    effort = output.effort if body.thinking is None or body.thinking.type != "disabled" else "none"
    if body.thinking is None and effort is None:
        effort = "none"  # here thoughts are to be asked for
    choice = body.tool_choice or {}
    fields: Fields = {
        "model": body.model,
        "max_tokens": body.max_tokens,
        "thinking_token_budget": body.thinking.budget_tokens if body.thinking else None,
        "stop": body.stop_sequences,
        "stream": bool(body.stream),
        "stream_options": {"include_usage": True} if body.stream else None,  # the last events carry it
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "tools": each_checked(body.tools or [], "tools", _tool) or None,
        "tool_choice": _choice(choice) if choice else None,
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
        "reasoning_effort": effort,
        "response_format": _format(output.format or body.output_format),
    }
    return {key: value for key, value in fields.items() if value is not None}


def _format(sent: Mapping[str, Any] | None) -> Fields | None:
    if sent is None:
        return None
    one_of(sent, "type", ("json_schema",), "output_config.format")
    if sent.get("schema") is None:
        raise InvalidRequestError("output_config.format.schema: required field is missing", "output_config.format")
    return {"type": "json_schema", "json_schema": {"schema": sent["schema"]}}


def _tool(tool: Mapping[str, Any], where: str) -> Fields:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        text = f"only tools with an input_schema are served here, not {str(kind)[:40]!r}; leave it out"
        raise InvalidRequestError.of_field(where, text)
    function = {"name": text_in(tool, "name", where), "parameters": tool.get("input_schema")}
    more = {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function | more}


def _choice(choice: Mapping[str, Any]) -> Any:
    kind = one_of(choice, "type", (*_CHOICES, "tool"), "tool_choice")
    if kind != "tool":
        return _CHOICES[kind]
    return {"type": "function", "function": {"name": text_in(choice, "name", "tool_choice")}}


def _turn(turn: Turn, where: str) -> list[Fields]:
    """Return one message as those of a chat: results of tools become separate messages, before the user's text."""
    if turn.role not in ("user", "assistant", "system"):
        raise InvalidRequestError.of_field(f"{where}.role", "must be one of user, assistant, system")
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    blocks = each_checked(turn.content, f"{where}.content", lambda block, at: _block(block, at, turn.role))
    content = _joined(blocks)
    results = [block["result"] for block in blocks if "result" in block]
    calls = [block["call"] for block in blocks if "call" in block]
    thoughts = "\n".join([block["thought"] for block in blocks if "thought" in block])
    message: Fields = {"role": turn.role, "content": content}
    if calls:
        message |= {"tool_calls": calls, "content": content or None}
    if thoughts and (content or calls):
        message["reasoning_content"] = thoughts
    return [*results, message] if content or calls or not results else results


def _block(block: Mapping[str, Any], where: str, role: str) -> Fields:
    """Return a block's kind: one of `text`, `image`, `result`, `call`, `thought`, or nothing."""
    kind = block.get("type")
    if kind == "text":
        return {"text": text_in(block, "text", where)}
    if kind == "tool_result" and role == "user":
        content = _shown(block.get("content") or "", f"{where}.content")
        return {"result": {"role": "tool", "tool_call_id": text_in(block, "tool_use_id", where), "content": content}}
    if kind == "tool_use" and role == "assistant":
        if not isinstance(block.get("input", {}), Mapping):
            raise InvalidRequestError.of_field(f"{where}.input", "must be an object")
        function = {"name": text_in(block, "name", where), "arguments": as_json(block.get("input", {}))}
        return {"call": {"id": text_in(block, "id", where), "type": "function", "function": function}}
    if kind == "thinking" and role == "assistant":
        return {"thought": text_in(block, "thinking", where)}
    if kind == "redacted_thinking" and role == "assistant":
        return {}
    if kind == "image" and role == "user":
        return {"image": _image(block, where), PLACE: f"{where}.source"}
    if kind == "document":
        source = block.get("source")
        if isinstance(source, Mapping) and source.get("type") == "text":
            return {"text": text_in(source, "data", f"{where}.source")}
    text = f"blocks of type {str(kind)[:40]!r} are not served here in a turn of the {role}; send text"
    raise InvalidRequestError.of_field(where, text)


def _joined(blocks: Sequence[Fields]) -> str | list[Fields]:
    """Return the texts among blocks as one; with an image among them, as parts of a chat's message."""
    if any("image" in block for block in blocks):
        return [_part(block) for block in blocks if "text" in block or "image" in block]
    return "\n".join([block["text"] for block in blocks if "text" in block])


def _shown(content: Any, where: str) -> str | list[Fields]:
    """Return the content of a tool's result as a chat has it."""
    if not isinstance(content, list) or not any(_is_image(block) for block in content):
        return content if isinstance(content, str) else _text(content, where)

    def shown(block: Mapping[str, Any], at: str) -> Fields:
        if not _is_image(block):
            return {"text": _text([block], where)}
        return {"image": _image(block, at), PLACE: f"{at}.source"}

    return _joined(each_checked(content, where, shown))


def _is_image(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("type") == "image"


def _part(block: Mapping[str, Any]) -> Fields:
    """Return a text or an image as a part of a chat's message."""
    if "text" in block:
        return {"type": "text", "text": block["text"]}
    return {"type": "image_url", "image_url": {"url": block["image"]}, PLACE: block[PLACE]}


def _image(block: Mapping[str, Any], where: str) -> str:
    """Return an image as a chat names it: by an address that holds it."""
    source = block.get("source")
    if not isinstance(source, Mapping):
        raise InvalidRequestError.of_field(f"{where}.source", "must be an object")
    if one_of(source, "type", ("base64", "url"), f"{where}.source") == "url":
        return text_in(source, "url", f"{where}.source")
    kind = text_in(source, "media_type", f"{where}.source")
    return f"data:{kind};base64,{text_in(source, 'data', f'{where}.source')}"


def _text(blocks: Sequence[Any] | Any, where: str) -> str:
    if not isinstance(blocks, list):
        raise InvalidRequestError.of_field(where, "must be text, or a list of blocks")

    def text_of(block: Mapping[str, Any], at: str) -> str:
        if block.get("type") != "text":
            kind = str(block.get("type"))[:40]
            raise InvalidRequestError.of_field(at, f"blocks of type {kind!r} are not served here; send text")
        return text_in(block, "text", at)

    return "\n".join(each_checked(blocks, where, text_of))
