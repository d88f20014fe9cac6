"""Goal: a text ends where a line is indented too little, or at the end of a line behind a time, however it arrives."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayline.coordinator.text.line_end import LineEnd, LineEndFinder

MS = 1_000_000


def shown(text: str, wanted: LineEnd, cuts: tuple[int, ...] = (), elapsed_ns: int = 0) -> tuple[str, bool]:
    finder = LineEndFinder(wanted)
    edges = [0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]
    parts = [finder.push(text[start:end], elapsed_ns) for start, end in itertools.pairwise(edges)]
    return "".join(parts), finder.is_over


@pytest.mark.parametrize(
    ("text", "n_indent", "wanted"),
    [
        ("a\n    b\n    c", 4, "a\n    b\n    c"),
        ("a\n    b\n  c\n    d", 4, "a\n    b\n  "),
        ("a\nb", 1, "a\n"),
        ("a\n\n    b", 4, "a\n"),
        ("a\n\t b", 2, "a\n\t b"),
        ("a\n  ", 4, "a\n  "),  # the line may go on
        ("a\nb", 0, "a\nb"),
    ],
)
def test_a_line_with_too_few_blanks_is_the_end(text: str, n_indent: int, wanted: str) -> None:
    assert shown(text, LineEnd(n_indent)) == (wanted, wanted != text)


@given(
    text=st.text("ab \t\n", max_size=30),
    n_indent=st.integers(0, 4),
    cuts=st.lists(st.integers(0, 30), max_size=6).map(tuple),
)
def test_pieces_do_not_matter(text: str, n_indent: int, cuts: tuple[int, ...]) -> None:
    assert shown(text, LineEnd(n_indent), cuts) == shown(text, LineEnd(n_indent))


def test_after_its_time_a_text_ends_with_the_next_line() -> None:
    finder = LineEndFinder(LineEnd(within_ms=10))
    assert finder.push("a\nb", 9 * MS) == "a\nb"
    assert finder.push("c", 20 * MS) == "c"
    assert not finder.is_over
    assert finder.push("d\n  e", 21 * MS) == "d\n  e"
    assert finder.is_over
    assert finder.push("f", 22 * MS) == ""
