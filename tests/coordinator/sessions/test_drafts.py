"""Drafts: what repetitions in a text and a client's prediction suggest as next tokens, and with what probability."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.coordinator.sessions.drafts import LENGTH_MAX, LOOKBACK_TOKENS, Acceptance, Drafter
from tests.support.examples import thinned


def drafter(history: list[int], prediction: list[int] | tuple[int, ...] = ()) -> Drafter:
    return Drafter(history, prediction, Acceptance())


def after(drafts: Drafter, *tokens: int) -> Drafter:
    for token in tokens:
        drafts.take(token)
    return drafts


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9, 1, 2]),
        ([0, 1, 2, 3, 8, 2, 3, 5, 0, 1, 2, 3], [8, 2, 3, 5, 0]),  # four alike are better than the latest two
        ([2, 3, 4, 2, 3, 5, 9, 2, 3], [5, 9, 2, 3, 5]),  # of two places the latest
        ([7, 7, 7], [7, 7, 7, 7, 7]),
        ([5, 6, 5, 6], [5, 6, 5, 6, 5]),  # overlapping its own end
        ([1, 2, 3], []),
        ([1], []),
        ([], []),
    ],
)
def test_a_draft_repeats_the_text_after_the_last_match(history: list[int], expected: list[int]) -> None:
    assert drafter(history).tokens(0, 5) == expected


def test_drafts_go_on_with_the_text() -> None:
    drafts = drafter([1, 2, 3, 4, 5, 6, 1, 2])
    assert drafts.tokens(0, 3) == [3, 4, 5]
    assert after(drafts, 3).tokens(0, 3) == [4, 5, 6]
    assert drafts.tokens(2, 2) == [6, 1], "behind two that are under way"
    assert after(drafts, 9).tokens(0, 3) == [], "nothing like it occurred"
    assert after(drafts, 5, 6).tokens(0, 2) == [1, 2]


def test_tokens_that_only_look_alike_byte_by_byte_are_none() -> None:
    # 0x00010001, 0x00010001 as bytes holds the tokens 0x0100..., shifted by a byte or two.
    history = [0x00010001, 0x00010001, 0x01000100, 0x00010001, 0x01]
    assert drafter([*history, 0x01000100, 0x00010001]).tokens(0, 1) == [0x01]
    assert drafter([*history, 0x00010001, 0x01000100]).tokens(0, 1) == [0x00010001]
    assert drafter([0x00000100, 0x00000200, 0x01, 0x02]).tokens(0, 1) == []


def test_a_prediction_is_followed_from_its_beginning() -> None:
    drafts = drafter([1, 2, 3], [10, 11, 12, 13])
    assert drafts.tokens(0, 9) == [10, 11, 12, 13], "and ends where it ends"
    assert [drafts.take(token) for token in (10, 11)] == [True, True]
    assert drafts.tokens(0, 9) == [12, 13]
    assert [drafts.take(token) for token in (12, 13)] == [True, True]
    assert drafts.tokens(0, 9) == []
    assert drafts.take(14) is False


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((10, 99), [12, 13, 14, 15]),  # another token in its place
        ((10, 12), [13, 14, 15]),  # one was left out
        ((10, 13, 14), [15]),
        ((10, 98, 99), [13, 14, 15]),
        ((10, 98, 97, 11, 12), [13, 14, 15]),  # some came in between
    ],
)
def test_an_answer_may_differ_from_its_prediction(answer: tuple[int, ...], expected: list[int]) -> None:
    assert after(drafter([1, 2, 3], [10, 11, 12, 13, 14, 15]), *answer).tokens(0, 9) == expected


def test_a_prediction_suggests_nothing_outside_itself() -> None:
    drafts = drafter([1, 2, 20, 21], [30, 31, 1, 2])
    after(drafts, 30, 31, 1, 2)
    assert drafts.tokens(0, 2) == [20, 21], "in the text, the answer follows the prediction, which never occurred there"
    assert after(drafter([5, 6], [30, 31]), 8, 5, 6).tokens(0, 2) == [], "nor did the prediction follow the prompt"


def test_only_tokens_of_the_prediction_count_as_predicted() -> None:
    drafts = drafter([1, 2, 3, 4, 1, 2], [8, 9])
    assert [drafts.take(token) for token in (7, 1, 2, 3)] == [False] * 4, "the last was drafted from the prompt"
    drafts = drafter([], [8, 9, 8, 9])
    assert [drafts.take(token) for token in (8, 9, 8, 9, 8)] == [True, True, True, True, False]


def test_chances_fall_along_a_draft_and_follow_past_acceptance() -> None:
    drafts = drafter([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2])
    chances = drafts.chances(0, 6)
    assert all(0 < later < earlier < 1 for earlier, later in itertools.pairwise(chances))
    assert drafts.chances(2, 3) == pytest.approx(chances[2:5]), "those under way before them have to be right as well"
    good, bad = drafter([1, 2] * 20), drafter([1, 2] * 20)
    for at in range(40):
        after(good, good.tokens(0, 1)[0])
        after(bad, 100 + at, 1, 2)
    assert good.chances(0, 1)[0] > 0.95
    assert sum(bad.chances(0, 1)) < 0.1
    assert good.chances(0, 8)[-1] > 0.7


def test_new_streams_learn_from_all_others() -> None:
    shared = Acceptance()
    before = Drafter([1, 2, 1, 2], (), shared).chances(0, 1)[0]
    for _ in range(10):
        after(Drafter([1, 2, 1, 2], (), shared), 99)
    assert Drafter([1, 2, 1, 2], (), shared).chances(0, 1)[0] < 0.8 * before


def test_drafts_that_were_bad_may_become_good_again() -> None:
    drafts = drafter([1, 2, 1, 2])
    for at in range(60):
        after(drafts, 100 + at, 1, 2)
    low = sum(drafts.chances(0, 1))
    for _ in range(60):
        after(drafts, 500, 1, 2)
    assert drafts.chances(0, 1)[0] > max(2 * low, 0.5)


def test_unlikely_guesses_are_not_looked_at() -> None:
    assert len(drafter([1, 2, 1, 2]).chances(0, 31)) < 20
    assert drafter([1, 2, 1, 2]).chances(3, 31) == drafter([1, 2, 1, 2]).chances(0, 34)[3:]


def test_a_search_among_lookalikes_ends() -> None:
    """Every byte looks like the middle of the searched text, which is at the very end."""
    drafts = drafter([1, 2], [0x01000000] * 4_000)
    assert drafts.take(7) is False
    assert after(drafts, 256, 1, 256, 1).tokens(0, 1) in ([], [256])


def test_the_search_is_bounded() -> None:
    noise = list(range(10, 10 + LOOKBACK_TOKENS))
    assert drafter([1, 2, 3, *noise[:100], 1, 2]).tokens(0, 1) == [3]
    assert drafter([1, 2, 3, *noise, 1, 2]).tokens(0, 1) == []


@settings(max_examples=thinned(300))
@given(
    history=st.lists(st.integers(0, 3), max_size=30),
    prediction=st.lists(st.integers(0, 3), max_size=20),
    answer=st.lists(st.integers(0, 3), max_size=60),
    data=st.data(),
)
def test_any_text(history: list[int], prediction: list[int], answer: list[int], data: st.DataObject) -> None:
    """Drafts are parts of the text, and a draft stays the same while it is right."""
    drafts = drafter(history, prediction)
    expected: list[int] = []
    for token in answer:
        if expected:
            assert drafts.tokens(0, len(expected)) == expected[: len(drafts.tokens(0, len(expected)))]
        n_tokens, first = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 4))
        found = drafts.tokens(0, first + n_tokens)
        assert drafts.tokens(first, n_tokens) == found[first:]
        assert set(found) <= {*history, *prediction, *answer}
        chances = drafts.chances(first, n_tokens)
        assert len(chances) <= n_tokens
        assert not found or all(0 < chance < 1 for chance in chances)
        assert 0 <= drafts._length <= LENGTH_MAX
        expected = found[1:] if found and found[0] == token else []
        drafts.take(token)


def test_an_edit_of_a_text_is_drafted_well() -> None:
    """In a text repeated with every twentieth token changed, nine in ten tokens are drafted correctly."""
    rng = random.Random(1)
    text = [rng.randrange(5_000) for _ in range(600)]
    answer = [rng.randrange(5_000) if rng.random() < 0.05 else token for token in text]
    for prompt, prediction, least in (([1, 2], text, 0.9), ([*text, 1, 2], (), 0.8)):
        drafts, n_right = drafter(prompt, prediction), 0
        for token in answer:
            n_right += drafts.tokens(0, 1) == [token]
            drafts.take(token)
        assert n_right > least * len(answer)
