"""The tokens of the marks of thoughts, in vocabularies where these are plain text."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from relayline.coordinator.answers.syntax import THINKING
from relayline.coordinator.http.requests.plan import NO_PLAN
from relayline.coordinator.http.requests.plan_tokens import PlanTokens
from relayline.coordinator.text.tokenizer import Tokenizer

PIECES = ["</", "<", "think", ">\n\n", ">\n", ">", "\r", "\n"]  # longer ones first, as merges have it


class Merging:
    """A vocabulary that joins `>` with the ends of lines, as those of Llama 3 and of many others do."""

    def encode(self, text: str, **_: Any) -> list[int]:
        tokens = []
        while text:
            token = next(at for at, piece in enumerate(PIECES) if text.startswith(piece))
            tokens.append(token)
            text = text[len(PIECES[token]) :]
        return tokens


def test_marks_that_are_no_tokens_of_their_own_may_be_joined_with_line_ends() -> None:
    tokens = PlanTokens(cast(Tokenizer, Merging()))
    plan = dataclasses.replace(NO_PLAN, max_tokens=None, thought_tokens_max=5)
    marks = tokens.with_thoughts(plan, THINKING[0], 100, is_thinking=False).sampling.thought_marks
    assert marks is not None
    assert (marks.begin, marks.end) == ((1, 2, 5), (0, 2, 5))
    assert marks.begin_lasts == marks.end_lasts == (4, 3)
