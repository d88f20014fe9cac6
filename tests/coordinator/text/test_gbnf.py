"""GBNF becomes a grammar of llguidance that takes the texts that llama.cpp takes."""

from __future__ import annotations

import ctypes
import functools
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llama_cpp import llama_cpp as llama
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from relayline.coordinator.text import gbnf
from relayline.coordinator.text.gbnf import GbnfError, lark_of
from relayline.coordinator.text.grammar_check import checker
from relayline.coordinator.text.grammar_worker import Bytes
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.paths import DEMO_MODEL
from relayline.wire.common.bounds import GRAMMAR_ITEMS_MAX


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO_MODEL)


@functools.cache
def vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Bytes()))


def fits(grammar: str, text: str) -> bool:
    """Whether the text is a whole answer."""
    limits = LLParserLimits(max_items_in_row=GRAMMAR_ITEMS_MAX, verbose_errors=False)
    matcher = LLMatcher(vocabulary(), lark_of(grammar), log_level=0, limits=limits)
    assert not matcher.is_error(), matcher.get_error()
    raw = list(text.encode())
    return matcher.try_consume_tokens(raw) == len(raw) and matcher.is_accepting()


def fits_natively(grammar: str, text: str) -> bool | None:
    """Whether llama.cpp takes the text as a whole answer; None: it does not take the grammar."""
    tokens = tokenizer()
    sampler = llama.llama_sampler_init_grammar(tokens._vocab, grammar.encode(), b"root")
    if not sampler:
        return None
    ends = next(token for token in range(tokens.n_vocab) if tokens.is_end(token))
    try:
        for token in [*tokens.encode(text, add_special=False), ends]:
            one = (llama.llama_token_data * 1)(llama.llama_token_data(token, 0.0, 0.0))
            array = llama.llama_token_data_array(one, 1, -1, False)
            llama.llama_sampler_apply(sampler, ctypes.byref(array))
            if math.isinf(array.data[0].logit):
                return False
            if token != ends:
                llama.llama_sampler_accept(sampler, token)
        return True
    finally:
        llama.llama_sampler_free(sampler)


ATOMS = st.sampled_from(
    ['"a"', '"ab"', '"b"', '"-"', "[ab]", "[^a]", "[a-c\\-]", ".", "x", "y-1", "( )", '"\\u0062\\x61"', '""', "[\\]b]"]
)
SIGNS = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,2}", "{0,1}", "{2,}", " { 1 , 3 }", "{2}{2}", "{0,0}"])
ITEMS = st.builds(lambda atom, sign: atom + ("" if atom == '""' else sign), ATOMS, SIGNS)
SEQUENCES = st.lists(ITEMS, min_size=1, max_size=3).map(" ".join)
CHOICES = st.lists(SEQUENCES, min_size=1, max_size=3).map(" |\n ".join)
GROUPS = st.builds(lambda inner, sign: f"(\n{inner} # why\n){sign}", CHOICES, SIGNS)
RULES = st.lists(GROUPS | SEQUENCES, min_size=1, max_size=3).map(" ".join)
TEXTS = st.text("abbcéx-]", max_size=7)


@settings(max_examples=200, deadline=None)
@given(
    root=RULES,
    x=st.lists(st.sampled_from(['"a"', "[bc]", '"ab"?', ".+"]), min_size=1, max_size=3),
    texts=st.lists(TEXTS, max_size=6),
)
def test_grammars_without_recursion_take_what_llama_cpp_takes(root: str, x: list[str], texts: list[str]) -> None:
    grammar = f'root ::= {root}\nx::={" ".join(x)}\ny-1 ::= "c" | x? "b" |\n'
    assume(fits_natively(grammar, "") is not None)  # it takes no part that may be empty, any number of times
    for text in ["", "ab", "aab", *texts]:
        assert fits(grammar, text) == fits_natively(grammar, text), (grammar, text, lark_of(grammar))


JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = 'root  ::= (sum "=" num "\\n")+\nsum ::= term ([-+*/] term)*\nterm ::= num | "(" sum ")"\nnum ::= [0-9]+'


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        ('root ::= (("a"{2}){3})', ["a" * 6, "a" * 5, "a" * 4]),
        (r'root ::= "\x41\u00e9\U0001F600\-"', ["Aé😀-", "Aé"]),
        (r"root ::= [\u0041-\U0001F600]+", ["Aé😀", "+"]),
        ("root ::= start\nstart ::= fooBar foo-bar\nfooBar ::= .\nfoo-bar ::= [&&~~]", ["x&", "\n~", "xy"]),
        ('root ::= "Answer: " words " is " words "."\nwords ::= [A-Za-z .]+', ["Answer: it. is it..", "Answer: it"]),
        ('root ::= 1\n1 ::= "a"? # the end', ["", "a", "b"]),
        ("root ::= [/\\]^-] [^/]", ["/a", "-\n", "]/", "^^"]),
        ('root ::= "a" root{0} none{0,0} "b"{0} | "(" root ")"', ["a", "(a)", "ab", "aa"]),
        (JSON, ['{"a": [1, -2.5e3, {"b": null}],"é":\n  "\\u00e9\\""}', "{}", "[]", '{"a":01}', '{"a"}']),
        (SUMS, ["1+(2*3)=7\n", "1=1\n22=(22)\n", "22=22\n", "(1=1\n", "1+=2\n"]),
    ],
)
def test_a_grammar_takes_what_llama_cpp_takes(grammar: str, texts: list[str]) -> None:
    assert checker.check(grammar, is_gbnf=True)[1] == ""
    found = [fits(grammar, text) for text in texts]
    assert found == [fits_natively(grammar, text) for text in texts]
    assert len({*found}) == 2


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("root ::= (", "Expected ')' in line 1"),
        ("root ::= other", "Rule 'other' not found"),
        ('other ::= "a"', "No 'root' rule found"),
        ('root ::= "a', "Unexpected end"),
        ('root ::= "\\q"', r"Unknown escape \q"),
        ('root ::= "\\u12"', "Expected 4 hexadecimal digits"),
        ("root ::= *", "Expected the end of the line"),
        ('root ::= ""*', "Nothing to repeat"),
        ('root ::= "a"{0}*', "Nothing to repeat"),
        ('root ::= "a"{2001}', "at least 2001 times"),
        ('root ::= "a"{x}', "Expected a number"),
        ('root = "a"', "Expected '::='"),
        ('root ::= "a"\n"b"', "Expected a rule's name in line 2"),
    ],
)
def test_what_llama_cpp_refuses_is_refused_with_its_place(grammar: str, reason: str) -> None:
    with pytest.raises(GbnfError) as caught:
        lark_of(grammar)
    assert reason in str(caught.value)
    assert fits_natively(grammar, "") is None


def test_more_than_llama_cpps_bound_at_most_is_any_number() -> None:
    assert lark_of('root ::= "a"{1,2001}') == "start: /a+/"


def test_tokens_are_named_as_llama_cpp_names_them() -> None:
    assert lark_of("root ::= <[5]> !<[6]>* <think> .") == "start: <[5]> <[^6]>* <think> /[\\x{0}-\\x{10ffff}]/"
    assert checker.check("root ::= <[5]> !<[6]>* <think> .", is_gbnf=True)[1] == ""
    with pytest.raises(GbnfError, match="named by its number"):
        lark_of("root ::= !<think>")


def test_what_is_long_keeps_the_names_of_its_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = 'root ::= a a | "b"\na ::= "c" [de] "f"{2}'
    assert lark_of(grammar) == "start: /c[de]f{2,2}c[de]f{2,2}|b/"
    monkeypatch.setattr(gbnf, "EXPRESSION_CHARS_MAX", 24)
    assert lark_of(grammar).splitlines()[0].startswith("R_ROOT: ")
    assert [fits(grammar, text) for text in ("cdffceff", "b", "cdff")] == [True, True, False]
    twice = "\n".join(f"a{at} ::= a{at + 1} a{at + 1}" for at in range(60))
    assert len(lark_of(f'root ::= a0\n{twice}\na60 ::= "x"')) < 5_000


DEEP = 150
CHAIN = "\n".join(f'r{at} ::= "a" r{at + 1}?' for at in range(DEEP))


@pytest.mark.parametrize(
    "grammar",
    [
        f'root ::= r0\n{CHAIN}\nr{DEEP} ::= "b"',
        "root ::= " + '("a" ' * DEEP + '"b"' + ")?" * DEEP,
        "root ::= " + '(("a" | "c")+ | "d" ' * DEEP + '"b"' + ")" * DEEP,
        'root ::= "b" | ' + '("a" ' * DEEP + "root" + ")?" * DEEP,
    ],
)
def test_parts_may_be_deep_within_others(grammar: str) -> None:
    """More than regular expressions and Lark may be as llguidance reads them."""
    assert checker.check(grammar, is_gbnf=True)[1] == ""
    texts = ["a", "aa", "a" * DEEP + "b", "a" * (DEEP + 1) + "b", "d" * DEEP + "b", "ba"]
    found = [fits(grammar, text) for text in texts]
    assert found == [fits_natively(grammar, text) for text in texts]
    assert len({*found}) == 2


def test_a_line_may_begin_with_a_further_way() -> None:
    grammar = 'root ::= "a"\n  # or\n  | b\n\nb ::=\n  | "c"\n  | "d" # why\n'
    assert [fits(grammar, text) for text in ("a", "c", "d", "", "b")] == [True, True, True, True, False]


@pytest.mark.parametrize("between", ["#" * 60 + "\n", "# " * 5_000 + "\n", "\n" * 40_000])
def test_comments_and_blank_lines_cost_nothing(between: str) -> None:
    assert checker.check(f'{between}root ::= x # why\n{between}x ::= "a"\n{between}', is_gbnf=True)[1] == ""


def test_lark_stays_as_it_is() -> None:
    for grammar in ('?start: "a" | b\nb: "c"', 'start: "a"', '%llguidance {}\nstart: "a"', "  start : /root ::= a/"):
        assert lark_of(grammar) == grammar
