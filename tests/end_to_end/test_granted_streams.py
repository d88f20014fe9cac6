"""Real stages that continue streams without waiting for the coordinator still give the unsplit model's answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relayline.coordinator.sessions.generation import SamplingParams, TokenEvent
from relayline.coordinator.sessions.streams import SessionStream
from relayline.deploy.testing.paths import DEMO_MODEL
from relayline.deploy.testing.processes import running as process_running
from relayline.deploy.testing.reference import ReferenceModel
from relayline.stage.sending_back import SendingBack
from tests.support.fleet import (
    GREEDY,
    LOGIT_MOVE,
    Artifacts,
    Fleet,
    answers_over_losses,
    artifacts_fixture,
    assert_greedy,
    assert_seeded,
    fleet,
    prompt_of,
    read,
    request,
    tokens_of,
    whole_fixture,
)
from tests.support.http_client import Client, assert_same_greedy
from tests.support.polling import pause

FIXTURES = (artifacts_fixture, whole_fixture)  # pytest finds them in the modules that name them
SEEDED = SamplingParams(temperature=0.8, top_k=20, seed=11)
LOGPROBS = SamplingParams(temperature=0.0, n_logprobs=2)
N_STEPS, N_TOKENS, WAIT_S = 8, 60, 60


@asynccontextmanager
async def granting(paths: Sequence[Path], n_steps: int = N_STEPS, **more: object) -> AsyncIterator[Fleet]:
    """A fleet whose last stage can send tokens back."""
    async with fleet(paths, grant_steps=n_steps, **more) as running:  # type: ignore[arg-type]
        await until_linked(running)
        yield running
        await running.until_free()


async def until_linked(running: Fleet) -> None:
    grants = running.pipeline.conductor.grants
    async with asyncio.timeout(WAIT_S):
        while grants._fed_back != running.pipeline.epoch or not running.pipeline.ready.is_set():
            await pause()


def n_granted(running: Fleet) -> int:
    return running.pipeline.conductor.grants.n_granted


async def read_until_granted(running: Fleet, stream: SessionStream) -> list[int]:
    """Read on until the stages have continued some stream by themselves."""
    tokens: list[int] = []
    while not n_granted(running):
        tokens += await read(stream, 1)
    return tokens


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_layout", ["unified", "per-lane"])
@pytest.mark.parametrize("cuts", [[2], [1, 3]], ids=["2 stages", "3 stages"])
async def test_streams_that_come_and_go(
    cuts: list[int], kv_layout: str, artifacts: Artifacts, whole: ReferenceModel
) -> None:
    """Greedy and drawn ones, prompts during decode, a client that leaves, answers of one token."""
    prompts = [prompt_of(at, 3 * at + 1) for at in range(5)]
    async with granting(artifacts(cuts), kv_layout=kv_layout, prefix_lanes=2) as running:
        leaving = running.pipeline.open(request(prompts[4], 200))
        await read(leaving, 5)
        first = asyncio.create_task(tokens_of(running.pipeline.open(request(prompts[0], N_TOKENS))))
        drawn = await tokens_of(running.pipeline.open(request(prompts[1], N_TOKENS, SEEDED)))
        await leaving.aclose()
        alone = await tokens_of(running.pipeline.open(request(prompts[2], N_TOKENS)))
        short = await tokens_of(running.pipeline.open(request(prompts[3], 1)))
        greedy = await first
        assert n_granted(running) > N_TOKENS // 2
    assert (len(greedy), len(drawn), len(alone), len(short)) == (N_TOKENS, N_TOKENS, N_TOKENS, 1)
    assert_seeded(whole, prompts[1], drawn, SEEDED)
    for prompt, tokens in ((prompts[0], greedy), (prompts[2], alone), (prompts[3], short)):
        assert_greedy(whole, prompt, tokens)


async def test_a_client_that_joins_in_the_middle_ends_the_grant(artifacts: Artifacts, whole: ReferenceModel) -> None:
    """The rows of both leave together again, and those computed too many are forgotten."""
    prompts = [prompt_of(81 + at, 5 + at) for at in range(2)]
    async with granting(artifacts([1, 3]), n_steps=2 * N_TOKENS, mode="fixed") as running:
        stream = running.pipeline.open(request(prompts[0], 2 * N_TOKENS))
        tokens = await read_until_granted(running, stream)
        joined, rest = await asyncio.gather(
            tokens_of(running.pipeline.open(request(prompts[1], N_TOKENS))), tokens_of(stream)
        )
        grants = running.pipeline.conductor.grants
        assert grants.n_repeated > 0
        assert grants.n_granted > N_TOKENS // 2
    assert (len(tokens + rest), len(joined)) == (2 * N_TOKENS, N_TOKENS)
    assert_greedy(whole, prompts[0], tokens + rest)
    assert_greedy(whole, prompts[1], joined)


async def test_streams_under_grants_are_drained(artifacts: Artifacts, whole: ReferenceModel) -> None:
    """The coordinator stops while the stages go on by themselves: every token still comes."""
    prompt = prompt_of(91, 6)
    async with fleet(artifacts([1, 3]), grant_steps=N_STEPS) as running:
        await until_linked(running)
        stream = running.pipeline.open(request(prompt, 2 * N_TOKENS))
        tokens = await read_until_granted(running, stream)
        rest = asyncio.create_task(tokens_of(stream))
    tokens += await rest
    assert len(tokens) == 2 * N_TOKENS
    assert_greedy(whole, prompt, tokens)


async def test_streams_over_losses(artifacts: Artifacts, whole: ReferenceModel) -> None:
    """Each stage is lost in turn while streams go on by themselves."""
    prompts = [prompt_of(20 + at, 5 + at) for at in range(2)]
    async with granting(artifacts([1, 3])) as running:
        answers = await answers_over_losses(running, prompts, N_TOKENS)
        await until_linked(running)
        after = await tokens_of(running.pipeline.open(request(prompts[0], N_TOKENS)))
        assert n_granted(running) > N_TOKENS // 2, "there are grants again"
    for prompt, tokens in ((prompts[0], answers[0]), (prompts[1], answers[1]), (prompts[0], after)):
        assert_greedy(whole, prompt, tokens)


@pytest.mark.parametrize("link", [0, 1], ids=["to stage 0", "to stage 1"])
async def test_streams_over_cut_links(link: int, artifacts: Artifacts, whole: ReferenceModel) -> None:
    """All connections to one stage: the first has that of the last stage, too."""
    prompt = prompt_of(31, 9)
    async with granting(artifacts([2]), proxied=True) as running:
        stream = running.pipeline.open(request(prompt, 2 * N_TOKENS))
        tokens = await read(stream, 20)
        await running.cut(link)
        tokens += await tokens_of(stream)
    assert len(tokens) == 2 * N_TOKENS
    assert_greedy(whole, prompt, tokens)


async def test_an_end_token_ends_a_stream_under_a_grant(artifacts: Artifacts) -> None:
    """The stages know no end tokens: rows behind it are computed, and never seen."""
    prompt = prompt_of(41, 6)
    async with granting(artifacts([2])) as running:
        tokens = await tokens_of(running.pipeline.open(request(prompt, N_TOKENS)))
    end = tokens[30]
    async with granting(artifacts([2]), is_end=lambda token: token == end) as running:
        stream = running.pipeline.open(request(prompt, N_TOKENS))
        events: list[TokenEvent] = [event async for event in stream]
        await stream.aclose()
        after = await tokens_of(running.pipeline.open(request(prompt, tokens.index(end))))
    n_said = tokens.index(end) + 1
    assert [event.token for event in events] == tokens[:n_said]
    assert [event.finish_reason for event in events] == [None] * (n_said - 1) + ["stop"]
    assert after == tokens[: n_said - 1]


async def test_log_probabilities_come_with_tokens_under_a_grant(artifacts: Artifacts) -> None:
    prompt = prompt_of(51, 6)
    found: list[list[tuple[int, float | None, tuple[int, ...]]]] = []
    for n_steps in (0, N_STEPS):
        async with fleet(artifacts([2]), grant_steps=n_steps) as running:
            if n_steps:
                await until_linked(running)
            stream = running.pipeline.open(request(prompt, 20, LOGPROBS))
            events = [event async for event in stream]
            await stream.aclose()
            assert (n_granted(running) > 0) == bool(n_steps)
        found.append(
            [(event.token, event.logprob, tuple(token for token, _ in event.top_logprobs)) for event in events]
        )
    assert [token for token, _, _ in found[0]] == [token for token, _, _ in found[1]]
    assert all(before[1] == pytest.approx(after[1], abs=LOGIT_MOVE) for before, after in zip(*found, strict=True))
    assert all(before[2] == after[2] for before, after in zip(*found, strict=True))


async def test_penalties_take_the_long_way(artifacts: Artifacts) -> None:
    """Samplers that look back cannot go back: no grant, and the same answer."""
    penalised = SamplingParams(temperature=0.0, frequency_penalty=0.7)
    answers = []
    for n_steps in (0, N_STEPS):
        async with fleet(artifacts([2]), grant_steps=n_steps) as running:
            if n_steps:
                await until_linked(running)
            answers.append(await tokens_of(running.pipeline.open(request(prompt_of(61, 6), 20, penalised))))
            assert n_granted(running) == 0
    assert answers[0] == answers[1]


async def test_a_stage_0_that_takes_no_tokens_gets_no_grants(
    artifacts: Artifacts, whole: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one, say, or one that the last stage cannot reach."""

    async def refused(self: SendingBack) -> None:
        return None

    monkeypatch.setattr(SendingBack, "_opened", refused)
    prompt = prompt_of(71, 4)
    async with fleet(artifacts([2]), grant_steps=N_STEPS) as running:
        tokens = await tokens_of(running.pipeline.open(request(prompt, 20, GREEDY)))
        assert n_granted(running) == 0
    assert_greedy(whole, prompt, tokens)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """The ready events of the demonstration model over two stages: without grants, and with them."""
    directory = tmp_path_factory.mktemp("split")
    flags = ("--stages", "2", "--split-dir", directory, "--http", "127.0.0.1:0", "--json", "--ctx", "512", "--lanes",
             "4", "--threads", "1", "--no-share", "--draft")  # fmt: skip
    with contextlib.ExitStack() as stack:
        events = []
        for last in (("off", "--name", "plain"), ("auto", "--name", "granting", "--grant-steps", str(N_STEPS))):
            events.append(stack.enter_context(process_running("up", DEMO_MODEL, *flags, *last)).event)
        yield events


async def rows_granted(client: Client) -> int:
    rows: int = (await client.pipeline())["grants"]["rows"]
    return rows


async def until_granting(client: Client) -> None:
    """Ask until the link back stands; drafts are off without a word."""
    async with asyncio.timeout(WAIT_S):
        while not await rows_granted(client):
            await client.complete(PROMPT, max_tokens=N_TOKENS)


PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n"


async def test_a_stop_string_in_the_middle_of_a_grant(served: list[dict[str, Any]]) -> None:
    """What the stages had computed beyond it is not seen, and the next answer is whole again."""
    async with aiohttp.ClientSession() as session:
        client = Client(session, served[1])
        await until_granting(client)
        text = (await client.complete(PROMPT, max_tokens=N_TOKENS))["choices"][0]["text"]
        stop = text[25:32]
        before = await rows_granted(client)
        (choice,) = (await client.complete(PROMPT, max_tokens=N_TOKENS, stop=stop))["choices"]
        assert await rows_granted(client) > before
        assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
        assert (await client.complete(PROMPT, max_tokens=N_TOKENS))["choices"][0]["text"] == text


async def test_a_shape_of_json_takes_the_long_way(served: list[dict[str, Any]]) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 120}}, "required": ["age"]}
    shape = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
    async with aiohttp.ClientSession() as session:
        plain, client = (Client(session, event) for event in served)
        await until_granting(client)
        before = await rows_granted(client)
        answers = [
            (await each.complete(PROMPT, max_tokens=100, response_format=shape, ignore_eos=False))["choices"][0]["text"]
            for each in (plain, client)
        ]
        assert await rows_granted(client) == before
    assert answers[0] == answers[1]
    assert json.loads(answers[1])["age"] <= 120


async def test_several_choices_are_granted_together(served: list[dict[str, Any]]) -> None:
    async with aiohttp.ClientSession() as session:
        plain, client = (Client(session, event) for event in served)
        await until_granting(client)
        before = await rows_granted(client)
        several = await client.complete(PROMPT, max_tokens=N_TOKENS, n=3, return_token_ids=True)
        alone = await plain.complete(PROMPT, max_tokens=N_TOKENS, return_token_ids=True)
        assert await rows_granted(client) > before + N_TOKENS
        assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
        for choice in several["choices"]:
            await assert_same_greedy(client, PROMPT, choice["token_ids"], alone["choices"][0]["token_ids"])
