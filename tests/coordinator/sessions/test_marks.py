"""What a coordinator that comes later knows of stored prefixes: marks, as notes, and the prompts that they find."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable

import pytest

from relayline.coordinator.sessions import marks as marks_module
from relayline.coordinator.sessions.marks import (
    GRID_MARKS_MAX,
    GRID_TOKENS,
    MARKS_MAX,
    PLACES_MAX,
    MarkIndex,
    Marks,
    marks_in,
    marks_of,
    note_of,
)
from relayline.coordinator.sessions.tier import key_of
from relayline.wire.common.bounds import CTX_TOKENS_MAX, NOTE_BYTES_MAX

ANY = lambda _: True  # noqa: E731


def tokens_of(seed: int, n_tokens: int) -> array[int]:
    return array("i", random.Random(seed).choices(range(50_000), k=n_tokens))


def index_of(
    prefixes: Iterable[tuple[int, array[int], tuple[int, ...]]], *, are_checkpoints: bool = False
) -> MarkIndex:
    index = MarkIndex()
    for key, tokens, places in prefixes:
        assert index.add(key, marks_of(tokens, "", places, are_checkpoints=are_checkpoints))
    return index


def test_marks_are_keys_of_beginnings() -> None:
    tokens = tokens_of(1, 300)
    marks = marks_of(tokens, "F16", (100, 101, 300, 0), are_checkpoints=False)
    assert list(marks.places) == [64, 100, 101, 128, 192, 256], "the end has the prefix's own key"
    assert list(marks.keys) == [key_of(tokens[:place], "F16") for place in marks.places]
    assert list(marks_of(tokens, "F16", (100,), are_checkpoints=True).places) == [100]


@pytest.mark.parametrize("n_tokens", [1, 64, 65, GRID_TOKENS * GRID_MARKS_MAX, 30_000, CTX_TOKENS_MAX])
def test_a_note_is_bounded_whatever_the_length(n_tokens: int) -> None:
    tokens = array("i", bytes(4 * n_tokens))
    marks = marks_of(tokens, "", range(10, 10 + 3 * PLACES_MAX), are_checkpoints=False)
    note = note_of(marks)
    assert len(note) <= NOTE_BYTES_MAX
    assert marks_in(note) == marks
    grid = [place for place in marks.places if place % GRID_TOKENS == 0]
    gaps = {after - before for before, after in zip([0, *grid], grid, strict=False)}
    assert len(gaps) <= 1, "all along it"
    assert not gaps or gaps.pop() <= max(GRID_TOKENS, 2 * n_tokens / GRID_MARKS_MAX)


def test_a_note_that_is_damaged_or_of_another_form_says_nothing() -> None:
    note = note_of(Marks(array("I", [70]), array("Q", [7])))
    for bad in (b"", note[:-1], note + b"x", b"mrk9" + note[4:], note[:10] + bytes([note[10] ^ 1]) + note[11:]):
        assert marks_in(bad) is None
    assert marks_in(note) == Marks(array("I", [70]), array("Q", [7]))


def test_the_longest_marked_beginning_of_a_prompt_is_found() -> None:
    tokens = tokens_of(1, 1_000)
    index = index_of([(7, tokens, (777,))])
    for n_common, n_found in ((1_000, 960), (800, 777), (776, 768), (640, 640), (639, 576)):
        prompt = tokens[:n_common] + tokens_of(2, 500)
        assert index.longest(prompt, 31, "", ANY) == (7, n_found)
    assert index.longest(tokens[:640], 639, "", ANY) == (7, 640)
    assert index.longest(tokens[:640], 640, "", ANY) == (None, 640), "no more than can be copied anyway"
    assert index.longest(tokens, 31, "F32", ANY) == (None, 31), "cells of another rounding"
    assert index.longest(tokens_of(3, 1_000), 31, "", ANY) == (None, 31)


def test_of_prefixes_that_begin_alike_the_one_that_goes_furthest_is_found() -> None:
    system = tokens_of(1, 500)
    chats = {key: system + tokens_of(key, 400) for key in (10, 11, 12)}
    index = index_of([(key, chat, (len(system) + 30 * (key - 9),)) for key, chat in chats.items()])
    assert index.longest(chats[10][:540] + tokens_of(4, 9), 31, "", ANY) == (10, 530)
    assert index.longest(chats[11][:800], 31, "", ANY) == (11, 768)
    assert index.longest(system + tokens_of(5, 90), 31, "", ANY) == (12, 448), "the latest of all"
    assert index.longest(system + tokens_of(5, 90), 31, "", {10, 11}.__contains__) == (11, 448)
    assert index.longest(chats[11][:800], 31, "", {10}.__contains__) == (10, 448), "where the best is gone"


def test_at_checkpoints_alone_where_stages_can_go_back_to_no_other_place() -> None:
    tokens = tokens_of(1, 5_000)
    index = index_of([(7, tokens, (40, 4_321))], are_checkpoints=True)
    assert index.longest(tokens[:4_320], 31, "", ANY) == (7, 40)
    assert index.longest(tokens[:4_400], 31, "", ANY) == (7, 4_321)


def test_a_prompt_that_agrees_with_none_is_not_hashed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    keys_at = marks_module.keys_at

    def counted(*args: object) -> Iterable[tuple[int, int]]:
        for place, key in keys_at(*args):  # type: ignore[arg-type]
            hashed.append(place)
            yield place, key

    index = index_of([(key, tokens_of(key, 16_000), ()) for key in range(8)])
    monkeypatch.setattr(marks_module, "keys_at", counted)
    assert index.longest(tokens_of(99, 16_000), 31, "", ANY) == (None, 31)
    assert hashed == [64, 128], "a prefix has marks at every 64th token"


def test_marks_are_bounded_over_all_prefixes() -> None:
    index = MarkIndex()
    many = Marks(array("I", range(1, MARKS_MAX)), array("Q", range(1, MARKS_MAX)))
    assert index.add(1, many)
    assert not index.add(2, many)
