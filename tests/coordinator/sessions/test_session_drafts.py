"""Guesses of one session: which are sent, which are dropped, and that they never change the answer."""

from __future__ import annotations

import pytest

from relayline.coordinator.sessions.drafts import Acceptance
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import OutFrame, Session
from relayline.wire.envelopes.frames import Flag
from tests.support.sessions import END_TOKEN, SAMPLE, chunks_of, new_session, prefilled, shape


def drafting(prediction: tuple[int, ...], max_tokens: int = 20) -> Session:
    """A session that has its first token, 50, and expects these after it."""
    request = GenerationRequest("r", (100, 101, 102), max_tokens, SamplingParams(), prediction=(50, *prediction))
    session = Session(7, request, lambda token: token == END_TOKEN, acceptance=Acceptance())
    prefilled(session)
    return session


def extended(session: Session, frames: list[OutFrame], n_tokens: int) -> OutFrame:
    (frame,) = frames
    session.extend(frame, n_tokens)
    return frame


GUESS = SAMPLE | Flag.DRAFTED


def test_guesses_travel_behind_the_row_and_right_ones_need_no_frame() -> None:
    session = drafting((51, 52, 53, 54))
    frame = extended(session, session.sampled(3, 50)[1], 2)
    assert shape([frame]) == [(3, (50, 51, 52), GUESS)]
    assert frame.n_drafted == 2
    for position, token in ((4, 51), (5, 52)):
        event, frames = session.sampled(position, token)
        assert event is not None
        assert (frames, event.is_drafted, event.is_predicted) == ([], True, True)
    event, frames = session.sampled(6, 53)
    assert event is not None
    assert (shape(frames), event.is_drafted, event.is_predicted) == ([(6, (53,), SAMPLE)], False, True)


def test_behind_a_wrong_guess_the_right_row_leaves() -> None:
    session = drafting((51, 52, 53, 54))
    extended(session, session.sampled(3, 50)[1], 3)
    assert session.sampled(4, 51)[1] == []
    event, frames = session.sampled(5, 99)
    assert event is not None
    assert (shape(frames), event.is_drafted) == ([(5, (99,), SAMPLE)], False)
    assert not session.ahead
    assert session.sampled(6, 53)[0] is not None, "guesses of before count no more"


def test_guesses_follow_behind_those_that_are_under_way() -> None:
    session = drafting((51, 52, 53, 54, 55))
    extended(session, session.sampled(3, 50)[1], 1)
    following = session.guess(2)
    assert following is not None
    assert shape([following]) == [(5, (52, 53), GUESS | Flag.GUESSED)]
    assert following.n_drafted == 2
    assert session.chances(9) == pytest.approx(session.guesses.chances([0] * 3, 2))  # type: ignore[union-attr]
    session.sampled(4, 51)
    last = session.guess(9)
    assert last is not None
    assert shape([last]) == [(7, (54, 55), GUESS | Flag.GUESSED)]
    assert session.guess(1) is None
    assert session.chances(1) == []


def test_no_guess_ends_an_answer_or_goes_beyond_it() -> None:
    session = drafting((51, END_TOKEN, 53))
    frame = extended(session, session.sampled(3, 50)[1], 9)
    assert frame.tokens == (50, 51)
    session = drafting((51, 52, 53, 54), max_tokens=3)
    frame = extended(session, session.sampled(3, 50)[1], 9)
    assert frame.tokens == (50, 51), "this row's token is the last"
    assert session.guess(1) is None
    assert session.sampled(4, 51)[1] == []
    event, frames = session.sampled(5, 52)
    assert event is not None
    assert (event.finish_reason, shape(frames)) == ("length", [(0, (), Flag.CLOSE)])
    assert not session.ahead


def test_a_restarted_session_has_no_drafts_under_way() -> None:
    session = drafting((51, 52, 53, 54, 55))
    extended(session, session.sampled(3, 50)[1], 4)
    session.sampled(4, 51)
    session.give_way()
    session.start()
    assert not session.ahead
    assert (session.chances(3), session.guess(3)) == ([], None), "while its history is read"
    chunks_of(session, 64)
    frame = extended(session, session.sampled(5, 52)[1], 2)
    assert frame.tokens == (52, 53, 54), "the statistics of its text stay"


def test_behind_a_replay_within_an_epoch_nothing_is_guessed() -> None:
    """Answers from before it count too, and might belong to other guesses than those now under way."""
    session = drafting((51, 52, 53, 54, 55))
    extended(session, session.sampled(3, 50)[1], 3)
    session.start()
    chunks_of(session, 64)
    (waiting,) = session.sampled(4, 51)[1]
    later = session.sampled(5, 52)[1]
    assert extended(session, [waiting], 2).tokens == (51,)
    assert extended(session, later, 2).tokens == (52,)
    assert (session.chances(3), session.guess(3)) == ([], None)
    session.give_way()
    session.start()  # the next epoch
    chunks_of(session, 64)
    assert extended(session, session.sampled(6, 53)[1], 2).tokens == (53, 54, 55)


def test_of_an_answer_that_waits_behind_another_nothing_is_guessed() -> None:
    session = drafting((51, 52, 53, 54, 55))
    (waiting,) = session.sampled(3, 50)[1]
    later = session.sampled(4, 51)[1]
    assert extended(session, [waiting], 2).tokens == (50,), "its successor has its own frame"
    assert extended(session, later, 2).tokens == (51, 52, 53)


def test_predicted_tokens_are_counted_without_drafts_too() -> None:
    session = drafting((51, 52, 53))
    session.acceptance = None
    events = [session.sampled(3 + at, token)[0] for at, token in enumerate((50, 51, 99, 53))]
    assert [event.is_predicted for event in events if event] == [True, True, False, True]
    assert (session.chances(3), session.guess(3)) == ([], None)


def test_a_session_without_acceptance_drafts_nothing() -> None:
    session = new_session(3, 9)
    prefilled(session)
    frame = extended(session, session.sampled(3, 100)[1], 5)
    assert (frame.tokens, frame.flags, session.guess(3), session.chances(3)) == ((100,), SAMPLE, None, [])
