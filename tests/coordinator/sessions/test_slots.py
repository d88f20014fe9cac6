"""The state of lanes, the progress of prompts, and the chunks of a prompt whose rows are pooled."""

from __future__ import annotations

import pytest

from relayline.coordinator.sessions.admission import Admission
from relayline.coordinator.sessions.generation import GenerationRequest, PromptProgress, SamplingParams
from relayline.coordinator.sessions.session import Session
from relayline.coordinator.sessions.slots import progress_of, slots_of
from relayline.wire.common.bounds import SCORED_ROWS_MAX
from relayline.wire.common.sampler_fields import POOLINGS
from relayline.wire.envelopes.frames import Flag


def session_of(n_prompt: int, *, pooling: str = "", wants_progress: bool = False, max_tokens: int = 4) -> Session:
    numbers = (("pooling", float(POOLINGS[pooling])),) if pooling else ()
    sampling = SamplingParams(0.0, numbers=numbers)
    request = GenerationRequest(
        "r", tuple(range(n_prompt)), max_tokens, sampling, ignore_eos=True, wants_progress=wants_progress
    )
    return Session(7, request, lambda _: False)


def test_slots_show_the_state_of_lanes() -> None:
    admission, session = Admission(2, 64, 4), session_of(10)
    assert admission.admit(session)
    session.start()
    session.next_chunk(6)
    busy, idle = slots_of(admission, may_draft=True)
    assert (busy.lane, busy.state, busy.is_busy, busy.task) == (0, "prefill", True, 7)
    assert (busy.n_prompt, busy.n_read, busy.n_generated, busy.n_left) == (10, 6, 0, 4)
    assert (idle.lane, idle.state, idle.is_busy, idle.task) == (1, "idle", False, -1)
    session.next_chunk(6)
    session.sampled(10, 3)
    busy, _ = slots_of(admission, may_draft=True)
    assert (busy.state, busy.n_read, busy.n_generated, busy.n_left) == ("decode", 10, 1, 3)


def test_progress_is_reported_once_and_only_on_request() -> None:
    assert progress_of(session_of(10), 4) is None
    session = session_of(10, wants_progress=True)
    session.start()
    assert progress_of(session, 4) == PromptProgress(10, 0, 4)
    session.next_chunk(10)
    session.sampled(10, 3)
    assert progress_of(session, 10) == PromptProgress(10, 0, 10)  # with its first token
    session.sampled(11, 3)
    assert progress_of(session, 10) is None
    session.start()  # another epoch: it is read again, and its client knows
    assert progress_of(session, 4) is None


@pytest.mark.parametrize(
    ("pooling", "chunks"),
    [
        ("last", [(0, 70, False)]),
        ("cls", [(0, 1, True), (1, 69, False)]),
        ("mean", [(0, SCORED_ROWS_MAX, True), (32, SCORED_ROWS_MAX, True), (64, 6, True)]),
    ],
)
def test_rows_that_are_pooled_are_looked_at(pooling: str, chunks: list[tuple[int, int, bool]]) -> None:
    session = session_of(70, pooling=pooling, max_tokens=1)
    session.start()
    found = []
    while (frame := session.next_chunk(256)) is not None:
        found.append((frame.position, len(frame.tokens), frame.flags & Flag.SCORED == Flag.SCORED))
        assert (frame.flags & Flag.WANTS_SAMPLE != 0) == (session.prefill_left == 0)
    assert found == chunks
    assert session.start(40)[-1].position == 0  # rows that were pooled elsewhere are read again
    while session.next_chunk(256) is not None:
        pass
    event, _ = session.sampled(70, 0, embedding=b"1234")
    assert event is not None
    assert (event.embedding, event.finish_reason) == (b"1234", "length")
