"""Automatic moves of layers: one for a lasting cause, few for a cause that comes and goes. On virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from relayline.coordinator.planner.imbalance import GAIN_MIN, HOLD_NS, STEPS_MIN, Imbalance, ImbalanceWatch, faster_cut
from relayline.coordinator.planner.rebalance import DAY_NS, Rebalancer
from relayline.coordinator.schedule.overhead import RoundTrip
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.wire.common.curve import CostCurve

S = 1_000_000_000
MS = 1_000_000
EVERY_NS = 600 * S
N_LAYERS = 24
LOOK_S = 5  # between looks; the coordinator's is a second

LayerMs = Callable[[float], tuple[float, ...]]
"""The cost of a layer on each host over time, in seconds."""


class World:
    """Hosts whose speed changes, under the real watch and the real decision; a move takes effect at once."""

    def __init__(self, layer_ms: LayerMs, cuts: tuple[int, ...]) -> None:
        self.layer_ms, self.cuts, self.now_ns = layer_ms, cuts, 5 * S
        self.rebalancer = Rebalancer(EVERY_NS)
        self.watch = ImbalanceWatch()
        self.moves: list[tuple[float, tuple[int, ...]]] = []

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        return tuple(itertools.pairwise((0, *self.cuts, N_LAYERS)))

    def run(self, seconds: int) -> World:
        for _ in range(0, seconds, LOOK_S):
            layer_ms = self.layer_ms(self.now_ns / 1e9)
            steps_ms = [ms * (end - start) for ms, (start, end) in zip(layer_ms, self.edges, strict=True)]
            costs = [_cost(ms) for ms in steps_ms]
            assert self.watch.stepped(STEPS_MIN)
            self.watch.look(faster_cut(costs, self.edges, 16, RoundTrip(), self.now_ns), self.now_ns)
            wanted = self.rebalancer.wanted(self.watch.reported, self.cuts, self.now_ns)
            if wanted:
                self.rebalancer.moved(self.cuts, wanted, self.now_ns, is_own=True)
                self.moves.append((self.now_ns / 1e9, wanted))
                self.cuts = wanted
                self.watch = ImbalanceWatch()
            self.now_ns += LOOK_S * S
        return self


def _cost(step_ms: float) -> StageCost:
    curve = CostCurve([(rows, step_ms * MS * rows / 8) for rows in (1, 2, 4, 8, 16, 32)])
    return StageCost(curve, curve, 32)


def found(*cuts: int, gain: float = 0.5) -> Imbalance:
    edges = tuple(itertools.pairwise((0, *cuts, N_LAYERS)))
    return Imbalance(0, edges, gain, 0)


def test_a_cause_that_stays_moves_layers_once() -> None:
    world = World(lambda at_s: (1.0, 1.0 if at_s < 100 else 3.0), (12,)).run(3600)
    ((at_s, cuts),) = world.moves
    assert cuts == (18,)
    assert 100 + HOLD_NS / S <= at_s < 100 + HOLD_NS / S + 3 * LOOK_S, "after the watch's minute, and no later"


def test_nothing_moves_below_the_gain_that_is_worth_it() -> None:
    assert World(lambda _: (1.0, 1.2), (12,)).run(3600).moves == []
    rebalancer = Rebalancer(EVERY_NS)
    assert rebalancer.wanted(found(14, gain=GAIN_MIN - 0.01), (12,), S) == (), "reported still, but small by now"
    assert rebalancer.wanted(found(12), (12,), S) == ()
    assert rebalancer.wanted(None, (12,), S) == ()


def test_a_laptop_that_throttles_in_steps_is_followed_with_time_between() -> None:
    world = World(lambda at_s: (1.0, 2.0 if at_s < 300 else 6.0), (12,)).run(3600)
    assert [cuts for _, cuts in world.moves] == [(16,), (21,)]
    (first_s, _), (second_s, _) = world.moves
    assert second_s - first_s == pytest.approx(EVERY_NS / S, abs=2 * LOOK_S), "both may not be nearer"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("period_s", [600, 3000])
def test_a_neighbour_that_comes_and_goes_does_not_drag_layers_back_and_forth(period_s: int) -> None:
    world = World(lambda at_s: (1.0, 1.0 if at_s // (period_s / 2) % 2 else 4.0), (12,)).run(6 * 3600)
    times_s = [at_s for at_s, _ in world.moves]
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(times_s)]
    assert 1 <= len(times_s) <= 6, "20, 40, 80 and 160 minutes between fit into six hours"
    for turn, gap_s in enumerate(gaps_s, 1):
        assert gap_s >= min(EVERY_NS / S * 2**turn, DAY_NS / S)


def test_three_stages_turn_back_where_one_boundary_does() -> None:
    rebalancer = Rebalancer(EVERY_NS)
    rebalancer.moved((8, 16), (10, 16), S, is_own=False)
    assert rebalancer.wanted(found(10, 18), (10, 16), S + EVERY_NS) == (10, 18), "another boundary, and no way back"
    rebalancer.moved((10, 16), (10, 18), S + EVERY_NS, is_own=True)
    for boundary in ((9, 18), (10, 17)):
        assert rebalancer.wanted(found(*boundary), (10, 18), S + 2 * EVERY_NS) == (), "each remembers its way"
    assert rebalancer.wanted(found(10, 17), (10, 18), S + 3 * EVERY_NS) == (10, 17)


def test_a_day_of_quiet_forgets_which_way_layers_went() -> None:
    rebalancer, up_ns = Rebalancer(EVERY_NS), 30 * DAY_NS
    for turn, (before, after) in enumerate([(12, 16), (16, 12), (12, 16)]):
        rebalancer.moved((before,), (after,), up_ns + turn * S, is_own=True)
    last_ns = up_ns + 2 * S
    assert rebalancer.wanted(found(12), (16,), last_ns + 7 * EVERY_NS) == ()
    assert rebalancer.wait_ns((16,), last_ns + 7 * EVERY_NS) == EVERY_NS, "2 turns, this the third: eight times as long"
    assert rebalancer.wanted(found(12), (16,), last_ns + DAY_NS) == (12,)
    last_ns += DAY_NS + S
    rebalancer.moved((16,), (12,), last_ns, is_own=True)
    assert rebalancer.wanted(found(16), (12,), last_ns + 2 * EVERY_NS) == (16,), "counted from the start again"


def test_a_move_that_fails_is_tried_again_ever_later_and_another_one_in_time() -> None:
    rebalancer = Rebalancer(EVERY_NS)
    assert rebalancer.wanted(found(14), (12,), S) == (14,)
    rebalancer.failed((14,), 2 * S)
    assert rebalancer.wanted(found(14), (12,), 2 * S + EVERY_NS) == ()
    assert rebalancer.describe((12,), 2 * S + EVERY_NS) == {
        "every_s": 600.0, "wait_s": 600.0, "moves": 0, "failed": [14],
    }  # fmt: skip
    assert rebalancer.wanted(found(15), (12,), 2 * S + EVERY_NS) == (15,)
    rebalancer.moved((12,), (15,), 3 * S + EVERY_NS, is_own=True)
    described = rebalancer.describe((15,), 3 * S + EVERY_NS)
    assert (described["moves"], described["failed"]) == (1, [])
