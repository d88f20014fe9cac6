"""Ends a text where a line ends, as editors want it: llama-server's `n_indent` and `t_max_predict_ms`. Pure."""

from __future__ import annotations

import dataclasses

BLANKS = " \t"


@dataclasses.dataclass(frozen=True, slots=True)
class LineEnd:
    """The lines behind which a text ends."""

    n_indent: int = 0
    """Each line but the first begins with so many blanks or tabs; one that does not, empty ones too, is the end."""
    within_ms: int = 0
    """After this time the next end of a line is the text's; 0: no limit."""


ANYWHERE = LineEnd()


class LineEndFinder:
    """Follows one text that arrives in pieces."""

    def __init__(self, wanted: LineEnd) -> None:
        self._n_indent, self._within_ns = wanted.n_indent, wanted.within_ms * 1_000_000
        self._n_blanks: int | None = None  # at the beginning of the line; None behind that, and on the first line
        self.is_over = False

    def push(self, text: str, elapsed_ns: int) -> str:
        """Take the next text, which came so long after the first; return the part that is shown."""
        if self.is_over:
            return ""
        if self._n_indent and (end := self._shallow_line(text)) is not None:
            self.is_over = True
            return text[:end]
        self.is_over = bool(self._within_ns) and elapsed_ns > self._within_ns and "\n" in text
        return text

    def _shallow_line(self, text: str) -> int | None:
        """Return where a line with too few blanks goes on behind them."""
        for at, char in enumerate(text):
            if self._n_blanks is not None:
                if char in BLANKS:
                    self._n_blanks += 1
                    continue
                if self._n_blanks < self._n_indent:
                    return at
                self._n_blanks = None
            if char == "\n":
                self._n_blanks = 0
        return None
