"""One request's life: the pure session, without drafts."""

from __future__ import annotations

import pytest

from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams, TokenEvent
from relayline.coordinator.sessions.session import REPLAYS_MAX, Session, State
from relayline.wire.common.errors import (
    NumericError,
    PositionGapError,
)
from relayline.wire.envelopes.frames import Flag
from tests.support.sessions import END_TOKEN, PREFILL, SAMPLE, chunks_of, new_session, prefilled, shape


@pytest.mark.parametrize(
    ("n_prompt", "chunks"),
    [(1, [(0, 1)]), (4, [(0, 4)]), (5, [(0, 4), (4, 1)]), (9, [(0, 4), (4, 4), (8, 1)])],
)
def test_the_prompt_leaves_in_chunks_and_only_the_last_is_sampled(n_prompt: int, chunks: list[tuple[int, int]]) -> None:
    session = new_session(n_prompt, 2)
    assert shape(session.start()) == [(0, (), Flag.OPEN)]
    assert session.prefill_left == n_prompt
    rest = chunks_of(session, 4)
    assert session.prefill_left == 0
    assert [(frame.position, len(frame.tokens)) for frame in rest] == chunks
    assert sum((frame.tokens for frame in rest), ()) == session.request.prompt_tokens
    assert [bool(frame.flags & SAMPLE) for frame in rest] == [False] * (len(chunks) - 1) + [True]
    assert all(frame.flags & PREFILL for frame in rest)


def test_a_token_goes_to_the_client_and_back_into_the_pipeline() -> None:
    session = new_session(3, 3)
    prefilled(session)
    event, frames = session.sampled(3, 50, -0.5, ((50, -0.5),))
    assert event == TokenEvent(50, -0.5, ((50, -0.5),))
    assert shape(frames) == [(3, (50,), SAMPLE)]
    assert (session.state, session.n_generated) == (State.DECODE, 1)


@pytest.mark.parametrize(
    ("tokens", "ignore_eos", "reason", "is_end_token"),
    [
        ([50, 51], False, "length", False),
        ([50, END_TOKEN], False, "stop", True),
        ([END_TOKEN], False, "stop", True),
        ([END_TOKEN, END_TOKEN], True, "length", False),
    ],
)
def test_the_last_token_says_why_and_closes(
    tokens: list[int], ignore_eos: bool, reason: str, is_end_token: bool
) -> None:
    session = new_session(2, 2, ignore_eos=ignore_eos)
    session.start()
    events = [session.sampled(2 + index, token) for index, token in enumerate(tokens)]
    assert [event.finish_reason for event, _ in events if event] == [None] * (len(tokens) - 1) + [reason]
    last, frames = events[-1]
    assert last is not None
    assert last.is_end_token == is_end_token
    assert shape(frames) == [(0, (), Flag.CLOSE)]
    assert session.sampled(2 + len(tokens), 9) == (None, [])


@pytest.mark.parametrize("position", [0, 2, 3, 5])
def test_an_echo_changes_nothing(position: int) -> None:
    session = new_session(3, 5)
    session.start()
    session.sampled(3, 50)
    assert session.sampled(position, 51) == (None, [])
    assert session.history[3:] == [50]


def test_a_waiting_session_takes_no_token_and_needs_no_close() -> None:
    session = new_session(3, 5)
    assert session.sampled(3, 50) == (None, [])
    assert session.cancel() == []
    assert session.start() == []
    assert session.state is State.DONE


def test_a_session_that_gives_way_loses_nothing_but_its_lane() -> None:
    session = new_session(3, 5)
    assert session.give_way() == [], "it has no lane yet"
    prefilled(session)
    session.sampled(3, 50)
    assert shape(session.give_way()) == [(0, (), Flag.CLOSE)]
    assert session.sampled(4, 51) == (None, []), "said before it gave way"
    assert (session.give_way(), session.next_chunk(64), session.state) == ([], None, State.WAITING)
    assert shape(session.start()) == [(0, (), Flag.OPEN)]
    (chunk,) = chunks_of(session, 64)
    assert (chunk.position, chunk.tokens) == (0, (100, 101, 102, 50))
    assert shape(session.give_way()) == [(0, (), Flag.CLOSE)]
    assert (session.cancel(), session.give_way(), session.state) == ([], [], State.DONE)


def test_a_new_epoch_replays_prompt_and_tokens_as_prefill() -> None:
    session = new_session(3, 5)
    prefilled(session)
    session.sampled(3, 50)
    session.sampled(4, 51)
    assert session.prefill_left == 0
    assert shape(session.start()) == [(0, (), Flag.OPEN)]
    frames = chunks_of(session, 2)
    assert sum((frame.tokens for frame in frames), ()) == (100, 101, 102, 50, 51)
    assert [frame.position for frame in frames] == [0, 2, 4]
    assert frames[-1].flags == PREFILL | SAMPLE
    event, _ = session.sampled(5, 52)
    assert event is not None


def test_a_replay_is_told_from_a_first_prefill_and_from_one_within_an_epoch() -> None:
    session = new_session(3, 5)
    prefilled(session)
    assert not session.is_replay
    session.sampled(3, 50)
    assert not session.is_replay, "it decodes"
    session.start()
    assert session.is_replay
    session.replays = 1
    assert not session.is_replay


def test_cancel_closes_once() -> None:
    session = new_session(3, 5)
    session.start()
    assert shape(session.cancel()) == [(0, (), Flag.CLOSE)]
    assert session.cancel() == []


def test_an_answer_from_before_a_replay_counts_once_and_the_replay_goes_on() -> None:
    session = new_session(3, 5)
    prefilled(session)
    session.sampled(3, 50)
    session.start()
    assert session.next_chunk(2) is not None
    event, frames = session.sampled(4, 51)  # was on its way when the replay began
    assert event is not None
    assert frames == []
    (rest,) = chunks_of(session, 64)
    assert (rest.position, rest.tokens) == (2, (102, 50, 51))
    assert rest.flags & SAMPLE


def test_a_lane_that_a_stage_gave_away_costs_no_replay() -> None:
    """Streams over a bad link to stages that others use as well may meet that more often than REPLAYS_MAX."""
    session = Session(1, GenerationRequest("r", tuple(range(9)), 50, SamplingParams()), lambda _: False)
    gap = PositionGapError("it cannot be trimmed to 5, it holds 0")
    for _ in range(2 * REPLAYS_MAX):
        session.start(5)
        assert session.may_replay(NumericError("in what was left"), is_retryable=False)
        session.count_replay()
    for n_replays in range(REPLAYS_MAX):
        session.start()
        assert session.replays == n_replays
        assert session.may_replay(gap, is_retryable=True)
        session.count_replay()
    assert not session.may_replay(gap, is_retryable=True)
