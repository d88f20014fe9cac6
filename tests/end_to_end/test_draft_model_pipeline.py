"""A draft model beside real stages: texts are the same as without it, whatever it guesses and whenever it dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from relayline.coordinator.drafting.link import DraftLink
from relayline.coordinator.drafting.messages import Guessed
from relayline.coordinator.engine.connection import Connection
from relayline.coordinator.engine.pipeline import Pipeline
from relayline.coordinator.schedule import draft_wait
from relayline.coordinator.schedule.draft_flights import DRAFT_AUTO
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.drafted import Drafted
from relayline.coordinator.sessions.generation import GenerationRequest
from relayline.coordinator.sessions.told_guesses import ToldGuesses
from relayline.deploy.testing.reference import ReferenceModel
from relayline.deploy.testing.simulation.world import smooth
from relayline.deploy.testing.tiny_slices import write_whole
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.end_to_end.test_drafts_pipeline import N_TOKENS, SAMPLINGS, assert_right
from tests.support.fleet import (
    SHAPE,
    Artifacts,
    Fleet,
    answers_over_losses,
    artifacts_fixture,
    assert_greedy,
    fleet,
    prompt_of,
    read,
    request,
    tokens_of,
    whole_fixture,
)
from tests.support.polling import pause

FIXTURES = (artifacts_fixture, whole_fixture)  # pytest finds them in the modules that name them


@pytest.fixture(name="knows_costs", autouse=True)
def knows_costs_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """All stages say that many rows cost what one does, and so much that waiting for a guess always pays."""
    slow = smooth(1_000.0)

    def costs(self: Connection) -> list[StageCost]:
        return [StageCost(slow, slow, 64, is_per_lane=facts.kv_per_lane) for facts in self.facts]

    monkeypatch.setattr(Connection, "stage_costs", costs)
    monkeypatch.setattr(Connection, "keep_costs", lambda *_: None)


@pytest.fixture(scope="module", name="same")
def same_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that guesses what the served one says."""
    return write_whole(tmp_path_factory.mktemp("draft") / "same.gguf", SHAPE)


@contextlib.asynccontextmanager
async def drafting_fleet(paths: list[Path], draft_model: Path, **more: object) -> AsyncIterator[Fleet]:
    async with fleet(paths, draft=DRAFT_AUTO, draft_model=draft_model, **more) as running:  # type: ignore[arg-type]
        yield running


@pytest.fixture(name="heard_first")
def heard_first_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer behind a stream's first token waits until its draft model has said all: these stages are faster.

    Rows wait for it as long as it is at work, however slow the machine is. Nothing waits for a model that died.
    """
    monkeypatch.setattr(draft_wait, "WAIT_STRETCH", 1e6)
    kept: list[tuple[Pipeline, pb.ReturnResponse]] = []
    said: dict[int, int] = {}  # by stream: the text's length when its model had no more to say
    on_return, guessed, lost = Pipeline.on_return, Drafted.guessed, Drafted.lost

    def is_at_work(drafted: Drafted) -> bool:
        found = ((key, session.guesses) for key, session in drafted._sessions.items() if session.guesses is not None)
        told = [(key, guesses.told) for key, guesses in found if guesses.told is not None]
        return not drafted._is_lost and any(said.get(key) != each._n_tokens for key, each in told)

    def go_on(drafted: Drafted) -> None:
        while kept and not is_at_work(drafted):
            on_return(*kept.pop(0))

    def keep(self: Pipeline, message: pb.ReturnResponse) -> None:
        kept.append((self, message))
        go_on(self.conductor.drafted)

    def note(self: Drafted, guesses: Sequence[Guessed], now_ns: int) -> bool:
        is_new = guessed(self, guesses, now_ns)
        said.update((guess.stream, guess.position) for guess in guesses if not guess.follows)
        go_on(self)
        return is_new

    def lose(self: Drafted) -> None:
        lost(self)
        go_on(self)

    monkeypatch.setattr(Pipeline, "on_return", keep)
    monkeypatch.setattr(Drafted, "guessed", note)
    monkeypatch.setattr(Drafted, "lost", lose)


def asked() -> list[GenerationRequest]:
    return [request(prompt_of(index, 5 + 9 * index), N_TOKENS, sampling) for index, sampling in enumerate(SAMPLINGS)]


async def counts(running: Fleet) -> tuple[int, int]:
    """Tokens that were drafted and accepted."""
    figures = await running.pipeline.describe()
    return figures["drafted_tokens"], figures["accepted_tokens"]  # type: ignore[return-value]


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("heard_first")
@pytest.mark.parametrize("cuts", [[], [2]], ids=["one stage", "two stages"])
@pytest.mark.parametrize("kv_layout", ["unified", "per-lane"])
async def test_texts_are_the_same_and_right_guesses_are_taken(
    artifacts: Artifacts, whole: ReferenceModel, same: Path, cuts: list[int], kv_layout: str
) -> None:
    requests = asked()
    async with drafting_fleet(artifacts(cuts), same, kv_layout=kv_layout) as running:
        alone = await tokens_of(running.pipeline.open(requests[0]))
        drafted, accepted = await counts(running)
        assert accepted > N_TOKENS / 4, "a stream alone waits for guesses and takes them"
        assert accepted > drafted / 2
        assert_right(whole, requests[:1], [alone])
        outputs = await asyncio.gather(*(tokens_of(running.pipeline.open(each)) for each in asked()))
        assert_right(whole, requests, outputs)


async def test_wrong_guesses_change_nothing(artifacts: Artifacts, whole: ReferenceModel, tmp_path: Path) -> None:
    other = write_whole(tmp_path / "other.gguf", dataclasses.replace(SHAPE, seed=SHAPE.seed + 1))
    requests = asked()
    async with drafting_fleet(artifacts([2]), other) as running:
        outputs = await asyncio.gather(*(tokens_of(running.pipeline.open(each)) for each in requests))
    assert_right(whole, requests, outputs)


async def test_answers_go_on_over_losses(artifacts: Artifacts, whole: ReferenceModel, same: Path) -> None:
    prompts = [prompt_of(7 + at, 20) for at in range(3)]
    async with drafting_fleet(artifacts([2]), same) as running:
        answers = await answers_over_losses(running, prompts, N_TOKENS)
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert_greedy(whole, prompt, tokens)


@pytest.mark.usefixtures("heard_first")
async def test_answers_go_on_where_a_row_has_waited_in_vain(
    artifacts: Artifacts, whole: ReferenceModel, same: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives up when the model has said all it has to say: nothing else comes before the next answer."""
    tell = ToldGuesses.tell

    def tell_and_give_up(self: ToldGuesses, *guesses: Any, follows: bool) -> bool:
        if not follows:
            asyncio.get_running_loop().call_soon(self.give_up)
        return tell(self, *guesses, follows=follows)

    monkeypatch.setattr(ToldGuesses, "tell", tell_and_give_up)
    prompt = prompt_of(3, 20)
    async with drafting_fleet(artifacts([2]), same) as running:
        assert_greedy(whole, prompt, await tokens_of(running.pipeline.open(request(prompt, N_TOKENS))))


@pytest.mark.usefixtures("heard_first")
async def test_a_death_costs_guesses_only(
    artifacts: Artifacts, whole: ReferenceModel, same: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relayline.coordinator.drafting.link.DRAFT_RESTART_PAUSE_S", 0.0)
    links: list[DraftLink] = []
    start = DraftLink.start

    async def noted(self: DraftLink) -> None:
        links.append(self)
        await start(self)

    monkeypatch.setattr(DraftLink, "start", noted)
    prompt = prompt_of(3, 20)
    async with drafting_fleet(artifacts([2]), same) as running:
        stream = running.pipeline.open(request(prompt, 3 * N_TOKENS))
        tokens = await read(stream, 5)
        assert links[0]._process is not None
        os.kill(links[0]._process.pid, signal.SIGKILL)
        async with asyncio.timeout(120):
            while len(links) < 2 or running.pipeline.conductor.drafted.figures()["is_lost"]:  # type: ignore[index]
                await pause()
        tokens += await tokens_of(stream)
        _, before = await counts(running)
        assert_greedy(whole, prompt, tokens)
        second = prompt_of(4, 20)
        assert_greedy(whole, second, await tokens_of(running.pipeline.open(request(second, N_TOKENS))))
        assert (await counts(running))[1] > before + N_TOKENS / 4, "the new process drafts"
