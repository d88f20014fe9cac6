"""How long the coordinator holds rows back until a flight lands."""

from __future__ import annotations

from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.schedule.scheduler import HOLD_STRETCH_MAX, Scheduler
from tests.support.scheduling import Fixed, answer, ids, row


def test_a_row_is_held_for_as_long_as_is_predicted_and_no_longer() -> None:
    """Then it would have its token, had it left at once: nothing is won any more by waiting for a flight."""
    scheduler = Scheduler(ScheduleConfig(), Fixed(1, 2, hold_max_ns=1_000.0))
    scheduler.decode(row(1))
    scheduler.take(0)
    for session_id, now_ns in ((2, 10), (3, 20), (4, 600)):
        scheduler.decode(row(session_id))
        assert scheduler.take(now_ns) == []
    assert scheduler.take(1_009) == []
    assert ids(scheduler.take(1_010)) == [[2, 3]], "a row that came after the oldest goes with it"
    assert scheduler.take(1_599) == []
    assert ids(scheduler.take(1_600)) == [[4]]


def test_a_row_that_was_given_up_or_has_left_is_held_again() -> None:
    scheduler = Scheduler(ScheduleConfig(), Fixed(1, 1, hold_max_ns=1_000.0))
    scheduler.decode(row(1))
    (first,) = scheduler.take(0)
    scheduler.decode(row(2))
    scheduler.decode(row(3))
    assert scheduler.take(0) == []
    scheduler.forget(3)
    answer(scheduler, first)
    ((second,),) = scheduler.take(600)
    for again in (row(2, second.position + 1), row(3)):
        scheduler.decode(again)
        assert scheduler.take(700) == []
    assert scheduler.take(1_699) == []
    assert ids(scheduler.take(1_700)) == [[2], [3]]


def test_while_no_curve_is_known_rows_are_held_for_as_long_as_the_slowest_flight_took() -> None:
    """Not sent at once: streams that began apart would stay apart until every stage has learned what its steps cost."""
    scheduler = Scheduler(ScheduleConfig(), Fixed(1, 2))
    scheduler.decode(row(1))
    (first,) = scheduler.take(0)
    scheduler.decode(row(2))
    assert scheduler.take(10**12) == [], "nothing has landed, so the time of a flight is unknown"
    answer(scheduler, first, now_ns=10**12 + 1_000)
    assert ids(scheduler.take(10**12 + 1_000)) == [[2]]
    for session_id, now_ns in ((3, 0), (4, 10**12), (5, 10**12)):
        scheduler.decode(row(session_id))
        assert scheduler.take(10**12 + 1_000 + now_ns) == []
    assert ids(scheduler.take(2 * 10**12 + 2_000)) == [[3, 4]]
    assert scheduler.take(3 * 10**12 + 1_999) == []
    assert ids(scheduler.take(3 * 10**12 + 2_000)) == [[5]]


def test_a_row_that_was_held_for_too_long_leaves_before_the_largest_block() -> None:
    """With per-lane cells flights take neighbours, and the largest block first."""
    scheduler = Scheduler(ScheduleConfig(), Fixed(1, 3, is_per_lane=True, hold_max_ns=1_000.0))
    frames = {lane: row(lane) for lane in (1, 3, 4, 5, 6, 7, 8, 30)}
    for lane, frame in frames.items():
        frame.session.lane = lane
    scheduler.decode(frames[1])
    scheduler.take(0)
    scheduler.decode(frames[30])
    assert scheduler.take(0) == []
    for lane in (3, 4, 5, 6, 7, 8):
        scheduler.decode(frames[lane])
    assert scheduler.take(900) == []
    (overdue,) = ids(scheduler.take(1_000))
    assert 30 in overdue


def test_streams_meet_again_though_flights_take_longer_than_predicted() -> None:
    """Flights take 3,000. If rows were held no longer than predicted, each stream would travel alone for ever."""
    scheduler = Scheduler(ScheduleConfig(), Fixed(1, 2, hold_max_ns=1_000.0))
    scheduler.decode(row(1))
    (first,) = scheduler.take(0)
    scheduler.decode(row(2))
    assert scheduler.take(100) == []
    (second,) = scheduler.take(1_100)
    answer(scheduler, first, now_ns=3_000)
    scheduler.decode(row(1, 11))
    assert scheduler.take(3_000) == []
    assert scheduler.take(4_000) == [], "it has waited as long as is predicted, and the other is about to land"
    answer(scheduler, second, now_ns=4_100)
    scheduler.decode(row(2, 11))
    assert ids(scheduler.take(4_100)) == [[1, 2]]


def test_a_row_is_held_for_as_long_as_the_latest_flight_took() -> None:
    scheduler, late_ns = Scheduler(ScheduleConfig(), Fixed(1, 1, hold_max_ns=1_000.0)), 10**9
    scheduler.decode(row(1))
    (first,) = scheduler.take(late_ns)
    answer(scheduler, first, now_ns=late_ns + 2_000)
    for session_id in (2, 3):
        scheduler.decode(row(session_id))
    assert ids(scheduler.take(late_ns + 2_000)) == [[2]]
    assert scheduler.take(late_ns + 2_000 + 1_999) == []
    assert ids(scheduler.take(late_ns + 2_000 + 2_000)) == [[3]]


def test_a_flight_that_took_very_long_lets_rows_be_held_for_some_times_the_prediction() -> None:
    scheduler = Scheduler(ScheduleConfig(), Fixed(1, 1, hold_max_ns=1_000.0))
    scheduler.decode(row(1))
    (first,) = scheduler.take(0)
    answer(scheduler, first, now_ns=10**9)
    for session_id in (2, 3):
        scheduler.decode(row(session_id))
    assert ids(scheduler.take(10**9)) == [[2]]
    assert scheduler.take(10**9 + HOLD_STRETCH_MAX * 1_000 - 1) == []
    assert ids(scheduler.take(10**9 + HOLD_STRETCH_MAX * 1_000)) == [[3]]


def test_two_rows_of_one_stream_are_held_each_for_itself() -> None:
    """As when answers from before a fault arrive after its history was sent again."""
    scheduler = Scheduler(ScheduleConfig(), Fixed(1, 1, hold_max_ns=1_000.0))
    scheduler.decode(row(9))
    scheduler.take(0)
    for position, now_ns in ((10, 0), (11, 500)):
        scheduler.decode(row(1, position))
        assert scheduler.take(now_ns) == []
    assert [[f.position for f in envelope] for envelope in scheduler.take(1_000)] == [[10]]
    assert scheduler.take(1_499) == []
    assert [[f.position for f in envelope] for envelope in scheduler.take(1_500)] == [[11]]


def test_by_hand_rows_are_held_for_as_long_as_flights_take() -> None:
    scheduler = Scheduler(ScheduleConfig("fixed", n_groups=1, group_rows=2), Fixed(1, 2, hold_max_ns=1_000.0))
    for session_id in (1, 2, 3):
        scheduler.decode(row(session_id))
    assert ids(scheduler.take(0)) == [[1, 2]]
    assert scheduler.take(10**9) == []
