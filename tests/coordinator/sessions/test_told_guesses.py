"""Guesses that a model made: which of them hold, how likely they are, and which source is asked."""

from __future__ import annotations

import pytest

from relayline.coordinator.sessions.drafts import CHANCE_MIN, Acceptance, Drafter
from relayline.coordinator.sessions.guesses import Guesses
from relayline.coordinator.sessions.told_guesses import LEARNING, ToldFacts, ToldGuesses


def _told(history: list[int]) -> ToldGuesses:
    return ToldGuesses(history, ToldFacts())


def test_guesses_hold_until_one_is_wrong() -> None:
    told = _told([1, 2, 3])
    assert told.tell(3, [4, 5, 6], [0.9, 0.9, 0.9], 0, follows=False)
    told.take(4)
    assert told.tokens(0, 8) == [5, 6]
    assert told.tokens(1, 8) == [6]
    told.take(7)
    assert told.tokens(0, 8) == []
    assert told.chances(0, 8) == []


def test_chances_end_where_hardly_all_guesses_are_right() -> None:
    told = _told([1, 2, 3])
    assert told.tell(3, [4] * 16, [0.3] * 16, 0, follows=False)
    chances = told.chances(0, 16)
    assert 0 < len(chances) < 16
    assert min(chances) >= CHANCE_MIN
    assert chances == sorted(chances, reverse=True)
    assert told.chances(2, 16) == chances[2:]


def test_late_guesses_count_where_they_were_right() -> None:
    told = _told([1, 2, 3])
    told.take(4)
    told.take(5)
    assert told.tell(3, [4, 5, 6], [0.9, 0.9, 0.8], 0, follows=True)
    assert told.tokens(0, 8) == [6]


@pytest.mark.parametrize(
    ("position", "tokens"),
    [(3, [4, 9, 6]), (3, [4]), (6, [1]), (-200, [1] * 300)],
    ids=["of another text", "all too late", "of a text to come", "older than what is remembered"],
)
def test_guesses_for_another_text_change_nothing(position: int, tokens: list[int]) -> None:
    told = _told([1, 2, 3])
    told.take(4)
    told.take(5)
    told.tell(5, [6], [0.5], 0, follows=False)
    assert not told.tell(position, tokens, [0.5] * len(tokens), 0, follows=True)
    assert told.tokens(0, 8) == [6]


@pytest.mark.parametrize(
    ("tokens", "chances"),
    [([1, 2], [0.5]), ([1], [0.5, 0.5]), ([-5], [0.5]), ([200], [0.5]), ([1, 200], [0.5, 0.5])],
    ids=["without a chance", "without a token", "negative", "beyond the vocabulary", "one beyond it"],
)
def test_what_is_no_guess_changes_nothing(tokens: list[int], chances: list[float]) -> None:
    told = ToldGuesses([1, 2, 3], ToldFacts(200))
    assert not told.tell(3, tokens, chances, 0, follows=False)
    assert len(told) == 0


@pytest.mark.parametrize("chance", [float("nan"), float("inf"), -1.0, 1.5, 7.0])
def test_a_chance_that_is_none_counts_as_the_smallest(chance: float) -> None:
    told = _told([1])
    assert told.tell(1, [5], [chance], 0, follows=False)
    assert told.chances(0, 1) == [pytest.approx(0.05)]
    told.take(5)


def test_the_first_token_and_a_certain_guess_are_guesses() -> None:
    told = _told([1])
    assert told.tell(1, [0], [1.0], 0, follows=False)
    assert (told.tokens(0, 2), told.chances(0, 2)) == ([0], [pytest.approx(0.95)])


def test_how_long_a_guess_takes_is_learned_where_one_more_comes() -> None:
    told = _told([1])
    assert not told.follows
    told.asked(1_000)
    told.tell(1, [5], [0.9], 4_000, follows=True)
    assert told.facts.guess_ns == 3_000
    told.tell(1, [5], [0.9], 5_000, follows=True)  # it says nothing more
    assert told.facts.guess_ns == 3_000
    told.tell(1, [5, 6], [0.9, 0.9], 11_000, follows=False)
    assert told.facts.guess_ns == pytest.approx(3_150)
    told.tell(1, [5, 6, 7], [0.9] * 3, 99_000, follows=False)  # nobody knows when it was begun
    told.asked(100_000)  # guesses are known: the next one was begun before
    told.tell(1, [5, 6, 7, 8], [0.9] * 4, 200_000, follows=False)
    assert told.facts.guess_ns == pytest.approx(3_150)


def test_what_a_model_was_asked_before_it_ended_teaches_nothing() -> None:
    told = _told([1])
    told.asked(1_000)
    told.lose()
    told.tell(1, [5], [0.9], 9_000, follows=False)
    assert told.facts.guess_ns == 0.0


def test_the_share_of_right_guesses_is_learned() -> None:
    told = _told([1])
    told.tell(1, [5], [0.9], 0, follows=False)
    told.take(5)
    assert told.facts.right_share == pytest.approx(0.6 + 0.4 * LEARNING)
    told.tell(2, [5], [0.9], 0, follows=False)
    told.take(6)
    assert told.facts.right_share == pytest.approx((0.6 + 0.4 * LEARNING) * (1 - LEARNING))


def test_a_guess_comes_from_a_model_at_work_whose_pace_is_known_and_that_guesses_better() -> None:
    guesses = Guesses(Drafter([5, 6, 7, 8, 5, 6], (), Acceptance()))
    none = (0.0, 0.0)
    assert guesses.coming() == none, "no model"
    told = guesses.told = _told([5, 6, 7, 8, 5, 6])
    told.tell(6, [9], [0.99], 0, follows=True)
    assert guesses.coming() == none, "of an unknown pace"
    told.facts.took(2_000)
    told.tell(6, [9, 10, 11, 12], [0.99] * 4, 0, follows=True)
    assert guesses.coming() == (told.facts.right_share, 2_000)
    told.tell(6, [9], [0.04], 0, follows=True)
    assert guesses.coming() == none, "the text's own repetition is likelier"
    told.tell(6, [9, 10, 11, 12], [0.99] * 4, 0, follows=False)
    assert guesses.coming() == none, "it is at work on nothing"
    other = Guesses(Drafter([1, 2, 3], (), Acceptance()))
    other.told = ToldGuesses([1, 2, 3], told.facts)
    other.told.tell(3, [], [], 0, follows=True)
    assert other.coming() == (told.facts.right_share, 2_000), "the first one, of a model that is right often enough"


def test_a_model_that_has_nothing_for_a_stream_is_not_expected_to_say_more() -> None:
    told = _told([1])
    told.tell(1, [], [], 0, follows=False)  # the text is too long for it
    told.take(2)
    assert not told.follows
    told.tell(2, [3], [0.9], 0, follows=True)
    told.give_up()
    told.take(9)
    assert not told.follows, "a row has waited in vain"
    told.tell(3, [4], [0.9], 0, follows=True)
    assert told.follows


def test_the_next_guess_follows_once_the_model_was_heard() -> None:
    told = _told([1])
    told.take(2)
    assert not told.follows  # the model still reads the prompt
    told.tell(2, [3], [0.9], 0, follows=False)
    assert not told.follows
    told.take(9)
    assert told.follows
    told.lose()
    told.take(4)
    assert not told.follows


def test_chances_follow_what_was_right() -> None:
    shared = ToldFacts()
    told = ToldGuesses([0], shared)
    told.tell(1, [1, 2], [0.95, 0.55], 0, follows=False)
    first = told.chances(0, 2)
    assert first == [pytest.approx(0.95), pytest.approx(0.95 * 0.55)]
    for at in range(1, 60):  # all guesses are wrong
        told.tell(at, [7], [0.95], 0, follows=False)
        told.take(8)
    told.tell(60, [1], [0.95], 0, follows=False)
    assert told.chances(0, 1)[0] < 0.1
    other = ToldGuesses([0], shared)
    other.tell(1, [1], [0.95], 0, follows=False)
    assert other.chances(0, 1)[0] < 0.35  # another stream begins with what all have seen
    other.tell(1, [1], [0.55], 0, follows=False)
    assert other.chances(0, 1)[0] == pytest.approx(0.55)  # guesses of other probabilities are other guesses


def test_the_likelier_source_is_asked_and_must_have_what_is_under_way() -> None:
    guesses = Guesses(Drafter([5, 6, 7, 8, 5, 6], (), Acceptance()))
    assert guesses.tokens((), 2) == [7, 8]
    told = guesses.told = _told([5, 6, 7, 8, 5, 6])
    assert guesses.tokens((), 2) == [7, 8]
    told.tell(6, [9, 10, 11], [0.99, 0.99, 0.99], 0, follows=False)
    assert guesses.tokens((), 2) == [9, 10]
    assert guesses.tokens([7, 8], 2) == [5, 6]
    assert guesses.tokens([9], 2) == [10, 11]
    told.tell(6, [9, 10], [0.3, 0.3], 0, follows=False)
    assert guesses.tokens([9], 2) == [10], "nobody else has what is under way"
    told.tell(6, [9], [0.04], 0, follows=False)
    assert guesses.tokens((), 2) == [7, 8]
    assert not guesses.take(9)
    assert guesses.tokens((), 2) == []
