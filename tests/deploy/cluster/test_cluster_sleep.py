"""A cluster that sleeps between requests: each is answered with its tokens, and mistakes would be noticed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from relayline.coordinator.engine.moves import MoveState
from relayline.coordinator.engine.sleep import Sleep
from relayline.deploy.testing.cluster.clock import S, Violation
from relayline.deploy.testing.cluster.model import N_LAYERS
from relayline.deploy.testing.cluster.plan import plan_of
from relayline.deploy.testing.cluster.run import Cluster, base_seed, simulate_many

OTHERS = ("dies", "flaps", "hangs", "moves", "drains", "is lost for long", "joins", "cut")


def test_no_request_is_lost_or_answered_otherwise_by_a_sleep() -> None:
    """One draw in 370 has few sleeps or few wakes: then another one must have enough."""
    draws = (simulate_many(f"{base_seed()}/sleep{more}", 24, ("sleeps",)) for more in ("", " 2", " 3"))
    assert any(one.n_sleeps > 8 and one.n_wakes > 2 and one.ends["length"] > 24 for one in draws)


def test_nor_with_losses_and_moves_among_its_sleeps() -> None:
    outcome = simulate_many(f"{base_seed()}/sleep and losses", 48, ("sleeps", "sleeps", "sleeps", *OTHERS))
    assert outcome.n_sleeps > 0, "a dozen of them is usual"


def test_a_sleep_while_a_request_runs_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sleep, "_may_sleep", lambda self: True)
    with pytest.raises(Violation, match="goes to sleep while a request runs"):
        simulate_many("canary", 24, ("sleeps",))


def test_a_request_that_wakes_nothing_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sleep, "came", lambda self, now_ns: [])
    with pytest.raises(Violation, match="a request waits for a pipeline that sleeps"):
        simulate_many("canary", 24, ("sleeps",))


def test_a_wake_that_fails_gives_up_the_change_that_was_to_replace_a_lost_stage() -> None:
    plan = plan_of("a takeover", ("sleeps",))
    cluster = Cluster(dataclasses.replace(plan, n_coordinators=1, n_stages=3, n_spares=0, wishes=(), troubles=()))
    (coordinator,) = cluster.coordinators
    mover = coordinator.mover
    assert mover is not None

    def until(is_so: Callable[[], bool]) -> None:
        until_ns = cluster.clock.now_ns + 60 * S
        while not is_so():
            assert cluster.clock.now_ns < until_ns
            cluster.clock.step()
            mover.sleeper.check()

    until(lambda: coordinator.is_connected)
    mover.sleeper.ask()
    until(lambda: mover.sleeper.sleep.is_asleep)
    cluster.nodes[1].die()
    mover.sleeper.wake()
    assert mover.ask((N_LAYERS // 2,), (0, 2)), "the others take over"
    until(lambda: mover.moves.latest is not None and mover.moves.latest.state is MoveState.PREPARING)
    mover.sleeper.fails()
    mover.sleeper.check()
    assert mover.sleeper.sleep.is_asleep
    assert not mover.moves.is_open
    cluster.nodes[1].start(1)
    mover.sleeper.wake()
    until(lambda: coordinator.is_connected or mover.sleeper.sleep.is_asleep)
