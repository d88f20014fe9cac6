"""Rows wait for guesses that a model makes, where these are worth it, and never for long."""

from __future__ import annotations

import itertools

import pytest

from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.schedule.draft_flights import DRAFT_AUTO
from relayline.coordinator.schedule.draft_plan import WAIT_GUESSES_MAX, Traffic, waits_for
from relayline.coordinator.schedule.draft_wait import WAIT_STRETCH
from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.coordinator.schedule.scheduler import Scheduler
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.drafts import Acceptance
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import OutFrame, Session
from relayline.coordinator.sessions.told_guesses import ToldFacts, ToldGuesses
from relayline.deploy.testing.simulation.world import CURVES, MS, smooth
from relayline.wire.common.curve import CostCurve

ALONE = Traffic(1, 0, 0)


def planner(curve: CostCurve, n_stages: int = 1, **more: bool) -> GroupPlanner:
    return GroupPlanner([StageCost(curve, curve, 512, **more)] * n_stages)


def waits(
    known: list[float], guess_ms: float, *, curve: str = "smooth", coming: float = 0.6, traffic: Traffic = ALONE
) -> int:
    return waits_for(planner(CURVES[curve]()), [known], traffic, [coming], guess_ms * MS)


def test_a_wait_pays_where_a_guess_costs_less_than_its_part_of_a_step() -> None:
    assert waits([], 0.1) > 1, "8 ms a step, and rows cost nothing"
    assert waits([], 0.1) >= waits([], 0.5) > 0
    assert waits([], 8.0) == 0, "as long as a step"
    assert waits([], 0.1, coming=0.0) == 0, "none comes"
    assert waits([], 0.1, coming=0.01) == 0
    assert waits([], 0.1, curve="arithmetic") == 0, "another row costs half a step"
    assert waits([], 0.5, coming=0.95) == 0, "the next flight will have them in any case"


def test_each_guess_that_comes_makes_the_next_one_worth_less() -> None:
    left = [waits([0.6**at for at in range(1, n + 1)], 0.1) for n in range(9)]
    assert left[0] > 0
    assert left[-1] == 0
    assert all(later <= sooner for sooner, later in itertools.pairwise(left))


def test_a_wait_of_one_flight_that_holds_up_others_has_to_pay_for_all() -> None:
    assert waits([], 0.1, coming=0.5) > 0
    assert waits([], 0.1, coming=0.5, curve="matrix", traffic=Traffic(8, 7, 0)) == 0


def test_several_lanes_with_cells_of_their_own_draft_nothing_and_wait_for_nothing() -> None:
    per_lane = planner(smooth(), is_per_lane=True)
    assert waits_for(per_lane, [[], []], ALONE, [0.6, 0.6], 0.1 * MS) == 0
    assert waits_for(per_lane, [[]], ALONE, [0.6], 0.1 * MS) > 0


def test_a_decision_for_eight_streams_predicts_each_number_of_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, asked = planner(smooth()), []
    monkeypatch.setattr(counted, "way_ns", lambda rows: asked.append(rows) or GroupPlanner.way_ns(counted, rows))
    known = [[0.9**at for at in range(1, 17)]] * 8
    waits_for(counted, known, ALONE, [0.9] * 8, 0.1 * MS)
    assert len(asked) <= counted.draft_room(8) + 2, "once with each number of guesses, whatever the flight waits for"


# --- in the scheduler -------------------------------------------------------------------------------------------------


class World:
    """One stream that decodes on one stage, and the model that drafts for it."""

    def __init__(self, n_stages: int = 1, curve: str = "smooth", guess_ms: float = 0.1) -> None:
        self.scheduler = Scheduler(
            ScheduleConfig(draft=DRAFT_AUTO, draft_model_tokens=4_096), planner(CURVES[curve](), n_stages)
        )
        request = GenerationRequest("1", (1, 2, 3), 100, SamplingParams())
        self.session = Session(1, request, lambda _: False, acceptance=Acceptance())
        self.session.start()
        self.session.next_chunk(64)
        (self.frame,) = self.session.sampled(3, 50)[1]
        facts = ToldFacts()
        facts.took(guess_ms * MS)
        assert self.session.guesses is not None
        self.told = self.session.guesses.told = ToldGuesses(self.session.history, facts)
        self.told.tell(4, [], [], 0, follows=True)  # it has read the prompt

    def tell(self, tokens: list[int], *, follows: bool = True) -> None:
        self.told.tell(len(self.session.history), tokens, [0.9] * len(tokens), 0, follows=follows)

    def take(self, now_ms: float) -> list[int]:
        """The rows of each frame that leaves."""
        envelopes: list[list[OutFrame]] = self.scheduler.take(int(now_ms * MS))
        return [len(frame.tokens) for envelope in envelopes for frame in envelope]


def test_a_row_waits_and_leaves_with_its_guesses() -> None:
    world = World()
    world.scheduler.decode(world.frame)
    assert world.take(0) == []
    assert 0 < world.scheduler.guess_wait.left_ns <= WAIT_STRETCH * WAIT_GUESSES_MAX * 0.1 * MS
    world.tell([60, 61, 62], follows=False)
    assert world.take(0.5) == [4]
    assert world.scheduler.guess_wait.left_ns == 0


def test_a_row_leaves_alone_when_its_model_says_nothing_and_the_next_does_not_wait() -> None:
    world = World()
    world.scheduler.decode(world.frame)
    assert world.take(0) == []
    left_ms = world.scheduler.guess_wait.left_ns / MS
    assert 0 < left_ms <= WAIT_STRETCH * WAIT_GUESSES_MAX * 0.1
    assert world.take(left_ms / 2) == []
    assert world.scheduler.guess_wait.left_ns / MS == pytest.approx(left_ms / 2), "looking again makes it no longer"
    assert world.take(left_ms + 0.001) == [1]
    world.scheduler.answered(1, 4, int(left_ms * MS))
    (frame,) = world.session.sampled(4, 51)[1]
    world.scheduler.decode(frame)
    assert world.take(left_ms + 9) == [1]


def test_a_look_at_a_row_of_which_nothing_is_new_decides_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = []

    def decide(*asked: object) -> int:
        decided.append(asked)
        return waits_for(*asked)  # type: ignore[arg-type]

    monkeypatch.setattr("relayline.coordinator.schedule.draft_wait.waits_for", decide)
    world = World()
    world.scheduler.decode(world.frame)
    assert [world.take(at / 100) for at in range(5)] == [[]] * 5
    assert len(decided) == 1
    world.tell([60])
    world.take(0.06)
    assert len(decided) == 2


@pytest.mark.parametrize("how", ["lost", "done", "unknown"])
def test_a_row_waits_for_no_model_that_is_not_at_work(how: str) -> None:
    world = World()
    if how == "lost":
        world.told.lose()
    elif how == "done":
        world.tell([], follows=False)
    else:
        world.told.facts.guess_ns = 0.0
    world.scheduler.decode(world.frame)
    assert world.take(0) == [1]


def test_a_row_whose_text_repeats_itself_waits_for_no_model() -> None:
    world = World()
    for _ in range(12):  # 50, 50, 50, ...
        world.frame = world.session.sampled(len(world.session.history), 50)[1][0]
    world.scheduler.decode(world.frame)
    assert world.take(0)[0] > 4


def test_guesses_that_come_later_follow_where_stages_would_stand_idle() -> None:
    world = World(n_stages=4, curve="arithmetic")
    world.scheduler.decode(world.frame)
    assert world.take(0) == [1], "on this curve guesses go into flights of their own"
    world.tell([60])
    assert world.take(1) == [1]
    world.tell([60, 61, 62])
    assert world.take(2) == [1, 1]
