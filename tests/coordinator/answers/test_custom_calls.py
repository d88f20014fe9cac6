"""The input of custom tools' calls: the text in their JSON, the same however the answer is cut into pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayline.coordinator.answers.custom_calls import CustomCallReader, InputText
from relayline.coordinator.answers.reader import CallPart, Parts

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=30) | st.sampled_from(
    ["", '"', "\\", "\\u0041", "a\nb\tc", "\U0001f600", "*** Begin Patch\n"]
)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    return [text[begin:end] for begin, end in itertools.pairwise(places)]


@given(TEXTS, st.lists(st.integers(0, 400), max_size=8), st.booleans(), st.sampled_from(["", " ", "\n  "]))
def test_the_text_comes_out_whole(text: str, cuts: list[int], ascii_only: bool, blank: str):
    written = json.dumps(text, ensure_ascii=ascii_only)
    arguments = f'{blank}{{{blank}"input"{blank}:{blank}{written}{blank}}}'
    reading = InputText()
    parts = [reading.push(piece) for piece in pieces_of(arguments, cuts)]
    assert "".join(parts) + reading.finish() == text


@given(st.text('\\\\ud83dea0"bx', max_size=40), st.lists(st.integers(0, 400), max_size=8))
def test_escapes_that_are_none_end_nowhere(tail: str, cuts: list[int]):
    """A model without a grammar may write anything: no error, no half pair of UTF-16, the same for any cut."""
    arguments = '{"input": "' + tail
    whole, cut = InputText(), InputText()
    expected = whole.push(arguments)
    expected.encode()
    assert "".join(cut.push(piece) for piece in pieces_of(arguments, cuts)) == expected


@pytest.mark.parametrize("arguments", ['{"patch": "x"}', "[1]", "", '{"input": 5}'])
def test_other_arguments_stay_as_they_are(arguments: str):
    reading = InputText()
    assert reading.push(arguments) == ""
    assert reading.finish() == arguments


class Inner:
    """A reader that gives prepared parts, one for each push."""

    def __init__(self, *parts: tuple[CallPart, ...], is_over_at_end: bool = False) -> None:
        self._parts, self._is_over_at_end = list(parts), is_over_at_end
        self.n_calls, self.is_over, self.is_thinking, self.has_cut_call = 0, False, False, False

    def push(self, text: str) -> Parts:
        calls = self._parts.pop(0)
        self.n_calls += sum(1 for part in calls if part.name)
        self.is_over = self._is_over_at_end and not self._parts
        return Parts(text, "", calls)

    def finish(self, *, is_cut: bool = False) -> Parts:
        return Parts()


def test_only_calls_of_custom_tools_are_translated():
    reader = CustomCallReader(
        Inner(
            (CallPart(0, '{"inp', "patch", "a"),),
            (CallPart(0, 'ut": "x\\'), CallPart(0, 'ny"}'), CallPart(1, '{"input": "z"}', "other", "b")),
            (CallPart(2, "{", "patch", "c"), CallPart(2, '"no": 1}')),
        ),
        {"patch"},
    )
    assert reader.push("t") == Parts("t", "", (CallPart(0, "", "patch", "a", is_custom=True),))
    assert reader.push("").calls == (
        CallPart(0, "x", is_custom=True),
        CallPart(0, "\ny", is_custom=True),
        CallPart(1, '{"input": "z"}', "other", "b"),
    )
    assert reader.push("").calls == (CallPart(2, "", "patch", "c", is_custom=True),)
    assert reader.finish().calls == (CallPart(2, '{"no": 1}', is_custom=True),)
    assert reader.finish().calls == ()
    assert reader.n_calls == 3


def test_an_answer_that_is_over_needs_no_end():
    reader = CustomCallReader(Inner((CallPart(0, "[]", "patch", "a"),), is_over_at_end=True), {"patch"})
    assert [part.arguments for part in reader.push("").calls] == ["", "[]"]
    assert reader.is_over


def test_a_cut_call_gives_no_part_of_its_json():
    inner = Inner((CallPart(0, "", name="patch"),), (CallPart(0, '{"inp'),))
    reader = CustomCallReader(inner, frozenset({"patch"}))
    reader.push("")
    reader.push("")
    inner.has_cut_call = True
    assert reader.finish(is_cut=True).calls == ()
