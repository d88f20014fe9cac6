"""Goal: whether a row is in a step of tiles depends on nothing else that travels, and is the same at every replay."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.schedule.cycles import CHUNK_LADDER
from relayline.coordinator.schedule.groups import GroupPlan, GroupPlanner
from relayline.coordinator.schedule.prompt_line import PromptLine
from relayline.coordinator.schedule.scheduler import Scheduler
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.schedule.tiles import LONG_PROMPT_ROWS, RIDE_ROWS_MIN, TILE_STEP_MAX_NS, TileRule
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import Session
from relayline.wire.common.curve import ATTENTION_TILE_ROWS as TILE
from relayline.wire.common.curve import CostCurve, goes_by_tiles
from relayline.wire.envelopes.frames import Flag
from tests.support.scheduling import answer, row

SHARED, PER_LANE = TileRule(True, is_apart=True), TileRule(True, is_per_lane=True, is_apart=True)
IN_PARTS, AVOIDED = TileRule(True), TileRule(True, is_avoided=True)


def session_of(session_id: int, n_prompt: int, n_said: int = 0) -> Session:
    request = GenerationRequest(str(session_id), tuple(range(n_prompt)), 9_999, SamplingParams())
    session = Session(session_id, request, lambda _: False)
    session.history.extend(range(n_said))
    return session


def read(sessions: list[Session], rule: TileRule, rows_max: int, n_decode: int = 0) -> dict[tuple[int, int], bool]:
    """Whether each row, by session and position, was computed in a tile; it was sent once."""
    line, found = PromptLine(), dict[tuple[int, int], bool]()
    for session in sessions:
        session.start()
        line.add(session, n_decode)
    while chunks := line.next_chunks(rows_max, rule.for_step(n_decode), n_decode):
        n_rows = sum(len(chunk.tokens) for chunk in chunks)
        assert n_rows <= rows_max
        if rule.is_per_lane and max(len(chunk.tokens) for chunk in chunks) >= TILE and not n_decode:
            assert len(chunks) == 1, "rows of neighbouring lanes would join some of its own"
        for chunk in chunks:
            n_together = len(chunk.tokens) if rule.is_per_lane else n_rows + n_decode
            for position in range(chunk.position, chunk.position + len(chunk.tokens)):
                assert (chunk.session.session_id, position) not in found
                found[chunk.session.session_id, position] = n_together >= TILE
    assert len(found) == sum(len(session.history) for session in sessions)
    return found


LENGTHS = st.tuples(st.integers(1, 3 * LONG_PROMPT_ROWS), st.integers(0, 400))


@settings(max_examples=40)
@given(st.lists(LENGTHS, min_size=1, max_size=9), st.integers(TILE, 700), st.integers(TILE, 700), st.booleans())
def test_alone_in_a_crowd_and_again_after_a_loss(
    lengths: list[tuple[int, int]], rows_max: int, other_max: int, is_per_lane: bool
) -> None:
    rule = PER_LANE if is_per_lane else SHARED
    alone: dict[tuple[int, int], bool] = {}
    for at, (n_prompt, n_said) in enumerate(lengths):
        alone |= read([session_of(at, n_prompt)], rule, rows_max)
        alone |= {(at, n_prompt + position): False for position in range(n_said)}  # decoded
    again = read([session_of(at, *each) for at, each in enumerate(lengths)], rule, other_max)
    assert again == alone


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, LONG_PROMPT_ROWS - 1), st.integers(0, 200)), min_size=1, max_size=9))
def test_short_prompts_are_read_during_decode_as_they_are_alone(lengths: list[tuple[int, int]]) -> None:
    for rule in (SHARED, PER_LANE):
        for n_decode in (1, TILE - RIDE_ROWS_MIN - 1):
            found = read([session_of(at, *each) for at, each in enumerate(lengths)], rule, 100, n_decode)
            assert not any(found.values())


@pytest.mark.parametrize("n_decode", [TILE - RIDE_ROWS_MIN, TILE - 1, TILE, 200])
def test_prompts_do_not_starve_in_a_large_crowd(n_decode: int) -> None:
    assert len(read([session_of(1, 90), session_of(2, 900, 30)], IN_PARTS, 48, n_decode)) == 90 + 930


@settings(max_examples=30)
@given(st.lists(LENGTHS, min_size=1, max_size=9), st.integers(8, 700), st.sampled_from([0, 1, 39, 46, 63, 64, 254]))
def test_where_lanes_are_taken_apart_no_prompt_makes_a_tile(
    lengths: list[tuple[int, int]], rows_max: int, n_decode: int
) -> None:
    line, n_read = PromptLine(), 0
    for session in (sessions := [session_of(at, *each) for at, each in enumerate(lengths)]):
        session.start()
        line.add(session, n_decode)
    rule = AVOIDED.within(rows_max).for_step(n_decode)
    while chunks := line.next_chunks(rows_max, rule, n_decode):
        n_rows = sum(len(chunk.tokens) for chunk in chunks)
        assert not goes_by_tiles(n_decode, n_rows, takes_lanes_apart=True)
        assert n_rows <= min(rows_max, rule.prompt_rows_max(n_decode))
        n_read += n_rows
    assert n_read == sum(len(session.history) for session in sessions), "prompts starve"


def test_more_prompt_rows_ride_with_more_decode_rows() -> None:
    assert [AVOIDED.prompt_rows_max(n_decode) for n_decode in (0, 40, 64, 127, 254)] == [63, 23, 31, 69, 145]
    curve = CostCurve([(1, 1e6), (512, 30e6)])
    planner = GroupPlanner([StageCost(curve, curve, 512, context_tiled_ns=2.0, takes_lanes_apart=True)] * 2)
    for n_decode in (1, 40, 64, 127, 254):
        assert 0 < max(planner.rides(n_decode)) <= AVOIDED.prompt_rows_max(n_decode)
    assert max(planner.rides(500)) == 12
    assert max(planner.chunks) == 60
    for n_streams in (0, 1, 70, 200):
        plan = planner.plan(n_streams, n_prompts=40, n_prompt_rows=9_000, pressure_min=4)
        assert plan.chunk_rows < TILE
        assert not goes_by_tiles(plan.group_rows if n_streams else 0, plan.ride_rows, takes_lanes_apart=True)


def test_a_train_has_few_steps_where_more_gain_little() -> None:
    """By the curve chunks of 32 rows are read a little sooner; each step costs more than that."""
    curve = CostCurve([(1, 0.3e6), (512, 40e6)])
    apart, plain = (StageCost(curve, curve, 512, 1.0, 2.0, takes_lanes_apart=each) for each in (True, False))
    chunks = [GroupPlanner([cost] * 2).plan(0, n_prompts=1, n_prompt_rows=500).chunk_rows for cost in (apart, plain)]
    assert chunks == [60, 32]


def test_without_tiles_all_room_is_used() -> None:
    line, sessions = PromptLine(), [session_of(at, 40, 300) for at in range(3)]
    for session in sessions:
        session.start()
        line.add(session, 0)
    assert [sum(len(chunk.tokens) for chunk in line.next_chunks(500)) for _ in range(3)] == [500, 500, 20]


@pytest.mark.parametrize(
    ("rule", "rows_max", "added"),
    [(AVOIDED, TILE - 1, [60]), (AVOIDED, 3, []), (SHARED, TILE - 1, []), (SHARED, 62, [])],
)
def test_plans_try_the_largest_step_below_a_tile_where_tiles_are_avoided(
    rule: TileRule, rows_max: int, added: list[int]
) -> None:
    assert rule.steps_tried(rows_max) == sorted([rows for rows in CHUNK_LADDER if rows <= rows_max] + added)


def test_stages_are_taken_to_go_by_tiles_where_they_may() -> None:
    curve = CostCurve([(1, 1e6)])
    for cost, rule in (
        (StageCost(curve, curve, 64), TileRule()),
        (StageCost(curve, curve, 64, context_ns=5.0), TileRule()),
        (StageCost(curve, curve, 64, context_ns=5.0, context_tiled_ns=2.0), SHARED),
        (StageCost(curve, curve, 64, is_per_lane=True), PER_LANE),
        (StageCost(curve, CostCurve([(64, TILE_STEP_MAX_NS + 1)]), 64, context_tiled_ns=2.0), IN_PARTS),
        (StageCost(curve, curve, TILE - 1, context_tiled_ns=2.0), IN_PARTS),
        (StageCost(curve, curve, 64, context_tiled_ns=2.0, takes_lanes_apart=True), AVOIDED),
        (StageCost(curve, curve, 64, takes_lanes_apart=True), TileRule()),
        (StageCost(curve, curve, 64, has_tiles=True, takes_lanes_apart=True), AVOIDED),
        (StageCost(CostCurve(), CostCurve(), 64, has_tiles=True, takes_lanes_apart=True), AVOIDED),
        (StageCost(curve, curve, 64, has_tiles=True), SHARED),
        (StageCost(curve, curve, 64, is_per_lane=True, takes_lanes_apart=True), PER_LANE),
    ):
        assert GroupPlanner([StageCost(curve, curve, 64), cost]).tile_rule == rule
    plain, apart = (StageCost(curve, curve, 64, context_tiled_ns=2.0, takes_lanes_apart=each) for each in (False, True))
    assert GroupPlanner([plain, apart]).tile_rule == SHARED, "one stage's attention is llama.cpp's"


@pytest.mark.parametrize(("n_streams", "room"), [(1, 32), (40, TILE - 1 - 40), (TILE - 1, 0), (TILE, 32)])
def test_guesses_make_no_step_tiled(n_streams: int, room: int) -> None:
    tiled = StageCost(CostCurve(), CostCurve(), 512, context_tiled_ns=2.0)
    assert GroupPlanner([tiled]).draft_room(n_streams) == room
    assert GroupPlanner([StageCost(CostCurve(), CostCurve(), 512)]).draft_room(n_streams) == 32
    assert GroupPlanner([StageCost(CostCurve(), CostCurve(), 64)]).draft_room(60) == 4
    apart = GroupPlanner([dataclasses.replace(tiled, takes_lanes_apart=True)])
    assert apart.draft_room(n_streams) == min(32, max(0, TILE - 1 - n_streams)), "a stream's guesses are alike"


class Planned(GroupPlanner):
    """Stages with tiles, and one plan."""

    def __init__(self, plan: GroupPlan, *, is_per_lane: bool) -> None:
        curve = CostCurve([(1, 1e6)])
        super().__init__([StageCost(curve, curve, 512, is_per_lane=is_per_lane, context_tiled_ns=2.0)])
        self.only = plan

    def plan(self, n_streams: int, **_: Any) -> GroupPlan:
        return self.only


@pytest.mark.parametrize("is_per_lane", [False, True])
@pytest.mark.parametrize(
    "plan", [GroupPlan(2, 3, 0.0, 0, 1, 7), GroupPlan(2, 3, 0.0, 2, 12, 0), GroupPlan(2, 3, 0.0, 2, 96, 0)]
)
def test_whole_tiles_go_by_themselves_during_decode_as_fast_as_planned(plan: GroupPlan, *, is_per_lane: bool) -> None:
    scheduler, at = Scheduler(ScheduleConfig(), Planned(plan, is_per_lane=is_per_lane)), dict.fromkeys(range(1, 7), 10)
    long, short = session_of(8, 3 * LONG_PROMPT_ROWS + 40), session_of(9, 30)
    for session in (long, short):
        session.start()
        scheduler.prompt(session)
    for session_id in at:
        scheduler.decode(row(session_id, 10))
    n_whole = long.prefill_left // TILE * TILE
    in_tiles, n_decode_flights, n_rows_read = 0, 0, 0
    for _ in range(3_000):
        for envelope in scheduler.take(0):
            chunks = [frame for frame in envelope if frame.flags & Flag.PREFILL]
            decoding = [frame for frame in envelope if not frame.flags & Flag.PREFILL]
            n_decode_flights += bool(decoding)
            n_rows_read += sum(len(chunk.tokens) for chunk in chunks)
            for chunk in chunks:
                if chunk.session is long and chunk.position < n_whole:
                    assert not decoding
                    assert len(chunk.tokens) % TILE == 0
                    in_tiles += len(chunk.tokens)
                elif is_per_lane:
                    assert len(chunk.tokens) < TILE
            answer(scheduler, envelope)
            for frame in decoding:
                at[frame.session.session_id] += 1
                scheduler.decode(row(frame.session.session_id, at[frame.session.session_id]))
        if not (long.prefill_left or short.prefill_left):
            break
    assert in_tiles == n_whole
    assert n_rows_read == len(long.history) + len(short.history)
    if plan.chunk_rows < TILE:
        planned_rows = plan.ride_rows + plan.prefill_flights * plan.chunk_rows / plan.n_groups
        assert n_decode_flights >= in_tiles // (planned_rows + plan.group_rows), "prompts are read faster than planned"
        assert n_decode_flights <= 2 * (in_tiles // planned_rows) + 20, "prompts are read slower than planned"


def test_chunks_by_hand_below_a_tile_find_room_during_decode() -> None:
    scheduler = Scheduler(ScheduleConfig(chunk_rows=32), Planned(GroupPlan(1, 4, 0.0, 0, 1, 40), is_per_lane=True))
    session = session_of(2, LONG_PROMPT_ROWS)
    session.start()
    scheduler.prompt(session)
    scheduler.decode(row(1))
    (envelope,) = scheduler.take(0)
    assert [len(frame.tokens) for frame in envelope] == [1, 32]
