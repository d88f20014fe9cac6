"""From the bodies of POST /api/chat and /api/generate to a chat, or to a plain prompt. Pure, and for a body's worker.

Fields as in Ollama's own description of its API (docs/api.md and api/types.go of github.com/ollama/ollama).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from relayline.coordinator.http.requests.bodies import (
    CALLS_MAX,
    MESSAGES_MAX,
    PARTS_MAX,
    CompletionBody,
    LogprobCount,
    decode_body,
)
from relayline.coordinator.http.requests.inner_form import Fields, Inner, as_json, chat_of, renamed, text_in
from relayline.coordinator.text.places import PLACE
from relayline.wire.common.errors import InvalidRequestError

# Options of Ollama's that mean something here -> the fields of a chat. The others are settings of the pipeline.
_OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repeat_last_n",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
    "seed": "seed",
    "stop": "stop",
    "num_predict": "max_tokens",
}
DEFAULTS = (("temperature", 0.8), ("top_k", 40), ("top_p", 0.9))  # Ollama's own, where the model recommends none
_OPTION = "options.{name}"
# A chat's fields -> those of this dialect, for errors.
_NAMES = {
    **{theirs: _OPTION.format(name=name) for name, theirs in _OPTIONS.items()},
    "response_format.json_schema": "format",
    "response_format": "format",
    "reasoning_effort": "think",
}
# A duration of Go's that is none: "0", "0s", "0h0m".
_NO_TIME = re.compile(r"[+-]?(0|(0+(\.0*)?|\.0+)(ns|us|µs|μs|ms|s|m|h))+")
_ROLES = ("system", "user", "assistant", "tool")


class Turn(Struct, kw_only=True):
    """One message."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[str], Meta(max_length=PARTS_MAX)] | None = None  # base64
    tool_calls: Annotated[list[dict[str, Any]], Meta(max_length=CALLS_MAX)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class _Body(Struct, kw_only=True):
    model: str | None = None
    stream: bool | None = None  # true where it is not given
    format: Any = None  # "json", or a JSON schema
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: Any = None  # the pipeline decides how long it is loaded
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    truncate: bool | None = None  # a prompt that is too long is refused
    shift: bool | None = None


class OllamaChatBody(_Body, kw_only=True):
    """POST /api/chat. None means absent."""

    messages: Annotated[list[Turn], Meta(max_length=MESSAGES_MAX)] | None = None
    tools: list[Any] | None = None


class OllamaGenerateBody(_Body, kw_only=True):
    """POST /api/generate. None means absent."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: Annotated[list[str], Meta(max_length=PARTS_MAX)] | None = None


class OllamaShowBody(Struct, kw_only=True):
    """POST /api/show. `name` is what `model` was called before."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    keep_alive: Any = None


class OllamaPullBody(Struct, kw_only=True):
    """POST /api/pull."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None


class OllamaEmbedBody(Struct, kw_only=True):
    """POST /api/embed and, with `prompt`, /api/embeddings."""

    model: str | None = None
    input: Any = None
    prompt: str | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None


def read_chat(raw: bytes | bytearray) -> Inner:
    """Return the body of /api/chat as a chat. Raises InvalidRequestError."""
    body = decode_body(raw, OllamaChatBody)
    if not body.messages:
        raise InvalidRequestError.of_field("messages", "needs at least one message")
    messages = _messages(body.messages)
    return _inner({**_fields(body), "messages": messages, "tools": body.tools or None})


def read_generate(raw: bytes | bytearray) -> Inner | CompletionBody:
    """Return the body of /api/generate as a chat of one question, or as a prompt. Raises InvalidRequestError."""
    body = decode_body(raw, OllamaGenerateBody)
    if body.template:
        raise InvalidRequestError.of_field("template", "the model's own template is used; leave it out, or send raw")
    if body.context:
        raise InvalidRequestError.of_field("context", "not served; send the conversation to /api/chat")
    if not (body.prompt or body.suffix or body.images):
        raise InvalidRequestError.of_field("prompt", "required field is missing")
    if body.raw or body.suffix:
        return _plain(body)
    messages: list[Fields] = [{"role": "system", "content": body.system}] if body.system else []
    question = Turn(role="user", content=body.prompt, images=body.images)
    return _inner({**_fields(body), "messages": [*messages, _message(question, "", _Calls())]})


def rename(error: InvalidRequestError) -> InvalidRequestError:
    """Return an error about the chat as one about the body."""
    return renamed(error, _NAMES)


def is_only_loading(raw: bytes) -> bool:
    """Return whether a body asks for no answer: Ollama's clients load a model so. `raw` must be short."""
    try:
        body = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # whoever reads it says why
    return not any(body.get(name) for name in ("messages", "prompt", "suffix", "images"))


def unloads(keep_alive: Any) -> bool:
    """Return whether a model is to be unloaded at once by what `keep_alive` says, in seconds or as a duration."""
    if isinstance(keep_alive, str):
        return _NO_TIME.fullmatch(keep_alive) is not None
    return keep_alive is not None and keep_alive is not False and keep_alive == 0


def _inner(fields: Fields) -> Inner:
    try:
        return Inner(chat_of({key: value for key, value in fields.items() if value is not None}, {}))
    except InvalidRequestError as error:
        raise rename(error) from None


def _plain(body: OllamaGenerateBody) -> CompletionBody:
    if body.images:
        raise InvalidRequestError.of_field("images", "not with raw or suffix")
    if body.system:
        raise InvalidRequestError.of_field("system", "not with raw or suffix")
    fields = _fields(body)
    n_top = fields.pop("top_logprobs", None)
    is_scored = fields.pop("logprobs", None)
    for name in ("reasoning_effort", "chat_template_kwargs"):
        fields.pop(name, None)
    fields |= {"prompt": body.prompt or "", "suffix": body.suffix or None}
    if is_scored:
        fields["logprobs"] = n_top or 0
    fields = {key: value for key, value in fields.items() if value is not None}
    try:
        return decode_body(as_json(fields).encode("utf-8", "surrogatepass"), CompletionBody)
    except InvalidRequestError as error:
        raise rename(error) from None


def _fields(body: _Body) -> Fields:
    options = body.options or {}
    fields: Fields = {theirs: options[name] for name, theirs in _OPTIONS.items() if options.get(name) is not None}
    for name, lowest in (("seed", 0), ("max_tokens", 1)):
        value = fields.get(name)
        if isinstance(value, int) and value < lowest:
            del fields[name]  # -1 and -2: no bound of its own; a random seed
    return fields | {
        "model": body.model,
        "stream": body.stream is not False,
        "timings_per_token": True,  # the last object of every answer has them
        "response_format": _format(body.format),
        "reasoning_effort": _effort(body.think),
        "chat_template_kwargs": _template_fields(body.think),
        "logprobs": True if body.logprobs else None,
        "top_logprobs": body.top_logprobs if body.logprobs else None,
    }


def _format(sent: Any) -> Fields | None:
    if sent in (None, ""):
        return None
    if sent == "json":
        return {"type": "json_object"}
    if not isinstance(sent, Mapping):
        raise InvalidRequestError.of_field("format", 'must be "json" or a JSON schema')
    return {"type": "json_schema", "json_schema": {"schema": sent}}


def _template_fields(think: bool | str | None) -> Fields | None:
    """Return what makes templates think that do so only if they are asked to."""
    return {"enable_thinking": True} if think is True else None


def _effort(think: bool | str | None) -> str | None:
    if isinstance(think, str):
        return think or None
    return "none" if think is False else None


class _Calls:
    """The calls of a conversation that have no result yet."""

    def __init__(self) -> None:
        self._open: list[tuple[str, str]] = []  # (id, name)
        self._n_made = 0

    def make(self, call: Mapping[str, Any], where: str) -> Fields:
        """Return a call as a chat has it: with an id, and its arguments as text."""
        function = call.get("function")
        if not isinstance(function, Mapping):
            raise InvalidRequestError.of_field(f"{where}.function", "must be an object")
        name, arguments = text_in(function, "name", f"{where}.function"), function.get("arguments")
        written = arguments if isinstance(arguments, str) else as_json(arguments or {})
        id = text_in(call, "id", where, default="") or f"call_{self._n_made}"
        self._n_made += 1
        self._open.append((id, name))
        return {"id": id, "type": "function", "function": {"name": name, "arguments": written}}

    def answer(self, name: str | None) -> str:
        """Return the id of the first open call of this name, or of any; it is open no longer."""
        for at, (id, called) in enumerate(self._open):
            if name is None or called == name:
                del self._open[at]
                return id
        return "call_0"


def _messages(turns: Sequence[Turn]) -> list[Fields]:
    calls = _Calls()
    return [_message(turn, f"messages[{at}]", calls) for at, turn in enumerate(turns)]


def _message(turn: Turn, where: str, calls: _Calls) -> Fields:
    """Return a turn as a chat's message."""
    role = turn.role.lower()
    if role not in _ROLES:
        raise InvalidRequestError.of_field(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    message: Fields = {"role": role, "content": _content(turn, where)}
    if turn.thinking:
        message["reasoning_content"] = turn.thinking
    if turn.tool_calls:
        made = [calls.make(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(turn.tool_calls)]
        message |= {"tool_calls": made, "content": message["content"] or None}
    if role == "tool":
        message["tool_call_id"] = turn.tool_call_id or calls.answer(turn.tool_name)
    return message


def _content(turn: Turn, where: str) -> str | list[Fields]:
    """Return a turn's text; with images, as parts of a chat's message, the images first, as Ollama has them."""
    if not turn.images:
        return turn.content or ""
    place = f"{where}.images" if where else "images"
    parts: list[Fields] = [
        {"type": "image_url", "image_url": {"url": _as_address(image)}, PLACE: f"{place}[{at}]"}
        for at, image in enumerate(turn.images)
    ]
    return [*parts, {"type": "text", "text": turn.content or ""}]


def _as_address(image: str) -> str:
    """Return an image as a chat names it. The decoder reads its kind from its bytes."""
    return image if image.startswith("data:") else f"data:image/png;base64,{image}"
