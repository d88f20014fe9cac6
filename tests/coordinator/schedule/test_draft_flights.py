"""How many guesses leave with each flight: as many as curves and chances make worthwhile, within the stages' limits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.schedule.draft_flights import DRAFT_AUTO, DraftFlights
from relayline.coordinator.schedule.draft_plan import Offers, Traffic, best_counts
from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.coordinator.schedule.overhead import RoundTrip
from relayline.coordinator.schedule.scheduler import Scheduler
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.drafts import Acceptance
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import OutFrame, Session
from relayline.deploy.testing.simulation.world import CURVES, GPU_MS, measured, smooth
from relayline.wire.common.bounds import DRAFT_TOKENS_MAX, DRAFTED_ROWS_MAX
from relayline.wire.common.curve import CostCurve
from relayline.wire.envelopes.frames import Flag

ALONE = Traffic(1, 0, 0)
SURE = [0.98**ahead for ahead in range(1, DRAFT_TOKENS_MAX + 2)]
UNLIKELY = [0.2**ahead for ahead in range(1, DRAFT_TOKENS_MAX + 2)]


def planner(curve: CostCurve, n_stages: int = 2, rows_max: int = 512, **more: bool) -> GroupPlanner:
    return GroupPlanner([StageCost(curve, curve, rows_max, **more)] * n_stages)


def counts(curve: str, chances: Sequence[Sequence[float]], traffic: Traffic = ALONE, **more: int) -> list[int]:
    return best_counts(planner(CURVES[curve](), **more), chances, traffic, Offers())


def test_likely_guesses_fill_cheap_rows() -> None:
    assert counts("smooth", [SURE]) == [DRAFT_TOKENS_MAX], "rows cost nothing"
    assert counts("staircase", [SURE])[0] % 4 == 3, "whole tiles"
    assert counts("matrix", [SURE])[0] >= 7
    assert counts("arithmetic", [SURE])[0] < counts("matrix", [SURE])[0], "where another row costs half a step"
    followed = Traffic(1, 0, 1)
    assert counts("staircase", [SURE], followed) == [3], "where more may follow a tile in each stage is enough"
    assert counts("arithmetic", [[0.6**ahead for ahead in range(1, 9)]]) == [0]


def test_a_guess_costs_no_part_of_the_round_trip_that_is_a_streams() -> None:
    chances = [[0.8**ahead for ahead in range(1, 17)]]
    plain, by_streams = planner(measured(GPU_MS), 1), planner(measured(GPU_MS), 1)
    plain.round_trip, by_streams.round_trip = RoundTrip(1e6, 1), RoundTrip(1e6, 1, 1e5)
    assert best_counts(by_streams, chances, ALONE, Offers()) == best_counts(plain, chances, ALONE, Offers()) == [10]


def test_unlikely_guesses_stay_where_they_cost_something() -> None:
    for curve in ("staircase", "arithmetic", "matrix"):
        assert counts(curve, [UNLIKELY]) == [0]
    assert 0 < counts("smooth", [UNLIKELY])[0] < 6
    assert counts("smooth", [[]]) == [0]


def test_the_likelier_of_two_streams_gets_the_rows() -> None:
    first, second = counts("staircase", [SURE, UNLIKELY], Traffic(1, 0, 1))
    assert first > second
    assert (first + second + 2) % 4 == 0


def test_never_more_than_fit() -> None:
    assert sum(counts("smooth", [SURE] * 4)) == DRAFTED_ROWS_MAX
    assert counts("smooth", [SURE], rows_max=8) == [7]
    assert counts("smooth", [SURE], rows_max=1) == [0]


def test_only_a_single_stream_drafts_with_per_lane_cells() -> None:
    assert best_counts(planner(smooth(), is_per_lane=True), [SURE, SURE], ALONE, Offers()) == [0, 0]
    assert best_counts(planner(smooth(), is_per_lane=True), [SURE], ALONE, Offers()) == [DRAFT_TOKENS_MAX]


def test_others_that_would_wait_weigh_against_guesses() -> None:
    chances = [0.8**ahead for ahead in range(1, 9)]
    assert counts("matrix", [chances], ALONE)[0] > 0
    assert counts("matrix", [chances], Traffic(8, 7, 0)) == [0]


@pytest.mark.parametrize("curve", ["staircase", "matrix"])
def test_a_guess_that_makes_two_flights_unequal_has_to_pay_for_that(curve: str) -> None:
    chances = [0.8**ahead for ahead in range(1, 9)]
    assert counts(curve, [chances], ALONE)[0] > 0
    assert counts(curve, [chances], Traffic(2, 4, 0)) == [0], "as equal flights they spread best over two stages"


# --- in the scheduler -------------------------------------------------------------------------------------------------


def decoding(scheduler: Scheduler, n_streams: int, prediction: Sequence[int], max_tokens: int = 100) -> list[Session]:
    """Streams that have their first token and expect these after it; their next rows wait."""
    acceptance = Acceptance()
    sessions: list[Session] = []
    for number in range(1, n_streams + 1):
        request = GenerationRequest(str(number), (1, 2, 3), max_tokens, SamplingParams(), prediction=(50, *prediction))
        session = Session(number, request, lambda _: False, acceptance=acceptance)
        session.start()
        session.next_chunk(64)
        (frame,) = session.sampled(3, 50)[1]
        scheduler.decode(frame)
        sessions.append(session)
    return sessions


def shapes(envelopes: list[list[OutFrame]]) -> list[list[tuple[int, int, bool]]]:
    """Position, rows, and whether all are guesses, of every frame."""
    return [[(f.position, len(f.tokens), bool(f.flags & Flag.GUESSED)) for f in envelope] for envelope in envelopes]


@pytest.mark.parametrize(("draft", "n_rows"), [(0, 1), (1, 2), (5, 6), (31, 8)])
def test_by_hand_as_many_as_was_said_and_a_step_takes(draft: int, n_rows: int) -> None:
    scheduler = Scheduler(ScheduleConfig("fixed", 1, 8, draft=draft), planner(smooth(), rows_max=8))
    decoding(scheduler, 1, range(60, 99))
    assert shapes(scheduler.take(0)) == [[(3, n_rows, False)]]


def test_by_hand_several_streams_share_a_steps_rows() -> None:
    scheduler = Scheduler(ScheduleConfig("fixed", 1, 8, draft=6), planner(smooth(), rows_max=12))
    decoding(scheduler, 3, range(60, 99))
    ((first, second, third),) = shapes(scheduler.take(0))
    assert [first[1], second[1], third[1]] == [7, 4, 1]


def test_stages_that_would_stand_idle_get_guesses_until_they_are_busy() -> None:
    """Four stages whose rows are expensive: one row in each of them, and a new one for every one that comes back."""
    scheduler = Scheduler(ScheduleConfig(draft=DRAFT_AUTO), planner(CURVES["arithmetic"](), 4))
    (session,) = decoding(scheduler, 1, range(60, 99))
    assert shapes(scheduler.take(0)) == [[(3, 1, False)], [(4, 1, True)], [(5, 1, True)], [(6, 1, True)]]
    scheduler.answered(1, 4, 1)
    assert session.sampled(4, 60)[1] == []
    assert shapes(scheduler.take(1)) == [[(7, 1, True)]]
    scheduler.answered(1, 5, 2)
    (frame,) = session.sampled(5, 99)[1]
    scheduler.decode(frame)
    assert shapes(scheduler.take(2))[0] == [(5, 1, False)], "the right row behind a wrong guess waits for nothing"
    for position in (6, 7, 8):
        scheduler.passed(1, position, 3)
    assert scheduler._flights.answered(1, 6) is not None, "the wrong guess has come back, the right row has not"


def test_a_tile_of_guesses_follows_a_tile() -> None:
    """A single row would be back before there is time for another; whole tiles are not."""
    scheduler = Scheduler(ScheduleConfig(draft=DRAFT_AUTO), planner(CURVES["staircase"]()))
    decoding(scheduler, 1, range(60, 99))
    assert shapes(scheduler.take(0)) == [[(3, 4, False)], [(7, 4, True)]]


def test_nothing_is_drafted_while_prompts_are_read_or_where_stages_cannot_forget() -> None:
    busy = Scheduler(ScheduleConfig(draft=DRAFT_AUTO), planner(smooth()))
    decoding(busy, 1, range(60, 99))
    request = GenerationRequest("p", tuple(range(2_000)), 5, SamplingParams())
    prompt = Session(9, request, lambda _: False)
    prompt.start()
    busy.prompt(prompt)
    assert not any(frame.flags & Flag.DRAFTED for envelope in busy.take(0) for frame in envelope)
    for draft in (DRAFT_AUTO, 5):
        firm = Scheduler(ScheduleConfig(draft=draft), planner(smooth()), may_draft=False)
        decoding(firm, 1, range(60, 99))
        assert shapes(firm.take(0)) == [[(3, 1, False)]]


@pytest.mark.parametrize("draft", [DRAFT_AUTO, 31])
def test_of_recurrent_states_guesses_go_with_rows_while_few_streams_meet(draft: int) -> None:
    """As many as stages can rewind; and none in separate flights, behind which they could not rewind."""
    for n_streams, n_rows in ((1, 5), (2, 5), (3, 1)):
        config = ScheduleConfig(draft=draft)
        scheduler = Scheduler(config, planner(smooth(), 4), may_draft=False, rewind_rows=4)
        decoding(scheduler, n_streams, range(60, 99))
        frames = [frame for envelope in scheduler.take(0) for frame in envelope]
        assert [len(frame.tokens) for frame in frames] == [n_rows] * n_streams
        assert not any(frame.flags & Flag.GUESSED for frame in frames)


def test_a_wide_hand_set_flight_that_one_stream_is_in_twice() -> None:
    """As after a replay, when answers from before it arrive."""
    scheduler = Scheduler(ScheduleConfig("fixed", 1, 8, draft=DRAFT_AUTO), planner(smooth()))
    (session,) = decoding(scheduler, 1, range(60, 99))
    (later,) = session.sampled(4, 60)[1]
    scheduler.decode(later)
    ((first, second),) = shapes(scheduler.take(0))
    assert first == (3, 1, False)
    assert second[0] == 4


@pytest.mark.parametrize("mode", ["drain", "auto"])
def test_nothing_is_drafted_without_batching_or_before_speeds_are_known(mode: str) -> None:
    unknown = planner(CostCurve()) if mode == "auto" else planner(smooth())
    scheduler = Scheduler(ScheduleConfig(mode, draft=DRAFT_AUTO), unknown)
    decoding(scheduler, 1, range(60, 99))
    assert shapes(scheduler.take(0)) == [[(3, 1, False)]]


def test_an_ended_stream_is_forgotten() -> None:
    drafts = DraftFlights(DRAFT_AUTO)
    scheduler = Scheduler(ScheduleConfig(draft=DRAFT_AUTO), planner(CURVES["arithmetic"](), 4))
    scheduler.drafts = drafts
    (session,) = decoding(scheduler, 1, range(60, 99))
    scheduler.take(0)
    assert drafts.may_follow
    scheduler.forget(1)
    scheduler.control(session.cancel())
    assert not drafts.may_follow
    assert not drafts._offers._of
    assert scheduler.take(2)[0][0].flags == Flag.CLOSE


def test_rows_without_guesses_cost_no_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> list[int]:
        raise AssertionError("there is nothing to plan")

    monkeypatch.setattr("relayline.coordinator.schedule.draft_flights.best_counts", asked)
    scheduler = Scheduler(ScheduleConfig(draft=DRAFT_AUTO), planner(CURVES["arithmetic"](), 4))
    decoding(scheduler, 2, range(0))
    assert shapes(scheduler.take(0)) == [[(3, 1, False)], [(3, 1, False)]]
