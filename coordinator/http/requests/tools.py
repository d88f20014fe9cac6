"""The tools that a chat request offers, and whether one must be called: from OpenAI's fields to one checked value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from relayline.coordinator.answers.grammar import REFS_MAX, Schema, resolved
from relayline.coordinator.answers.tagged_calls import QUOTED, Types, type_of
from relayline.coordinator.http.requests.bodies import ChatBody, MessageBody
from relayline.coordinator.http.requests.custom_tools import NAME_FORM, custom_function, function_call, is_name
from relayline.wire.common.errors import InvalidRequestError

TOOLS_MAX = 256  # of one request; OpenAI allows 128
_NO_ARGUMENTS: Schema = {"type": "object", "properties": {}}


@dataclasses.dataclass(frozen=True, slots=True)
class Offered:
    """The tools that a request offers."""

    shown: tuple[Mapping[str, Any], ...]  # as the client sent them, for the prompt; custom tools as functions
    schemas: Mapping[str, Schema]  # of the arguments, by the name of the tools that may be called
    strict: frozenset[str]  # of these: whose calls must fit their schema
    types: Mapping[str, Types]  # of each tool's arguments: JSON types
    is_required: bool
    is_parallel: bool
    leaves_some: bool  # some tools are shown that may not be called
    custom: frozenset[str] = frozenset()  # of those that may be called: whose input is free text

    @property
    def needs_grammar(self) -> bool:
        """Whether answers must be led, for the tools' sake alone."""
        return self.is_required or bool(self.strict) or self.leaves_some


def offered_by(body: ChatBody) -> Offered | None:
    """Return a body's tools, None for none or where none may be called. Raises InvalidRequestError."""
    if len(body.tools or ()) > TOOLS_MAX:
        raise InvalidRequestError.of_field("tools", f"at most {TOOLS_MAX}, got {len(body.tools or ())}")
    tools = [_function(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())]
    by_name = {tool["name"]: tool for tool in tools}
    if len(by_name) < len(tools):
        raise InvalidRequestError.of_field("tools", "two have the same name")
    mode, names = _choice(body.tool_choice, by_name)
    if not tools or mode == "none":
        return None
    schemas = {name: _parameters(by_name[name]) for name in names}
    return Offered(
        shown=tuple(map(_as_function, body.tools or (), tools)),
        schemas=schemas,
        types={name: _types(schema) for name, schema in schemas.items()},
        leaves_some=len(schemas) < len(tools),
        strict=frozenset(name for name in names if by_name[name].get("strict")),
        custom=frozenset(names) & {each["custom"]["name"] for each in body.tools or () if each["type"] == "custom"},
        is_required=mode == "required",
        # A required call is made once, unless several are asked for: a small model would call without end.
        is_parallel=mode == "auto" if body.parallel_tool_calls is None else body.parallel_tool_calls,
    )


def check_calls(messages: Sequence[MessageBody]) -> None:
    """Refuse turns whose calls have no name, or no arguments. Calls of custom tools become those of functions."""
    for index, message in enumerate(messages):
        for at, call in enumerate(message.tool_calls or ()):
            param = f"messages[{index}].tool_calls[{at}]"
            if isinstance(call, Mapping) and call.get("type") == "custom":
                call = function_call(call, f"{param}.custom")
                message.tool_calls[at] = call  # type: ignore[index]  # it has calls
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise InvalidRequestError.of_field(param, "needs a function with a name")
            if not isinstance(function.get("arguments", ""), str | Mapping):
                raise InvalidRequestError(f"{param}.function.arguments: must be JSON text", param=param)


def _as_function(tool: Mapping[str, Any], function: Mapping[str, Any]) -> Mapping[str, Any]:
    return tool if tool["type"] == "function" else {"type": "function", "function": function}


def _function(tool: Any, param: str) -> Mapping[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind == "custom":
        return custom_function(tool, param)
    if kind != "function":
        raise InvalidRequestError.of_field(param, 'only tools of types "function" and "custom" are supported')
    function: Mapping[str, Any] | None = tool.get("function")
    if not isinstance(function, Mapping) or not is_name(function.get("name")):
        raise InvalidRequestError.of_field(param, f"needs a function whose name {NAME_FORM}")
    parameters = function.get("parameters") or {}
    is_schema = isinstance(parameters, Mapping) and isinstance(parameters.get("properties", {}), Mapping)
    if not is_schema or not all(isinstance(key, str) for key in _list(parameters, "required")):
        raise InvalidRequestError(f"{param}.function.parameters: must be a JSON schema of an object", param=param)
    if not isinstance(function.get("description") or "", str):
        raise InvalidRequestError(f"{param}.function.description: must be text", param=param)
    return function


def _parameters(function: Mapping[str, Any]) -> Schema:
    schema = function.get("parameters") or _NO_ARGUMENTS
    return schema if "type" in schema or "anyOf" in schema or "$ref" in schema else {"type": "object", **schema}


_Mode = Literal["none", "auto", "required"]


def _choice(choice: Any, by_name: Mapping[str, Any]) -> tuple[_Mode, Sequence[str]]:
    """Return the demand of a `tool_choice`, and its tools."""
    if choice is None or choice in ("none", "auto"):
        return choice or "auto", [*by_name]
    mode: _Mode = "required"
    names = [*by_name]
    if isinstance(choice, Mapping) and choice.get("type") in ("function", "custom"):
        names = [_name_of(choice)]
    elif isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        mode = "auto" if isinstance(allowed, Mapping) and allowed.get("mode") == "auto" else "required"
        names = [_name_of(tool) for tool in _list(allowed, "tools")] if isinstance(allowed, Mapping) else []
    elif choice != "required":
        raise InvalidRequestError.of_field("tool_choice", 'must be "none", "auto", "required", or name a function')
    unknown = [name for name in names if name not in by_name]
    if unknown or not names:
        text = f"{unknown[0][:64]!r} is not one of the tools" if unknown else "needs tools"
        raise InvalidRequestError.of_field("tool_choice", text)
    return mode, list(dict.fromkeys(names))


def _name_of(named: Any) -> str:
    function = named.get("function", named.get("custom", named)) if isinstance(named, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequestError.of_field("tool_choice", "each function needs a name")
    return name


def _types(schema: Schema) -> Types:
    schema = resolved(schema)
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    known: dict[str, frozenset[str]] = {}
    found = {key: _types_of(each, shared, known) for key, each in properties.items()}
    loose = {key for key, types in found.items() if types == {"string"} and properties[key].get("type") != "string"}
    return {key: types | {QUOTED} if key in loose else types for key, types in found.items()}


def _types_of(
    schema: Any, shared: Schema, known: dict[str, frozenset[str]], n_levels: int = REFS_MAX
) -> frozenset[str]:
    """Return the types that a schema allows; none where it does not say.

    `shared` are the schemas it may refer to, `known` the types of those that were looked at: each is looked at once,
    however often the others refer to it.
    """
    if not isinstance(schema, Mapping) or not n_levels:
        return frozenset()
    way = schema.get("$ref")
    if isinstance(way, str):
        if way not in known:
            known[way] = frozenset()  # what refers to itself says nothing by that
            target = {key: value for key, value in resolved({**schema, **shared}).items() if key not in shared}
            known[way] = _types_of({**target, "$ref": None}, shared, known, n_levels - 1)
        return known[way]
    kind = schema.get("type")
    if kind is not None:
        return frozenset(each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str))
    if "const" in schema or _list(schema, "enum"):
        return frozenset(type_of(value) for value in _list(schema, "enum") or [schema["const"]])
    ways = [_types_of(each, shared, known, n_levels - 1) for key in ("anyOf", "oneOf") for each in _list(schema, key)]
    if ways:
        return frozenset().union(*ways) if all(ways) else frozenset()
    parts = [_types_of(part, shared, known, n_levels - 1) for part in _list(schema, "allOf")]
    return next((types for types in parts if types), frozenset())


def _list(schema: Schema, key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []
