"""Where stages share a host, one flight of all streams is tried as well as the planned ones, and the better is kept."""

from __future__ import annotations

import collections
import heapq
import itertools
import random
from collections.abc import Callable

import pytest

from relayline.coordinator.engine.descriptions import share_host
from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.coordinator.schedule.one_flight import (
    AGAIN_SOON_WINDOWS,
    AGAIN_WINDOWS,
    CONTESTS_MAX,
    ROUNDS,
    SETTLE_ROUNDS,
    OneFlight,
    may_be_better,
)
from relayline.coordinator.schedule.scheduler import Scheduler
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.session import OutFrame
from relayline.wire.common.curve import CostCurve
from tests.support.scheduling import answer, row

MS = 1_000_000
# Of a stage that reads its weights while another one does: more rows cost little, so small flights gain little.
MEMORY_BOUND = CostCurve([(1, 22 * MS), (2, 24 * MS), (4, 26 * MS), (8, 43 * MS)])


def planner(*, shares_host: bool = True, n_stages: int = 2) -> GroupPlanner:
    return GroupPlanner([StageCost(MEMORY_BOUND, MEMORY_BOUND, 64, shares_host=shares_host)] * n_stages)


def run(
    scheduler: Scheduler, n_streams: int, n_flights: int, round_ns: Callable[[int, int], int]
) -> list[tuple[int, ...]]:
    """Decode where the i-th flight takes `round_ns(i, its rows)`; return the sessions of each flight as it left."""
    under_way: list[tuple[int, int, list[OutFrame]]] = []
    left: list[tuple[int, ...]] = []
    order = itertools.count()
    now_ns = 0
    positions = dict.fromkeys(range(1, n_streams + 1), 10)
    for session_id, position in positions.items():
        scheduler.decode(row(session_id, position))
    while len(left) < n_flights:
        for envelope in scheduler.take(now_ns):
            left.append(tuple(frame.session.session_id for frame in envelope))
            heapq.heappush(under_way, (now_ns + round_ns(len(left), len(envelope)), next(order), envelope))
        now_ns, _, envelope = heapq.heappop(under_way)
        answer(scheduler, envelope, now_ns)
        for frame in envelope:
            session_id = frame.session.session_id
            positions[session_id] += 1
            scheduler.decode(row(session_id, positions[session_id]))
    return left


@pytest.mark.parametrize(
    ("single_ms", "planned_ms", "rows"),
    [(28, 44, 2), (40, 44, 2), (44, 44, 1), (60, 44, 1), (120, 44, 1)],
)
def test_the_faster_number_of_flights_is_kept(single_ms: int, planned_ms: int, rows: int) -> None:
    scheduler = Scheduler(ScheduleConfig(), planner())
    left = run(scheduler, 2, 600, lambda _, n_rows: (single_ms if n_rows == 2 else planned_ms) * MS)
    shares = collections.Counter(len(flight) for flight in left[len(left) // 4 :])
    assert {len(flight) for flight in left} == {1, 2}, "both were tried"
    assert shares[rows] > 0.9 * shares.total()


def test_a_number_of_flights_that_became_faster_is_found() -> None:
    scheduler = Scheduler(ScheduleConfig(), planner())
    left = run(scheduler, 2, 2_000, lambda i, n_rows: (44 if n_rows == 1 else 28 if i < 1_000 else 60) * MS)
    assert collections.Counter(map(len, left[500:1_000])).most_common(1)[0][0] == 2
    assert collections.Counter(map(len, left[-500:])).most_common(1)[0][0] == 1


@pytest.mark.parametrize(
    ("shares_host", "n_streams", "n_stages"), [(False, 2, 2), (True, 8, 2), (True, 1, 2), (True, 2, 1)]
)
def test_nothing_is_tried_where_it_promises_nothing(shares_host: bool, n_streams: int, n_stages: int) -> None:
    """Separate hosts; enough streams for clear curves; and only one possible plan."""
    plans = planner(shares_host=shares_host, n_stages=n_stages)
    assert not may_be_better(plans, n_streams)
    left = run(Scheduler(ScheduleConfig(), plans), n_streams, 300, lambda _, n_rows: 44 * MS)
    assert {len(flight) for flight in left} == {plans.plan(n_streams, n_prompts=0).group_rows}


def test_prompts_spoil_a_measurement_and_by_hand_nothing_is_tried() -> None:
    trials = OneFlight()
    for at in range(SETTLE_ROUNDS + ROUNDS - 1):
        trials.landed(2, 2, at * MS)
    trials.landed(2, 0, 100 * MS)
    for at in range(SETTLE_ROUNDS + ROUNDS - 1):
        trials.landed(2, 2, (200 + at) * MS)
    assert not trials.is_chosen(2), "a window in two parts would have ended"
    trials.landed(2, 2, 300 * MS)
    assert trials.is_chosen(2), "the first trial follows the first whole window"
    left = run(Scheduler(ScheduleConfig("fixed", 2, 1), planner()), 2, 300, lambda _, n_rows: 44 * MS)
    assert {len(flight) for flight in left} == {1}


def test_the_worse_way_is_tried_rarely() -> None:
    trials = OneFlight()
    n_trials, now_ns = 0, 0
    for _ in range(20 * AGAIN_WINDOWS * ROUNDS):
        is_single = trials.is_chosen(4)
        now_ns += (60 if is_single else 44) * MS
        trials.landed(4, 4, now_ns)
        n_trials += is_single
    assert n_trials < 0.06 * 20 * AGAIN_WINDOWS * ROUNDS


@pytest.mark.parametrize(("trial_ms", "tokens"), [(120, 4), (60, 4), (45, 8), (30, 40)])
def test_a_hopeless_trial_is_given_up_early(trial_ms: int, tokens: int) -> None:
    """How many tokens of a stream go the way that is tried: while flights settle, and while it is measured."""
    trials, now_ns, n_single = OneFlight(), 0, 0
    for _ in range(SETTLE_ROUNDS + ROUNDS + 40):
        is_single = trials.is_chosen(2)
        now_ns += (trial_ms if is_single else 44) * MS
        trials.landed(2, 2, now_ns)
        n_single += is_single
    assert n_single == tokens


def test_a_trial_that_was_given_up_in_a_bad_moment_is_made_again_soon() -> None:
    trials, now_ns = OneFlight(), 0
    tokens: list[bool] = []
    while len(tokens) < 400:
        is_single = trials.is_chosen(2)
        is_bad_moment = sum(tokens) < 4
        now_ns += (100 if is_bad_moment else 30) * MS if is_single else 44 * MS
        trials.landed(2, 2, now_ns)
        tokens.append(is_single)
    first = tokens.index(True)
    again = tokens.index(True, first + 4)
    assert again - first - 4 <= AGAIN_SOON_WINDOWS * ROUNDS + SETTLE_ROUNDS
    assert all(tokens[again : again + AGAIN_SOON_WINDOWS * ROUNDS])


@pytest.mark.parametrize(("single_ms", "is_better"), [(41, True), (47, False)])
def test_of_two_that_are_close_the_better_is_found_although_one_window_says_little(
    single_ms: int, is_better: bool
) -> None:
    n_rounds, n_single, generator = 2_000, 0, random.Random(11)
    for _ in range(20):
        trials, now_ns = OneFlight(), 0.0
        for at in range(n_rounds):
            if at % (SETTLE_ROUNDS + ROUNDS) == 0:  # a host that gives and takes
                pace = generator.uniform(0.85, 1.15)
            is_single = trials.is_chosen(2)
            now_ns += pace * (single_ms if is_single else 44) * MS
            trials.landed(2, 2, int(now_ns))
            n_single += is_single
    assert (n_single > 0.8 * 20 * n_rounds) if is_better else (n_single < 0.2 * 20 * n_rounds)


def test_contests_are_bounded() -> None:
    trials = OneFlight()
    for n_streams in range(2, 3 * CONTESTS_MAX):
        trials.landed(1, n_streams, n_streams * MS)
        assert len(trials._contests) <= CONTESTS_MAX


def test_hosts_are_distinguished_by_their_names() -> None:
    assert share_host(["a:1", "b:1", "a:2"]) == [True, False, True]
    assert share_host(["[::1]:7", "[::2]:7"]) == [False, False]
