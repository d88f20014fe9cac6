"""Kept lanes: what is copied for which session, and which kept lane yields."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

import pytest

from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.prefixes import PREFIX_TOKENS_MIN, Prefixes, common_tokens
from relayline.coordinator.sessions.session import OutFrame, Session, State
from relayline.wire.envelopes.frames import Flag

NAMES = {Flag.OPEN: "open", Flag.COPY_PREFIX: "copy", Flag.CLOSE: "close"}


def session_of(session_id: int, tokens: list[int], lane: int = 0) -> Session:
    request = GenerationRequest(str(session_id), tuple(tokens), 8, SamplingParams())
    return Session(session_id, request, lambda _: False, lane=lane)


def of_circle(session: Session, circle: str) -> Session:
    session.request = dataclasses.replace(session.request, circle=circle)
    return session


def ended(session_id: int, tokens: list[int], lane: int = 0) -> Session:
    """A session whose answer's last token has just been sampled: the lane holds all tokens but that one."""
    session = session_of(session_id, [*tokens, 9], lane)
    session.state = State.DONE
    return session


def controls_of(frames: list[OutFrame]) -> list[tuple[str, int, int, int]]:
    return [(NAMES[frame.flags], frame.session.session_id, frame.position, frame.argument) for frame in frames]


def prefixes(n_max: int, lanes: Sequence[int]) -> Prefixes:
    return Prefixes(n_max, itertools.count(100), lambda: lanes, {})


def run_of(first: int, n_tokens: int) -> list[int]:
    return list(range(first, first + n_tokens))


def test_the_next_turn_of_a_chat_goes_on_where_the_last_ended() -> None:
    kept = Prefixes(2, itertools.count(100), lambda: [1, 2, 3], {})
    turn = run_of(0, 50)
    assert controls_of(kept.keep(ended(1, turn))) == [("open", 100, 0, 4), ("copy", 100, 50, 1)]
    following = session_of(2, [*turn, 9, 77, 78], lane=0)
    assert controls_of(kept.start(following)) == [("open", 2, 0, 1), ("copy", 2, 50, 100)]
    assert (following.n_sent, following.n_copied, following.prefill_left) == (50, 50, 3)
    chunk = following.next_chunk(64)
    assert chunk is not None
    assert (chunk.position, chunk.tokens) == (50, (9, 77, 78))
    longer = controls_of(kept.keep(ended(2, [*turn, 9, 77, 78, 5])))
    assert longer == [("close", 100, 0, 0), ("open", 101, 0, 4), ("copy", 101, 54, 2)], "one lane for each chat"
    assert kept.figures() == {"lanes": 1, "tokens": 54}


def test_the_last_token_of_a_prompt_is_read_in_any_case() -> None:
    kept = prefixes(1, [1])
    kept.keep(ended(1, run_of(0, 50)))
    same = session_of(2, run_of(0, 50))
    kept.start(same)
    assert same.prefill_left == 1


def test_a_session_copies_the_longest_common_prefix() -> None:
    kept, system = prefixes(3, [1, 2, 3]), run_of(0, 40)
    kept.keep(ended(1, [*system, *run_of(1_000, 10)]))
    kept.keep(ended(2, [*system, *run_of(2_000, 10)]))
    assert controls_of(kept.start(session_of(3, [*system, *run_of(2_000, 5), 7])))[1] == ("copy", 3, 45, 101)
    assert controls_of(kept.start(session_of(4, [*system, *run_of(3_000, 5)])))[1][2] == 40
    assert controls_of(kept.start(session_of(5, [*system[: PREFIX_TOKENS_MIN - 1], 7, 7]))) == [("open", 5, 0, 1)]


def test_a_session_takes_the_lane_that_it_would_copy_last() -> None:
    kept = prefixes(2, [1, 2])
    kept.keep(ended(1, run_of(1_000, 40)))
    kept.keep(ended(2, run_of(2_000, 40)))
    assert kept.lanes == [2, 1]
    assert kept.lanes_before(session_of(3, run_of(1_000, 60))) == [1, 2]
    assert kept.lanes_before(session_of(4, run_of(3_000, 60))) == [2, 1]


def test_an_equal_prefix_is_kept_once() -> None:
    kept = prefixes(2, [1, 2, 3])
    kept.keep(ended(1, run_of(1_000, 60)))
    kept.keep(ended(2, run_of(2_000, 60)))
    assert kept.keep(ended(3, run_of(1_000, 40))) == []
    assert controls_of(kept.keep(ended(4, run_of(4_000, 40))))[0] == ("close", 101, 0, 0), "the other was used last"


def test_kept_lanes_yield_the_one_longest_unused_first() -> None:
    kept = prefixes(2, [1, 2])
    kept.keep(ended(1, run_of(1_000, 40), lane=0))
    kept.keep(ended(2, run_of(2_000, 40), lane=0))
    kept.start(session_of(3, run_of(1_000, 60), lane=0))
    assert kept.lanes == [1, 2]
    assert controls_of(kept.keep(ended(4, run_of(4_000, 40), lane=0))) == [
        ("close", 101, 0, 0), ("open", 102, 0, 2), ("copy", 102, 40, 4),
    ]  # fmt: skip
    assert controls_of(kept.start(session_of(5, [1, 2], lane=2))) == [("close", 100, 0, 0), ("open", 5, 0, 3)]
    assert kept.lanes == [1]


@pytest.mark.parametrize(("n_max", "n_tokens", "lanes"), [(0, 50, [1]), (1, PREFIX_TOKENS_MIN - 1, [1]), (1, 50, [])])
def test_nothing_is_kept_without_leave_or_use_or_lane(n_max: int, n_tokens: int, lanes: list[int]) -> None:
    kept = prefixes(n_max, lanes)
    assert kept.keep(ended(1, run_of(0, n_tokens))) == []
    assert kept.lanes == []


def test_a_cancelled_answer_is_kept_and_a_cancelled_prompt_is_not() -> None:
    kept = prefixes(2, [1, 2])
    session = session_of(1, run_of(0, 50))
    session.start()
    assert kept.keep(session) == []
    session.next_chunk(64)
    session.sampled(50, 7)
    session.sampled(51, 8)
    assert controls_of(kept.keep(session)) == [("open", 100, 0, 3), ("copy", 100, 51, 1)]


def test_a_prefix_that_a_stage_refused_is_not_copied() -> None:
    kept = prefixes(2, [1, 2])
    kept.keep(ended(1, run_of(1_000, 40)))
    kept.keep(ended(2, run_of(2_000, 40)))
    assert kept.refused([7, 0], is_full=False) == []
    assert controls_of(kept.refused([7, 100], is_full=False)) == [("close", 100, 0, 0)]
    assert controls_of(kept.start(session_of(3, run_of(1_000, 60)))) == [("open", 3, 0, 1)]
    assert controls_of(kept.refused([3], is_full=True)) == [("close", 101, 0, 0)], "lanes are short"


def test_a_session_that_had_a_fault_reads_everything_itself() -> None:
    kept = prefixes(1, [1])
    kept.keep(ended(1, run_of(0, 50)))
    session = session_of(2, run_of(0, 60))
    session.replays = 1
    assert controls_of(kept.start(session)) == [("open", 2, 0, 1)]
    assert len(kept.start(session_of(3, run_of(0, 60)))) == 2
    kept.renew(3, is_per_lane=True)
    assert controls_of(kept.start(session_of(3, run_of(0, 60)))) == [("open", 3, 0, 1)], "another epoch"


def test_an_uncached_session_shares_no_prefix() -> None:
    kept = prefixes(1, [1])
    kept.keep(ended(1, run_of(0, 50)))
    session = session_of(2, run_of(0, 60))
    session.request = dataclasses.replace(session.request, cache_prompt=False)
    assert controls_of(kept.start(session)) == [("open", 2, 0, 1)]
    session.state = State.DONE
    assert kept.keep(session) == []
    assert kept.figures() == {"lanes": 1, "tokens": 50}


@pytest.mark.parametrize("is_running", [True, False])
def test_another_circle_shares_no_prefix(is_running: bool) -> None:
    """Neither of a running request nor of a kept lane."""
    source = of_circle(session_of(1, run_of(0, 60), lane=0) if is_running else ended(1, run_of(0, 60)), "a")
    made = Prefixes(2, itertools.count(100), lambda: [2, 3], {1: source} if is_running else {})
    if is_running:
        source.start()
        source.next_chunk(60)
    else:
        made.keep(source)
    for session_id, circle in ((5, "b"), (6, ""), (7, "a")):
        session = of_circle(session_of(session_id, run_of(0, 70), lane=1), circle)
        made.start(session)
        assert (session.n_copied > 0) == (circle == "a")
    other = of_circle(ended(8, run_of(0, 60)), "b")
    made.keep(other)
    assert made.figures()["lanes"] == (1 if is_running else 2), "it takes no place of an equal one"


@pytest.mark.parametrize(
    ("n_asked", "expected"), [(None, {True: 3, False: 0}), (0, {True: 0, False: 0}), (3, {True: 3, False: 3})]
)
def test_per_lane_cells_keep_prefixes_by_default(n_asked: int | None, expected: dict[bool, int]) -> None:
    kept = Prefixes(n_asked, itertools.count(100), list, {})
    for is_per_lane in (True, False, True):
        kept.renew(7, is_per_lane=is_per_lane)
        assert kept.n_max == expected[is_per_lane]


def test_common_tokens_is_the_length_of_the_common_beginning() -> None:
    rng = random.Random(5)
    for _ in range(300):
        first = [rng.randrange(3) for _ in range(rng.randrange(12))]
        second = [*first[: rng.randrange(13)], *(rng.randrange(3) for _ in range(rng.randrange(4)))]
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
        assert common_tokens(first, second) == len(list(pairs))


def test_rows_left_in_stages_are_used_by_the_next_start_alone() -> None:
    kept = prefixes(2, [3])
    kept.keep(ended(1, run_of(0, 60)))
    kept.renew(4, is_per_lane=True, left_rows={7: 40, 8: 0, 9: 40})
    going_on = [session_of(7, run_of(0, 60)), session_of(8, run_of(0, 60))]
    closes = kept.left_behind(going_on)
    assert [(frame.session.session_id, frame.flags) for frame in closes] == [(8, Flag.CLOSE), (9, Flag.CLOSE)]
    assert [frame.flags for frame in kept.start(going_on[0])] == [Flag.OPEN, Flag.TRIM]
    assert (going_on[0].n_sent, going_on[0].n_kept) == (40, 40)
    frames = kept.start(going_on[0])
    assert [(frame.flags, frame.position) for frame in frames] == [(Flag.OPEN, 0), (Flag.TRIM, 0)], "others hold it yet"
    assert (going_on[0].n_sent, going_on[0].n_kept) == (0, 0)


def test_a_session_that_resumes_in_its_lane_copies_nothing_into_it() -> None:
    running = {1: ended(1, run_of(0, 60))}
    running[1].state = State.DECODE
    kept = Prefixes(2, itertools.count(100), lambda: [3], running)
    kept.renew(4, is_per_lane=True, left_rows={7: 5})
    session = session_of(7, run_of(0, 60))
    kept.left_behind([session])
    assert [frame.flags for frame in kept.start(session)] == [Flag.OPEN, Flag.TRIM]
