"""The overlap figure, on intervals small enough to do by hand."""

from __future__ import annotations

import pytest

from relayline.coordinator.observe.description import overlap_since, percentile
from relayline.coordinator.observe.overlap import overlap, overlap_between
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb


@pytest.mark.parametrize(
    ("stages", "both"),
    [
        ([[(0, 10), (20, 30)], [(10, 20), (30, 40)]], 0.0),  # lock-step: never at once
        ([[(0, 10), (10, 20)], [(0, 10), (10, 20)]], 1.0),  # always at once
        ([[(0, 10), (20, 30)], [(5, 15), (25, 30)]], 0.5),  # window 5..30: both 5-10 and 25-30, one 10-15 and 20-25
    ],
)
def test_share_of_busy_time_with_both_stages(stages: list[list[tuple[int, int]]], both: float) -> None:
    shares = overlap(stages)
    assert shares["2+"] == pytest.approx(both)
    assert shares["1"] + shares["2"] == pytest.approx(1.0)


def test_nothing_to_say_without_steps_or_common_window() -> None:
    assert overlap([]) == {}
    assert overlap([[(0, 1)], []]) == {}
    assert overlap([[(0, 1)], [(5, 6)]]) == {}


def test_only_tokens_within_a_window_count() -> None:
    earlier = [(0, 10), (10, 20)]  # both at once, as in an earlier run
    first, second = [*earlier, (28, 40), (60, 70)], [*earlier, (35, 50)]
    assert overlap([first, second])["2+"] == pytest.approx(25 / 42)
    # 30-35 and 40-50 and 60-65 alone, 35-40 together: before, between and after the other's steps too.
    assert overlap_between([first, second], 30, 65) == pytest.approx({"1": 0.8, "2": 0.2, "2+": 0.2})
    assert overlap_between([first, []], 20, 70) == {"1": 1.0, "2": 0.0, "2+": 0.0}
    assert overlap_between([first, second], 70, 80) == {}
    assert overlap_between([first, second], 40, 30) == {}


def status(*steps: tuple[int, int], n_forgotten: int = 0, uptime_ns: int = 1_000) -> pb.StatusResponse:
    return pb.StatusResponse(
        n_steps=len(steps) + n_forgotten,
        uptime_ns=uptime_ns,
        step_start_ns=[start_ns for start_ns, _ in steps],
        step_end_ns=[end_ns for _, end_ns in steps],
    )


def test_overlap_since_says_from_when_every_stage_knows_its_steps() -> None:
    whole = status((100, 110), (200, 210), (300, 310))
    late = status((200, 210), (300, 310), n_forgotten=1)
    alike = {"1": 0.0, "2": 1.0, "2+": 1.0}
    assert overlap_since([whole, whole], 90, 1_000) == {"overlap": alike, "overlap_since_ns": 90}
    # Times that one stage has forgotten count for no stage: the other would seem to work alone.
    assert overlap_since([whole, late], 90, 1_000) == {"overlap": alike, "overlap_since_ns": 200}
    assert overlap_since([whole, late], 250, 1_000) == {"overlap": alike, "overlap_since_ns": 250}
    # A restarted stage knows nothing of its life before.
    young = status((300, 310), uptime_ns=750)
    assert overlap_since([whole, young], 90, 1_000) == {"overlap": alike, "overlap_since_ns": 250}
    assert overlap_since([whole, None], 90, 1_000) == {"overlap": {}, "overlap_since_ns": 90}
    assert overlap_since([], 90, 1_000) == {"overlap": {}, "overlap_since_ns": 90}


def test_percentile_is_nearest_rank() -> None:
    assert percentile([], 0.5) == 0
    assert percentile([7], 0.95) == 7
    assert percentile(list(range(100)), 0.5) == 50
    assert percentile(list(range(100)), 0.95) == 95
