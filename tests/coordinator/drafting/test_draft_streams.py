"""The streams of a drafting model: its cells always hold what its guesses follow from, whatever happens."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.coordinator.drafting.messages import Begin, End, Guessed, Took
from relayline.coordinator.drafting.streams import CHANCE_STOP, NEAR_ROWS, PROMPT_ROWS, STEP_ROWS_MAX, Row, Streams
from relayline.wire.common.bounds import DRAFT_AHEAD_MAX, DRAFT_SEQUENCES_MAX

N_VOCAB = 7
N_SERVED = 200
END = 0


def following(tokens: Sequence[int]) -> tuple[int, float]:
    """What the fake model guesses behind some tokens, and its probability."""
    value = zlib.crc32(bytes(tokens))
    return value % N_VOCAB, (1 + value % 10) / 10


class World:
    """The process that drafts, on a fake model whose cells are tokens."""

    def __init__(self, cells_max: int = 4_000) -> None:
        self.streams = Streams(cells_max, N_SERVED, END.__eq__)
        self.cells: dict[int, list[int]] = {}
        self.cells_max = cells_max
        self.texts: dict[int, list[int]] = {}
        self.heard: dict[int, Guessed] = {}
        self.n_rows = 0

    def begin(self, key: int, tokens: Sequence[int]) -> None:
        self.texts[key] = list(tokens)
        self.heard.pop(key, None)
        self.note(self.streams.hear(Begin(key, list(tokens))))

    def take(self, key: int, tokens: Sequence[int]) -> None:
        self.note(self.streams.hear(Took(key, len(self.texts[key]), list(tokens))))
        self.texts[key] += tokens

    def end(self, key: int) -> None:
        del self.texts[key]
        self.streams.hear(End(key))

    def step(self) -> tuple[Row, ...]:
        step = self.streams.next_step()
        for sequence, position in step.trims:
            del self.cells.get(sequence, [])[position:]
        assert len(step.rows) <= STEP_ROWS_MAX
        if sum(map(len, self.cells.values())) + len(step.rows) > self.cells_max:
            self.note(self.streams.full())
            return tuple(step.rows)
        results = []
        for row in step.rows:
            held = self.cells.setdefault(row.sequence, [])
            assert row.sequence < DRAFT_SEQUENCES_MAX
            assert row.token < N_SERVED, "the model has no such token"
            assert row.position == len(held), "cells were to be dropped first"
            held.append(row.token)
            if row.is_last:
                results.append(following(held))
        self.n_rows += len(step.rows)
        self.note(self.streams.computed(step.rows, results))
        return tuple(step.rows)

    def note(self, heard: Sequence[Guessed]) -> None:
        for each in heard:
            self.heard[each.stream] = each

    def settle(self) -> None:
        for _ in range(10_000):
            if not self.step():
                return
        pytest.fail("it never ends")

    def check(self, key: int) -> None:
        """The guesses told last are those of the model, as many as are wanted."""
        text, heard = self.texts[key], self.heard[key]
        assert heard.position == len(text)
        assert not heard.follows
        n_least, chance = 0, 1.0
        expected: list[int] = []
        probabilities: list[float] = []
        while len(expected) < DRAFT_AHEAD_MAX:
            token, probability = following([*text, *expected])
            if token == END:
                break
            expected.append(token)
            probabilities.append(probability)
            if chance >= CHANCE_STOP:
                n_least = len(expected)
            chance *= probability
        assert heard.tokens == expected[: len(heard.tokens)]
        assert heard.probabilities == probabilities[: len(heard.tokens)]
        assert len(heard.tokens) >= n_least  # more were made when the text was shorter


def test_a_right_guess_costs_no_row_and_a_wrong_one_a_new_chain() -> None:
    world = World()
    world.begin(1, [1, 2, 3])
    world.settle()
    world.check(1)
    guesses = world.heard[1].tokens
    assert guesses
    n_rows = world.n_rows
    world.take(1, guesses[:1])
    world.settle()
    world.check(1)
    assert world.n_rows - n_rows <= DRAFT_AHEAD_MAX - len(guesses) + 1
    world.take(1, [(world.heard[1].tokens[0] + 1) % N_VOCAB])
    world.settle()
    world.check(1)


def test_right_guesses_before_a_wrong_one_cost_no_row_either() -> None:
    world = World()
    world.begin(1, [1, 2, 3])
    world.settle()
    first, second = world.heard[1].tokens[:2]
    world.take(1, [first, (second + 1) % N_VOCAB])
    (row,) = world.step()
    assert row.position == 4
    world.settle()
    world.check(1)


@pytest.mark.parametrize(("probability", "n_guesses"), [(1.0, DRAFT_AHEAD_MAX), (0.5, 5)])
def test_guesses_go_on_until_they_are_many_or_hardly_all_right(probability: float, n_guesses: int) -> None:
    streams = Streams(200, N_SERVED, lambda _: False)

    def settle() -> Guessed:
        while rows := streams.next_step().rows:
            (said,) = streams.computed(rows, [(7, probability) for row in rows if row.is_last])
        return said

    streams.hear(Begin(1, [1]))
    said = settle()
    assert (said.tokens, said.follows) == ([7] * n_guesses, False)
    streams.hear(Took(1, 1, [7, 7]))
    said = settle()
    assert (said.tokens, said.follows) == ([7] * n_guesses, False), "those that are left count with their chance"


def test_so_many_streams_have_cells_and_one_that_begins_anew_has_no_others() -> None:
    streams = Streams(10_000, N_SERVED, lambda _: False)
    for key in range(DRAFT_SEQUENCES_MAX + 2):
        assert bool(streams.hear(Begin(key, [1, 2]))) is (key >= DRAFT_SEQUENCES_MAX), "those without are told"
    assert {row.sequence for row in streams.next_step().rows} == {*range(DRAFT_SEQUENCES_MAX)}
    for _ in range(3):
        assert streams.hear(Begin(0, [1, 2])) == []


def test_an_end_that_was_guessed_stands_while_guesses_are_right() -> None:
    world = World()
    world.begin(1, [1, 1])
    world.settle()
    assert world.heard[1].tokens == [4, 6], "an end follows these"
    for token in (4, 6):
        world.take(1, [token])
        assert not world.step()
        world.check(1)
    world.take(1, [3])
    world.settle()
    world.check(1)
    assert world.heard[1].position == 5


def test_prompts_are_read_beside_streams_that_draft() -> None:
    world = World()
    world.begin(1, [1, 2, 3])
    world.begin(2, [3] * 300)
    rows = world.step()
    assert [row.sequence for row in rows].count(rows[0].sequence) == 3
    assert len(rows) == 3 + PROMPT_ROWS
    world.settle()
    world.check(1)
    world.check(2)


def test_prompts_share_the_rows_that_are_for_prompts() -> None:
    world = World()
    world.begin(1, [1, 2, 3] * 40)
    world.settle()
    world.take(1, [2])
    for key in (2, 3):
        world.begin(key, [key] * 300)
    rows = world.step()
    assert (len(rows), rows[0].position) == (1 + PROMPT_ROWS, 120), "one that drafts comes first, however long it is"
    world.settle()
    for key in world.texts:
        world.check(key)


@pytest.mark.parametrize(
    ("n_streams", "n_rows"), [(10, 10 * NEAR_ROWS + PROMPT_ROWS), (STEP_ROWS_MAX // NEAR_ROWS + 4, STEP_ROWS_MAX)]
)
def test_a_step_has_a_bound_for_all_its_rows(n_streams: int, n_rows: int) -> None:
    world = World()
    for key in range(n_streams):
        world.begin(key, [1 + key % 3] * NEAR_ROWS)
    world.begin(n_streams, [4] * 300)
    assert len(world.step()) == n_rows
    world.settle()
    for key in world.texts:
        world.check(key)


def test_the_next_turn_of_a_chat_reads_what_is_new() -> None:
    world = World()
    world.begin(1, [1, 2, 3] * 40)
    world.settle()
    world.take(1, [5, 6])
    world.settle()
    text = world.texts[1]
    world.end(1)
    n_rows = world.n_rows
    world.begin(2, [*text, 4, 4])
    world.settle()
    world.check(2)
    assert world.n_rows - n_rows < NEAR_ROWS + DRAFT_AHEAD_MAX
    (said,) = world.streams.full()
    assert said.stream == 2, "nothing else has cells"


def test_ended_streams_make_room_before_the_model_is_full() -> None:
    world = World(cells_max=200)
    for key in (1, 2):
        world.begin(key, [key] * 60)
        world.settle()
        world.end(key)
    world.begin(3, [3] * 60)
    assert world.streams.next_step().trims == [(0, 0)], "the oldest alone"


def test_the_same_text_again_has_guesses_for_one_row() -> None:
    world = World()
    world.begin(1, [1, 2, 3] * 4)
    world.settle()
    world.end(1)
    world.begin(2, [1, 2, 3] * 4)
    (row,) = world.step()
    assert (row.position, row.is_last) == (11, True)
    world.settle()
    world.check(2)


def test_the_oldest_ended_stream_gives_its_place_to_one_that_begins_otherwise() -> None:
    streams = Streams(10_000, N_SERVED, lambda _: False)
    for key in range(DRAFT_SEQUENCES_MAX + 1):
        assert streams.hear(Begin(key, [1 + key, 5])) == [], "it has cells"
        trims, rows = streams.next_step()
        assert trims == ([(0, 0)] if key == DRAFT_SEQUENCES_MAX else [])
        streams.computed(rows, [(7, 1.0)])
        streams.hear(End(key))


def test_a_text_that_does_not_fit_has_no_guesses_and_others_go_on() -> None:
    world = World(cells_max=100)
    world.begin(1, [1] * 200)
    world.begin(2, [1, 2])
    world.settle()
    world.check(2)
    assert not world.heard[1].follows
    assert not world.heard[1].tokens
    world.take(1, [3])
    world.end(1)
    world.settle()


def test_a_token_that_the_model_lacks_ends_the_guesses_of_its_stream_alone() -> None:
    world = World()
    world.begin(1, [1, N_SERVED, 2])
    world.begin(3, [1, 3])
    world.begin(2, [1, 2])
    world.take(3, [1, N_SERVED, 1])
    world.settle()
    world.check(2)
    for key in (1, 3):
        assert not world.heard[key].tokens
        assert not world.heard[key].follows


def test_where_cells_run_out_the_youngest_stream_gives_way() -> None:
    world = World(cells_max=110)
    for key in (1, 2):
        world.begin(key, [key] * 30)
    world.settle()
    for _ in range(70):
        world.take(1, [2])
        world.settle()
    world.check(1)
    assert not world.heard[2].tokens
    assert not world.heard[2].follows


def test_a_model_that_is_full_gives_up_first_what_no_stream_uses() -> None:
    world = World()
    world.begin(1, [1, 2, 3])
    world.settle()
    world.end(1)
    world.begin(2, [4, 5])
    world.settle()
    (kept,) = (sequence for sequence, held in world.cells.items() if held[0] == 1)
    (used,) = (sequence for sequence in world.cells if sequence != kept)
    assert world.streams.full() == []
    assert world.streams.next_step().trims == [(kept, 0)]
    (said,) = world.streams.full()
    assert (said.stream, said.tokens, said.follows) == (2, [], False)
    assert world.streams.next_step().trims == [(used, 0)]
    assert world.streams.full() == [], "there is nothing to give up"
    alone = World()
    alone.begin(1, [1, 2, 3])
    (said,) = alone.streams.full()
    assert (said.stream, said.follows) == (1, False)


def test_tokens_that_do_not_follow_a_text_change_nothing() -> None:
    world = World()
    world.begin(1, [1, 2, 3])
    world.settle()
    assert world.streams.hear(Took(1, 2, [5])) == []
    assert world.streams.hear(Took(1, 4, [5])) == []
    assert world.streams.hear(Took(2, 0, [5])) == [], "it ended before this came"
    world.settle()
    world.check(1)
    world.take(1, [5])
    world.settle()
    world.check(1)


def test_a_stream_that_lost_its_cells_has_some_again_when_another_ends() -> None:
    world = World(cells_max=140)
    for key in (1, 2):
        world.begin(key, [key] * 30)
    for _ in range(90):
        world.take(1, [2])
        world.settle()
    assert not world.heard[2].tokens
    world.take(2, [3, 4])
    world.end(1)
    world.settle()
    world.check(2)
    assert world.heard[2].tokens


def test_a_stream_that_lost_its_cells_with_unlikely_guesses_guesses_at_once_when_it_has_some_again() -> None:
    streams = Streams(200, N_SERVED, lambda _: False)

    def settle() -> None:
        while rows := streams.next_step().rows:
            streams.computed(rows, [(7, CHANCE_STOP / 2) for row in rows if row.is_last])

    streams.hear(Begin(1, [1] * 80))
    streams.hear(Begin(2, [2] * 60))
    settle()
    streams.full()  # the younger one gives way
    streams.hear(End(1))
    assert streams.next_step().rows, "not only with its next token"


def test_a_stream_for_which_there_was_no_room_has_some_when_others_end() -> None:
    world = World(cells_max=1_000)
    world.begin(1, [1] * 400)
    world.begin(2, [2] * 400)
    world.begin(3, [3] * 400)
    world.settle()
    assert [bool(world.heard[key].tokens) for key in (1, 2, 3)] == [True, True, False]
    world.end(1)
    n_rows = world.n_rows
    world.settle()
    world.check(3)
    assert world.n_rows - n_rows < 400 + 3 * DRAFT_AHEAD_MAX, "its text is read once"


def test_a_text_is_not_read_again_where_it_would_soon_lack_cells_once_more() -> None:
    world = World(cells_max=1_000)
    world.begin(1, [1] * 60)
    world.begin(2, [2] * 500)
    world.begin(3, [3] * 460)
    world.settle()
    assert not world.heard[3].tokens
    world.end(1)
    n_rows = world.n_rows
    world.settle()
    assert world.n_rows == n_rows, "there is room for its text, and for few tokens more"
    world.end(2)
    world.settle()
    world.check(3)


def test_a_text_with_a_token_that_the_model_lacks_is_not_read_again() -> None:
    world = World()
    world.begin(1, [1, 2])
    world.begin(2, [1, 3])
    world.take(2, [N_SERVED + 3])
    world.settle()
    world.end(1)
    assert not world.step()
    assert not world.heard[2].tokens


_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(1, 30), st.lists(st.integers(1, 3), min_size=1, max_size=60)),
        st.tuples(st.just("right"), st.integers(1, 30), st.integers(1, 4)),
        st.tuples(st.just("take"), st.integers(1, 30), st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=3)),
        st.tuples(st.just("end"), st.integers(1, 30), st.none()),
        st.tuples(st.just("step"), st.integers(1, 5), st.none()),
    ),
    max_size=80,
)


@given(_EVENTS, st.sampled_from((150, 400, 100_000)))
@settings(max_examples=150)
def test_guesses_follow_from_the_text_whatever_happens(events: list[tuple[str, int, object]], cells_max: int) -> None:
    world = World(cells_max)
    for what, key, how in events:
        if what == "begin" and key not in world.texts:
            world.begin(key, how)  # type: ignore[arg-type]
        elif what == "right" and key in world.texts and key in world.heard:
            heard = world.heard[key]
            world.take(key, heard.tokens[len(world.texts[key]) - heard.position :][:how])  # type: ignore[misc]
        elif what == "take" and key in world.texts:
            world.take(key, how)  # type: ignore[arg-type]
        elif what == "end" and key in world.texts:
            world.end(key)
        elif what == "step":
            for _ in range(key):
                world.step()
    world.settle()
    for key, text in world.texts.items():
        has_room = cells_max > sum(map(len, world.texts.values())) + 1_000 and len(world.texts) <= DRAFT_SEQUENCES_MAX
        heard = world.heard.get(key)
        if has_room or (heard is not None and heard.tokens and heard.position == len(text)):
            world.check(key)
