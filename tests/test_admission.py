from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.admission import Admission
from coordinator.generation import GenerationRequest, SamplingParams
from coordinator.session import Session
from wire.errors import ContextLengthError, OverloadedError


def session(session_id: int, n_prompt: int = 1, max_tokens: int = 1) -> Session:
    request = GenerationRequest(str(session_id), (0,) * n_prompt, max_tokens, SamplingParams())
    return Session(session_id, request, lambda _: False)


def test_lanes_then_the_line_then_a_refusal() -> None:
    admission = Admission(n_lanes=2, ctx_tokens=8, waiting_max=1)
    sessions = [session(index) for index in range(4)]
    assert [admission.admit(each) for each in sessions[:3]] == [True, True, False]
    with pytest.raises(OverloadedError, match="all 2 lanes are taken and 1 requests"):
        admission.admit(sessions[3])
    assert admission.leave(sessions[3]) is None
    assert admission.leave(sessions[0]) is sessions[2]
    assert admission.admit(sessions[3]) is False


def test_a_request_fits_its_context_to_the_last_token() -> None:
    admission = Admission(2, 16, 1)
    assert admission.admit(session(1, n_prompt=10, max_tokens=6))
    with pytest.raises(ContextLengthError) as refusal:
        admission.admit(session(2, n_prompt=10, max_tokens=7))
    text = str(refusal.value)
    assert all(
        number in text for number in ("16 tokens", "17 were requested", "10 in the prompt", "7 for the completion")
    )
    assert list(admission.running) == [1]


def test_leaving_the_line_frees_no_lane() -> None:
    admission = Admission(1, 8, 4)
    first, second, third = (session(index) for index in range(3))
    for each in (first, second, third):
        admission.admit(each)
    assert admission.leave(second) is None
    assert admission.leave(first) is third
    assert (admission.leave(first), list(admission.running)) == (None, [2])


def test_fewer_lanes_after_a_recovery_are_not_overbooked() -> None:
    admission = Admission(3, 8, 4)
    sessions = [session(index) for index in range(5)]
    for each in sessions:
        admission.admit(each)
    admission.n_lanes = 2
    assert admission.leave(sessions[0]) is None
    assert admission.leave(sessions[1]) is sessions[3]
    assert len(admission.running) == 2


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60), st.integers(1, 4), st.integers(0, 3))
def test_lanes_and_line_never_overflow_and_nobody_is_lost(
    events: list[tuple[bool, int]], n_lanes: int, waiting_max: int
) -> None:
    admission = Admission(n_lanes, 8, waiting_max)
    inside: list[Session] = []
    running: set[int] = set()
    for index, (enters, which) in enumerate(events):
        if enters:
            each = session(index)
            try:
                if admission.admit(each):
                    running.add(index)
                inside.append(each)
            except OverloadedError:
                assert len(inside) == n_lanes + waiting_max
        elif inside:
            leaving = inside.pop(which % len(inside))
            following = admission.leave(leaving)
            running.discard(leaving.session_id)
            if following is not None:
                running.add(following.session_id)
        assert set(admission.running) == running
        assert len(running) == min(n_lanes, len(inside))
        waiting = [each.session_id for each in admission.waiting]
        assert waiting == [each.session_id for each in inside if each.session_id not in running]
