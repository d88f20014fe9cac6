"""The estimate of another host's clock, its uncertainty, and the stamps of spans."""

from __future__ import annotations

import asyncio
import random

import pytest

from relayline.coordinator.engine.heartbeat import FIRST_BEATS, Heartbeat
from relayline.coordinator.engine.stage_client import RoundTrip
from relayline.wire.envelopes import trace_context
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry import names
from relayline.wire.telemetry.clock import DRIFT_MAX, ROUND_TRIPS_KEPT, Clock, OffsetEstimate
from relayline.wire.telemetry.spans import Finished
from relayline.wire.telemetry.telemetry import Role
from tests.support.spans import Kept

S, MS = 1_000_000_000, 1_000_000


def test_nothing_is_known_before_the_first_answer() -> None:
    assert OffsetEstimate().best(0) is None


def test_processes_of_one_machine_have_one_clock() -> None:
    estimate = OffsetEstimate()
    estimate.heard(1_000, 9_000, 2_000)
    assert estimate.best(9_000) == (0, 4_001)


@pytest.mark.parametrize("skew_ns", [5 * S, -5 * S, 3 * MS])
def test_the_truth_is_within_the_uncertainty_however_unequal_the_two_ways_are(skew_ns: int) -> None:
    draw = random.Random(skew_ns)
    estimate, now_ns = OffsetEstimate(), 100 * S
    for _ in range(200):
        there_ns, back_ns = draw.choice([(MS, MS), (9 * MS, MS), (0, 7 * MS), (40 * MS, 0)])
        sent_ns = now_ns
        theirs_ns = sent_ns + there_ns + skew_ns
        now_ns = sent_ns + there_ns + back_ns
        estimate.heard(sent_ns, now_ns, theirs_ns)
        best = estimate.best(now_ns)
        assert best is not None
        offset_ns, uncertainty_ns = best
        assert abs(offset_ns + skew_ns) <= uncertainty_ns
        now_ns += S


def test_the_shortest_round_trip_counts_until_drift_may_have_spoilt_it() -> None:
    estimate = OffsetEstimate()
    estimate.heard(0, 2 * MS, 5 * S)  # right to a millisecond
    estimate.heard(S, S + 20 * MS, 6 * S)
    assert estimate.best(2 * S) == (-5 * S + MS, MS + round(DRIFT_MAX * (2 * S - 2 * MS)) + 1)
    later_ns = 400 * S
    estimate.heard(later_ns, later_ns + 20 * MS, later_ns + 5 * S)
    best = estimate.best(later_ns + 20 * MS)
    assert best is not None
    assert best[1] == 10 * MS + 1


def test_samples_are_bounded_and_a_clock_that_goes_back_is_ignored() -> None:
    estimate = OffsetEstimate()
    for at in range(ROUND_TRIPS_KEPT * 3):
        estimate.heard(at, at + 2, 10**12)
    estimate.heard(500, 400, 0)
    assert len(estimate._kept) == ROUND_TRIPS_KEPT


class SkewedStage:
    """A stage as the heartbeat sees it: its clock is ahead, each way takes a set time, and time is made up."""

    def __init__(self, skew_ns: int, *, answers: bool = True) -> None:
        self.skew_ns, self.answers, self.now_ns = skew_ns, answers, 10 * S
        self.clock = OffsetEstimate()
        self.beats: list[pb.BeatRequest] = []
        self.beaten = asyncio.Event()

    async def beat(self, request: pb.BeatRequest) -> RoundTrip | None:
        self.beats.append(request)
        self.beaten.set()
        if not self.answers:
            return None
        sent_ns, self.now_ns = self.now_ns, self.now_ns + 2 * MS
        return RoundTrip(sent_ns, self.now_ns, sent_ns + MS + self.skew_ns)


async def test_a_stage_gets_its_clock_before_its_first_frame() -> None:
    ahead, silent = SkewedStage(5 * S), SkewedStage(0, answers=False)
    heartbeat = Heartbeat([ahead, silent])  # type: ignore[list-item]
    await heartbeat.first()
    assert [request.knows_clock for request in ahead.beats] == [False] + [True] * FIRST_BEATS
    assert len(silent.beats) == 1, "it keeps its own clock, and holds up no other"
    best = ahead.clock.best(ahead.now_ns)
    assert best is not None
    assert abs(best[0] + 5 * S) <= best[1] < 2 * MS


async def test_beats_go_on_while_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SkewedStage(5 * S)
    monkeypatch.setattr("relayline.coordinator.engine.heartbeat.BEAT_S", 0.001)
    beating = asyncio.create_task(Heartbeat([stage]).keep([1]))  # type: ignore[list-item]
    async with asyncio.timeout(20):
        for _ in range(3):
            await stage.beaten.wait()
            stage.beaten.clear()
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    assert [request.knows_clock for request in stage.beats[:3]] == [False, True, True]


def test_spans_say_whose_clock_they_are_stamped_with() -> None:
    kept = Kept(Role.STAGE)
    telemetry = kept.telemetry

    def emit() -> None:
        telemetry.emit(Finished("x", trace_context.new_root(), trace_context.NONE, 1, 2, {}))

    emit()
    own_ns = telemetry.wall_offset_ns()
    telemetry.set_clock(Clock(own_ns - 5 * S, 2 * MS))
    assert telemetry.wall_offset_ns() == own_ns - 5 * S
    emit()
    telemetry.set_clock(Clock(own_ns - 5 * S + MS, 2 * MS))  # the same truth: no new resource, but the better stamp
    assert telemetry.wall_offset_ns() == own_ns - 5 * S + MS
    emit()
    telemetry.set_clock(Clock(own_ns - 6 * S, 2 * MS))
    emit()
    before, second, third, moved = (dict(span.resource.attributes) for span in kept.spans("x"))
    assert names.RESOURCE_CLOCK not in before
    assert second[names.RESOURCE_CLOCK] == names.CLOCK_COORDINATOR
    assert second[names.RESOURCE_CLOCK_OFFSET] == pytest.approx(-5.0, abs=0.1)
    assert second[names.RESOURCE_CLOCK_UNCERTAINTY] == 0.002
    assert third == second
    assert moved[names.RESOURCE_CLOCK_OFFSET] == pytest.approx(-6.0, abs=0.1)
