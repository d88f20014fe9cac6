"""The scheduler: which envelopes leave."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.schedule.groups import GroupPlan, GroupPlanner
from relayline.coordinator.schedule.prompt_line import OLDEST_EVERY
from relayline.coordinator.schedule.scheduler import Scheduler
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.session import OutFrame
from relayline.deploy.testing.simulation.world import staircase
from relayline.wire.common.curve import CostCurve
from relayline.wire.envelopes.frames import Flag
from tests.support.scheduling import Fixed, answer, ids, new_session, row, start


def test_no_more_flights_than_planned_and_the_oldest_rows_first() -> None:
    scheduler = Scheduler(ScheduleConfig(), Fixed(2, 2))
    for session_id in range(1, 8):
        scheduler.decode(row(session_id))
    first, second = scheduler.take(0)
    assert ids([first, second]) == [[1, 2], [3, 4]]
    assert scheduler.take(0) == []
    answer(scheduler, second)
    assert ids(scheduler.take(0)) == [[5, 6]]
    answer(scheduler, first[:1])
    assert scheduler.take(0) == [], "a flight has landed when all of it has"
    answer(scheduler, first[1:])
    assert ids(scheduler.take(0)) == [[7]]


def test_fragments_meet_in_the_pool() -> None:
    scheduler = Scheduler(ScheduleConfig(), Fixed(1, 4))
    scheduler.decode(row(1))
    (alone,) = scheduler.take(0)
    for session_id in (2, 3, 4):
        scheduler.decode(row(session_id))
    assert scheduler.take(0) == []
    answer(scheduler, alone)
    scheduler.decode(row(1, 11))
    assert ids(scheduler.take(0)) == [[2, 3, 4, 1]]


def test_an_echo_changes_nothing() -> None:
    scheduler = Scheduler(ScheduleConfig(), Fixed(1, 1))
    scheduler.decode(row(1))
    (envelope,) = scheduler.take(0)
    answer(scheduler, envelope)
    answer(scheduler, envelope)
    scheduler.answered(99, 3, 0)
    for session_id in (2, 3):
        scheduler.decode(row(session_id))
    assert ids(scheduler.take(0)) == [[2]]


def test_controls_never_wait_and_go_before_data() -> None:
    scheduler = Scheduler(ScheduleConfig(), Fixed(1, 1))
    scheduler.decode(row(1))
    scheduler.take(0)
    scheduler.decode(row(2))
    closing = OutFrame(new_session(3), 0, (), Flag.CLOSE)
    scheduler.control([closing])
    assert scheduler.take(0) == [[closing]]
    session = new_session(4)
    start(scheduler, session)
    ((opening, chunk),) = scheduler.take(0)
    assert opening.flags & Flag.OPEN
    assert chunk.tokens == (0, 1, 2, 3)


def test_a_forgotten_session_frees_its_flight_and_leaves_the_pool() -> None:
    scheduler = Scheduler(ScheduleConfig(), Fixed(1, 2))
    for session_id in (1, 2, 3, 4):
        scheduler.decode(row(session_id))
    scheduler.take(0)
    scheduler.forget(3)
    scheduler.forget(1)
    assert scheduler.take(0) == []
    scheduler.forget(2)
    assert ids(scheduler.take(0)) == [[4]]
    assert scheduler.n_decoding == 1
    scheduler.forget(4)
    scheduler.forget(4)
    assert scheduler.n_decoding == 0


def test_a_forgotten_prompt_is_asked_for_nothing_more() -> None:
    scheduler = Scheduler(ScheduleConfig(), Fixed())
    session = new_session(1, n_prompt=100)
    start(scheduler, session)
    scheduler.take(0)
    scheduler.forget(1)
    assert scheduler.take(0) == []


def test_short_prompts_share_a_flight() -> None:
    scheduler = Scheduler(ScheduleConfig(), Fixed(flights=1, chunk_rows=8))
    for session_id in (1, 2, 3):
        start(scheduler, new_session(session_id, n_prompt=4))
    (envelope,) = scheduler.take(0)
    assert [len(frame.tokens) for frame in envelope] == [0, 0, 0, 4, 4]


def test_a_prompt_is_a_train_of_chunks() -> None:
    scheduler = Scheduler(ScheduleConfig(), Fixed(flights=3, chunk_rows=8))
    start(scheduler, new_session(1, n_prompt=30))
    envelopes = scheduler.take(0)
    assert [[(f.position, len(f.tokens)) for f in envelope if f.tokens] for envelope in envelopes] == [
        [(0, 8)],
        [(8, 8)],
        [(16, 8)],
    ]
    answer(scheduler, envelopes[0])
    ((last,),) = scheduler.take(0)
    assert (last.position, len(last.tokens), last.flags) == (24, 6, Flag.PREFILL | Flag.WANTS_SAMPLE)


def test_prompt_rows_ride_in_decode_flights() -> None:
    scheduler = Scheduler(ScheduleConfig(), Fixed(2, 2, flights=0, ride_rows=3))
    prompt = new_session(9, n_prompt=10)
    start(scheduler, prompt)
    opening = scheduler.take(0)
    assert [len(frame.tokens) for frame in opening[0]] == [0], "nothing to ride in yet"
    for session_id in (1, 2, 3):
        scheduler.decode(row(session_id))
    first, second = scheduler.take(0)
    assert [(f.session.session_id, len(f.tokens)) for f in first] == [(1, 1), (2, 1), (9, 3)]
    assert [(f.session.session_id, f.position, len(f.tokens)) for f in second] == [(3, 10, 1), (9, 3, 4)], (
        "a flight with fewer decode rows has more room"
    )
    scheduler.decode(row(4))
    answer(scheduler, first[:2])
    assert ids(scheduler.take(0)) == [[4]], "no stream waits for prompt rows left in stages, or adds to them"
    answer(scheduler, first[2:])
    answer(scheduler, second)
    scheduler.decode(row(5))
    ((_, last),) = scheduler.take(0)
    assert (last.position, len(last.tokens), last.flags) == (7, 3, Flag.PREFILL | Flag.WANTS_SAMPLE)


def test_prompt_rows_that_are_computed_apart_fill_no_place_of_decode_rows() -> None:
    scheduler = Scheduler(ScheduleConfig(), Fixed(2, 2, flights=0, ride_rows=3, is_per_lane=True))
    start(scheduler, new_session(9, n_prompt=10))
    scheduler.take(0)
    for session_id in (1, 2, 3):
        scheduler.decode(row(session_id))
    rows = [[len(frame.tokens) for frame in envelope] for envelope in scheduler.take(0)]
    assert rows == [[1, 1, 3], [1, 3]]


@pytest.mark.parametrize(("further_ns", "expected"), [(0.0, 505), (1_000.0, 900)])
def test_rows_that_pay_for_the_longest_of_their_lanes_are_planned_as_such(further_ns: float, expected: float) -> None:
    planner, asked = Fixed(1, 2), set[tuple[float, float]]()
    planner.update((dataclasses.replace(planner.stages[0], context_tiled_ns=further_ns, is_per_lane=True),))

    def at(decode_tokens: float, prompt_tokens: float) -> GroupPlanner:
        asked.add((decode_tokens, prompt_tokens))
        return planner

    planner.at = at  # type: ignore[method-assign]
    scheduler = Scheduler(ScheduleConfig(), planner)
    for session_id, position in ((1, 110), (2, 900)):
        scheduler.decode(row(session_id, position))
    assert ids(scheduler.take(0)) == [[1, 2]]
    assert asked == {(expected, 0)}


def test_a_flight_behind_others_that_became_longer_takes_fewer_rows_along() -> None:
    """Four streams, 8 ms apart at every one of four stages, meet a prompt: each ride delays the next stream."""
    every_row_counts = CostCurve([(1, 8_000_000), (512, 85_000_000)])
    stage = StageCost(every_row_counts, every_row_counts, 512)

    def rides(gap_ns: int) -> tuple[int, list[int]]:
        scheduler = Scheduler(ScheduleConfig(), GroupPlanner([stage] * 4))
        start(scheduler, new_session(9, n_prompt=4_000))
        scheduler._pool.streams |= dict.fromkeys((1, 2, 3, 4), (-1, 10))  # those not back yet are under way
        planned, found = scheduler.plan().ride_rows, []
        for turn in range(4):
            scheduler.decode(row(turn + 1))
            (envelope,) = scheduler.take(turn * gap_ns)
            found.append(len(envelope[-1].tokens))
        return planned, found

    planned, found = rides(8_000_000)
    assert found[0] == planned
    assert planned / 2 <= found[3] < planned
    planned, found = rides(10**9)
    assert found == [planned] * 4, "nothing is in the way"


def test_plans_are_made_for_the_contexts_of_those_that_run_and_of_the_prompt_that_goes_next() -> None:
    asked: list[tuple[float, float]] = []

    class Noting(Fixed):
        def at(self, decode_tokens: float, prompt_tokens: float) -> GroupPlanner:
            asked.append((decode_tokens, prompt_tokens))
            return self

    scheduler = Scheduler(ScheduleConfig(), Noting(n_groups=1, group_rows=2, flights=0, ride_rows=4))
    scheduler.decode(row(1, position=100))
    scheduler.decode(row(2, position=300))
    ((*_,),) = scheduler.take(0)
    assert asked == [(200, 0), (200, 0)], "the plan, and the flight"
    start(scheduler, new_session(3, n_prompt=12))
    for session_id, position in ((1, 101), (2, 301)):
        scheduler.answered(session_id, position, 1)
        scheduler.decode(row(session_id, position))
    asked.clear()
    scheduler.take(1)
    assert asked == [(201, 0), (201, 0)]
    scheduler.plan()
    assert asked[-1] == (201, 4), "four rows of the prompt have left"
    scheduler.forget(2)
    scheduler.plan()
    assert asked[-1] == (101, 4)
    scheduler.forget(1)
    scheduler.forget(3)
    scheduler.plan()
    assert asked[-1] == (0, 0)


def test_a_train_of_many_prompts_is_planned_for_all_of_them_to_its_end() -> None:
    asked: list[tuple[int, int]] = []

    class Noting(Fixed):
        def plan(self, n_streams: int, **more: Any) -> GroupPlan:
            asked.append((more["n_prompts"], more["n_prompt_rows"]))
            return super().plan(n_streams, **more)

    scheduler = Scheduler(ScheduleConfig(), Noting(flights=1, chunk_rows=8))
    for session_id in range(1, 5):
        start(scheduler, new_session(session_id, n_prompt=6))
    scheduler.take(0)
    scheduler.plan()
    assert asked == [(4, 24)] * 2, "some of them have left"
    for session_id in range(1, 5):
        scheduler.forget(session_id)
    scheduler.plan()
    assert asked[-1] == (0, 0)


def test_a_train_is_planned_for_the_contexts_that_its_rows_will_have() -> None:
    asked: list[float] = []

    class Noting(Fixed):
        def at(self, decode_tokens: float, prompt_tokens: float) -> GroupPlanner:
            asked.append(prompt_tokens)
            return self

    scheduler = Scheduler(ScheduleConfig(), Noting(flights=1, chunk_rows=8))
    start(scheduler, new_session(1, n_prompt=100))
    scheduler.take(0)
    assert asked == [50, 0], "the plan, and the first chunk"
    scheduler.plan()
    assert asked[-1] == 50, "the same to its end: its chunks stay as they are"
    start(scheduler, new_session(2, n_prompt=20))
    scheduler.plan()
    assert asked[-1] == 10, "that of the prompt that goes next"
    scheduler.decode(row(3))
    scheduler.plan()
    assert asked[-1] == 0, "among others only its next rows"


def test_a_flight_that_left_before_anything_was_known_lands_after_curves_have_come() -> None:
    planner = GroupPlanner([StageCost(CostCurve(), CostCurve(), 64)])
    scheduler = Scheduler(ScheduleConfig(), planner)
    scheduler.decode(row(1))
    (envelope,) = scheduler.take(0)
    planner.update([StageCost(staircase(), staircase(), 64, 1_000.0)])
    answer(scheduler, envelope, now_ns=10**7)
    assert planner.round_trip.ns == 0, "nothing was predicted, so nothing was missed"
    scheduler.decode(row(1, position=11))
    assert scheduler.take(10**7)


def test_chunks_of_an_idle_pipeline_suit_the_rows_that_wait() -> None:
    stage = StageCost(staircase(), staircase(), 512)
    for n_prompts, rows in ((1, 4), (60, 32)):
        scheduler = Scheduler(ScheduleConfig(), GroupPlanner([stage] * 2))
        for session_id in range(n_prompts):
            start(scheduler, new_session(session_id, n_prompt=16))
        first = next(envelope for envelope in scheduler.take(0) if any(frame.tokens for frame in envelope))
        assert sum(len(frame.tokens) for frame in first) == rows


def test_a_long_prompt_advances_among_short_ones() -> None:
    scheduler = Scheduler(ScheduleConfig(), Fixed(flights=1, chunk_rows=8))
    long = new_session(1, n_prompt=32)
    start(scheduler, long)
    turns = 0
    for session_id in range(2, 200):
        start(scheduler, new_session(session_id, n_prompt=8))
        (envelope,) = scheduler.take(0)
        turns += 1
        answer(scheduler, envelope)
        if long.prefill_left == 0:
            break
    assert long.prefill_left == 0
    assert turns <= 4 * OLDEST_EVERY


def test_chunk_rows_by_hand_only_make_chunks_smaller() -> None:
    for by_hand, rows in ((3, 3), (100, 8)):
        scheduler = Scheduler(ScheduleConfig(chunk_rows=by_hand), Fixed(chunk_rows=8))
        start(scheduler, new_session(1, n_prompt=30))
        ((_, chunk),) = scheduler.take(0)
        assert len(chunk.tokens) == rows


def test_fixed_mode_takes_groups_by_hand() -> None:
    scheduler = Scheduler(ScheduleConfig("fixed", n_groups=3, group_rows=1), Fixed(1, 50))
    for session_id in range(5):
        scheduler.decode(row(session_id))
    assert ids(scheduler.take(0)) == [[0], [1], [2]]


def test_prompts_find_room_although_groups_by_hand_fill_every_step() -> None:
    scheduler = Scheduler(ScheduleConfig("fixed", n_groups=1, group_rows=64), Fixed(2, 2, flights=0, ride_rows=3))
    start(scheduler, new_session(9, n_prompt=3))
    assert (scheduler.plan().ride_rows, scheduler.plan().prefill_flights) == (0, 1)
    ((_, chunk),) = scheduler.take(0)
    assert chunk.flags & Flag.PREFILL


def test_values_not_set_by_hand_suit_the_running_streams() -> None:
    def plan(config: ScheduleConfig) -> GroupPlan:
        scheduler = Scheduler(config, Fixed(2, 2, flights=0, chunk_rows=1, ride_rows=6))
        for session_id in range(1, 11):
            scheduler.decode(row(session_id))
        start(scheduler, new_session(99, n_prompt=40))
        return scheduler.plan()

    groups_only = plan(ScheduleConfig("fixed", n_groups=3))
    assert (groups_only.n_groups, groups_only.group_rows, groups_only.ride_rows) == (3, 4, 6)
    rows_only = plan(ScheduleConfig("fixed", group_rows=4))
    assert (rows_only.n_groups, rows_only.group_rows) == (3, 4)
    full = plan(ScheduleConfig("fixed", n_groups=1, group_rows=2_000))
    assert (full.group_rows, full.ride_rows) == (64, 0)
    assert (full.prefill_flights, full.chunk_rows) == (1, 6), "as many prompt rows as would have ridden"


@pytest.mark.parametrize("mode", ["auto", "drain", "fixed"])
def test_no_frame_is_wider_than_a_step_however_large_chunks_are_by_hand(mode: str) -> None:
    scheduler = Scheduler(ScheduleConfig(mode, chunk_rows=2_000), Fixed(chunk_rows=500))
    start(scheduler, new_session(9, n_prompt=1_000))
    widths = [len(frame.tokens) for envelope in scheduler.take(0) for frame in envelope]
    assert max(widths) == 64


def test_drain_mode_sends_everything_at_once() -> None:
    scheduler = Scheduler(ScheduleConfig("drain", chunk_rows=8), Fixed(1, 1))
    for session_id in range(1, 6):
        scheduler.decode(row(session_id))
    start(scheduler, new_session(9, n_prompt=20))
    decode, prefill = scheduler.take(0)
    assert ids([decode]) == [[9, 1, 2, 3, 4, 5]]
    assert [len(frame.tokens) for frame in prefill] == [8, 8, 4]
    assert scheduler.take(0) == []


def test_an_overhead_that_nothing_explains_is_learned() -> None:
    planner = GroupPlanner([StageCost(CostCurve([(1, 1e6), (8, 8e6)]), CostCurve([(1, 1e6)]), 64)] * 2)
    scheduler = Scheduler(ScheduleConfig(), planner)
    now_ns = 0
    for position in range(10, 60):
        scheduler.decode(row(1, position))
        (envelope,) = scheduler.take(now_ns)
        now_ns += 2_000_000 + 5_000_000
        answer(scheduler, envelope, now_ns)
    assert planner.round_trip.ns == scheduler.describe()["overhead_ns"] == pytest.approx(5e6)
    for position in range(60, 200):  # the link became quicker
        scheduler.decode(row(1, position))
        (envelope,) = scheduler.take(now_ns)
        now_ns += 2_000_000 + 1_000_000
        answer(scheduler, envelope, now_ns)
    assert planner.round_trip.ns == pytest.approx(1e6, rel=0.3)


def test_a_flight_that_a_session_left_tells_nothing_of_round_trips() -> None:
    """It lands without that session's row, and maybe before any has come back."""
    planner = GroupPlanner([StageCost(CostCurve([(1, 1e6)]), CostCurve([(1, 1e6)]), 64)])
    scheduler, now_ns = Scheduler(ScheduleConfig("fixed", n_groups=1, group_rows=2), planner), 0
    for position in range(10, 60):
        for session_id in (1, position):
            scheduler.decode(row(session_id, position))
        (envelope,) = scheduler.take(now_ns)
        scheduler.forget(position)
        now_ns += 50_000_000
        answer(scheduler, [frame for frame in envelope if frame.session.session_id == 1], now_ns)
    assert planner.round_trip.ns == 0


def test_queueing_is_not_taken_for_overhead() -> None:
    """Four flights on one stage: each takes four steps, three of them waiting."""
    planner = GroupPlanner([StageCost(CostCurve([(1, 1e6)]), CostCurve([(1, 1e6)]), 64)])
    scheduler = Scheduler(ScheduleConfig("fixed", n_groups=4, group_rows=1), planner)
    for session_id in range(4):
        scheduler.decode(row(session_id))
    line = scheduler.take(0)
    for step in range(1, 100):
        envelope = line.pop(0)
        answer(scheduler, envelope, step * 1_000_000)
        scheduler.decode(row(envelope[0].session.session_id, 10 + step))
        line += scheduler.take(step * 1_000_000)
    assert planner.round_trip.ns == 0
