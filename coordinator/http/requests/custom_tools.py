"""OpenAI's `custom` tools, whose input is free text: to the model each is a function with one text argument."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from relayline.coordinator.answers.custom_calls import ARGUMENT
from relayline.wire.common.errors import InvalidRequestError

NAME_CHARS_MAX = 128  # as Anthropic has it; OpenAI allows 64, and a name space before them
NAME_FORM = f"has 1 to {NAME_CHARS_MAX} letters, digits, and any of _ . : / -"
_NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{NAME_CHARS_MAX}}}")  # with what servers of other protocols put in front


def is_name(value: Any) -> bool:
    """Return whether a tool can have this name."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def custom_function(tool: Mapping[str, Any], param: str) -> Mapping[str, Any]:
    """Return a custom tool, as a chat has it, as the function that the model sees. Raises InvalidRequestError."""
    custom = tool.get("custom")
    if not isinstance(custom, Mapping) or not is_name(custom.get("name")):
        raise InvalidRequestError.of_field(param, f"needs a `custom` whose name {NAME_FORM}")
    description = custom.get("description") or ""
    if not isinstance(description, str):
        raise InvalidRequestError(f"{param}.custom.description: must be text", param=param)
    pattern = _pattern(custom.get("format"), f"{param}.custom.format")
    text: dict[str, Any] = {"type": "string", "description": "The whole input of the tool, as plain text."}
    if pattern:
        text |= {"pattern": f"^(?:{pattern})$"}
    parameters = {"type": "object", "properties": {ARGUMENT: text}, "required": [ARGUMENT]}
    shown = {"name": custom["name"], "description": description}
    return {**shown, "parameters": {**parameters, "additionalProperties": False}, "strict": True}


def _pattern(form: Any, param: str) -> str:
    """Return the regular expression of an input, "" for any text. Raises InvalidRequestError."""
    kind = form.get("type") if isinstance(form, Mapping) else "text" if form is None else ""
    if kind == "text":
        return ""
    grammar = form.get("grammar", form) if kind == "grammar" else None
    syntax, definition = (
        grammar.get(key) if isinstance(grammar, Mapping) else None for key in ("syntax", "definition")
    )
    if syntax == "lark":
        text = "an input cannot follow a Lark grammar here, since it is written as JSON; send a regex, or no format"
        raise InvalidRequestError.of_field(param, text)
    if syntax != "regex" or not isinstance(definition, str) or not definition:
        text = "must be of type text, or of type grammar with syntax regex and a definition"
        raise InvalidRequestError.of_field(param, text)
    return definition


def function_call(call: Mapping[str, Any], param: str) -> dict[str, Any]:
    """Return an earlier call of a custom tool as one of a function. Raises InvalidRequestError."""
    custom = call.get("custom")
    name, text = (custom.get(key) if isinstance(custom, Mapping) else None for key in ("name", ARGUMENT))
    if not isinstance(name, str) or not isinstance(text, str):
        raise InvalidRequestError.of_field(param, f"needs a name and {ARGUMENT}, both of them text")
    return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": arguments_of(text)}}


def arguments_of(text: str) -> str:
    """Return the arguments of a call with this input, as JSON text."""
    return json.dumps({ARGUMENT: text}, ensure_ascii=False)
