"""Incremental text equals text decoded at once, and stop strings cut at the same place, at every cut of the bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayline.coordinator.text.detokenize import StopFinder, TextAssembler


@st.composite
def cut_bytes(draw: st.DrawFn, source: st.SearchStrategy[bytes]) -> tuple[bytes, list[bytes]]:
    """Some bytes and one way of cutting them into pieces (empty pieces included)."""
    data = draw(source)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    edges = [0, *cuts, len(data)]
    return data, [data[a:b] for a, b in itertools.pairwise(edges)]


# Bytes rich in multi-byte leads and continuations, so that broken and split sequences are common.
NASTY = st.lists(
    st.sampled_from([b"a", b"\xc3", b"\xb6", b"\xe2\x82\xac", b"\xf0\x9f", b"\x8c\x8d", b"\xed\xa0\x80", b"\xff"]),
    max_size=20,
).map(b"".join)


def assemble(pieces: list[bytes], stops: list[str]) -> tuple[str, bool]:
    assembler = TextAssembler(stops)
    text = "".join([assembler.push(piece) for piece in pieces])
    return text + assembler.finish(), assembler.stopped


@given(cut_bytes(NASTY | st.binary(max_size=40) | st.text(max_size=20).map(str.encode)))
def test_pieces_give_the_text_of_the_whole(case: tuple[bytes, list[bytes]]) -> None:
    data, pieces = case
    assert assemble(pieces, []) == (data.decode("utf-8", errors="replace"), False)


def cut_at_first_completed(text: str, stops: list[str]) -> tuple[str, bool]:
    """The rule, written the slow way: grow the text by a character; the longest stop it ends with wins."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


STOPS = st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=4)


@given(cut_bytes(st.text("abé", max_size=24).map(str.encode)), STOPS)
def test_stop_cuts_at_the_same_place_whatever_the_pieces(case: tuple[bytes, list[bytes]], stops: list[str]) -> None:
    data, pieces = case
    assert assemble(pieces, stops) == cut_at_first_completed(data.decode(), stops)


@given(cut_bytes(st.text("ab", max_size=24).map(str.encode)), STOPS)
def test_text_handed_out_is_never_taken_back(case: tuple[bytes, list[bytes]], stops: list[str]) -> None:
    data, pieces = case
    final, _ = cut_at_first_completed(data.decode(), stops)
    assembler, shown = TextAssembler(stops), ""
    for piece in pieces:
        shown += assembler.push(piece)
        assert final.startswith(shown)


def test_a_split_character_is_held_until_it_is_whole() -> None:
    assembler = TextAssembler()
    assert [assembler.push(b) for b in (b"x\xf0\x9f", b"\x8c", b"\x8dy")] == ["x", "", "\N{EARTH GLOBE EUROPE-AFRICA}y"]
    assert assembler.n_chars_decoded == 3


def test_only_a_possible_stop_prefix_is_held() -> None:
    assembler = TextAssembler(["STOP"])
    assert assembler.push(b"one ST") == "one "
    assert assembler.push(b"AR ST") == "STAR "
    assert assembler.push(b"OP and more") == ""
    assert assembler.stopped
    assert assembler.push(b"late") == ""
    assert assembler.finish() == ""


def test_held_text_comes_out_at_the_end() -> None:
    assembler = TextAssembler(["STOP"])
    assert assembler.push(b"ends with STO") == "ends with "
    assert assembler.finish() == "STO"
    assert not assembler.stopped


def test_the_stop_completed_first_wins_over_the_one_begun_first() -> None:
    assert assemble([b"xabcd"], ["abcd", "bc"]) == ("xa", True)
    assert assemble([b"xab", b"cd"], ["abcd", "bc"]) == ("xa", True)
    assert assemble([b"xabc"], ["c", "abc"]) == ("x", True)


def test_a_stop_string_may_be_completed_by_the_replacement_of_an_unfinished_character() -> None:
    assert assemble([b"a\xf0\x9f"], ["\ufffd"]) == ("a", True)


def test_an_empty_stop_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopFinder(["x", ""])


@pytest.mark.parametrize(("shows", "text"), [(False, "a b"), (True, "a bEND")])
def test_a_stop_string_may_be_shown(shows: bool, text: str) -> None:
    assembler = TextAssembler(["END"], shows_stop=shows)
    assert "".join(map(assembler.push, (b"a ", b"bE", b"N", b"D", b"c"))) == text
    assert assembler.stopped


def test_a_stop_string_inside_one_that_may_come_does_not_count_later() -> None:
    """`bc` was complete before its time; it is held back only because `abcd` may follow."""
    assembler = TextAssembler(["abcd", "bc"])
    early = assembler.push(b"abc", may_stop=False)
    assert (early + assembler.push(b"x") + assembler.finish(), assembler.stopped) == ("abcx", False)


def test_no_stop_string_counts_before_its_time() -> None:
    assembler = TextAssembler(["END"])
    early = "".join(assembler.push(piece, may_stop=False) for piece in (b"xEND", b"EN"))
    assert early + assembler.push(b"D and") == "xEND"
    assert assembler.stopped
