"""The process in which grammars are tried, as `grammar_check.py` starts it.

One JSON object a line: {"text": ..., "is_gbnf": ...} in, {"grammar": ..., "fault": ...} out.
"""

from __future__ import annotations

import json
import random
import re
import resource
import signal
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from relayline.coordinator.text.gbnf import lark_of
from relayline.wire.common.bounds import GRAMMAR_ITEMS_MAX, GRAMMAR_LEXER_FUEL_MAX
from relayline.wire.common.grammars import step_items_max, without_forcing
from relayline.wire.common.limits import lower_limit

CPU_S_MAX = 0.5  # of one grammar; a thread of the last stage takes as long for it. Honest ones take 0.06
MEMORY_BYTES_MAX = 2 << 30
STACK_BYTES_MAX = 4 << 20  # far less than stages have (stage/steps/runner.py): what fits here fits there
_TOKEN = re.compile(r"<[^<>\s]+>")  # a model's own, by name or number: none of ours
_LIMITS = LLParserLimits(max_items_in_row=GRAMMAR_ITEMS_MAX, verbose_errors=False)
_WALKS, _WALK_TOKENS = 3, 12


class Bytes:
    """The vocabulary of single bytes and an end. Grammars that name tokens of a model are tried without one."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the tokens of a text."""
        return list(text.encode() if isinstance(text, str) else text)


class Runs(Bytes):
    """With runs of each letter and sign, as long as those that models have: what ambiguous grammars are dear with."""

    tokens = (*Bytes.tokens, *(bytes([byte]) * length for byte in range(0x20, 0x7F) for length in range(2, 17)))


def main() -> None:
    """Answer until stdin ends. A grammar that is too costly ends the process."""
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_AS, MEMORY_BYTES_MAX)
    lower_limit(resource.RLIMIT_STACK, STACK_BYTES_MAX)
    vocabulary = LLTokenizer(TokenizerWrapper(Runs()))
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_S_MAX)  # the signal ends a process, whatever code runs
        try:
            grammar = lark_of(asked["text"]) if asked["is_gbnf"] else asked["text"]
            answer = {"grammar": grammar, "fault": _fault(vocabulary, grammar)}
        except RecursionError:
            answer = {"grammar": "", "fault": "nested too deeply"}
        except Exception as error:
            answer = {"grammar": "", "fault": str(error) or type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _fault(vocabulary: LLTokenizer, grammar: str) -> str:
    fault = LLMatcher.validate_grammar(grammar, limits=_LIMITS)
    if fault:
        return fault
    # The stages check the model's tokens; this checks the cost of starting and following the grammar.
    nameless = _TOKEN.sub("<[256]>", grammar)
    for text in (grammar, nameless):
        followed = without_forcing(text)
        matcher = LLMatcher(vocabulary, followed, log_level=0, limits=_stage_limits(followed))
        if not matcher.is_error():
            signal.setitimer(signal.ITIMER_PROF, CPU_S_MAX)
            return _too_costly(matcher)
    return _reason(matcher) if nameless == grammar else ""


def _stage_limits(grammar: str) -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=GRAMMAR_ITEMS_MAX,
        step_max_items=step_items_max(grammar),
        step_lexer_fuel=GRAMMAR_LEXER_FUEL_MAX,
        verbose_errors=False,
    )


def _too_costly(begun: LLMatcher) -> str:
    """Return why the grammar cannot be followed within a stage's bounds, "" if at least one of a few ways can be.

    A stage would find out too, but in the middle of an answer, at the cost of other streams.
    """
    fault = ""
    for seed in range(_WALKS):
        matcher = begun.deep_copy()
        _walk(matcher, random.Random(seed))
        if not matcher.is_error():
            return ""
        fault = _reason(matcher)
    return f"it takes too long to follow: {fault}"


def _reason(matcher: LLMatcher) -> str:
    return matcher.get_error().strip().split("\n", 1)[0]


def _walk(matcher: LLMatcher, dice: random.Random) -> None:
    for _ in range(_WALK_TOKENS):
        bits = matcher.compute_bitmask()
        fitting = [token for token in range(len(Runs.tokens)) if bits[token >> 3] >> (token & 7) & 1]
        if matcher.is_error() or matcher.is_stopped() or not fitting:
            return
        matcher.consume_token(dice.choice(fitting))


if __name__ == "__main__":
    main()
