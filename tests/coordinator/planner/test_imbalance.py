"""A clearly faster cut is reported once, after a minute, from measured steps. Time is an argument."""

from __future__ import annotations

import pytest

from relayline.coordinator.planner import imbalance
from relayline.coordinator.planner.imbalance import HOLD_NS, STEPS_MIN, Imbalance, ImbalanceWatch, faster_cut
from relayline.coordinator.schedule.overhead import RoundTrip
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.wire.common.curve import CostCurve

S = 1_000_000_000
MS = 1_000_000
EDGES = ((0, 10), (10, 20))


def cost(step_ms: float) -> StageCost:
    """Return the cost of a stage whose step of eight rows takes so long, and others in proportion."""
    curve = CostCurve([(rows, step_ms * MS * rows / 8) for rows in (1, 2, 4, 8, 16, 32)])
    return StageCost(curve, curve, 32)


class Looks:
    """A watch that looks once a second."""

    def __init__(self) -> None:
        self.watch = ImbalanceWatch()
        self.now_ns = 5 * S

    def take(
        self, seconds: int, *steps_ms: float, overhead_ms: float = 1e-6, n_steps: int = STEPS_MIN
    ) -> list[Imbalance]:
        findings = []
        for _ in range(seconds):
            if self.watch.stepped(n_steps):
                costs = [cost(ms) for ms in steps_ms]
                cut = faster_cut(costs, EDGES, 16, RoundTrip(overhead_ms * MS), self.now_ns)
                found = self.watch.look(cut, self.now_ns)
                findings += [found] if found is not None else []
            self.now_ns += S
        return findings


def test_a_neighbour_that_gets_busy_is_reported_once_after_a_minute() -> None:
    looks = Looks()
    assert looks.take(300, 10, 10) == []
    assert looks.take(60, 10, 30) == [], "a minute has not passed"
    (finding,) = looks.take(120, 10, 30)
    assert finding.slowest == 1
    assert finding.layers == ((0, 15), (15, 20)), "three times as slow, a third of the layers"
    # Sixteen streams in two groups: from 2 x 30 ms a cycle to 2 x 15 ms, and work that equals the way costs a little.
    assert finding.gain == pytest.approx(1.0, rel=1e-5)
    assert looks.watch.reported is not None
    assert looks.watch.reported.describe(looks.now_ns)["for_s"] == pytest.approx(180.0)
    assert finding.words(["desk", "laptop"]).startswith(
        "laptop slows the pipeline down: with layers 0-14, 15-19 it would make about 100% more tokens"
    )


def test_figures_of_the_start_are_not_believed_until_steps_have_replaced_them() -> None:
    looks = Looks()
    assert looks.take(600, 10, 30, n_steps=0) == [], "nothing decodes: only the measurements at the start are known"
    assert looks.take(1, 10, 30, n_steps=STEPS_MIN - 1) == []
    assert looks.take(HOLD_NS // S, 10, 30, n_steps=1) == [], "the minute began with the first look that counted"
    assert len(looks.take(2, 10, 30, n_steps=1)) == 1
    looks.watch.restarted()
    assert looks.take(STEPS_MIN - 1, 10, 10, n_steps=1) == []
    assert looks.watch.reported is not None, "a stage that was started again says nothing yet"
    looks.take(1, 10, 10, n_steps=1)
    assert looks.watch.reported is None


def test_it_is_over_when_the_neighbour_is_quiet_again() -> None:
    looks = Looks()
    looks.take(100, 10, 30)
    looks.take(1, 10, 10)
    assert looks.watch.reported is None
    assert looks.take(59, 10, 30) == [], "and the minute starts again"


def test_a_gain_about_the_bound_does_not_come_and_go() -> None:
    looks = Looks()
    assert len(looks.take(100, 10, 14)) == 1
    assert imbalance.GAIN_KEPT < 0.1 < imbalance.GAIN_MIN
    # From 12.2 ms to 11 ms: a gain of less than GAIN_MIN, and more than GAIN_KEPT.
    assert looks.take(100, 10, 12.3) == []
    assert looks.watch.reported is not None
    assert Looks().take(100, 10, 12.3) == [], "not worth a report by itself"


def test_a_short_burst_and_a_time_without_measurements_tell_nothing() -> None:
    looks = Looks()
    for _ in range(10):
        assert looks.take(50, 10, 30) == []
        looks.take(5, 10, 10)
    looks.take(50, 10, 30)
    looks.now_ns += HOLD_NS  # nothing ran
    assert looks.take(50, 10, 30) == []


def test_another_cut_gains_little_where_round_trips_take_the_time() -> None:
    assert Looks().take(200, 1, 2, overhead_ms=100) == []


def test_nothing_is_reported_without_curves_or_neighbours() -> None:
    bare = StageCost(CostCurve(), CostCurve(), 32)
    assert faster_cut([bare, cost(5)], EDGES, 16, RoundTrip(), S) is None
    assert faster_cut([cost(5)], ((0, 20),), 16, RoundTrip(), S) is None
    assert ImbalanceWatch().look(None, S) is None
