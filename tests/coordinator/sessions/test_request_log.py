"""Records and ring: bounds hold, every id finds its request, and figures equal the noted events."""

from __future__ import annotations

import array

from relayline.coordinator.sessions.request_log import (
    CHUNKS_MAX,
    EVENTS_MAX,
    Gaps,
    RequestLog,
    RequestRecord,
    SessionRecord,
    StreamRecord,
    condense,
)


def record_of(name: str, *, ended_ns: int = 0) -> RequestRecord:
    record = RequestRecord(name, "POST", "/v1/completions", 1, completion_id=f"cmpl-{name}", ended_ns=ended_ns)
    session = SessionRecord(session_id=len(name), request_id=f"cmpl-{name}-0")
    record.streams.append(StreamRecord(f"cmpl-{name}-0", session, 1, request=record))
    return record


def test_the_ring_forgets_the_oldest() -> None:
    log = RequestLog(requests_max=3)
    records = [record_of(f"r{index}") for index in range(5)]
    for record in records:
        log.add(record)
    assert list(log) == records[2:]
    assert len(log) == 3
    assert log.find("r1") is None
    assert log.find("r2") is records[2]


def test_requests_of_many_choices_leave_no_more_than_so_many() -> None:
    """A body of embeddings has 2,048: of 512 such requests there would be a million, some gigabytes."""
    log, running = RequestLog(streams_max=8), record_of("running")
    log.add(running)
    for index in range(5):
        wide = record_of(f"r{index}", ended_ns=9)
        wide.streams *= 3
        log.add(wide)
    assert [record.request_id for record in log] == ["running", "r2", "r3", "r4"], "what runs can be cancelled"
    log.add(record_of("last"))
    assert sum(len(record.streams) for record in log) == 8
    assert log.find("r2") is None


def test_every_id_of_a_request_finds_it() -> None:
    log = RequestLog()
    first, again = record_of("same"), record_of("same")
    again.completion_id = "cmpl-again"
    log.add(first)
    log.add(again)
    assert log.find("same") is again  # a client may use an id twice: the latest counts
    assert log.find("cmpl-same") is first
    assert log.find("cmpl-again") is again
    assert log.find("cmpl-same-0") is again
    assert log.find("") is None


def test_last_is_the_one_that_ended_last() -> None:
    log = RequestLog()
    assert log.last() is None
    running, early, late = record_of("running"), record_of("early", ended_ns=5), record_of("late", ended_ns=9)
    log.add(running)
    assert log.last() is running
    log.add(late)
    log.add(early)
    assert log.last() is late


def test_owners_name_the_request_that_opened_a_session() -> None:
    log = RequestLog()
    opener, joiner = record_of("opener"), RequestRecord("joiner", "POST", "/v1/completions", 1)
    joiner.streams.append(StreamRecord("cmpl-joiner-0", opener.streams[0].session, 2, is_shared=True))
    log.add(opener)
    log.add(joiner)
    assert log.owners() == {6: "cmpl-opener-0"}


def test_gaps_are_condensed_by_nearest_rank() -> None:
    assert condense(array.array("q", range(1, 101))) == Gaps(100, 50, 51, 96, 100)
    assert condense(array.array("q", [7])) == Gaps(1, 7, 7, 7, 7)
    assert condense(array.array("q")) == Gaps()


def test_a_session_counts_tokens_and_the_times_between_them() -> None:
    session = SessionRecord(n_prompt=4)
    assert [session.token(4 + index, at_ns) for index, at_ns in enumerate((100, 130, 190))] == [None, 30, 60]
    session.end(200)
    assert (session.n_tokens, session.first_token_ns, session.last_token_ns) == (3, 100, 190)
    assert session.gaps == Gaps(2, 45, 60, 60, 60)
    assert len(session.gaps_ns) == 0


def test_chunks_are_answered_by_their_end_and_bounded() -> None:
    session = SessionRecord(n_prompt=40)
    session.prompt.sent(0, 16, 10)
    session.prompt.sent(16, 24, 11)
    session.prompt.answered(16, 20)
    session.prompt.answered(16, 25)  # an echo
    session.prompt.answered(17, 26)  # of no session
    assert [chunk.answered_ns for chunk in session.prompt.chunks] == [20, 0]
    session.token(40, 30)  # the first token answers the last chunk
    assert [chunk.answered_ns for chunk in session.prompt.chunks] == [20, 30]
    for _ in range(CHUNKS_MAX):
        session.prompt.sent(0, 1, 50)
    assert (len(session.prompt.chunks), session.prompt.n_dropped) == (CHUNKS_MAX, 2)
    for at_ns in range(EVENTS_MAX + 5):
        session.event("paused", at_ns)
    assert len(session.events) == EVENTS_MAX


def test_outcomes() -> None:
    session = SessionRecord()
    stream = StreamRecord("r-0", session, 1)
    assert stream.outcome() == ("", "")
    stream.ended_ns = 5
    assert stream.outcome() == ("abort", "cancelled")
    session.finish_reason = "length"
    assert stream.outcome() == ("length", "")
    session.finish_reason, session.error = "", "stage_lost"
    assert stream.outcome() == ("error", "stage_lost")
    stream.finish_reason = "stop"  # a stop string, which only the HTTP side sees
    assert stream.outcome() == ("stop", "")
