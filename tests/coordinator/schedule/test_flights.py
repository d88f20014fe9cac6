"""The ledger of flights under way: every flight lands once, in whatever order its frames are answered."""

from __future__ import annotations

import collections
import random

import pytest

from relayline.coordinator.schedule.flights import Flight, Flights, Kind
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import OutFrame, Session
from relayline.wire.envelopes.frames import Flag


def frame(session_id: int, position: int, n_rows: int = 1, flags: int = Flag.WANTS_SAMPLE) -> OutFrame:
    request = GenerationRequest(str(session_id), (1,), 1_000, SamplingParams())
    return OutFrame(Session(session_id, request, lambda _: False), position, (1,) * n_rows, flags)


def launch(flights: Flights, kind: Kind, *frames: OutFrame, now_ns: int = 0) -> None:
    decode = [] if kind is Kind.PREFILL else list(frames)
    flights.launch(kind, decode, [] if decode else frames, now_ns, step_ns=10.0, way_ns=20.0)


def test_a_flight_lands_with_its_last_answer() -> None:
    flights = Flights()
    launch(flights, Kind.DECODE, frame(1, 10), frame(2, 20, 3))
    assert flights.answered(2, 21) is None, "an answer within a frame lands nothing"
    assert flights.answered(1, 11) is None
    landed = flights.answered(2, 23)
    assert landed is not None
    assert (landed.kind, landed.n_streams, landed.is_whole) == (Kind.DECODE, 2, True)
    assert flights.answered(2, 23) is None, "an echo"
    assert flights.count(Kind.DECODE) == 0


def test_of_two_that_end_at_one_position_the_earlier_is_answered_first() -> None:
    flights = Flights()
    launch(flights, Kind.DECODE, frame(1, 10))
    launch(flights, Kind.GUESS, frame(1, 11, 2))  # turns out wrong
    assert flights.answered(1, 11) is not None
    launch(flights, Kind.DECODE, frame(1, 11, 2))
    assert (flights.count(Kind.DECODE), flights.count(Kind.GUESS)) == (1, 1)
    landed = flights.answered(1, 13)
    assert landed is not None
    assert landed.kind is Kind.GUESS
    landed = flights.answered(1, 13)
    assert landed is not None
    assert landed.kind is Kind.DECODE


def test_a_decode_flight_that_only_prompt_rows_are_left_of_is_one_of_prompt_rows() -> None:
    flights = Flights()
    riding = frame(9, 4, 8, Flag.PREFILL)
    for session_id in (1, 2):
        flights.launch(Kind.DECODE, [frame(session_id, 10)], [riding], 0, step_ns=10.0, way_ns=20.0)
        riding = frame(8, 4, 8, Flag.PREFILL)
    served = flights.answered(1, 11)
    assert served is not None
    assert served.is_whole
    assert (flights.count(Kind.DECODE), flights.count(Kind.PREFILL)) == (1, 1)
    assert [flight.is_whole for flight in flights.forget(2)] == [False]
    assert (flights.count(Kind.DECODE), flights.count(Kind.PREFILL), flights.n_ridden) == (0, 2, 2)
    assert flights.answered(9, 12) is None, "it was reported already"
    assert flights.forget(8) == []
    assert (flights.count(Kind.PREFILL), flights.n_with_chunks, flights.n_ridden) == (0, 0, 0)


def test_a_forgotten_stream_holds_up_no_flight() -> None:
    flights = Flights()
    launch(flights, Kind.DECODE, frame(1, 10), frame(2, 20))
    launch(flights, Kind.GUESS, frame(1, 11))
    launch(flights, Kind.GUESS, frame(1, 11))
    landed = flights.forget(1)
    assert [flight.kind for flight in landed] == [Kind.GUESS, Kind.GUESS]
    assert not any(flight.is_whole for flight in landed)
    last = flights.answered(2, 21)
    assert last is not None
    assert not last.is_whole
    assert flights.forget(1) == []


def test_work_ahead_and_the_queue_before_the_busiest_stage() -> None:
    flights = Flights()
    launch(flights, Kind.DECODE, frame(1, 10), now_ns=100)
    launch(flights, Kind.DECODE, frame(2, 10), now_ns=104)
    assert flights.queued_ns(104) == pytest.approx(16.0)
    assert flights.queued_ns(1_000) == 0.0
    landed = [flights.answered(session_id, 11) for session_id in (1, 2)]
    assert [flight.ahead_ns for flight in landed if flight] == [10.0, 20.0]


def test_flights_with_prompt_rows_that_follow_each_other() -> None:
    flights = Flights()
    launch(flights, Kind.DECODE, frame(9, 5))
    for position in (4, 8):
        launch(flights, Kind.PREFILL, frame(1, position - 4, 4, Flag.PREFILL))
    assert (flights.n_with_chunks, flights.n_chunks, flights.n_chunks_running) == (2, 2, 2)
    launch(flights, Kind.DECODE, frame(8, 5))
    before, concurrent = flights.answered(9, 6), flights.answered(8, 6)
    assert before is not None
    assert concurrent is not None
    assert (before.n_chunks_before, concurrent.n_chunks_before) == (0, -1)
    flights.answered(1, 4)
    flights.answered(1, 8)
    assert (flights.n_with_chunks, flights.n_chunks_running) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_left_whatever_the_order(seed: int) -> None:
    rng, flights = random.Random(seed), Flights()
    waiting: dict[int, list[int]] = {}  # session id -> ends of its frames, oldest first
    landed: list[Flight] = []
    n_launched = 0
    for _ in range(300):
        kind = rng.choice([*Kind])
        ids = rng.sample(range(6), rng.randint(1, 4))
        if rng.random() < 0.4:
            frames = [frame(each, rng.randint(0, 5), rng.randint(1, 3)) for each in ids]
            n_riding = rng.randint(0, len(frames) - 1) if kind is Kind.DECODE else 0
            riders = [] if kind is not Kind.PREFILL else frames
            decode = [] if riders else frames[n_riding:]
            flights.launch(kind, decode, riders or frames[:n_riding], 0, step_ns=10.0, way_ns=20.0)
            n_launched += 1
            for each in frames:
                waiting.setdefault(each.session.session_id, []).append(each.position + len(each.tokens))
        elif rng.random() < 0.9 and waiting.get(ids[0]):
            flight = flights.answered(ids[0], waiting[ids[0]].pop(0))
            landed += [flight] if flight else []
        elif rng.random() < 0.1:
            landed += flights.forget(ids[0])
            waiting.pop(ids[0], None)
        under_way = {id(flight): flight for each in flights._by_key.values() for flight in each}.values()
        counts = collections.Counter(Kind.PREFILL if flight.is_behind else flight.kind for flight in under_way)
        assert [*map(flights.count, Kind)] == [counts[kind] for kind in Kind]
        assert flights.n_with_chunks == sum(flight.has_chunks for flight in under_way)
        assert flights.n_ridden == sum(flight.is_ridden for flight in under_way)
    for session_id in list(waiting):
        landed += flights.forget(session_id)
    assert len(landed) == n_launched == len(set(map(id, landed)))
    assert [*map(flights.count, Kind), flights.n_with_chunks, flights.n_ridden] == [0] * 5
    assert not flights._by_key
    assert not flights._positions
    assert flights._work_ns == pytest.approx(0.0)
