"""Answer formats as clients request them, and the grammars made from them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from relayline.coordinator.http.requests import structure
from relayline.coordinator.http.requests.bodies import CompletionBody, decode_body
from relayline.coordinator.http.requests.structure import Shape, grammar_of, shape_of
from relayline.coordinator.text import grammar_check
from relayline.coordinator.text.grammar_check import GrammarChecker
from relayline.coordinator.text.grammar_worker import Bytes
from relayline.wire.common import bounds
from relayline.wire.common.errors import InvalidRequestError, OverloadedError

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Bytes()))


def asked(**fields: Any) -> Shape | None:
    return shape_of(decode_body(json.dumps({"prompt": "x", **fields}).encode(), CompletionBody))


def fits(vocabulary: LLTokenizer, grammar: str, text: str) -> bool:
    """Whether the text is a whole answer."""
    limits = LLParserLimits(max_items_in_row=bounds.GRAMMAR_ITEMS_MAX, verbose_errors=False)
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    assert not matcher.is_error(), matcher.get_error()
    raw = list(text.encode())
    return matcher.try_consume_tokens(raw) == len(raw) and matcher.is_accepting()


PEOPLE = (
    ['{"name":"Ada","age":36}', '{ "name" : "é\\n",\n\t"age": -1 }'],
    ["{}", '{"name":"Ada"}', "5", '{"age":1,"name":""}'],
)
OBJECTS = ["{}", '{"a": [1, null, {"b": 2.5e3}]}'], ["[]", "5", '{"a"}', ""]
DIGITS = ["123-4567", "000-0000"], ["123-456", "a23-4567", "123-45678"]
CHOICES = ["yes", 'no "n"\\', "é\n🎉"], ["ye", "yesno", ""]
LETTERS = ["aab", "b"], ["aa", "ba", "c"]
MANY = [f"choice {number}" for number in range(2 * bounds.GRAMMAR_ITEMS_MAX)], ["choice", "choice 5000"]
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": PERSON}}
LOOSE = {key: value for key, value in PERSON.items() if key != "additionalProperties"}
FREE = {**LOOSE, "additionalProperties": {"type": "integer"}}
MORE = '{"name":"","age":1,"height":2}'
NAMED_TWICE = '{"name":"","age":1,"age":2}'
FREE_TWICE = (
    '{"name":"","age":1,"height":2,"height":3}'  # no grammar can count them, as docs/reference/http-api.md says
)
GBNF = 'root ::= "a"* end\nend ::= "b"'


@pytest.mark.parametrize(
    ("fields", "param", "answers"),
    [
        ({"response_format": SCHEMA_FORMAT}, "response_format.json_schema.schema", PEOPLE),
        ({"response_format": {"type": "json_object"}}, "response_format", OBJECTS),
        ({"response_format": {"type": "json_object", "schema": PERSON}}, "response_format.schema", PEOPLE),
        ({"response_format": {"type": "json_schema", "schema": PERSON}}, "response_format.schema", PEOPLE),
        ({"json_schema": PERSON}, "json_schema", PEOPLE),
        ({"json_schema": LOOSE}, "json_schema", (PEOPLE[0], [*PEOPLE[1], MORE])),
        ({"json_schema": FREE}, "json_schema", ([*PEOPLE[0], MORE, FREE_TWICE], [*PEOPLE[1], NAMED_TWICE])),
        ({"json_schema": True}, "json_schema", (["5", '{"a":1}', '"x"', "null"], ["x", ""])),
        ({"guided_json": PERSON}, "guided_json", PEOPLE),
        ({"guided_json": json.dumps(PERSON)}, "guided_json", PEOPLE),
        ({"structured_outputs": {"json": PERSON}}, "structured_outputs.json", PEOPLE),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", OBJECTS),
        ({"guided_regex": "[0-9]{3}-[0-9]{4}"}, "guided_regex", DIGITS),
        ({"structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}}, "structured_outputs.regex", DIGITS),
        ({"guided_choice": CHOICES[0]}, "guided_choice", CHOICES),
        ({"structured_outputs": {"choice": CHOICES[0]}}, "structured_outputs.choice", CHOICES),
        ({"guided_choice": MANY[0]}, "guided_choice", MANY),
        ({"guided_json": {"enum": MANY[0]}}, "guided_json", ([f'"{one}"' for one in MANY[0]], MANY[0])),
        ({"grammar": GBNF}, "grammar", LETTERS),
        ({"guided_grammar": 'start: "a"* "b"'}, "guided_grammar", LETTERS),
        ({"structured_outputs": {"grammar": GBNF}}, "structured_outputs.grammar", LETTERS),
        ({"regex": "[0-9]{3}-[0-9]{4}"}, "regex", DIGITS),  # as SGLang has it, and Outlines sends it
        ({"ebnf": GBNF}, "ebnf", LETTERS),
        # As guidance sends it, for old and new servers of vLLM.
        ({"guided_grammar": GBNF, "structured_outputs": {"grammar": GBNF}}, "guided_grammar", LETTERS),
        ({"structured_outputs": {"json": PERSON, "disable_fallback": True}}, "structured_outputs.json", PEOPLE),
    ],
)
def test_each_way_of_asking_makes_its_grammar(
    vocabulary: LLTokenizer, fields: dict[str, Any], param: str, answers: tuple[list[str], list[str]]
) -> None:
    shape = asked(**fields)
    assert shape is not None
    assert shape.param == param
    assert shape.is_json == ("json" in param or param.startswith("response_format"))
    grammar = grammar_of(shape)
    assert [text for text in answers[0][:50] if not fits(vocabulary, grammar, text)] == []
    assert [text for text in answers[1][:50] if fits(vocabulary, grammar, text)] == []


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"guided_json": "", "json_schema": None, "grammar": "", "guided_regex": None, "guided_choice": []},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False}},
    ],
)
def test_an_answer_without_a_requested_shape_is_free(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


CHAIN = "\n".join(f'a{number}: a{number + 1} "x"' for number in range(3_000))
REFS = {f"a{number}": {"properties": {"x": {"$ref": f"#/$defs/a{number + 1}"}}} for number in range(1_100)}
MULTIPLE = '{"type": "integer", "multipleOf": 4000037}'


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("grammar", f'start: a0\n{CHAIN}\na3000: "x"', "refer to each other too deeply"),
        ("json", json.dumps({"$ref": "#/$defs/a0", "$defs": {**REFS, "a1100": {}}}), "refer to each other too deeply"),
        ("json", MULTIPLE, "takes too long to begin with"),
        ("grammar", f'start: %json {MULTIPLE} <|any|> <[5]> "<a b>"', "takes too long to begin with"),
    ],
    ids=["rules", "references", "multiples", "multiples with tokens"],
)
def test_a_grammar_that_would_crash_its_process_is_refused(
    kind: Any, text: str, reason: str, vocabulary: LLTokenizer
) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        grammar_of(Shape("grammar", kind, (text,)))
    assert fits(vocabulary, grammar_of(Shape("grammar", "grammar", (GBNF,))), "aab"), (
        "the next grammar is tried in a new process"
    )


LETTER = "/[a-z ]/"
TOO_DEAR = {
    "ambiguous": f"start: a\na: a a a | a a | | {LETTER}",
    "ambiguous lists": f'start: a+\na: b* c* | b\nb: c | {LETTER}\nc: b b | "x"',
    "nothing, many times": "start: a0\n"
    + "\n".join(f"a{at}: a{at + 1}? a{at + 1}? a{at + 1}?" for at in range(12))
    + f"\na12: {LETTER}?",
    "on both sides": "start: p\np: "
    + " | ".join(f'"{each}" p "{each}"' for each in "abcdefghijklmnopqrstuvwxyz ")
    + f" | {LETTER}",
    "wide": "start: s*\ns: "
    + " | ".join(f"r{at}" for at in range(280))
    + "\n"
    + "\n".join(f'r{at}: /[a-z]+/ " " | /[a-z]+/ r{(at + 7) % 280}' for at in range(280)),
}


@pytest.mark.parametrize("grammar", TOO_DEAR.values(), ids=TOO_DEAR)
def test_a_grammar_that_is_slow_to_follow_is_refused_beforehand(grammar: str) -> None:
    """A stage would find out during the answer, in the thread that decodes for all."""
    with pytest.raises(InvalidRequestError, match=r"it takes too long to follow: [^\n]*items") as caught:
        grammar_of(Shape("grammar", "grammar", (grammar,)))
    assert "\n" not in caught.value.message


def test_a_grammar_that_can_be_followed_in_some_way_is_accepted() -> None:
    wide = {"type": "object", "properties": {f"key {at}": {"type": "string"} for at in range(60)}}
    grammar_of(Shape("json", "json", (json.dumps(wide),)))
    expression = 'root ::= (e "=" t "\\n")+\ne ::= t ([-+*/] t)*\nt ::= [a-z]+ | [0-9]+ | "(" e ")"'
    grammar_of(Shape("grammar", "grammar", (expression,)))
    named = GrammarChecker()
    assert named.check("start: <|no_token_of_these_bytes|> /a/")[1] == "", "only a stage knows the model's tokens"
    named.close()


def test_grammars_are_tried_by_one_process_from_many_threads() -> None:
    checker = GrammarChecker()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: checker.check(f"start: /[a-z]{{{number}}}/"), range(1, 33)))
    assert found == [(f"start: /[a-z]{{{number}}}/", "") for number in range(1, 33)]
    worker = checker._worker
    assert worker is not None
    checker.close()
    assert worker.poll() == 0, "it exits on request, as it does after its coordinator's end"


def test_a_process_with_many_open_files_can_try_grammars() -> None:
    """`select` takes no file from number 1,024 on, which a server with that many connections gives to a new worker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1_200:
        if hard != resource.RLIM_INFINITY and hard < 1_200:
            pytest.skip("this process may not open 1,200 files")
        resource.setrlimit(resource.RLIMIT_NOFILE, (1_200, hard))
    checker = GrammarChecker()
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1_030):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert checker.check('start: "a"') == ('start: "a"', "")
        assert checker._worker is not None
        assert checker._worker.stdout is not None
        assert checker._worker.stdout.fileno() >= 1_024
    checker.close()


@pytest.mark.parametrize("field", ["guided_json", "json_schema", "structured_outputs"])
def test_a_schema_that_is_not_utf8_is_the_clients_fault(field: str) -> None:
    schema = b'{"json":{"a":"\xff"}}' if field == "structured_outputs" else b'{"a":"\xff"}'
    with pytest.raises(InvalidRequestError, match="UTF-8"):
        shape_of(decode_body(b'{"prompt":"a","' + field.encode() + b'":' + schema + b"}", CompletionBody))


def test_a_worker_that_something_else_has_ended_is_started_again() -> None:
    checker = GrammarChecker()
    assert checker.check('start: "a"')[1] == ""
    assert checker._worker is not None
    checker._worker.kill()
    checker._worker.wait()
    assert checker.check('start: "b"') == ('start: "b"', "")
    checker.close()


def test_blanks_in_json_are_bounded(vocabulary: LLTokenizer) -> None:
    """A small model may otherwise repeat them until its tokens are used up."""
    grammar = grammar_of(Shape("json_schema", "json", ("{}",)))
    deep = {"a": [{"b": {"c": 1}}, []], "d": None}
    for options in ({}, {"separators": (",", ":")}, {"indent": 4}, {"indent": "\t"}, {"separators": (" , ", " : ")}):
        assert fits(vocabulary, grammar, json.dumps(deep, **options)), options  # type: ignore[arg-type]
    for text in ("[ \n1, \r\n  2\r\n]", "[  1,  2]", "[" + "\n" + " " * 16 + "]"):
        assert fits(vocabulary, grammar, text), text
    for text in ("[   ]", "[\n\n]", "[\n" + " " * 17 + "]", "[1   ,2]", '{"a":   1}'):
        assert not fits(vocabulary, grammar, text), text


@pytest.mark.parametrize(
    ("fields", "is_kept"),
    [
        ({"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}}, (True, False, False)),
        ({"structured_outputs": {"json": PERSON, "whitespace_pattern": " ?"}}, (True, True, False)),
        ({"guided_json": PERSON, "guided_whitespace_pattern": " {0,9}"}, (True, True, True)),
        ({"guided_json": {**PERSON, "not": {"const": 1}}}, (True, True, False)),
    ],
)
def test_the_blanks_that_a_client_asks_for(
    vocabulary: LLTokenizer, fields: dict[str, Any], is_kept: tuple[bool, ...]
) -> None:
    shape = asked(**fields)
    assert shape is not None
    grammar = grammar_of(dataclasses.replace(shape, is_strict=False))
    texts = ('{"name":"Ada","age":36}', '{"name": "Ada", "age": 36}', '{"name":     "Ada","age":36}')
    assert tuple(fits(vocabulary, grammar, text) for text in texts) == is_kept


@pytest.mark.parametrize("kind", ["date-time", "time"])
@pytest.mark.parametrize("more", [{}, {"pattern": r"^[-0-9:.TZz+]+$"}], ids=["", "with a pattern, as zod writes it"])
@pytest.mark.parametrize("other", [{}, {"type": "string", "pattern": r"\h"}], ids=["alone", "beside a foreign pattern"])
def test_a_time_has_nine_digits_of_a_second_at_most(
    vocabulary: LLTokenizer, kind: str, more: dict[str, Any], other: dict[str, Any]
) -> None:
    """llguidance's own rule has no end: a small model fills an answer with them."""
    schema = {"properties": {"at": {"type": "string", "format": kind, **more}, "other": other}, "required": ["at"]}
    grammar = grammar_of(Shape("response_format", "json", (json.dumps(schema),), is_strict=False))
    date = "" if kind == "time" else "2024-02-29T"
    for text in ("23:59:60Z", "00:00:00.123456789+14:00", "12:30:05.5z"):
        assert fits(vocabulary, grammar, json.dumps({"at": date + text})), text
    for text in ("24:00:00Z", "00:00:00.1234567890Z", "00:00:00", "00:00:00.Z"):
        assert not fits(vocabulary, grammar, json.dumps({"at": date + text})), text
    if date:
        assert not fits(vocabulary, grammar, '{"at": "2024-02-30T00:00:00Z"}')


@pytest.mark.parametrize(
    ("pattern", "is_taken"),
    [
        *((broken, False) for broken in ("[a-z", "(a", "a)", "*a", "a{2,1}", "[z-a]")),
        *((foreign, True) for foreign in (r"\h", "[^]", r"\cA", "(?>a)", r"[\w-.]", "^(?!x)[a-z]+$", "[[a]", r"\p{L}")),
    ],
)
@pytest.mark.parametrize("place", ["pattern", "patternProperties"])
def test_a_pattern_is_left_out_only_where_some_dialect_has_it(place: str, pattern: str, is_taken: bool) -> None:
    part = {"type": "string", "pattern": pattern} if place == "pattern" else {place: {pattern: {}}}
    shape = Shape("response_format", "json", (json.dumps({"properties": {"n": part}}),), is_strict=False)
    if is_taken:
        assert grammar_of(shape)
        return
    with pytest.raises(InvalidRequestError, match=r"not a JSON schema that can be used: .*regex parse error") as caught:
        grammar_of(shape)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json", '{"type": "strin"}', "not a JSON schema that can be used: Invalid type: strin"),
        ("json", '{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
        ("json", '{"$ref": "http://elsewhere/x"}', "does not fetch"),
        ("json", "5", "not a JSON schema"),
        ("json", "{", "not a JSON schema"),
        ("json", '{"items":' * 5_000 + "{}" + "}" * 5_000, "recursion limit"),
        ("regex", "([", "not a regular expression that can be used"),
        ("regex", "(" * 5_000 + ")" * 5_000, "not a regular expression"),
        ("grammar", "root ::= (", "not a grammar (GBNF or Lark) that can be used: Expected ')'"),
        ("grammar", "root ::= other", "Rule 'other' not found"),
        ("grammar", "start: other", "other"),
        ("grammar", "root ::= " + "(" * 5_000, "nested too deeply"),
        (
            "grammar",
            'root ::= "' + "x" * bounds.GRAMMAR_BYTES_MAX + '"',
            f"over the limit of {bounds.GRAMMAR_BYTES_MAX}",
        ),
        ("json", json.dumps({"enum": [f"{number:060}" for number in range(1_500)]}), "its grammar has"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused_in_one_line(kind: Any, text: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        grammar_of(Shape("grammar", kind, (text,)))
    assert caught.value.param == "grammar"
    assert caught.value.message.startswith("grammar: ")
    assert reason in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 600


def test_the_same_replacement_of_a_schema_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying a large one that cannot be followed takes a second of all who have grammars."""
    tried: list[str] = []

    def refuse(grammar: str, **_: Any) -> tuple[str, str]:
        tried.append(grammar)
        return "", "no"

    monkeypatch.setattr(structure.checker, "check", refuse)
    with pytest.raises(InvalidRequestError):
        grammar_of(Shape("response_format", "json", (json.dumps(PERSON),), is_strict=False))
    assert len(tried) == len(set(tried)) == 2, "as it is, and leniently"


def test_a_grammar_that_a_busy_host_does_not_check_in_time_is_no_mistake_of_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checker = GrammarChecker()
    monkeypatch.setattr(grammar_check, "ANSWER_TIMEOUT_S", 0.0)
    with pytest.raises(OverloadedError, match="too busy to check the grammar"):
        checker.check('start: "a"', is_gbnf=True)
    assert checker._worker is None
