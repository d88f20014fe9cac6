"""Where a token's time went: the parts are the whole, whatever the clocks, drafts, grants and gaps in memory."""

from __future__ import annotations

import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayline.coordinator.observe.token_times import (
    BACK,
    COMPUTE,
    DECIDING,
    EARLIER,
    GROUP,
    HANDLE,
    HOP,
    OF_STAGES,
    PARTS,
    PAUSED,
    QUEUE,
    REST,
    TAKING,
    Known,
    TokenTime,
    cut,
    summed,
    token_times,
)
from relayline.coordinator.sessions.request_log import GAPS_MAX, SessionRecord
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry import names

US = 1_000
START_NS = 10**10
N_PROMPT = 3
WAYS = {HOP: 100 * US, QUEUE: 20 * US, HANDLE: 10 * US, COMPUTE: 200 * US}  # at every stage
BACK_NS, TURN_NS, DECIDING_NS = 300 * US, 30 * US, 5 * US


class Circle:
    """A pipeline of two stages, each token of which takes the same time everywhere."""

    def __init__(self, skews_ns: tuple[int, ...] = (0, 0), own_error_ns: tuple[int, ...] = (0, 0)) -> None:
        """skews_ns: by how much the stages' clocks are ahead. own_error_ns: the errors of their times."""
        self.skews_ns, self.errors_ns = skews_ns, own_error_ns
        self.answers = [pb.BatchesResponse(stage_index=0), pb.BatchesResponse(stage_index=1)]
        self.arrivals_ns: list[int] = []
        self.sessions: dict[int, SessionRecord] = {}

    def open(self, session_id: int, at_ns: int = 0) -> SessionRecord:
        session = self.sessions[session_id] = SessionRecord(session_id, n_prompt=N_PROMPT, started_ns=at_ns)
        return session

    def send(self, sessions: list[SessionRecord], row: int, sent_ns: int, *, is_granted: bool = False) -> int:
        """Rows of these leave together; returns when the last stage had sampled them."""
        is_prefill, at_ns, from_ns = row < N_PROMPT, sent_ns, 0 if is_granted else sent_ns
        for stage, answer in enumerate(self.answers):
            arrived_ns = at_ns + WAYS[HOP]
            taken_ns = arrived_ns + WAYS[QUEUE]
            started_ns = taken_ns + WAYS[HANDLE] // 2
            member = pb.BatchMember(position=0 if is_prefill else row, n_rows=row + 1 if is_prefill else 1,
                                    is_prefill=is_prefill, wait_ns=WAYS[QUEUE], sent_ns=from_ns)  # fmt: skip
            error_ns = self.errors_ns[stage]
            batch = pb.BatchRecord(step=len(answer.batches) + 1, start_ns=started_ns + error_ns,
                                   taken_ns=taken_ns + error_ns, decode_ns=WAYS[COMPUTE],
                                   encode_ns=WAYS[HANDLE] // 2)  # fmt: skip
            for session in sessions:
                member.session_id = session.session_id
                batch.members.append(member)
            answer.batches.append(batch)
            at_ns = started_ns + WAYS[COMPUTE] + WAYS[HANDLE] // 2
            from_ns = at_ns + self.skews_ns[stage]
        return at_ns

    def tell(self, sessions: list[SessionRecord], row: int, sampled_ns: int) -> int:
        """The answer comes; returns when its tokens were taken."""
        self.arrivals_ns.append(sampled_ns + BACK_NS)
        told_ns = self.arrivals_ns[-1] + TURN_NS
        for session in sessions:
            session.token(row + 1, told_ns)
        return told_ns

    def times(self, session: SessionRecord) -> list[TokenTime]:
        return token_times(session, self.answers, Known(self.sessions, self.arrivals_ns))


def lived(circle: Circle, n_tokens: int = 4) -> SessionRecord:
    """A session whose prompt left 1 ms after it had its lane, and each row DECIDING_NS after the token before it."""
    session, at_ns = circle.open(1, START_NS), START_NS + 1_000 * US
    for index in range(n_tokens):
        row = N_PROMPT - 1 + index
        at_ns = circle.tell([session], row, circle.send([session], row, at_ns)) + DECIDING_NS
    session.end(at_ns)
    return session


def share(time: TokenTime, part: str) -> int | list[int]:
    if part in OF_STAGES:
        return time.parts.stage_ns.get(part, [0] * time.parts.n_stages)
    return time.parts.whole_ns.get(part, 0)


def total(time: TokenTime) -> int:
    found = [share(time, part) for part in PARTS]
    return sum(sum(each) if isinstance(each, list) else each for each in found)


def test_every_part_of_a_token_is_named() -> None:
    circle = Circle()
    first, second, *_ = circle.times(lived(circle))
    assert [first.index, second.index, first.position, second.position] == [0, 1, 2, 3]
    assert share(first, EARLIER) == 1_000 * US
    assert (share(second, EARLIER), share(second, GROUP), share(second, PAUSED)) == (0, 0, 0)
    for time in (first, second):
        assert {part: share(time, part) for part in OF_STAGES} == {part: [ns, ns] for part, ns in WAYS.items()}
        assert (share(time, BACK), share(time, REST)) == (BACK_NS, 0)
        assert total(time) == time.parts.took_ns
    assert (share(first, DECIDING), share(first, TAKING)) == (0, TURN_NS)
    assert (share(second, DECIDING), share(second, TAKING)) == (DECIDING_NS, TURN_NS)
    assert [each.batch.step for each in second.chain if each is not None] == [2, 2]


def test_the_tokens_are_the_request() -> None:
    circle = Circle()
    session = lived(circle, 9)
    times = circle.times(session)
    assert sum(time.parts.took_ns for time in times[1:]) == session.last_token_ns - session.first_token_ns
    sums = summed(times[1:], session.last_token_ns - session.first_token_ns, 2)
    assert sums.stage_ns[COMPUTE] == [8 * WAYS[COMPUTE]] * 2
    assert sums.whole_ns.get(REST, 0) == 0


def test_a_running_request_is_accounted_for_as_far_as_it_got() -> None:
    circle = Circle()
    session = lived(circle)
    running, other = Circle(), Circle()
    unended, at_ns = running.open(1, START_NS), START_NS + 1_000 * US
    for row in range(2, 6):
        at_ns = running.tell([unended], row, running.send([unended], row, at_ns)) + DECIDING_NS
    assert [each.parts for each in running.times(unended)] == [each.parts for each in circle.times(session)]
    assert other.times(other.open(2)) == []


def test_a_token_that_waits_for_others_says_so() -> None:
    circle = Circle()
    one, two = circle.open(1), circle.open(2)
    told_ns = circle.tell([one], 2, circle.send([one], 2, 0))
    late_ns = circle.tell([two], 2, circle.send([two], 2, 2_000 * US))
    assert late_ns > told_ns
    circle.tell([one, two], 3, circle.send([one, two], 3, late_ns + DECIDING_NS))
    assert share(circle.times(one)[1], GROUP) == late_ns - told_ns
    assert share(circle.times(one)[1], DECIDING) == DECIDING_NS
    assert share(circle.times(two)[1], GROUP) == 0


def test_rows_under_a_grant_wait_for_no_coordinator() -> None:
    circle, session = Circle(), SessionRecord()
    session = circle.open(1)
    circle.tell([session], 2, circle.send([session], 2, 0))
    sampled_ns = circle.send([session], 3, session.last_token_ns + DECIDING_NS)
    rows = [(3, sampled_ns)]
    for row in (4, 5):
        rows.append((row, circle.send([session], row, rows[-1][1], is_granted=True)))
    for row, at_ns in rows:
        circle.tell([session], row, at_ns)
    session.end(session.last_token_ns)
    _, second, third, last = circle.times(session)
    assert (share(second, BACK), share(third, BACK), share(last, BACK)) == (0, 0, BACK_NS)
    assert [share(time, DECIDING) for time in (second, third, last)] == [DECIDING_NS, 0, 0]
    assert [share(time, TAKING) for time in (second, third, last)] == [0, 0, TURN_NS]
    for time in (third, last):
        assert {part: share(time, part) for part in OF_STAGES} == {part: [ns, ns] for part, ns in WAYS.items()}
    took_ns = sum(time.parts.took_ns for time in (second, third, last))
    assert took_ns == session.last_token_ns - session.first_token_ns


def test_a_stage_that_has_forgotten_leaves_a_rest_and_nothing_is_counted_for_another() -> None:
    circle = Circle()
    session = lived(circle)
    del circle.answers[0].batches[:]
    (_, second, *_) = circle.times(session)
    assert share(second, REST) == DECIDING_NS + sum(WAYS.values()) + WAYS[HOP]
    assert share(second, HOP) == [0, 0]
    assert share(second, COMPUTE) == [0, WAYS[COMPUTE]]
    silent = token_times(session, [None, None], Known())
    assert all(share(time, REST) == time.parts.took_ns == total(time) for time in silent)
    sums = summed([], 500, 2)
    assert (sums.took_ns, sums.whole_ns) == (500, {REST: 500})


def test_a_pause_is_named() -> None:
    circle = Circle()
    session = circle.open(1)
    told_ns = circle.tell([session], 2, circle.send([session], 2, 0))
    session.event(names.EVENT_PAUSED, told_ns + 10 * US, "stage 1 is gone")
    circle.tell([session], 3, circle.send([session], 3, told_ns + 5_000 * US))
    assert share(circle.times(session)[1], PAUSED) == 5_000 * US


def test_a_row_that_was_computed_in_vain_before_does_not_count() -> None:
    circle = Circle()
    session = circle.open(1)
    told_ns = circle.tell([session], 2, circle.send([session], 2, 0))
    circle.send([session], 3, told_ns - 600 * US, is_granted=True)
    circle.tell([session], 3, circle.send([session], 3, told_ns + 20_000 * US))
    time = circle.times(session)[1]
    assert [each.batch.step for each in time.chain if each is not None] == [3, 3]
    assert share(time, DECIDING) == 20_000 * US


def test_guesses_count_from_the_token_before_them() -> None:
    """A frame of three rows, two of which were guessed: all of its tokens come at once."""
    circle = Circle()
    session = circle.open(1)
    told_ns = circle.tell([session], 2, circle.send([session], 2, 0))
    sampled_ns = circle.send([session], 3, told_ns)
    for answer in circle.answers:
        answer.batches[-1].members[0].n_rows = 3
    told_ns = circle.tell([session], 3, sampled_ns)
    for position in (5, 6):
        session.token(position, told_ns)
    _, *times = circle.times(session)
    assert [time.parts.took_ns for time in times][1:] == [0, 0]
    assert total(times[0]) == session.last_token_ns - session.first_token_ns


def test_an_older_stage_makes_a_rest_of_what_it_does_not_say() -> None:
    circle = Circle()
    session = lived(circle)
    for answer in circle.answers:
        for batch in answer.batches:
            batch.taken_ns = batch.members[0].sent_ns = 0
    (_, second, *_) = circle.times(session)
    assert share(second, REST) == DECIDING_NS + WAYS[HOP] + WAYS[HANDLE] // 2
    assert total(second) == second.parts.took_ns


def test_only_the_latest_tokens_of_a_long_answer_are_known() -> None:
    circle = Circle()
    session = lived(circle, GAPS_MAX + 5)
    times = circle.times(session)
    assert (times[0].index, times[-1].index, len(times)) == (5, GAPS_MAX + 4, GAPS_MAX)
    assert all(share(time, REST) == 0 for time in times)
    took_ns = session.last_token_ns - session.first_token_ns
    sums = summed(times, took_ns, 2)
    assert sums.took_ns == took_ns
    assert sums.whole_ns[REST] == took_ns - sum(time.parts.took_ns for time in times)


@pytest.mark.parametrize("errors_ns", [(40 * US, -30 * US), (-90_000 * US, 70_000 * US)])
def test_an_error_of_the_clocks_adds_no_time(errors_ns: tuple[int, int]) -> None:
    circle = Circle(skews_ns=(5 * 10**9, -3 * 10**9), own_error_ns=errors_ns)
    session = lived(circle, 6)
    times = circle.times(session)
    assert all(total(time) == time.parts.took_ns for time in times)
    assert sum(time.parts.took_ns for time in times[1:]) == session.last_token_ns - session.first_token_ns
    if abs(errors_ns[0]) < WAYS[HOP]:
        assert share(times[1], COMPUTE) == [WAYS[COMPUTE]] * 2
        assert share(times[1], HOP) == [140 * US, 30 * US]
        assert share(times[1], BACK) == BACK_NS + 30 * US


@given(
    st.lists(st.tuples(st.sampled_from(PARTS), st.integers(0, 1), st.integers(-50, 200)), max_size=12),
    st.integers(0, 100),
    st.integers(0, 100),
)
def test_a_time_is_shared_out_whole(marks: list[tuple[str, int, int]], start_ns: int, took_ns: int) -> None:
    parts = cut(start_ns, start_ns + took_ns, marks, 2)
    whole = [*parts.whole_ns.values(), *(ns for of_stages in parts.stage_ns.values() for ns in of_stages)]
    assert all(ns >= 0 for ns in whole)
    assert sum(whole) == parts.took_ns == took_ns


def test_the_gaps_of_an_ended_session_are_bounded() -> None:
    session = SessionRecord(gaps_ns=array.array("q", range(GAPS_MAX + 9)))
    session.end(1)
    assert list(session.gaps.latest_ns) == list(range(9, GAPS_MAX + 9))
