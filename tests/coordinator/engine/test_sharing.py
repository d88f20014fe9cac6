"""Identical deterministic requests in flight share one session, and each client gets its own stream."""

from __future__ import annotations

import dataclasses

from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams, TokenEvent
from relayline.coordinator.sessions.readers import sharing_key
from relayline.coordinator.sessions.streams import Audience, SessionStream

REQUEST = GenerationRequest("a", (1, 2, 3), 4, SamplingParams(temperature=0, seed=1))


def test_key_covers_all_that_decides_the_answer_and_nothing_else() -> None:
    same = dataclasses.replace(REQUEST, request_id="b", sampling=SamplingParams(temperature=0, seed=2, top_k=5))
    assert sharing_key(same) == sharing_key(REQUEST)
    for other in (
        dataclasses.replace(REQUEST, prompt_tokens=(1, 2)),
        dataclasses.replace(REQUEST, max_tokens=5),
        dataclasses.replace(REQUEST, ignore_eos=True),
        dataclasses.replace(REQUEST, sampling=SamplingParams(temperature=0, n_logprobs=2)),
        dataclasses.replace(REQUEST, sampling=SamplingParams(temperature=1, seed=1)),
    ):
        assert sharing_key(other) != sharing_key(REQUEST)
    seeded = [dataclasses.replace(REQUEST, sampling=SamplingParams(temperature=1, seed=seed)) for seed in (1, 1, 2)]
    assert sharing_key(seeded[0]) == sharing_key(seeded[1]) != sharing_key(seeded[2])


async def test_a_late_stream_gets_the_past_and_then_the_same_tokens() -> None:
    audience = Audience(1)
    early, late = SessionStream(audience.streams.remove), SessionStream(audience.streams.remove)
    audience.join(early)
    audience.put(TokenEvent(5, None, ()))
    audience.join(late)
    audience.put(TokenEvent(6, None, (), "length"))
    assert [event.token async for event in early] == [5, 6]
    assert [event.token async for event in late] == [5, 6]
    await early.aclose()
    assert audience.streams == [late]
