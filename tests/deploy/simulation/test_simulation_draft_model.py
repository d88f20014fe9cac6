"""A draft model on virtual time: what it gains, that it never costs, and the invariants whatever it guesses."""

from __future__ import annotations

import dataclasses
import random

import pytest

from relayline.coordinator.schedule.draft_wait import GuessWait
from relayline.deploy.testing.simulation.draft_model import DraftedSimulation, DraftModelFacts
from relayline.deploy.testing.simulation.scenarios import churn, draft_model_gain
from relayline.deploy.testing.simulation.stage import Violation
from relayline.deploy.testing.simulation.world import CURVES, MS, World, equal_stages, streams

GOOD, POOR = DraftModelFacts(0.85, 2 * MS), DraftModelFacts(0.2, 2 * MS)


@pytest.mark.parametrize("curve", CURVES)
def test_a_lone_stream_gains_most_over_many_machines(curve: str) -> None:
    near = draft_model_gain(equal_stages(2, curve), 1, GOOD)
    far = draft_model_gain(equal_stages(4, curve), 1, GOOD, link_ns=10 * MS)
    assert near > 1.4
    assert far > near + 0.3


@pytest.mark.sampled(6)
@pytest.mark.parametrize("model", [GOOD, POOR], ids=["good", "poor"])
@pytest.mark.parametrize("n_streams", [1, 2, 4])
@pytest.mark.parametrize("n_stages", [1, 2])
@pytest.mark.parametrize("curve", CURVES)
def test_it_never_costs(curve: str, n_stages: int, n_streams: int, model: DraftModelFacts) -> None:
    assert draft_model_gain(equal_stages(n_stages, curve), n_streams, model) > 0.95


@pytest.mark.sampled(3)
@pytest.mark.parametrize("guess_ms", [0.2, 5, 400])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_request_ends_while_streams_come_and_go(seed: int, guess_ms: float) -> None:
    rng = random.Random(seed)
    world = churn(equal_stages(1 + seed, rng.choice(list(CURVES))), 40, seed, link_ns=MS)
    model = DraftModelFacts(rng.choice((0.0, 0.5, 1.0)), int(guess_ms * MS), 10_000)
    assert len(DraftedSimulation(world, model).run().audit.ends) == len(world.requests)


def test_a_row_that_waits_without_end_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def holds(self: GuessWait, *_: object) -> bool:
        self.left_ns = 50 * MS
        return True

    monkeypatch.setattr(GuessWait, "holds", holds)
    with pytest.raises(Violation, match="is held for"):
        DraftedSimulation(World(equal_stages(2, "smooth"), streams(1, 20)), GOOD).run()


def test_equal_worlds_run_equally() -> None:
    world = World(equal_stages(2, "smooth"), streams(2, 40), jitter=0.03)
    first, second = (DraftedSimulation(world, GOOD).run() for _ in range(2))
    other = DraftedSimulation(dataclasses.replace(world, seed=9), GOOD).run()
    assert first.now_ns == second.now_ns != other.now_ns
