"""A comparison repeats as often as the time allows."""

from __future__ import annotations

from benches.pace import TURNS, Pace, turns_of


def test_every_point_is_measured_once_whatever_the_time() -> None:
    pace = Pace(end_ns=100)
    assert pace.has_time(8, 0, now_ns=5_000)
    assert pace.left_out == []


def test_a_repeat_that_would_end_too_late_is_left_out_and_reported() -> None:
    pace = Pace(end_ns=100)
    pace.took(1, 10)
    pace.took(32, 70)
    assert pace.has_time(1, 1, now_ns=90)
    assert not pace.has_time(32, 1, now_ns=31)
    assert pace.has_time(32, 1, now_ns=30)
    pace.took(1, 5)  # the longest counts
    assert not pace.has_time(1, 2, now_ns=91)
    assert pace.left_out == [(32, 1), (1, 2)]


def test_without_a_time_all_repeats_are_made() -> None:
    pace = Pace(end_ns=None)
    pace.took(1, 10**15)
    assert pace.has_time(1, 9, now_ns=10**18)


def test_short_runs_are_made_more_often() -> None:
    assert [turns_of(n_streams) for n_streams in (1, 2, 4, 32)] == [TURNS, TURNS // 2, 1, 1]
