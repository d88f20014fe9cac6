"""When the last stage's prediction layers are asked for guesses, and what a session tells them."""

from __future__ import annotations

import dataclasses

import pytest

from relayline.coordinator.engine.token_sender import _options
from relayline.coordinator.schedule.draft_flights import (
    ASK_AGAIN,
    ASK_AGAIN_FRAMES,
    PREDICTED_STREAMS_MAX,
    VAIN_MAX,
    DraftFlights,
)
from relayline.coordinator.schedule.draft_plan import Traffic
from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.drafts import Acceptance
from relayline.coordinator.sessions.frame import Opening
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import OutFrame, Session, take_guesses
from relayline.coordinator.sessions.told_guesses import ToldFacts, ToldGuesses
from relayline.deploy.testing.simulation.world import smooth
from relayline.wire.common import bounds
from relayline.wire.envelopes.frames import Flag

PLANNER, TRAFFIC = GroupPlanner((StageCost(smooth(), smooth(), 64),)), Traffic(1, 0, 0)
FACTS = ToldFacts()


def decoding(drafts: DraftFlights, n_tokens: int = 200) -> Session:
    """A session whose prompt was read, and a first token sampled."""
    session = Session(
        1, GenerationRequest("a", (5, 6, 7), n_tokens, SamplingParams()), lambda _: False, acceptance=Acceptance()
    )
    drafts.begin(session)
    session.start()
    session.next_chunk(16)
    session.sampled(3, 50)
    return session


def row(session: Session) -> OutFrame:
    return OutFrame(session, len(session.history) - 1, (session.history[-1],), Flag.WANTS_SAMPLE)


def tell(drafts: DraftFlights, session: Session, position: int, tokens: list[int], chances: list[float]) -> None:
    assert drafts.predicts
    take_guesses(session, position, tokens, chances, FACTS, 0)


def asks(drafts: DraftFlights, session: Session, n_streams: int = 1) -> bool:
    frame = row(session)
    drafts.extend([frame], PLANNER, TRAFFIC, n_streams)
    return bool(frame.flags & Flag.WANTS_GUESSES)


def test_it_is_asked_only_if_it_predicts_and_few_streams_decode() -> None:
    drafts = DraftFlights(2, predictions=3)
    session = decoding(drafts)
    assert asks(drafts, session, PREDICTED_STREAMS_MAX)
    assert not asks(drafts, session, PREDICTED_STREAMS_MAX + 1)
    for silent in (DraftFlights(2), DraftFlights(0, predictions=3)):
        assert not asks(silent, decoding(silent))


def test_it_is_not_asked_beside_a_draft_model() -> None:
    drafts = DraftFlights(2, predictions=3)
    session = decoding(drafts)
    assert session.guesses is not None
    session.guesses.told = ToldGuesses(session.history, ToldFacts(is_own_model=True))
    assert not asks(drafts, session)


def test_guesses_that_are_never_worth_a_row_are_asked_for_rarely() -> None:
    drafts = DraftFlights(2, predictions=3)
    session = decoding(drafts)
    asked = [asks(drafts, session) for _ in range(VAIN_MAX + 2 * ASK_AGAIN)]
    assert all(asked[:VAIN_MAX])
    assert sum(asked[VAIN_MAX:]) == 2 * ASK_AGAIN_FRAMES
    tell(drafts, session, len(session.history), [8, 9], [0.9, 0.8])
    assert asks(drafts, session), "this frame takes guesses along"
    assert list(session.ahead) == [8, 9]


def test_guesses_of_the_stage_are_the_sessions() -> None:
    drafts = DraftFlights(2, predictions=3)
    session = decoding(drafts)
    tell(drafts, session, len(session.history), [8, 9, 10], [0.9, 0.8, 0.7])
    assert session.chances(3) == sorted(session.chances(3), reverse=True)
    session.sampled(4, 8)
    frame = row(session)
    session.extend(frame, 3)
    assert frame.tokens == (8, 9, 10)
    tell(drafts, session, 2, [1], [1.0])  # an echo: of tokens that came long ago
    assert len(session.chances(3)) == 0


@pytest.mark.parametrize("predictions", [0, 3])
def test_an_open_tells_the_history_to_prediction_layers_alone(predictions: int) -> None:
    session = decoding(DraftFlights(2, predictions=predictions))
    session.start()
    opening = session.opening()
    assert opening.told == ((5, 6, 7, 50) if predictions else ())
    session.kept_key = 0
    assert not session.opening().told, "nobody decodes in a kept lane"


def test_what_is_told_fits_an_open_with_other_options() -> None:
    told = tuple(range(100_000, 100_000 + bounds.TOLD_TOKENS_MAX))
    plain = Opening(SamplingParams(), told=told, told_from=7)
    assert (len(_options(plain, "").told), _options(plain, "").told_from) == (len(told), 7)
    grammar = "x" * bounds.GRAMMAR_BYTES_MAX
    said = tuple(range(bounds.GRAMMAR_TOKENS_MAX))
    long = dataclasses.replace(plain, sampling=SamplingParams(grammar=grammar), said=said)
    options = _options(long, "")
    assert options.ByteSize() <= bounds.OPTIONS_BYTES_MAX
    assert 0 < len(options.told) < len(told)
    assert options.told[-1] == told[-1]
    assert options.told_from + len(options.told) == 7 + len(told)
