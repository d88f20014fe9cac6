"""Flights of neighbouring lanes: which streams leave together, and that none is passed over for ever."""

from __future__ import annotations

import random

import pytest

from relayline.coordinator.schedule.lane_groups import PASSES_MAX, next_group
from relayline.coordinator.schedule.pool import Pool
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import OutFrame, Session
from relayline.wire.envelopes.frames import Flag


def frame(lane: int) -> OutFrame:
    request = GenerationRequest(str(lane), (1,), 4, SamplingParams())
    return OutFrame(Session(lane, request, lambda _: False, lane=lane), 1, (1,), Flag.WANTS_SAMPLE)


def lanes_of(frames: list[OutFrame]) -> list[int]:
    return [each.session.lane for each in frames]


def test_a_flight_is_of_one_block_and_the_fullest_goes_first() -> None:
    pool = [frame(lane) for lane in (5, 0, 1, 3)]
    assert lanes_of(next_group(pool, range(8), 4, 0)) == [0, 1, 3]
    assert lanes_of(next_group(pool[:1], range(8), 4, 0)) == [5], "nothing is held while a flight is free"


def test_blocks_go_by_rank_so_that_lanes_nobody_decodes_in_leave_no_gap() -> None:
    pool = [frame(lane) for lane in (2, 9, 4, 30)]
    assert lanes_of(next_group(pool, [2, 4, 9, 30], 2, 0)) == [2, 4]
    assert lanes_of(next_group(pool[1:2] + pool[3:], [2, 4, 9, 30], 2, 0)) == [9, 30]


def test_the_oldest_row_leaves_after_so_many_passes() -> None:
    pool = [frame(lane) for lane in (7, 0, 1, 2)]
    assert lanes_of(next_group(pool, range(8), 4, PASSES_MAX)) == [7]


def test_streams_that_were_mixed_travel_with_their_neighbours_after_two_rounds() -> None:
    rng, lanes = random.Random(5), list(range(16))
    flights = [rng.sample(lanes, 8)]
    flights.append([lane for lane in lanes if lane not in flights[0]])
    pool: list[OutFrame] = []
    for turn in range(6):
        pool += [frame(lane) for lane in flights[turn % 2]]
        group = next_group(pool, lanes, 8, 0)
        pool = [each for each in pool if each not in group]
        flights[turn % 2] = lanes_of(group)
    assert sorted(map(sorted, flights)) == [lanes[:8], lanes[8:]]
    assert not pool


@pytest.mark.parametrize("is_per_lane", [False, True])
def test_a_flight_is_of_one_adapter_as_far_as_there_are_rows_of_it(is_per_lane: bool) -> None:
    pool = Pool()
    for lane in range(8):
        request = GenerationRequest(str(lane), (1,), 4, SamplingParams(), adapter=lane % 2)
        pool.add(OutFrame(Session(lane, request, lambda _: False, lane=lane), 1, (1,), Flag.WANTS_SAMPLE))
    groups = [pool.take_group(4, is_per_lane=is_per_lane, must_take_oldest=True) for _ in range(2)]
    assert [lanes_of(group) for group in groups] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_flight_that_would_not_be_full_takes_rows_of_others() -> None:
    pool = Pool()
    for lane in range(4):
        request = GenerationRequest(str(lane), (1,), 4, SamplingParams(), adapter=int(lane == 1))
        pool.add(OutFrame(Session(lane, request, lambda _: False, lane=lane), 1, (1,), Flag.WANTS_SAMPLE))
    assert lanes_of(pool.take_group(4, is_per_lane=False, must_take_oldest=True)) == [0, 2, 3, 1]
    assert not pool
