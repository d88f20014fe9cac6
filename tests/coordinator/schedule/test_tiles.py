"""Goal: a row is in a step of tiles or not, whatever else travels, and however often it is read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.coordinator.schedule.prompt_line import PromptLine
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.schedule.tiles import LONG_PROMPT_ROWS, RIDE_ROWS_MIN, TileRule
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import Session
from relayline.wire.common.curve import ATTENTION_TILE_ROWS as TILE
from relayline.wire.common.curve import CostCurve

SHARED, PER_LANE = TileRule(True), TileRule(True, is_per_lane=True)


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
    while chunks := line.next_chunks(rows_max, rule.beside(n_decode), n_decode):
        n_rows = sum(len(chunk.tokens) for chunk in chunks)
        assert n_rows <= rows_max
        if rule.is_per_lane and max(len(chunk.tokens) for chunk in chunks) >= TILE and not n_decode:
            assert len(chunks) == 1, "rows of neighbouring lanes would go along with some of its own"
        for chunk in chunks:
            n_together = len(chunk.tokens) if rule.is_per_lane else n_rows + n_decode
            for position in range(chunk.position, chunk.position + len(chunk.tokens)):
                assert (chunk.session.session_id, position) not in found
                found[chunk.session.session_id, position] = n_together >= TILE
    assert len(found) == sum(len(session.history) for session in sessions)
    return found


LENGTHS = st.tuples(st.integers(1, 3 * LONG_PROMPT_ROWS), st.integers(0, 400))


@settings(deadline=None, max_examples=40)
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


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, LONG_PROMPT_ROWS - 1), st.integers(0, 200)), min_size=1, max_size=9))
def test_short_prompts_beside_streams_are_read_as_they_are_alone(lengths: list[tuple[int, int]]) -> None:
    for rule in (SHARED, PER_LANE):
        for n_decode in (1, TILE - RIDE_ROWS_MIN - 1):
            found = read([session_of(at, *each) for at, each in enumerate(lengths)], rule, 100, n_decode)
            assert not any(found.values())


@pytest.mark.parametrize("n_decode", [TILE - RIDE_ROWS_MIN, TILE - 1, TILE, 200])
def test_prompts_beside_a_great_crowd_do_not_starve(n_decode: int) -> None:
    assert len(read([session_of(1, 90), session_of(2, 900, 30)], SHARED, 48, n_decode)) == 90 + 930


def test_without_tiles_all_room_is_used() -> None:
    line, sessions = PromptLine(), [session_of(at, 40, 300) for at in range(3)]
    for session in sessions:
        session.start()
        line.add(session, 0)
    assert [sum(len(chunk.tokens) for chunk in line.next_chunks(500)) for _ in range(3)] == [500, 500, 20]


def test_stages_are_taken_to_go_by_tiles_where_they_may() -> None:
    curve = CostCurve([(1, 1e6)])
    for cost, rule in (
        (StageCost(curve, curve, 64), TileRule()),
        (StageCost(curve, curve, 64, context_ns=5.0), TileRule()),
        (StageCost(curve, curve, 64, context_ns=5.0, context_tiled_ns=2.0), SHARED),
        (StageCost(curve, curve, 64, is_per_lane=True), PER_LANE),
    ):
        assert GroupPlanner([StageCost(curve, curve, 64), cost]).tile_rule == rule


@pytest.mark.parametrize(("n_streams", "room"), [(1, 32), (40, TILE - 1 - 40), (TILE - 1, 0), (TILE, 32)])
def test_guesses_make_no_step_tiled(n_streams: int, room: int) -> None:
    tiled = StageCost(CostCurve(), CostCurve(), 512, context_tiled_ns=2.0)
    assert GroupPlanner([tiled]).draft_room(n_streams) == room
    assert GroupPlanner([StageCost(CostCurve(), CostCurve(), 512)]).draft_room(n_streams) == 32
    assert GroupPlanner([StageCost(CostCurve(), CostCurve(), 64)]).draft_room(60) == 4
