"""The shape that an answer must have: from the ways in which clients ask for it to one grammar.

OpenAI's `response_format`, vLLM's `structured_outputs` and the `guided_*` before it, llama-server's `json_schema` and
`grammar`, SGLang's `regex` and `ebnf`. Stages follow the grammar token by token (`stage/sampling/constraint.py`); here
it is made and checked, by llguidance.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Literal

from llguidance import LLMatcher

from relayline.coordinator.answers.grammar import JSON_BLANKS, closed, short_times, weaker
from relayline.coordinator.http.requests.bodies import GenerationBody, Json
from relayline.coordinator.text.grammar_check import checker
from relayline.wire.common.bounds import GRAMMAR_BYTES_MAX
from relayline.wire.common.errors import InvalidRequestError

Kind = Literal["json", "regex", "choice", "grammar"]

ANY_OBJECT = '{"type":"object"}'
CLOSED_CHARS_MAX = GRAMMAR_BYTES_MAX // 2  # of a schema; closing adds to it, and a longer one might not fit any more
ERROR_CHARS_MAX = 400  # of llguidance's reason


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The client's request for structure."""

    param: str  # the field that did
    kind: Kind
    texts: tuple[str, ...]  # the choices; of other kinds one: a JSON schema, a regular expression, GBNF or Lark
    is_strict: bool = True  # of a schema: a keyword that cannot be followed is refused, not left out
    blanks: str = JSON_BLANKS  # of a schema: a regular expression of what may stand between tokens; "" for nothing

    @property
    def is_json(self) -> bool:
        """Whether the answer is JSON."""
        return self.kind == "json"


def shape_of(body: GenerationBody) -> Shape | None:
    """Return what shape a body asks for, None for any. Raises InvalidRequestError, also for more than one.

    Clients that speak to old and new servers send one shape under two names.
    """
    outputs = body.structured_outputs
    asked = [
        _response_format(body),
        _json("json_schema", body.json_schema),
        _text("grammar", "grammar", body.grammar),
        _json("guided_json", body.guided_json),
        _text("guided_regex", "regex", body.guided_regex),
        _choice("guided_choice", body.guided_choice),
        _text("guided_grammar", "grammar", body.guided_grammar),
        _text("regex", "regex", body.regex),
        _text("ebnf", "grammar", body.ebnf),
        _json("structured_outputs.json", outputs.json_schema) if outputs else None,
        _text("structured_outputs.regex", "regex", outputs.regex) if outputs else None,
        _choice("structured_outputs.choice", outputs.choice) if outputs else None,
        _text("structured_outputs.grammar", "grammar", outputs.grammar) if outputs else None,
        Shape("structured_outputs.json_object", "json", (ANY_OBJECT,)) if outputs and outputs.json_object else None,
    ]
    shapes = [shape for shape in asked if shape]
    if not shapes:
        return None
    first = shapes[0]
    if any((shape.kind, shape.texts) != (first.kind, first.texts) for shape in shapes):
        names = " and ".join(shape.param for shape in shapes)
        raise InvalidRequestError(f"{names}: an answer has one format; send one of them", param=shapes[1].param)
    return dataclasses.replace(first, blanks=_blanks(body))


def _blanks(body: GenerationBody) -> str:
    """Return the regular expression of what may stand between the tokens of JSON."""
    outputs = body.structured_outputs
    if outputs and outputs.disable_any_whitespace:
        return ""
    asked = outputs.whitespace_pattern if outputs else None
    asked = body.guided_whitespace_pattern if asked is None else asked
    return JSON_BLANKS if asked is None else asked


def grammar_of(shape: Shape) -> str:
    """Return the grammar that stages follow. May take a second for a large one: not for the event loop.

    Raises InvalidRequestError where the shape is none, or llguidance does not know it.
    """
    check_size(sum(len(text.encode()) for text in shape.texts), shape.param)  # before anything is made of it
    reason = ""
    for each in _ways(shape):
        grammar, fault = _checked(each)
        if not fault:
            break
        reason = reason or fault
    else:
        raise InvalidRequestError.of_field(
            shape.param, f"not a {_NAMES[shape.kind]} that can be used: {in_a_line(reason)}"
        )
    check_size(len(grammar.encode()), shape.param)
    return grammar


def check_size(size_bytes: int, param: str) -> None:
    """Raise InvalidRequestError for a grammar that is too long for stages."""
    if size_bytes > GRAMMAR_BYTES_MAX:
        text = f"its grammar has {size_bytes} bytes, over the limit of {GRAMMAR_BYTES_MAX}"
        raise InvalidRequestError.of_field(param, text)


def fault_of(grammar: str) -> str:
    """Return what speaks against a grammar, "" for nothing. It may take half a second: not for the event loop."""
    return checker.check(grammar)[1]


def in_a_line(reason: str) -> str:
    """Return llguidance's reason as one line of bearable length."""
    return " ".join(reason.split())[:ERROR_CHARS_MAX]


def _ways(shape: Shape) -> Iterator[Shape]:
    """Yield the shape, a schema's objects closed; then its replacements where it cannot be followed."""
    if shape.kind != "json":
        yield shape
        return
    try:
        schema = json.loads(shape.texts[0])
        if len(shape.texts[0]) <= CLOSED_CHARS_MAX:
            schema = closed(short_times(schema))
        # Of most schemas several are the same, and a large one that cannot be followed takes a second each time.
        ways = dict.fromkeys(json.dumps(each) for each in (schema, *weaker(schema, is_strict=shape.is_strict)))
    except (ValueError, RecursionError):  # `_checked` says so
        yield shape
        return
    for text in ways:
        yield dataclasses.replace(shape, texts=(text,))


def _checked(shape: Shape) -> tuple[str, str]:
    """Return the grammar of a shape and what speaks against it, "" for nothing."""
    try:
        grammar = _grammar(shape)
        check_size(len(grammar.encode()), shape.param)
        return checker.check(grammar, is_gbnf=shape.kind == "grammar")
    except RecursionError:
        raise InvalidRequestError.of_field(shape.param, "nested too deeply") from None
    except ValueError as error:  # llguidance's for JSON
        return "", str(error) or type(error).__name__


_NAMES: dict[Kind, str] = {
    "json": "JSON schema",
    "regex": "regular expression",
    "choice": "list of choices",
    "grammar": "grammar (GBNF or Lark)",
}


def _grammar(shape: Shape) -> str:
    text = shape.texts[0]
    if shape.kind == "json":
        if text == "true":  # of a schema: anything
            text = "{}"
        if not shape.blanks:
            return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
        return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": shape.blanks})
    if shape.kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if shape.kind == "choice":
        # Named in capitals it is one regular expression, however many there are.
        return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in shape.texts)
    return text


def _response_format(body: GenerationBody) -> Shape | None:
    wanted, param = body.response_format, "response_format"
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return _json(f"{param}.schema", wanted.for_object) or Shape(param, "json", (ANY_OBJECT,))
    if wanted.type != "json_schema":
        text = 'type must be "text", "json_object" or "json_schema"'
        raise InvalidRequestError.of_field(param, f"{text}, not {wanted.type[:40]!r}")
    inner = wanted.json_schema.json_schema if wanted.json_schema else Json()
    schema = _json(f"{param}.schema", wanted.for_object)  # as llama-server's README has it
    param = f"{param}.json_schema"
    schema = _json(f"{param}.schema", inner) or schema
    if schema is None:
        raise InvalidRequestError.of_field(param, "needs a schema")
    is_strict = bool(wanted.json_schema and wanted.json_schema.strict)
    return dataclasses.replace(schema, is_strict=is_strict)


def _json(param: str, sent: Json) -> Shape | None:
    """Return the shape of a schema, sent as JSON or as a text that is JSON."""
    try:
        text = bytes(sent).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError.of_field(param, "is not UTF-8") from error
    if text in ("", "null", '""'):
        return None
    return Shape(param, "json", (json.loads(text) if text.startswith('"') else text,))


def _text(param: str, kind: Kind, text: str | None) -> Shape | None:
    return Shape(param, kind, (text,)) if text else None


def _choice(param: str, choices: list[str] | None) -> Shape | None:
    return Shape(param, "choice", tuple(choices)) if choices else None
