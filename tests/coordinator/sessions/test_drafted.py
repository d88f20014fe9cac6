"""Which sessions a draft model hears of, and what; its guesses reach them, and its death costs nothing else."""

from __future__ import annotations

import dataclasses

import numpy as np

from relayline.coordinator.drafting.messages import Begin, End, Guessed, Took
from relayline.coordinator.sessions.drafted import Drafted
from relayline.coordinator.sessions.generation import ROW_TOKEN_MIN, GenerationRequest, ImageRows, SamplingParams
from relayline.coordinator.sessions.session import Session, take_guesses
from relayline.wire.common.bounds import DRAFT_STREAMS_MAX


def begun(drafted: Drafted, number: int = 1) -> Session:
    request = GenerationRequest(str(number), (1, 2, 3), 100, SamplingParams())
    session = Session(number, request, lambda _: False, acceptance=drafted.acceptance)
    session.start()
    drafted.began(session)
    session.next_chunk(64)
    return session


def take(drafted: Drafted, session: Session, token: int, now_ns: int = 0) -> None:
    position = len(session.history)
    session.sampled(position, token)
    drafted.took(session, position, token, now_ns)


def news(drafted: Drafted) -> list[object]:
    found, drafted.news = drafted.news, []
    return list(found)


def guess(session: Session, tokens: list[int]) -> Guessed:
    return Guessed(session.session_id, len(session.history), tokens, [0.9] * len(tokens), follows=True)


def test_the_model_hears_each_text_once_and_then_its_tokens() -> None:
    drafted = Drafted(drafts=True, model_tokens=100, n_vocab=90)
    session = begun(drafted)
    drafted.began(session)  # again, after a loss
    take(drafted, session, 50)
    take(drafted, session, 51)
    assert news(drafted) == [Begin(1, [1, 2, 3]), Took(1, 3, [50, 51])]
    take(drafted, session, 52)
    drafted.ended(1)
    drafted.ended(1)
    assert news(drafted) == [Took(1, 5, [52]), End(1)]


def test_guesses_reach_their_session_and_their_pace_is_learned() -> None:
    drafted = Drafted(drafts=True, model_tokens=100, n_vocab=90)
    session = begun(drafted)
    assert not drafted.guessed([guess(session, [50])], 0), "its first token has not come"
    take(drafted, session, 50, now_ns=1_000)
    assert drafted.guessed([guess(session, [60])], 3_000)
    assert drafted.guessed([guess(session, [60, 61])], 6_000)
    assert session.chances(2)
    assert session.guesses is not None
    assert session.guesses.tokens((), 4) == [60, 61]
    assert not drafted.guessed([Guessed(99, 4, [1], [0.9], follows=True)], 0)
    assert drafted.figures() == {"streams": 1, "is_lost": False, "guess_ns": 2_050, "right_share": 0.6}
    take(drafted, session, 60)
    assert session.guesses.tokens((), 4) == [61]


def test_a_death_is_forgotten_once_another_has_read_all_texts() -> None:
    drafted = Drafted(drafts=True, model_tokens=100, n_vocab=90)
    session, ended = begun(drafted), begun(drafted, 2)
    take(drafted, session, 50)
    drafted.guessed([guess(session, [60])], 0)
    news(drafted)
    drafted.lost()
    assert session.chances(2) == []
    take(drafted, session, 51)
    drafted.ended(ended.session_id)
    later = begun(drafted, 3)
    assert news(drafted) == []
    drafted.back()
    assert news(drafted) == [Begin(1, [1, 2, 3, 50, 51]), Begin(later.session_id, [1, 2, 3])]


def test_a_stream_that_heard_prediction_layers_hears_the_model_alone_once_it_has_one() -> None:
    drafted = Drafted(drafts=True, model_tokens=100, n_vocab=90)
    request = GenerationRequest("1", (1, 2, 3), 100, SamplingParams())
    session = Session(1, request, lambda _: False, acceptance=drafted.acceptance)
    session.start()
    session.next_chunk(64)
    session.sampled(3, 50)
    take_guesses(session, 4, [60], [0.9], drafted.predicted_facts, 0)
    drafted.began(session)  # as after a replay
    drafted.guessed([guess(session, [80])], 0)
    assert session.guesses is not None
    assert session.guesses.tokens((), 2) == [60], "the model's come with its first token"
    take(drafted, session, 60)
    drafted.guessed([guess(session, [70])], 0)
    take_guesses(session, 5, [80], [0.9], drafted.predicted_facts, 0)
    assert session.guesses.tokens((), 2) == [70]


def test_a_text_that_is_too_long_for_the_model_is_not_told() -> None:
    drafted = Drafted(drafts=True, model_tokens=3, n_vocab=90)
    begun(drafted)
    assert news(drafted) == []
    assert (drafted.figures() or {})["streams"] == 0
    longer = Drafted(drafts=True, model_tokens=5, n_vocab=90)
    session = begun(longer)
    take(longer, session, 50)
    take(longer, session, 51)
    longer.lost()
    longer.back()
    assert news(longer) == []


def test_one_that_waits_takes_the_place_of_one_that_ends() -> None:
    drafted = Drafted(drafts=True, model_tokens=100, n_vocab=90)
    sessions = [begun(drafted, 1 + number) for number in range(DRAFT_STREAMS_MAX + 3)]
    news(drafted)
    *_, gone, next_one, last = sessions
    take(drafted, next_one, 50)
    drafted.ended(gone.session_id)
    drafted.ended(1)
    assert news(drafted) == [End(1), Begin(next_one.session_id, [1, 2, 3, 50])]
    take(drafted, next_one, 51)
    assert drafted.guessed([guess(next_one, [60])], 0)
    assert news(drafted) == [Took(next_one.session_id, 4, [51])]
    for _ in range(100):
        take(drafted, last, 52)
    drafted.ended(2)
    assert news(drafted) == [End(2)], "the last one has become too long meanwhile"


def test_some_sessions_have_none() -> None:
    drafted = Drafted(drafts=True, model_tokens=100, n_vocab=90)
    rows = ImageRows(0, np.zeros((2, 4), np.float32))
    request = GenerationRequest("i", (ROW_TOKEN_MIN, ROW_TOKEN_MIN + 1, 3), 9, SamplingParams(), images=(rows,))
    drafted.began(Session(99, request, lambda _: False, acceptance=drafted.acceptance))
    drafted.began(Session(98, dataclasses.replace(request, images=()), lambda _: False, acceptance=None))
    assert news(drafted) == []
    for number in range(DRAFT_STREAMS_MAX + 1):
        begun(drafted, 1 + number)
    assert len(news(drafted)) == DRAFT_STREAMS_MAX
    for none in (Drafted(drafts=False, model_tokens=100, n_vocab=90), Drafted(drafts=True, model_tokens=0, n_vocab=90)):
        take(none, begun(none), 50)
        none.ended(1)
        assert (news(none), none.figures()) == ([], None)
