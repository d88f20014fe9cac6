"""Chat messages to one prompt text, by the model's own Jinja template.

Templates come with the model, so strangers wrote them. They run in Jinja's immutable sandbox, and any error they raise
is the request's error, not ours. They may also run forever or fill the memory, compiling or rendering. So a coordinator
does both in processes that may die of it (`coordinator/http/workers/body_worker.py`). This module knows message
dictionaries and text; it knows no HTTP and no token ids.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from relayline.coordinator.text.places import place_of
from relayline.wire.common.errors import InvalidRequestError, UsageError

Message = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # templates may know others
_PROBE = "q7VxK2probe"  # a text that no template writes
_NINE = re.compile(r"\bid\b['\"\]]*\s*\|\s*length\s*(?:!=|<|==)\s*9\b")  # of templates that want ids of nine letters
_FITTING_ID = re.compile(r"[A-Za-z0-9]{9}")
_NO_VARIABLES: Mapping[str, Any] = {}


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's own words for training tools. Here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace the block by the nodes inside it."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes HTML, which would put &lt; into prompts.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@dataclasses.dataclass(frozen=True, slots=True)
class CallForm:
    """In which form a template takes turns that call tools. Templates differ; the usual form comes first."""

    arguments_as_text: bool = False  # as JSON text, not as an object
    content_is_none: bool = False  # for a turn that has only calls; not an empty text


USUAL_FORM = CallForm()


class ChatTemplate:
    """One model's chat template, compiled once."""

    def __init__(
        self,
        source: str | None,
        *,
        bos_text: str = "",
        eos_text: str = "",
        for_tools: ChatTemplate | None = None,
    ) -> None:
        """`source` None means that the model has no template; rendering then always refuses.

        It is compiled when first needed. One that does not compile refuses likewise: completions still work.
        `for_tools` is the one that the model has for chats with tools, where that is another.
        """
        self.source, self.for_tools = source, for_tools or self
        self.bos_text, self.eos_text = bos_text, eos_text
        self._fits_ids = _NINE.search(source or "") is not None
        self._specials = {"bos_token": bos_text, "eos_token": eos_text}

    @functools.cached_property
    def _compiled(self) -> tuple[jinja2.Template | None, str]:
        """The template, or the reason why there is none."""
        if self.source is None:
            return None, "this model has no chat template; use /v1/completions"
        try:
            return _environment().from_string(self.source), ""
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            # Python's own errors are those of the code that is made of it: nested too deeply, or a number too long.
            reason = str(error).strip().splitlines() or [type(error).__name__]
            return None, f"this model's chat template does not compile ({reason[0]}); use /v1/completions"

    @functools.cached_property
    def _wants_parts(self) -> bool:
        """Whether content as one text is lost, and as a list of parts is not."""
        return not self._shows({"role": "user", "content": _PROBE}) and self._shows(
            {"role": "user", "content": _as_parts(_PROBE)}
        )

    @functools.cached_property
    def _knows_developer(self) -> bool:
        """Whether a turn of the role `developer` is written."""
        return "developer" in (self.source or "") and self._shows(self._probe("developer"), self._probe("user", "x"))

    @functools.cached_property
    def _loses_system(self) -> bool:
        """Whether system turns are refused or left out, and user turns are not."""
        return not self._shows(self._probe("system"), self._probe("user", "x")) and self._shows(self._probe("user"))

    def _probe(self, role: str, text: str = "") -> Message:
        text = text or _PROBE
        return {"role": role, "content": _as_parts(text) if self._wants_parts else text}

    def _shows(self, *messages: Message) -> bool:
        """Return whether the template writes the probe's text when these are the messages."""
        template, _ = self._compiled
        if template is None:
            return False
        try:
            known = {"add_generation_prompt": True, **self._specials, "messages": [dict(each) for each in messages]}
            return _PROBE in template.render(known)
        except MemoryError:
            raise
        except Exception:  # of a stranger's code
            return False

    def fault(self) -> str:
        """Return why a template does not compile; nothing if it does, or if there is none."""
        return self._compiled[1] if self.source is not None else ""

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] = _NO_VARIABLES,
        form: CallForm = USUAL_FORM,
    ) -> str:
        """Return the prompt text, ending where the assistant is to speak.

        `messages` have a `role` and a `content` (text, text parts, or None with tool calls); other keys pass through.
        `variables` reach the template by name, except messages and special tokens. Turns that call tools are written in
        the given `form`. Raises InvalidRequestError (param `messages`) without a template, for a part that is not text,
        and when the template itself refuses.
        """
        template, refusal = self._compiled
        if template is None:
            raise InvalidRequestError(refusal, param="messages")
        plain = [self._plain(message, index, form) for index, message in enumerate(messages)]
        if any(message["role"] == "system" for message in plain) and self._loses_system:
            plain = _folded(plain)
        if self._wants_parts:
            plain = [_in_parts(message) for message in plain]
        try:
            # Without any, `tools` stays undefined: templates made for tools iterate over it, and None would stop them.
            known = {"add_generation_prompt": True, **variables, **self._specials, "messages": plain}
            return template.render(known)
        except MemoryError:
            raise
        except Exception as error:
            # A template written for other message shapes fails in any way at all; the shapes came from the client.
            reason = str(error).strip().splitlines() or [type(error).__name__]
            text = f"the model's chat template refuses this chat: {reason[0]}"
            raise InvalidRequestError(text, param="messages") from error

    def _plain(self, message: Message, index: int, form: CallForm) -> dict[str, Any]:
        """Return the message as templates expect it: content as one text, tool arguments as objects."""
        plain = dict(message)
        role = plain.get("role")
        if role not in ROLES and str(role) not in (self.source or ""):
            text = f"{str(role)[:40]!r} is not a role; use one of {', '.join(ROLES)}"
            raise InvalidRequestError.of_field(f"messages[{index}].role", text)
        if role == "developer" and not self._knows_developer:
            plain["role"] = "system"
        plain["content"] = content_text(plain.get("content"), f"messages[{index}].content")
        if not plain.get("tool_calls"):
            plain.pop("tool_calls", None)  # templates ask whether there is such a field
        else:
            if self._fits_ids:
                plain["tool_calls"] = [_with_fitting_id(call, "id") for call in plain["tool_calls"]]
            if form.content_is_none and not plain["content"]:
                plain["content"] = None
            if not form.arguments_as_text:
                plain["tool_calls"] = [_with_object_arguments(call) for call in plain["tool_calls"]]
        return _with_fitting_id(plain, "tool_call_id") if self._fits_ids else plain


def _folded(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the system turns put before the first user turn's text; without a user turn they stay."""
    system_text = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    others = [message for message in messages if message["role"] != "system"]
    first = next((at for at, message in enumerate(others) if message["role"] == "user"), None)
    if first is None:
        return list(messages)
    others[first] = {**others[first], "content": f"{system_text}\n\n{others[first]['content']}"}
    return others


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return {**message, "content": _as_parts(content)} if isinstance(content, str) else message


def _with_fitting_id(holder: Any, key: str) -> Any:
    """Return a call or a result with an id of nine letters and digits, the same for the same id."""
    sent = holder.get(key) if isinstance(holder, Mapping) else None
    if not isinstance(sent, str) or _FITTING_ID.fullmatch(sent):
        return holder
    return {**holder, key: hashlib.sha256(sent.encode(errors="replace")).hexdigest()[:9]}


def read_template(path: Path) -> str:
    """Return a template's text from a file.

    Raises UsageError if it cannot be read, or is not a template. It is only parsed here: compiling could cost any
    amount.
    """
    try:
        source = path.read_text(encoding="utf-8")
        _environment().parse(source)
    except OSError as error:
        raise UsageError(f"chat template {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"chat template {path}: not UTF-8 at byte {error.start}") from error
    except (jinja2.TemplateError, RecursionError, ValueError) as error:  # the last of a number that is too long
        raise UsageError(f"chat template {path}: does not compile ({error})") from error
    return source


# Types of parts that a projector is needed for.
_MEDIA = ("image_url", "input_audio", "audio_url", "input_video", "video_url")


def content_text(content: Any, param: str) -> str:
    """Return a message's content as one text. Raises InvalidRequestError for a part that is none."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for at, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            is_media = isinstance(part, Mapping) and part.get("type") in _MEDIA
            text = "only text parts are supported" + (": this model is served without a projector" if is_media else "")
            if isinstance(part, Mapping) and part.get("type") == "text":
                text = "a part of type text needs a string `text`"
            place = place_of(part) or f"{param}[{at}]"
            raise InvalidRequestError.of_field(place, text)
        texts.append(part["text"])
    return "\n".join(texts)


def _with_object_arguments(call: Any) -> Any:
    """Return the tool call with `function.arguments` parsed: the API carries JSON text, templates want the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": object_arguments(function)}}


def object_arguments(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of an earlier call as an object; the model may have written something else, or been cut."""
    sent = function.get("arguments") or {}
    try:
        arguments = json.loads(sent) if isinstance(sent, str) else sent
    except (ValueError, RecursionError):
        arguments = sent
    return arguments if isinstance(arguments, Mapping) else {"arguments": arguments}
