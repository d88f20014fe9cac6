"""The trained hybrid over real processes: text, chats, a killed stage and a grammar, against the whole model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import jsonschema
import numpy as np
import pytest

from relayline.coordinator.sessions.generation import SamplingParams
from relayline.deploy.testing.paths import HYBRID_DEMO_MODEL as MODEL
from relayline.deploy.testing.processes import Running, child_running, running
from relayline.deploy.testing.reference import ReferenceModel
from tests.end_to_end.test_end_to_end import PERSON, PROMPTS
from tests.support.fleet import assert_seeded, logits_along
from tests.support.http_client import NEAR_TIE, Client, tokens_of

N_STAGES = 3
SIGMA = 0.02  # how far f16 rows between stages move these logits; f32 rows do not move them


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("split")
    with running("up", MODEL, "--stages", str(N_STAGES), "--split-dir", directory, "--http", "127.0.0.1:0", "--json",
                 "--ctx", "512", "--lanes", "10", "--prefix-lanes", "2", "--threads", "1") as process:  # fmt: skip
        yield process


@pytest.fixture(scope="module", name="whole")
def whole_fixture() -> Iterator[ReferenceModel]:
    with ReferenceModel(MODEL, 512, 1) as model:
        yield model


async def ids_of(client: Client, text: str) -> tuple[int, ...]:
    return tuple((await client.post("/tokenize", {"content": text, "add_special": True}))["tokens"])


def assert_said_by(whole: ReferenceModel, prompt: tuple[int, ...], tokens: list[int]) -> None:
    """Every token is the whole model's choice, or tied with it."""
    logits = logits_along(whole, prompt, tokens)
    behind = logits.max(axis=1) - logits[np.arange(len(tokens)), tokens]
    assert behind.max() < NEAR_TIE, f"token {int(behind.argmax())} of {len(tokens)} is {behind.max()} behind"
    margins = np.sort(logits, axis=1)
    assert np.mean(margins[:, -1] - margins[:, -2] > NEAR_TIE) > 0.7, "as much as a near-tie may hide"


async def test_eight_streams_give_the_whole_models_answers(served: Running, whole: ReferenceModel) -> None:
    async with aiohttp.ClientSession() as session:
        client = Client(session, served.event)
        prompts = [await ids_of(client, prompt) for prompt in PROMPTS]
        answers = await asyncio.gather(*map(client.stream, PROMPTS))
    for prompt, events in zip(prompts, answers, strict=True):
        assert_said_by(whole, prompt, tokens_of(events))


async def test_seeded_answers_are_drawn_from_the_whole_models_distribution(
    served: Running, whole: ReferenceModel
) -> None:
    async with aiohttp.ClientSession() as session:
        client = Client(session, served.event)
        prompt = await ids_of(client, PROMPTS[0])
        options = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}
        replies = await asyncio.gather(
            *(client.complete(PROMPTS[0], seed=seed, return_token_ids=True, **options) for seed in (7, 7, 8))
        )
    first, again, other = (reply["choices"][0]["token_ids"] for reply in replies)
    assert first == again != other
    for seed, tokens in ((7, first), (8, other)):
        assert_seeded(whole, prompt, tokens, SamplingParams(**options, seed=seed), SIGMA)


async def test_each_turn_of_a_chat_reads_only_new_text(served: Running, whole: ReferenceModel) -> None:
    end, user, assistant = 1, 2, 3  # control tokens
    async with aiohttp.ClientSession() as session:
        client = Client(session, served.event)
        history: tuple[int, ...] = ()
        n_known = 0
        for asked in ("What does textwrap.dedent do?", "Thank you", "Who are you?", "Explain heapq.heappush"):
            history = (*history, user, *await ids_of(client, asked), end, assistant)
            reply = await client.complete(list(history), return_token_ids=True)
            n_cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert n_cached >= n_known, "the earlier turns are there, except the last row"
            tokens = reply["choices"][0]["token_ids"]
            assert_said_by(whole, history, tokens)
            n_known = len(history) - 1 if len(history) > 32 else 0
            history = (*history, *tokens, end)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage", range(N_STAGES))
async def test_a_killed_stage_is_a_pause_and_no_more(stage: int, served: Running, whole: ReferenceModel) -> None:
    async with aiohttp.ClientSession() as session:
        client = Client(session, served.event)
        text = PROMPTS[1 + stage]
        prompt = await ids_of(client, text)
        epoch = (await client.pipeline())["epoch"]
        victim = child_running(served.process.pid, f"stage-{stage}")
        seen = 0

        def kill_once(_: dict[str, Any]) -> None:
            nonlocal seen
            seen += 1
            if seen == 3:
                os.kill(victim, signal.SIGKILL)

        tokens = tokens_of(await client.stream(text, kill_once, max_tokens=120))
        await client.until_ready(epoch)
    assert len(tokens) == 120
    assert_said_by(whole, prompt, tokens)


async def test_an_answer_has_the_shape_that_was_asked_for(served: Running) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    async with aiohttp.ClientSession() as session:
        client = Client(session, served.event)
        replies = await asyncio.gather(
            *(
                client.complete(prompt, max_tokens=300, response_format=schema, ignore_eos=False, seed=1, temperature=t)
                for prompt, t in zip(PROMPTS[:3], (0, 0.5, 1), strict=True)
            )
        )
    for reply in replies:
        assert reply["choices"][0]["finish_reason"] == "stop"
        jsonschema.validate(json.loads(reply["choices"][0]["text"]), PERSON)
