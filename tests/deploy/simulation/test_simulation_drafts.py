"""Drafts on virtual time: their gain, that they never cost, and the invariants for any guesses."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.sessions.session import OutFrame, Session
from relayline.deploy.testing.simulation import stage as simulate_stage
from relayline.deploy.testing.simulation.run import AUTO, Setup, Simulation
from relayline.deploy.testing.simulation.scenarios import Drafting, drafting, drafting_churn
from relayline.deploy.testing.simulation.stage import Violation
from relayline.deploy.testing.simulation.world import CURVES, MS, Disturbance, Request, World, equal_stages, streams


def gain(curve: str, n_stages: int, n_streams: int, predicted: float, link_ms: int = 0, n_tokens: int = 96) -> Drafting:
    return drafting(equal_stages(n_stages, curve), n_streams, predicted, link_ns=link_ms * MS, n_tokens=n_tokens)


@pytest.mark.parametrize("curve", CURVES)
def test_a_single_stream_whose_answer_is_known_beforehand_gains(curve: str) -> None:
    here, far = gain(curve, 2, 1, 1.0), gain(curve, 4, 1, 1.0, link_ms=10)
    assert here.gain_whole >= (3.0 if curve == "smooth" else 1.5)
    assert far.gain_whole >= (1.0 if curve == "smooth" else 1.25) * here.gain_whole


@pytest.mark.parametrize("curve", CURVES)
def test_a_single_stream_gains_from_a_prediction_that_is_mostly_right(curve: str) -> None:
    assert gain(curve, 2, 1, 0.9).gain_whole >= 1.5
    assert gain(curve, 4, 1, 0.7, link_ms=10).gain_whole >= 1.1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("predicted", [1.0, 0.9, 0.7, 0.5, 0.3, 0.0])
@pytest.mark.parametrize(
    ("curve", "n_stages", "n_streams", "link_ms"),
    [
        ("arithmetic", 4, 4, 10),
        ("arithmetic", 4, 16, 10),
        ("matrix", 2, 16, 10),
        ("matrix", 4, 4, 0),
        ("matrix", 4, 4, 10),
        ("matrix", 4, 8, 0),
        ("smooth", 2, 4, 0),
        ("staircase", 2, 1, 0),
        ("staircase", 2, 2, 0),
        ("staircase", 4, 4, 0),
        ("staircase", 4, 16, 10),
    ],
)
def test_drafts_hardly_ever_cost(curve: str, n_stages: int, n_streams: int, link_ms: int, predicted: float) -> None:
    """If flights share the stages a longer one delays all others, and streams that part leave smaller groups.

    The mean of these is far above 1. The worst, 0.93, are where some flights take guesses along and some do not.
    """
    found = gain(curve, n_stages, n_streams, predicted, link_ms, n_tokens=64 if n_streams > 4 else 96)
    assert found.gain >= 0.92


def test_several_streams_gain_where_all_are_predicted() -> None:
    assert gain("matrix", 2, 2, 1.0).gain >= 2.5
    assert gain("staircase", 4, 4, 1.0).gain >= 1.8
    assert gain("smooth", 2, 16, 0.9, n_tokens=64).gain >= 2.0


@pytest.mark.parametrize("curve", CURVES)
def test_streams_without_guesses_wait_no_longer_than_they_may(curve: str) -> None:
    """Two of four are predicted: what these gain makes the tokens of the others later, within bounds."""
    longest = []
    for predicted in (1.0, None):
        requests = (*streams(2, 200, predicted=predicted), *streams(2, 64))
        simulation = Simulation(World(equal_stages(2, curve), requests, jitter=0.03)).run()
        latencies = [itl_ns for _, itl_ns, session_id in simulation.audit.itls if session_id > 2]
        longest.append(sum(latencies) / len(latencies))
    assert longest[0] <= 4.0 * longest[1]


def test_links_are_learned_although_all_that_lands_is_guesses() -> None:
    """One decode flight leaves, and everything else follows it as guesses: only these can say how far it is."""
    world = World(equal_stages(2), streams(1, 400, predicted=1.0), link_ns=10 * MS, jitter=0.03)
    simulation = Simulation(world).run()
    assert simulation.audit.flights.n_guess_flights > 50
    assert simulation.planner.round_trip.ns == pytest.approx(world.overhead_ns, rel=0.15)


def test_the_same_seed_gives_the_same_history() -> None:
    first, again, other = (
        Simulation(drafting_churn(equal_stages(3, "smooth"), 30, seed, link_ns=MS)).run().audit for seed in (5, 5, 9)
    )
    assert first.rows.n_drafted > 0
    assert first.token_times_ns == again.token_times_ns
    assert first.steps == again.steps
    assert first.token_times_ns != other.token_times_ns


@pytest.mark.sampled(1)
@pytest.mark.parametrize("draft", [-1, 1, 5, 31])
@pytest.mark.parametrize("seed", range(4))
def test_invariants_hold_while_requests_come_and_go(seed: int, draft: int) -> None:
    curve = ("staircase", "smooth", "arithmetic", "matrix")[seed]
    world = drafting_churn(equal_stages(2 + seed % 3, curve), 50, seed, link_ns=(0, 1, 10)[seed % 3] * MS)
    simulation = Simulation(world, Setup(ScheduleConfig(draft=draft))).run()
    assert len(simulation.audit.ends) == 50
    assert simulation.audit.rows.n_drafted > 0


REQUESTS = st.builds(
    Request,
    arrives_ns=st.integers(0, 2_000 * MS),
    n_prompt=st.sampled_from((1, 4, 40)),
    max_tokens=st.integers(1, 40),
    cancel_ns=st.none() | st.integers(0, 3_000 * MS),
    predicted=st.none() | st.floats(0.0, 1.0),
)


@settings(max_examples=30)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=6),
    curve=st.sampled_from(sorted(CURVES)),
    n_stages=st.integers(1, 4),
    link_ms=st.sampled_from((0, 1, 20)),
    stall=st.tuples(st.integers(0, 2_000 * MS), st.integers(0, 500 * MS)),
    draft=st.sampled_from((-1, -1, 3)),
    seed=st.integers(0, 1_000),
)
def test_random_worlds_break_no_rule(
    requests: list[Request], curve: str, n_stages: int, link_ms: int, stall: tuple[int, int], draft: int, seed: int
) -> None:
    disturbances = (Disturbance(stall[0], seed % n_stages, stall_ns=stall[1]),)
    world = World(
        equal_stages(n_stages, curve), tuple(requests), link_ns=link_ms * MS, jitter=0.05, disturbances=disturbances,
        n_lanes=4, refresh_ns=500 * MS, seed=seed,
    )  # fmt: skip
    simulation = Simulation(world, Setup(ScheduleConfig(draft=draft))).run()
    assert len(simulation.audit.ends) == len(requests)


# --- canaries: broken code must be caught -----------------------------------------------------------------------------


def predicted_world() -> World:
    return World(equal_stages(2), streams(2, 40, predicted=0.8))


def test_a_lane_that_keeps_wrong_guesses_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator continues behind its guesses in place of the true row."""
    sampled = Session.sampled

    def goes_on(self: Session, *arguments: object, **named: object) -> object:
        event, frames = sampled(self, *arguments, **named)  # type: ignore[arg-type]
        return event, [dataclasses.replace(frame, position=frame.position + 1) for frame in frames]

    monkeypatch.setattr(Session, "sampled", goes_on)
    with pytest.raises(Violation, match="rows have left"):
        Simulation(predicted_world()).run()


def test_a_last_stage_that_computes_behind_wrong_guesses_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_stage, "is_guessed_wrong", lambda frame, sampler: False)
    with pytest.raises(Violation, match="behind a wrong token"):
        Simulation(World(equal_stages(2), streams(1, 60, predicted=0.8)), AUTO).run()


def test_guesses_without_end_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayline.coordinator.schedule.flights.Flights.is_time_for", lambda *_: True)
    with pytest.raises(Violation, match="flights are under way"):
        Simulation(World(equal_stages(2), streams(1, 60, predicted=1.0))).run()


def test_an_audit_needs_a_row_that_guesses_follow() -> None:
    simulation = Simulation(predicted_world())
    simulation.run(200 * MS)
    session = next(iter(simulation.sessions.values()))
    position = len(session.history) + 40
    with pytest.raises(Violation, match="rows have left"):
        simulation.audit.sent([[OutFrame(session, position, (1,), 0)]], simulation.scheduler.plan())
