"""The stage's own changes to a grammar's text. Grammars are tried beforehand with the same changes."""

from __future__ import annotations

import json
import re

from relayline.wire.common.bounds import GRAMMAR_EXPRESSION_ITEMS_MAX, GRAMMAR_STEP_ITEMS_MAX
from relayline.wire.common.errors import InvalidRequestError

# Around every grammar. llguidance would spell out all text that leaves no choice, at each token, and tokenise it: half
# a second and hundreds of megabytes for a kilobyte of grammar. And with vocabularies that put a blank before every text
# nothing would fit.
_START = '%llguidance {"no_forcing": true}\nstart: @grammar'

_ONE_EXPRESSION = re.compile(r"start: /(?:[^/\\\n]|\\.)*/")  # as LLMatcher.grammar_from_regex writes it


def without_forcing(grammar: str) -> str:
    """Return the grammar inside one that spells nothing out. Raises InvalidRequestError for JSON that is none."""
    parts = [{"lark_grammar": grammar}]
    if grammar.lstrip().startswith("{"):
        try:
            first, *others = json.loads(grammar)["grammars"]
            parts = [{**first}, *others]
        except (ValueError, RecursionError, LookupError, TypeError) as error:
            raise InvalidRequestError(f"the grammar cannot be used: {type(error).__name__}") from error
    parts[0]["name"] = "grammar"
    return json.dumps({"grammars": [{"lark_grammar": _START}, *parts]}, ensure_ascii=False)


def step_items_max(grammar: str) -> int:
    """Return how many ways a grammar may be understood in, over all tokens that may come next.

    `grammar` is the result of `without_forcing`, or Lark.
    """
    parts = json.loads(grammar)["grammars"][1:] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    is_one = len(parts) == 1 and _ONE_EXPRESSION.fullmatch(parts[0].get("lark_grammar") or "")
    return GRAMMAR_EXPRESSION_ITEMS_MAX if is_one else GRAMMAR_STEP_ITEMS_MAX
