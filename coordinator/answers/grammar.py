"""Grammars of calls: they constrain an answer that must call a tool, or that may call one.

A grammar is llguidance's Lark. Marks that are single tokens, which no text spells, are written as their ids.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from relayline.coordinator.answers.syntax import NamedBody, ObjectBody, Syntax, TaggedBody, Thinking

CALLS_MAX = 16  # of one answer that a grammar constrains; a small model may call without end
REFS_MAX = 8  # of schemas that say nothing but where another one stands
# Between the parts of JSON: what pretty printers write, one line's end and an indentation. A small model would write
# blanks without end, and with more of them a call of two arguments fills hundreds of tokens.
JSON_BLANKS = r"(?:[\x20\x09]{1,2}|\x20?\x0D?\x0A[\x20\x09]{0,16})"
ANYTHING = r"/(.|\n)*/"
_NUMBER = "/[0-9]{1,3}/"
_KEY = r'/[^<>"=\n]{1,64}/'
_BLANKS = r"/[ \n]{0,3}/"

Schema = Mapping[str, Any]
# Of JSON schemas: what says nothing about which values fit, and where further schemas stand.
_ANNOTATIONS = {"title", "description", "default", "examples", "example", "deprecated", "$comment", "$schema", "$id"}
_NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_SCHEMA_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_BESIDE_PROPERTIES = {
    "anyOf",
    "oneOf",
    "$ref",
    "if",
    "not",
    "dependentSchemas",
    "patternProperties",
    "unevaluatedProperties",
}
_SCHEMAS = {"items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"}


# Formats of texts that llguidance holds answers to. Any other is an annotation, as JSON Schema says. No set: in what
# clients send a format may be any JSON.
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
# llguidance's own rules for times have no end: a small model writes digits of a fraction until its tokens are used up.
_ZONE = "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]{{1,9}})?{_ZONE}"
_LONG_MONTHS = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_DAY = rf"(?:{_LONG_MONTHS}|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-9]))"
_TIMES = {"time": f"^{_TIME}$", "date-time": f"^[0-9]{{4}}-{_DAY}[tT]{_TIME}$"}  # formats -> patterns
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")
_EMPTY_CLASS = re.compile(r"\[\^?\]")  # only ECMAScript has one
# The faults of a pattern in every dialect of regular expressions, in the words of Python's `re`.
_BROKEN = (
    "unterminated character set",
    "missing )",
    "unbalanced parenthesis",
    "nothing to repeat",
    "min repeat greater",
    "bad character range",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The tools, schema and choices that a grammar must allow."""

    syntax: Syntax
    tools: Mapping[str, Schema]  # name -> JSON schema of its arguments; at least one
    marks: Mapping[str, int]  # texts that are control tokens -> their ids
    is_required: bool  # a call must come; otherwise it may, after or instead of text
    is_parallel: bool
    thinking: Thinking | None = None  # that may come first
    is_thinking: bool = False  # the prompt has begun it
    answer: str = (
        ""  # where no call must come: the grammar of all else, as `after_thoughts` takes it; any text if empty
    )


def calls_grammar(wanted: Wanted) -> str:
    """Return the grammar."""
    rules = Rules(wanted.marks)
    syntax = wanted.syntax
    bodies = [_body(rules, syntax, number, name, schema) for number, (name, schema) in enumerate(wanted.tools.items())]
    call = rules.add(f"call: ({' | '.join(bodies)}) {rules.text(syntax.close)}")
    more = f"({rules.text(syntax.between + syntax.open)} {call}){{0,{CALLS_MAX - 1}}}" if wanted.is_parallel else ""
    calls = f"{call} {more} {rules.text(syntax.end)}"
    if wanted.is_required:
        thought = thought_of(rules, wanted.thinking, is_open=wanted.is_thinking)
        start = f"{thought} {rules.text(syntax.begin + syntax.open)} {calls}"
    elif wanted.answer:
        thought = thought_of(rules, wanted.thinking, is_open=True) if wanted.is_thinking else ""
        start = f"{thought} (@answer | {rules.text(syntax.begin + syntax.open)} {calls})"
        return with_answer(rules.whole(start), wanted.answer)
    elif syntax.trigger:
        behind = (syntax.begin or syntax.open)[len(syntax.trigger) :] + (syntax.open if syntax.begin else "")
        thought = thought_of(rules, wanted.thinking, is_open=wanted.is_thinking)
        start = f"{thought} ({ANYTHING} | {rules.until(syntax.trigger)} {rules.text(behind)} {calls})"
    else:
        start = rf"/([^{{](.|\n)*)?/ | {calls}"
    return rules.whole(start)


def after_thoughts(grammar: str, thinking: Thinking, marks: Mapping[str, int]) -> str:
    """Return a grammar (Lark, or llguidance's JSON around one) that lets a thought end before the given one begins."""
    rules = Rules(marks)
    return with_answer(rules.whole(f"{thought_of(rules, thinking, is_open=True)} @answer"), grammar)


def with_answer(lark: str, grammar: str) -> str:
    """Return a grammar whose `@answer` is another one (Lark, or llguidance's JSON around one)."""
    answer = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**answer, "name": "answer"}]}, ensure_ascii=False)


def lean(schema: Any) -> Any:
    """Return a JSON schema without what says nothing about values, its objects closed as by `closed`.

    A tool that names no arguments has none.
    """
    return closed(short_times(_without(schema, lambda key, _value: key in _ANNOTATIONS)), also_empty=True)


def short_times(schema: Any) -> Any:
    """Return a JSON schema whose times have fractions of at most nine digits."""
    return _changed(schema, _short_time)


def _short_time(part: Schema) -> Schema:
    kind = part.get("format")
    if not isinstance(kind, str) or kind not in _TIMES or ("pattern" in part and "allOf" in part):
        return part
    ours = {"pattern": _TIMES[kind]}
    others = {key: value for key, value in part.items() if key != "format"}
    return {**others, "allOf": [ours]} if "pattern" in part else {**others, **ours}  # zod gives both


def weaker(schema: Any, *, is_strict: bool) -> Iterator[Any]:
    """Yield weaker and weaker replacements for a schema that cannot be followed.

    Unknown formats are dropped first. If the schema is not strict, rules that llguidance lacks are dropped one kind
    after the other, and all others stay. A pattern that is broken is not dropped.
    """
    plain = _without(schema, lambda key, value: key == "format" and value not in _FORMATS)
    yield plain
    if is_strict or not isinstance(plain, Mapping):
        return
    leniently = {"x-guidance": {"lenient": True}}
    yield {**plain, **leniently}
    looks = _without(plain, lambda key, value: key == "pattern" and bool(_LOOKS_AROUND.search(str(value))))
    yield {**looks, **leniently}
    if not has_broken_pattern(schema):
        yield {**_without(looks, _is_foreign), **leniently}


def _is_foreign(key: str, value: Any) -> bool:
    """Tell whether a keyword has a pattern of the client's."""
    return key == "patternProperties" or (key == "pattern" and value not in _TIMES.values())


def has_broken_pattern(schema: Any) -> bool:
    """Tell whether a pattern of a JSON schema that llguidance refuses is no regular expression in any dialect."""
    patterns: list[Any] = []

    def noted(part: Schema) -> Schema:
        named = part.get("patternProperties")
        patterns.extend([part.get("pattern"), *(named if isinstance(named, Mapping) else ())])
        return part

    _changed(schema, noted)
    return any(_is_broken(pattern) for pattern in patterns if isinstance(pattern, str))


def _is_broken(pattern: str) -> bool:
    if _EMPTY_CLASS.search(pattern):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sets inside sets, which are none in other dialects either
            re.compile(pattern)
    except re.error as error:
        is_range_of_classes = error.msg.startswith("bad character range \\")  # literal in ECMAScript
        return error.msg.startswith(_BROKEN) and not is_range_of_classes
    except (RecursionError, OverflowError):
        return False
    return False


def closed(schema: Any, *, also_empty: bool = False) -> Any:
    """Return a JSON schema whose objects have no properties but those that they name, unless they say otherwise.

    Otherwise an answer may invent properties, or repeat one: no grammar can forbid that. A schema that combines several
    for one object stays as it is: each would forbid the others' properties.
    """
    parts: list[Schema] = []

    def noted(part: Schema) -> Schema:
        parts.append(part)
        return part

    _changed(schema, noted)
    if any(map(_is_put_together, parts)):
        return schema
    return _changed(schema, lambda part: _closed(part) if also_empty or part.get("properties") else part)


def _is_put_together(part: Schema) -> bool:
    """Tell whether several schemas state an object's properties. One schema in `allOf` counts as that schema."""
    whole = part.get("allOf", [])
    if not isinstance(whole, list) or len(whole) > 1:
        return True
    return "properties" in part and bool(whole or _BESIDE_PROPERTIES & part.keys())


def _closed(part: Schema) -> Schema:
    names, required = part.get("properties"), part.get("required", [])
    if not isinstance(names, Mapping) or not isinstance(required, list):
        return part
    is_met = all(isinstance(name, str) and name in names for name in required) and "minProperties" not in part
    return {"additionalProperties": False, **part} if is_met else part


def _without(schema: Any, is_out: Callable[[str, Any], bool]) -> Any:
    """Return a schema without some of its keywords, here and in the schemas inside it."""
    return _changed(schema, lambda part: {key: value for key, value in part.items() if not is_out(key, value)})


def _changed(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """Return a schema with a change made to it and to the schemas inside it, the inner ones first."""
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            found[key] = {name: _changed(each, change) for name, each in value.items()}
        elif key in _SCHEMA_LISTS | _SCHEMAS and isinstance(value, list):
            found[key] = [_changed(each, change) for each in value]
        else:
            found[key] = _changed(value, change) if key in _SCHEMAS else value
    return change(found)


def thought_of(rules: Rules, thinking: Thinking | None, *, is_open: bool) -> str:
    """Return the terms of a thought before the answer: one that has begun has to end, any other may come."""
    if thinking is None:
        return ""
    thought = f"{rules.until(thinking.close)} {_BLANKS}"
    return thought if is_open else f"({rules.text(thinking.open)} {thought})?"


class Rules:
    """The rules of one grammar."""

    def __init__(self, marks: Mapping[str, int]) -> None:
        self._marks = marks
        known = "|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True))
        self._split = re.compile(f"({known})") if known else None
        self._numbers = itertools.count()
        self._lines: list[str] = []

    def add(self, rule: str) -> str:
        """Add `name: terms` and return the name."""
        self._lines.append(rule)
        return rule.partition(":")[0].partition("[")[0]

    def text(self, text: str) -> str:
        """Return the terms of a text."""
        return " ".join(self._terms(text))

    def until(self, mark: str) -> str:
        """Return the terms of anything up to a mark, the mark included."""
        first, *others = self._terms(mark)
        if first.startswith("<"):
            return " ".join((ANYTHING, first, *others))
        return " ".join((self.add(f"until_{next(self._numbers)}[lazy]: {ANYTHING} {first}"), *others))

    def json(self, schema: Any) -> str:
        """Return the term of a JSON value."""
        sent = schema if isinstance(schema, Mapping) else {}
        hints = sent.get("x-guidance")
        hints = {"whitespace_pattern": JSON_BLANKS, **(hints if isinstance(hints, Mapping) else {})}
        whole = {**sent, "x-guidance": hints}
        return self.add(f"json_{next(self._numbers)}: %json {json.dumps(whole)}")

    def whole(self, start: str) -> str:
        """Return the grammar whose first rule says `start`."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._lines])

    def _terms(self, text: str) -> Iterator[str]:
        for part in self._split.split(text) if self._split else [text]:
            if part in self._marks:
                yield f"<[{self._marks[part]}]>"
            elif part:
                yield json.dumps(part, ensure_ascii=False)


def _body(rules: Rules, syntax: Syntax, number: int, name: str, schema: Schema) -> str:
    """Return the name of the rule of one tool's calls."""
    body = syntax.body
    if isinstance(body, ObjectBody):
        numbered = [f'{{"{body.number_key}": "', _NUMBER, f'", "{body.name_key}"'] if body.number_key else []
        opening = numbered[:1] or [f'{{"{body.name_key}"']
        behind = f': {json.dumps(name, ensure_ascii=False)}, "{body.arguments_key}": '
        terms = [rules.text(opening[0]), *numbered[1:2], rules.text("".join(numbered[2:]) + behind)]
        terms += [rules.json(schema), rules.text("}")]
    elif isinstance(body, NamedBody):
        numbered = [rules.text(f"{body.prefix}{name}:"), _NUMBER] if body.is_numbered else []
        terms = numbered or [rules.text(body.prefix + name)]
        terms += [rules.text(body.name_end), rules.json(schema)]
    else:
        terms = [rules.text(body.name_open + name + body.name_end), *_arguments(rules, body, schema)]
        terms.append(rules.text(body.end))
    return rules.add(f"tool_{number}: {' '.join(terms)}")


def _arguments(rules: Rules, body: TaggedBody, schema: Schema) -> Iterator[str]:
    """Yield the terms of tagged arguments, in the schema's order."""
    schema = resolved(schema)
    required = schema.get("required")
    if "properties" not in schema and schema.get("additionalProperties") is not False:
        key = f"{rules.text(body.key_open)} {_KEY} {rules.text(body.key_end)}"
        yield f"({key} {rules.until(body.value_end)})*"  # whichever the model names
    shared = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
    properties = schema.get("properties")
    for key, each in properties.items() if isinstance(properties, Mapping) else ():
        of_value = {**each, **shared} if isinstance(each, Mapping) else {}
        term = f"{rules.text(body.key_open + key + body.key_end)} {_value(rules, body, of_value)}"
        yield term if isinstance(required, list) and key in required else f"({term})?"


def resolved(schema: Schema) -> Schema:
    """Return the schema that a root `$ref` names, with the definitions it may refer to; unchanged if the name is not
    found.
    """
    shared = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
    for _ in range(REFS_MAX):
        way = schema.get("$ref")
        if not isinstance(way, str) or not way.startswith("#/"):
            break
        kind, _, name = way.removeprefix("#/").partition("/")
        found = shared[kind].get(name) if isinstance(shared.get(kind), Mapping) and kind != "x-guidance" else None
        if not isinstance(found, Mapping):
            break
        schema = {**shared, **found}
    return schema


def _value(rules: Rules, body: TaggedBody, schema: Schema) -> str:
    """Return the terms of one value and its end."""
    if schema.get("type") != "string":
        return f"{rules.json(schema)} {rules.text(body.value_end)}"
    choices = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else []
    if choices and isinstance(choices, list):
        return f"({' | '.join(rules.text(str(choice)) for choice in choices)}) {rules.text(body.value_end)}"
    return rules.until(body.value_end)
