"""Where the thoughts of an answer begin and end, by the tokens of their marks. Pure.

The last stage follows an answer token by token; a coordinator that opens a session anew looks at all that was said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from relayline.wire.common.bounds import LAST_WORDS_BYTES_MAX, LAST_WORDS_TOKENS_MAX, THOUGHT_MARK_TOKENS_MAX
from relayline.wire.common.errors import ProtocolError


class ThoughtMarks(NamedTuple):
    """The tokens of the marks of thoughts."""

    begin: tuple[int, ...]
    """`<think>`, say."""
    end: tuple[int, ...]
    """`</think>`, say."""
    last_words: tuple[int, ...] = ()
    """What is said before that mark where thoughts have become too long."""
    begin_lasts: tuple[int, ...] = ()
    """Tokens in place of the last one of `begin`, where a vocabulary joins it with the end of its line. A mark that is
    no token of its own has some: many models write `>` and two ends of lines as one token.
    """
    end_lasts: tuple[int, ...] = ()
    """The same of `end`."""


def read_last_words(text: str) -> str:
    """Return a text that ends thoughts. Raises ValueError where its tokens may be too many."""
    if len(text.encode(errors="replace")) > LAST_WORDS_BYTES_MAX:
        raise ValueError(f"a text of at most {LAST_WORDS_BYTES_MAX} bytes")
    return text


def marks_from(lists: Sequence[Sequence[int]], n_vocab: int) -> ThoughtMarks:
    """Return the marks that a coordinator sent. Raises ProtocolError for what none sends."""
    if len(lists) not in (3, len(ThoughtMarks._fields)) or not all(lists[:2]):
        raise ProtocolError("the marks of thoughts are not three or five lists of tokens")
    found = ThoughtMarks(*(tuple(each) for each in lists))
    n_begin, n_end = len(found.begin) + len(found.begin_lasts), len(found.end) + len(found.end_lasts)
    is_long = max(n_begin, n_end) > THOUGHT_MARK_TOKENS_MAX
    if is_long or len(found.last_words) > LAST_WORDS_TOKENS_MAX:
        raise ProtocolError("a mark of thoughts, or what is said where they are too long, has too many tokens")
    if max(map(max, filter(None, found))) >= n_vocab:
        raise ProtocolError(f"a mark of thoughts has a token outside the vocabulary of {n_vocab}")
    return found


class Thoughts:
    """The thoughts of one answer, as far as it has come."""

    def __init__(self, marks: ThoughtMarks, begun_at: int | None = None) -> None:
        """`begun_at`: position of the first token of thoughts that are under way."""
        self._marks = marks
        self._lasts = {marks.begin[-1], *marks.begin_lasts, marks.end[-1], *marks.end_lasts}
        self._places = [(-1, begun_at)]  # position behind each mark, and where thoughts began that it leaves under way

    @property
    def begun_at(self) -> int | None:
        """The position of the first token of the thoughts that are under way; None: there are none."""
        return self._places[-1][1]

    def said(self, latest: Sequence[int], position: int) -> None:
        """Take in that `latest` ends with the token before `position`."""
        marks, is_open = self._marks, self.begun_at is not None
        mark, lasts = (marks.end, marks.end_lasts) if is_open else (marks.begin, marks.begin_lasts)
        is_last = latest[-1] == mark[-1] or latest[-1] in lasts
        if is_last and tuple(latest[-len(mark) : -1]) == mark[:-1]:
            self._places.append((position, position if self.begun_at is None else None))

    def go_to(self, position: int) -> None:
        """Go back: the token at `position` is picked again, and those behind it."""
        while self._places[-1][0] > position:
            self._places.pop()

    def read(self, tokens: Sequence[int], position: int) -> None:
        """Take in tokens that were said from a position on."""
        for n_read in range(1, len(tokens) + 1):
            if tokens[n_read - 1] in self._lasts:
                self.said(tokens[max(0, n_read - THOUGHT_MARK_TOKENS_MAX) : n_read], position + n_read)
