"""The overlap figure, on intervals small enough to do by hand."""

from __future__ import annotations

import pytest

from coordinator.description import percentile
from coordinator.overlap import overlap


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


def test_percentile_is_nearest_rank() -> None:
    assert percentile([], 0.5) == 0
    assert percentile([7], 0.95) == 7
    assert percentile(list(range(100)), 0.5) == 50
    assert percentile(list(range(100)), 0.95) == 95
