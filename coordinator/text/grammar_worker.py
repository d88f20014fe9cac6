"""The process in which grammars are tried, as `grammar_check.py` starts it.

One JSON object a line: {"text": ..., "is_gbnf": ...} in, {"grammar": ..., "fault": ...} out.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from relayline.wire.common.bounds import GRAMMAR_ITEMS_MAX

CPU_S_MAX = 0.5  # of one grammar; a thread of the last stage takes as long for it. Honest ones take 0.06
MEMORY_BYTES_MAX = 2 << 30
STACK_BYTES_MAX = 4 << 20  # far less than stages have (stage/steps/runner.py): what fits here fits there
_TOKEN = re.compile(r"<[^<>\s]+>")  # a model's own, by name or number: none of ours
_LIMITS = LLParserLimits(max_items_in_row=GRAMMAR_ITEMS_MAX, verbose_errors=False)


class Bytes:
    """The vocabulary of single bytes and an end. Grammars that name tokens of a model are tried without one."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the tokens of a text."""
        return list(text.encode() if isinstance(text, str) else text)


def main() -> None:
    """Answer until stdin ends. A grammar that is too costly ends the process."""
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, MEMORY_BYTES_MAX)
    _limit(resource.RLIMIT_STACK, STACK_BYTES_MAX)
    vocabulary = LLTokenizer(TokenizerWrapper(Bytes()))
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_S_MAX)  # the signal ends a process, whatever code runs
        try:
            grammar = any_to_lark(asked["text"]) if asked["is_gbnf"] else asked["text"]
            answer = {"grammar": grammar, "fault": _fault(vocabulary, grammar)}
        except RecursionError:
            answer = {"grammar": "", "fault": "nested too deeply"}
        except Exception as error:  # bare ones for GBNF
            answer = {"grammar": "", "fault": str(error) or type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _fault(vocabulary: LLTokenizer, grammar: str) -> str:
    fault = LLMatcher.validate_grammar(grammar, limits=_LIMITS)
    if not fault:  # the stages check the model's tokens; this checks the cost of starting with the grammar
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            LLMatcher(vocabulary, _TOKEN.sub("<[256]>", grammar), log_level=0, limits=_LIMITS)
    return fault


if __name__ == "__main__":
    main()
