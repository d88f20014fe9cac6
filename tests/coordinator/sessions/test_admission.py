from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayline.coordinator.sessions.admission import Admission
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import Session
from relayline.wire.common.errors import ContextLengthError, OverloadedError


def session(session_id: int, n_prompt: int = 1, max_tokens: int = 1) -> Session:
    request = GenerationRequest(str(session_id), (0,) * n_prompt, max_tokens, SamplingParams())
    return Session(session_id, request, lambda _: False)


def test_lanes_then_the_line_then_a_refusal() -> None:
    admission = Admission(n_lanes=2, ctx_tokens=8, waiting_max=1)
    sessions = [session(index) for index in range(4)]
    assert [admission.admit(each) for each in sessions[:3]] == [sessions[:1], sessions[1:2], []]
    with pytest.raises(OverloadedError, match="all 2 lanes are taken and 1 request already waits"):
        admission.admit(sessions[3])
    assert admission.leave(sessions[3]) == []
    assert admission.leave(sessions[0]) == [sessions[2]]
    assert admission.admit(sessions[3]) == []


def test_a_request_fits_its_context_to_the_last_token() -> None:
    admission = Admission(2, 16, 1)
    assert admission.admit(session(1, n_prompt=10, max_tokens=6))
    with pytest.raises(ContextLengthError) as refusal:
        admission.admit(session(2, n_prompt=10, max_tokens=7))
    text = str(refusal.value)
    assert "maximum context length is 16 tokens. However, you requested 17 tokens (10 in the prompt, 7 in" in text
    assert list(admission.running) == [1]


def test_leaving_the_line_frees_no_lane() -> None:
    admission = Admission(1, 8, 4)
    first, second, third = (session(index) for index in range(3))
    for each in (first, second, third):
        admission.admit(each)
    assert admission.leave(second) == []
    assert admission.leave(first) == [third]
    assert (admission.leave(first), list(admission.running)) == ([], [2])


def filled(n_lanes: int, n_sessions: int, waiting_max: int) -> tuple[Admission, list[Session]]:
    admission, sessions = Admission(n_lanes, 8, waiting_max), [session(index) for index in range(n_sessions)]
    for each in sessions:
        admission.admit(each)
    return admission, sessions


def test_with_fewer_lanes_the_youngest_wait_again_before_all_others() -> None:
    admission, sessions = filled(3, 5, waiting_max=2)
    assert admission.resize(1, 8) == sessions[1:3]
    assert list(admission.running.values()) == sessions[:1]
    assert list(admission.waiting) == sessions[1:], "none is refused, although the line exceeds its bound"
    with pytest.raises(OverloadedError, match="the one lane is taken and 4 requests already wait"):
        admission.admit(session(5))
    assert admission.leave(sessions[1]) == [], "it had no lane any more"
    assert admission.leave(sessions[0]) == [sessions[2]]


def test_with_more_lanes_waiting_sessions_get_them_before_new_ones() -> None:
    admission, sessions = filled(1, 4, waiting_max=4)
    assert admission.resize(3, 16) == []
    assert list(admission.running.values()) == sessions[:3]
    assert admission.admit(session(4, n_prompt=10)) == []
    assert admission.leave(sessions[0]) == [sessions[3]]


def test_sessions_without_a_lane_wait_first_and_limit_how_many_run() -> None:
    admission, sessions = filled(3, 4, waiting_max=4)
    assert [admission.put_back(sessions[index]) for index in (1, 0)] == [True, True]
    assert list(admission.running.values()) == sessions[2:3]
    assert list(admission.waiting) == [sessions[index] for index in (0, 1, 3)]
    assert admission.admit(session(4)) == [], "a lane may be free, but others came first"
    assert admission.leave(sessions[1]) == []
    assert [each.session_id for each in admission.leave(sessions[2])] == [0]
    assert [each.session_id for each in admission.try_lanes()] == [3]
    assert admission.is_short
    assert [each.session_id for each in admission.try_lanes()] == [4]
    assert not admission.is_short


def test_a_shortage_is_forgotten_where_nobody_waits() -> None:
    admission, sessions = filled(2, 1, waiting_max=4)
    assert admission.put_back(sessions[0])
    assert admission.leave(sessions[0]) == []
    assert admission.is_short
    assert admission.try_lanes() == []
    assert not admission.is_short
    new = session(4)
    assert admission.admit(new) == [new]


def test_a_session_gets_the_lowest_free_lane_and_keeps_it() -> None:
    admission, sessions = filled(3, 5, waiting_max=4)
    assert [each.lane for each in sessions[:3]] == [0, 1, 2]
    admission.leave(sessions[1])
    assert [each.lane for each in sessions[:4]] == [0, 1, 2, 1], "the next gets the one that is free again"
    admission.resize(2, 8)
    assert sorted(each.lane for each in admission.running.values()) == [0, 1], "and a number that there still is"


EVENTS = st.lists(st.tuples(st.sampled_from(["enter", "leave", "resize"]), st.integers(0, 9)), max_size=60)


@given(EVENTS, st.integers(1, 4), st.integers(0, 3))
def test_lanes_and_line_never_overflow_and_nobody_is_lost(
    events: list[tuple[str, int]], n_lanes: int, waiting_max: int
) -> None:
    admission = Admission(n_lanes, 8, waiting_max)
    inside: list[Session] = []
    running: set[int] = set()
    for index, (kind, which) in enumerate(events):
        if kind == "enter":
            each = session(index)
            try:
                if admission.admit(each):
                    running.add(index)
                inside.append(each)
            except OverloadedError:
                assert len(inside) >= n_lanes + waiting_max
        elif kind == "resize":
            n_lanes = 1 + which % 4
            losing = {each.session_id for each in admission.resize(n_lanes, 8)}
            assert losing == running - {each.session_id for each in inside[:n_lanes]}
            running = {each.session_id for each in inside[:n_lanes]}
        elif inside:
            leaving = inside.pop(which % len(inside))
            running.discard(leaving.session_id)
            running |= {each.session_id for each in admission.leave(leaving)}
        assert set(admission.running) == running
        assert len(running) == min(n_lanes, len(inside))
        lanes = {each.lane for each in admission.running.values()}
        assert len(lanes) == len(running)
        assert all(0 <= lane < n_lanes for lane in lanes)
        waiting = [each.session_id for each in admission.waiting]
        assert waiting == [each.session_id for each in inside if each.session_id not in running]
