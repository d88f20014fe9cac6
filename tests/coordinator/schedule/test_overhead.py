"""Goal: plans know the time of a round trip beyond native steps, and notice when it changes, despite queues."""

from __future__ import annotations

import pytest

from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.coordinator.schedule.overhead import (
    ROUND_TRIPS_MIN,
    WINDOWS_MIN,
    WINDOWS_USED,
    Held,
    Overhead,
    RoundTrip,
)
from relayline.deploy.testing.simulation.run import Simulation
from relayline.deploy.testing.simulation.world import MS, SlowLinks, World, equal_stages, streams

STEP_MS, WAIT_MS = 50, 100


class Pipeline:
    """Flights of four rows through two stages whose counters it keeps; every flight waits WAIT_MS at each."""

    def __init__(self) -> None:
        self.overhead = Overhead()
        self.stages = [Held(1_000, 7), Held(2_000, 9)]  # other epochs were before

    def window(self, overhead_ms: float, n_flights: int = ROUND_TRIPS_MIN) -> None:
        """Land flights, then let the stages report their counters."""
        held_ms = STEP_MS + WAIT_MS
        for _ in range(n_flights):
            self.overhead.landed(4, round((2 * held_ms + overhead_ms) * MS), 8)
        self.stages = [Held(s.n_frames + 4 * n_flights, s.held_ns + 4 * n_flights * held_ms * MS) for s in self.stages]
        self.overhead.stages_held(self.stages)

    def known_ms(self, before_ms: float = 500) -> float:
        return self.overhead.revised(RoundTrip(before_ms * MS)).ns / MS


@pytest.fixture
def pipeline() -> Pipeline:
    """A stage that has reported its counters once."""
    made = Pipeline()
    made.overhead.stages_held(made.stages)
    return made


def test_time_held_by_stages_is_no_overhead(pipeline: Pipeline) -> None:
    for _ in range(WINDOWS_MIN):
        assert pipeline.known_ms() == 500, "not before there are enough windows"
        pipeline.window(3)
    assert pipeline.known_ms() == pytest.approx(3)


def test_counts_before_the_first_look_do_not_matter() -> None:
    pipeline = Pipeline()
    for _ in range(WINDOWS_MIN + 1):
        pipeline.window(3)
    assert pipeline.known_ms() == pytest.approx(3)


def test_one_window_spoiled_by_a_hitch_changes_nothing(pipeline: Pipeline) -> None:
    for overhead_ms in (3, 3, 2_000, 3, 3):
        pipeline.window(overhead_ms)
    assert pipeline.known_ms(3) == 3


def test_a_change_of_the_links_is_noticed_either_way(pipeline: Pipeline) -> None:
    for overhead_ms in (3, 80, 1):
        for _ in range(WINDOWS_MIN):
            pipeline.window(overhead_ms)
        assert pipeline.known_ms() == pytest.approx(overhead_ms)


def test_a_window_goes_on_until_enough_flights_have_landed(pipeline: Pipeline) -> None:
    for _ in range(WINDOWS_MIN * ROUND_TRIPS_MIN - 1):
        pipeline.window(3, n_flights=1)
    assert pipeline.known_ms() == 500
    pipeline.window(3, n_flights=1)
    assert pipeline.known_ms() == pytest.approx(3)


def test_small_moves_are_noise(pipeline: Pipeline) -> None:
    for _ in range(WINDOWS_MIN):
        pipeline.window(10)
    assert pipeline.known_ms(11) == 11
    assert pipeline.known_ms(13) == pytest.approx(10)


def test_stages_that_count_nothing_leave_the_bounds() -> None:
    """As in an older version: every flight had 40 ms of work ahead of it in addition to its own 100."""
    overhead = Overhead()
    for _ in range(2 * WINDOWS_MIN * ROUND_TRIPS_MIN):
        overhead.landed(4, 160 * MS, 4)
        overhead.bounded(4, 160 * MS, 100 * MS, 140 * MS)
        overhead.stages_held([Held(0, 0), Held(0, 0)])
    assert [overhead.revised(RoundTrip(known_ms * MS)).ns / MS for known_ms in (0, 30, 500)] == [20, 30, 60]


def test_frames_of_others_do_not_make_an_overhead_negative(pipeline: Pipeline) -> None:
    """A stage may serve another coordinator, whose frames wait longer."""
    for _ in range(WINDOWS_MIN):
        pipeline.window(-40)
    assert pipeline.known_ms() == 0


def landed(
    overhead: Overhead,
    n_rows: int,
    overhead_ms: float,
    before: tuple[Held, ...],
    n_streams: int = 0,
    n_windows: int = WINDOWS_USED,
) -> tuple[Held, ...]:
    """Land enough flights for an estimate at a stage that holds none of them for long; return its counters."""
    now = before
    for _ in range(n_windows):
        for _ in range(ROUND_TRIPS_MIN):
            overhead.landed(n_rows, round((STEP_MS + overhead_ms) * MS), n_streams or n_rows)
        n_frames = n_rows * ROUND_TRIPS_MIN
        now = (Held(now[0].n_frames + n_frames, now[0].held_ns + n_frames * STEP_MS * MS),)
        overhead.stages_held(now)
    return now


def test_the_overhead_of_a_stream_is_learned_from_two_numbers_of_them() -> None:
    overhead, before = Overhead(), (Held(0, 0),)
    overhead.stages_held(before)
    before = landed(overhead, 8, 1.0, before)
    known = overhead.revised(RoundTrip())
    assert known.of(8) == pytest.approx(1.0 * MS)
    landed(overhead, 64, 3.8, before)
    known = overhead.revised(known)
    assert [known.of(streams) / MS for streams in (8, 36, 64)] == pytest.approx([1.0, 2.4, 3.8])
    now, few = overhead.known(known)
    assert (now.streams, few.streams, few.ns / MS) == (64, 8, pytest.approx(1.0))


def test_a_figure_of_one_stream_never_comes_from_windows_of_many() -> None:
    overhead, before, known = Overhead(), (Held(0, 0),), RoundTrip()
    overhead.stages_held(before)
    before = landed(overhead, 32, 20.0, before)
    known = overhead.revised(known)
    for _ in range(WINDOWS_MIN - 1):
        before = landed(overhead, 1, 1.0, before, n_windows=1)
        known = overhead.revised(known)
        assert [each.streams for each in overhead.known(known)] == [32], "too few windows to tell of one stream"
    landed(overhead, 1, 1.0, before, n_windows=1)
    known = overhead.revised(known)
    assert known.of(1) == pytest.approx(1.0 * MS)
    assert {each.streams: each.ns / MS for each in overhead.known(known)} == pytest.approx({1: 1.0, 32: 20.0})


def test_a_stream_that_runs_alone_after_many_bounds_its_overhead_at_once() -> None:
    """Its flights meet no queue, so that bounds are exact long before there are windows."""
    overhead, before = Overhead(), (Held(0, 0),)
    overhead.stages_held(before)
    landed(overhead, 32, 20.0, before)
    known = overhead.revised(RoundTrip())
    for _ in range(ROUND_TRIPS_MIN):
        overhead.landed(1, (STEP_MS + 1) * MS, 1)
        overhead.bounded(1, (STEP_MS + 1) * MS, STEP_MS * MS, 0.0)
        known = overhead.revised(known)
    assert known.of(1) == pytest.approx(1.0 * MS)


def test_steps_of_a_busy_host_are_no_overhead_of_another_number_of_streams() -> None:
    """They take longer than predicted; only windows tell such time from overhead."""
    overhead, before = Overhead(), (Held(0, 0),)
    overhead.stages_held(before)
    landed(overhead, 32, 2.0, before)
    known = overhead.revised(RoundTrip())
    for _ in range(2 * ROUND_TRIPS_MIN):
        overhead.landed(8, (2 * STEP_MS) * MS, 8)
        overhead.bounded(8, (2 * STEP_MS) * MS, STEP_MS * MS, 0.0)
        assert overhead.revised(known) is known


def test_a_load_that_comes_and_goes_leaves_the_estimate_steady() -> None:
    overhead, before, known, n_changes = Overhead(), (Held(0, 0),), RoundTrip(), 0
    overhead.stages_held(before)
    for _ in range(2 * WINDOWS_USED):
        for n_streams, overhead_ms in ((1, 1.0), (32, 7.2)):
            before = landed(overhead, n_streams, overhead_ms, before, n_windows=1)
            found = overhead.revised(known)
            n_changes += found is not known
            known = found
    assert [known.of(n) / MS for n in (1, 32)] == pytest.approx([1.0, 7.2])
    assert n_changes <= 2, "once for each number of streams"


def test_the_overhead_of_a_small_flight_is_that_of_all_streams_that_run() -> None:
    """It waits for the tokens of the other flight. If it were that of 32, 8 streams would seem to need a long one."""
    overhead, before = Overhead(), (Held(0, 0),)
    overhead.stages_held(before)
    before = landed(overhead, 8, 0.7, before)
    known = overhead.revised(RoundTrip())
    landed(overhead, 32, 6.3, before, n_streams=64)
    known = overhead.revised(known)
    assert [known.of(streams) / MS for streams in (8, 64)] == pytest.approx([0.7, 6.3])


def test_most_of_an_overhead_is_its_streams_until_another_number_is_known() -> None:
    """That of 64 says little about that of 8. But no stream costs so much that a slow link would be forgotten."""
    for overhead_ms, few_ms in ((3.2, 1.1), (53.2, 47.6)):
        overhead = Overhead()
        overhead.stages_held((Held(0, 0),))
        landed(overhead, 64, overhead_ms, (Held(0, 0),))
        known = overhead.revised(RoundTrip())
        assert known.of(64) == pytest.approx(overhead_ms * MS)
        assert known.of(8) == pytest.approx(few_ms * MS)


def test_bounds_beside_several_numbers_of_streams_agree() -> None:
    overhead = Overhead()
    for n_streams in (64, 8) * ROUND_TRIPS_MIN:
        overhead.bounded(n_streams, (STEP_MS + n_streams // 8) * MS, STEP_MS * MS, 0.0)
    known = overhead.revised(RoundTrip(8.0 * MS, 64, MS / 8))
    assert known.of(8) == pytest.approx(1.0 * MS)
    assert known.of(64) == pytest.approx(8.0 * MS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("n_stages", "n_streams"), [(2, 8), (2, 16), (4, 16)])
def test_a_spell_of_slow_links_does_not_stay_in_the_plan(n_stages: int, n_streams: int) -> None:
    """Many small flights suit them; behind these the truth is hidden, so that half the speed was lost for good."""
    ends_ns, look_ns, over_ns = 60_000 * MS, 70_000 * MS, 100_000 * MS
    world = World(
        equal_stages(n_stages, host_ns=400_000), streams(n_streams, 20_000), link_ns=400_000, jitter=0.05,
        slow_links=(SlowLinks(20_000 * MS, 100 * MS), SlowLinks(ends_ns, 0)), refresh_ns=1_000 * MS,
    )  # fmt: skip
    simulation = Simulation(world).run(ends_ns)
    slow_ms = (n_stages + 1) * 100.4
    assert simulation.planner.round_trip.ns == pytest.approx(slow_ms * MS, rel=0.2)
    assert simulation.scheduler.plan().n_groups > n_stages
    simulation.run(over_ns)
    assert simulation.planner.round_trip.ns == pytest.approx(world.overhead_ns, rel=0.3)
    undisturbed = GroupPlanner(simulation.planner.stages)
    plan, quiet = simulation.scheduler.plan(), undisturbed.plan(n_streams, n_prompts=0)
    assert plan.period_ns <= 1.03 * quiet.period_ns
    rate = simulation.audit.figures(look_ns, over_ns).tokens_per_s
    assert rate >= 0.93 * n_streams / quiet.period_ns * 1e9
