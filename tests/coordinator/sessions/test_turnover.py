"""The waiting time in a refusal: when a lane is expected to be free."""

from __future__ import annotations

import random

import pytest

from relayline.coordinator.http.edge.errors import error_body, retry_headers
from relayline.coordinator.http.replies.shapes import encode
from relayline.coordinator.sessions.admission import Admission
from relayline.coordinator.sessions.turnover import HOLDS_MAX, RETRY_AFTER_MAX_S, Holding, Turnover, holdings
from relayline.wire.common.errors import LaneLimitError, NotReadyError, OverloadedError, StageLostError
from tests.coordinator.sessions.test_admission import session
from tests.support.session_world import World

S = 1_000_000_000


def test_it_is_the_time_of_the_queue() -> None:
    """A queue of 256 at 32 lanes, in which each request holds its lane for about this long: simulated."""
    for seed, hold_s in enumerate((0.3, 2.0, 12.0)):
        rng, turnover, now_s, ends = random.Random(seed), Turnover(), 0.0, [0.0] * 32
        for _ in range(32 + 256 + 200):
            now_s = min(ends)
            hold = hold_s * rng.uniform(0.5, 1.5)
            ends[ends.index(now_s)] = now_s + hold
            turnover.left(round(hold * S))
        for _ in range(256):
            ends[ends.index(min(ends))] = min(ends) + hold_s * rng.uniform(0.5, 1.5)
        took_s = min(ends) - now_s
        advised_s = turnover.wait_s(256, 32, [Holding(round(hold_s / 2 * S))] * 32)
        assert advised_s == pytest.approx(min(took_s, RETRY_AFTER_MAX_S), rel=0.25, abs=1)


@pytest.mark.parametrize(
    ("held_s", "running_s", "n_before", "n_lanes", "advised_s"),
    [
        ([], [], 0, 4, 1),  # nothing is known
        ([], [8.0] * 4, 3, 4, 8),  # none has ended yet
        ([0.5] * 9, [40.0] * 4, 3, 4, 40),  # these take longer than those before
        ([2.0] * 9, [0.1] * 4, 9, 4, 5),
        ([2.0], [], 0, 0, 2),  # another coordinator has all lanes
        ([1e6], [], 99, 1, RETRY_AFTER_MAX_S),
        ([0.001], [], 0, 64, 1),
    ],
)
def test_bounds_and_unknown_times(
    held_s: list[float], running_s: list[float], n_before: int, n_lanes: int, advised_s: int
) -> None:
    turnover = Turnover()
    for each in held_s:
        turnover.left(round(each * S))
    assert turnover.wait_s(n_before, n_lanes, [Holding(round(each * S)) for each in running_s]) == advised_s


def test_before_any_lane_was_given_back_the_running_requests_are_foreseen() -> None:
    turnover, running = Turnover(), [Holding(S, 12.0 * S), Holding(S, 20.0 * S)]
    assert turnover.wait_s(3, 2, running) == 32, "32 s for four at two lanes of 16 s"
    turnover.left(2 * S)
    assert turnover.wait_s(3, 2, running) == 4, "answers end before their limit: the measured length counts"


def test_the_forecast_uses_a_requests_own_pace_else_the_plans() -> None:
    fresh, going, waiting = (session(index, max_tokens=100) for index in range(3))
    fresh.started_ns, going.started_ns = 10 * S, 5 * S
    going.history.extend(range(20))
    found = holdings([fresh, going, waiting], 15 * S, 0.1 * S)
    assert found == [(5 * S, 15.0 * S), (10 * S, 50.0 * S)]
    assert holdings([fresh], 15 * S, 0.0) == [(5 * S, 0.0)]


def test_the_latest_holds_count() -> None:
    turnover = Turnover()
    for held_s in [90] * HOLDS_MAX + [2] * HOLDS_MAX:
        turnover.left(held_s * S)
    assert turnover.wait_s(0, 1, []) == 2


def test_the_refusal_says_it() -> None:
    admission = Admission(1, 16, 1)
    admission.admit(session(0))
    admission.admit(session(1))
    with pytest.raises(OverloadedError, match="try again in about 42 s") as caught:
        admission.admit(session(2), lambda: 42)
    assert retry_headers(caught.value) == {"Retry-After": "42"}
    assert b'"retry_after_s":42' in encode(error_body(caught.value))


async def test_a_pipeline_reports_its_lanes_holding_times() -> None:
    world = World(n_lanes=1)
    for n_prompt in (3, 4):
        world.open(n_prompt, 2)
    world.finish()
    world.pipeline.conductor._turnover.left(20 * S)
    for n_prompt in (3, 4, 5):
        world.open(n_prompt, 2)
    with pytest.raises(OverloadedError) as caught:
        world.pipeline.open(world.clients[0].session.request)
    assert caught.value.retry_after_s == pytest.approx(3 * 20 / 3, abs=1)
    world.finish()


@pytest.mark.parametrize(
    ("error", "header"),
    [
        (NotReadyError("loading"), {"Retry-After": "2"}),
        (LaneLimitError("none"), {"Retry-After": "1"}),
        (StageLostError("gone"), {"Retry-After": "1"}),
    ],
)
def test_other_errors_agree_in_body_and_header(error: StageLostError, header: dict[str, str]) -> None:
    assert retry_headers(error) == header
    assert f'"retry_after_s":{header["Retry-After"]}'.encode() in encode(error_body(error))
    error.retry_after_s = 9
    assert retry_headers(error) == {"Retry-After": "9"}
