"""A session whose prompt is scored: its frames, and the scores that it keeps over a loss."""

from __future__ import annotations

from relayline.coordinator.sessions.generation import GenerationRequest, PromptScore, SamplingParams
from relayline.coordinator.sessions.session import Session, take_score
from relayline.wire.common.bounds import SCORED_ROWS_MAX
from relayline.wire.envelopes.frames import Flag
from tests.support.sessions import SAMPLE, chunks_of, shape


def scoring(n_prompt: int, max_tokens: int = 2) -> Session:
    prompt = tuple(range(100, 100 + n_prompt))
    request = GenerationRequest("r", prompt, max_tokens, SamplingParams(n_logprobs=0), scores_prompt=True)
    return Session(7, request, lambda _: False)


def score(session: Session, upto: int, begin: int = 1) -> None:
    for position in range(begin, upto):
        assert take_score(session, position, PromptScore(100 + position, -float(position), ()))


def test_each_row_travels_with_the_token_behind_it_in_frames_that_a_step_has_room_for() -> None:
    session = scoring(SCORED_ROWS_MAX + 3)
    session.start()
    first, last = chunks_of(session, 1_000)
    assert (len(first.tokens), len(last.tokens)) == (SCORED_ROWS_MAX, 3)
    assert first.followers == tuple(token + 1 for token in first.tokens)
    assert last.followers == (last.tokens[1], last.tokens[2], 0)
    assert (first.flags, last.flags) == (Flag.SCORED, Flag.SCORED | SAMPLE)
    assert last.leave().followers == last.followers
    assert last.leave().n_drafted == 0


def test_the_first_token_brings_all_scores_and_echoes_change_none() -> None:
    session = scoring(4)
    session.start()
    chunks_of(session, 64)
    score(session, 4)
    assert take_score(session, 2, PromptScore(102, -99.0, ()))
    event, _ = session.sampled(4, 50, -0.5)
    assert event is not None
    assert [(each.token, each.logprob) for each in event.prompt_scores] == [(101, -1.0), (102, -2.0), (103, -3.0)]
    assert not take_score(session, 4, PromptScore(50, -1.0, ()))
    event, _ = session.sampled(5, 51, -0.5)
    assert event is not None
    assert event.prompt_scores == ()


def test_rows_whose_scores_a_loss_took_are_read_again() -> None:
    session = scoring(8)
    session.start()
    chunks_of(session, 64)
    score(session, 4)
    opening, trim = session.start(n_kept=6)
    assert shape([opening, trim]) == [(0, (), Flag.OPEN), (0, (), Flag.TRIM)]
    (chunk,) = chunks_of(session, 64)
    assert (chunk.position, len(chunk.tokens)) == (0, 8)
    score(session, 8)
    assert len(session.scores) == 7
    session.start(n_kept=6)
    assert [frame.position for frame in chunks_of(session, 64)] == [6]


def test_tokens_generated_before_a_loss_are_not_scored() -> None:
    session = scoring(3)
    session.start()
    chunks_of(session, 64)
    score(session, 3)
    session.sampled(3, 50)
    session.start()
    scored, rest = chunks_of(session, 64)
    assert (scored.tokens, scored.followers, scored.flags) == ((100, 101), (101, 102), Flag.SCORED)
    assert (rest.tokens, rest.followers, rest.flags) == ((102, 50), (), Flag.PREFILL | SAMPLE)
