"""A session keeps mirostat's state (mu) of the last accepted token, and sends it when it is opened again."""

from __future__ import annotations

from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import Session, State

SAMPLING = SamplingParams(numbers=(("mirostat", 2.0),))


def test_a_session_is_opened_with_its_latest_mu() -> None:
    session = Session(1, GenerationRequest("r", (1, 2, 3), 9, SAMPLING), is_end=lambda token: False)
    opened, *_ = session.start()
    assert opened.leave().opening.sampling == SAMPLING  # type: ignore[union-attr]
    session.next_chunk(8)
    session.sampled(3, 50, mirostat_mu=9.5)
    session.sampled(4, 51, mirostat_mu=9.25)
    session.sampled(4, 52, mirostat_mu=1.0)  # an echo
    session.start()
    assert dict(session.opening().sampling.numbers) == {"mirostat": 2.0, "mirostat_mu": 9.25}
    # Until all rows are there again, the last stage will sample this one again.
    assert session.sampled(5, 53, mirostat_mu=8.0) == (None, [])
    session.next_chunk(8)
    session.sampled(5, 53, mirostat_mu=8.5)
    assert dict(session.opening().sampling.numbers)["mirostat_mu"] == 9.25, "of when it was opened"
    session.start()
    assert dict(session.opening().sampling.numbers)["mirostat_mu"] == 8.5
    assert session.state is State.PREFILL
