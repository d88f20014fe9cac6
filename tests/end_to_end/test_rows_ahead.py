"""One real stage that computes rows ahead of the coordinator's request still gives the unsplit model's answers."""

from __future__ import annotations

import asyncio
import threading

import pytest

from relayline.coordinator.schedule import draft_flights
from relayline.coordinator.schedule.config import DRAFT_AUTO
from relayline.coordinator.sessions.generation import SamplingParams
from relayline.deploy.testing.reference import ReferenceModel
from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps import runner
from relayline.stage.steps.run_ahead import RunAhead
from relayline.stage.steps.runner import Runner, _Bell
from relayline.wire.envelopes.frames import Flag
from tests.support.fleet import (
    Artifacts,
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

WAIT_S = 60
FIXTURES = (artifacts_fixture, whole_fixture)  # pytest finds them in the modules that name them
SEEDED = SamplingParams(temperature=0.8, top_k=20, seed=11)
PENALISED = SamplingParams(temperature=0.0, frequency_penalty=0.7)


@pytest.fixture(name="made")
def made_fixture(monkeypatch: pytest.MonkeyPatch) -> list[RunAhead]:
    """Every RunAhead of the test, in order."""
    found: list[RunAhead] = []
    init = RunAhead.__init__

    def noted(self: RunAhead, *arguments: object) -> None:
        init(self, *arguments)  # type: ignore[arg-type]
        found.append(self)

    monkeypatch.setattr(RunAhead, "__init__", noted)
    return found


class WatchedBell(_Bell):
    """A bell that tells whether its thread sleeps: then it has done all it can, and computed ahead what it may."""

    def __init__(self) -> None:
        super().__init__()
        self.sleeps = threading.Event()

    def __exit__(self, *_: object) -> None:
        if self._asleep:
            self.sleeps.clear()
        super().__exit__()

    def wait(self) -> None:
        self.sleeps.set()
        super().wait()


@pytest.fixture
def frames_come_to_a_sleeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames reach a decode thread only when it has computed ahead what it could, whatever else the host does."""
    push = Runner.push

    def gated(self: Runner, frames: list[QueuedFrame]) -> list[QueuedFrame]:
        assert isinstance(self._bell, WatchedBell)
        assert self._bell.sleeps.wait(WAIT_S), "the decode thread never sleeps"
        return push(self, frames)

    monkeypatch.setattr(runner, "_Bell", WatchedBell)
    monkeypatch.setattr(Runner, "push", gated)


@pytest.mark.usefixtures("frames_come_to_a_sleeper")
@pytest.mark.parametrize("kv_layout", ["unified", "per-lane"])
async def test_streams_that_come_and_go(
    kv_layout: str, artifacts: Artifacts, whole: ReferenceModel, made: list[RunAhead]
) -> None:
    """Prompts during decode, a client that leaves, kept prefixes, answers of one token."""
    prompts = [prompt_of(1, 40) + prompt_of(10 + at, 3 * at + 1) for at in range(6)]
    async with fleet(artifacts([]), prefix_lanes=2, kv_layout=kv_layout, run_ahead="on") as running:
        leaving = running.pipeline.open(request(prompts[5], 200))
        await read(leaving, 5)
        first = [asyncio.create_task(tokens_of(running.pipeline.open(request(one, 30)))) for one in prompts[:2]]
        await read(leaving, 5)
        seeded = asyncio.create_task(tokens_of(running.pipeline.open(request(prompts[2], 25, SEEDED))))
        second = asyncio.create_task(tokens_of(running.pipeline.open(request(prompts[3], 1))))
        await leaving.aclose()
        answers = [*await asyncio.gather(*first), await second]
        again = await tokens_of(running.pipeline.open(request((*prompts[0], *answers[0]), 10)))
        drawn = await seeded
    for prompt, tokens in zip((prompts[0], prompts[1], prompts[3]), answers, strict=True):
        assert_greedy(whole, prompt, tokens)
    assert_greedy(whole, (*prompts[0], *answers[0]), again)
    assert_seeded(whole, prompts[2], drawn, SEEDED)
    assert sum(ahead.n_used for ahead in made) > 90, "nearly every token of the six streams"


@pytest.mark.usefixtures("frames_come_to_a_sleeper")
async def test_a_cut_link_loses_and_doubles_nothing(
    artifacts: Artifacts, whole: ReferenceModel, made: list[RunAhead]
) -> None:
    """The next epoch resumes from the stage's lanes, one of which had a row that was never asked for."""
    prompts = [prompt_of(20 + at, 9 + at) for at in range(3)]
    async with fleet(artifacts([]), proxied=True, run_ahead="on") as running:
        streams = [running.pipeline.open(request(prompt, 60)) for prompt in prompts]
        heads = [await read(stream, 8) for stream in streams]
        for _ in range(2):
            await running.cut(0)
            heads = [head + await read(stream, 8) for head, stream in zip(heads, streams, strict=True)]
        tails = await asyncio.gather(*map(tokens_of, streams))
    for prompt, head, tail in zip(prompts, heads, tails, strict=True):
        assert len(head) + len(tail) == 60
        assert_greedy(whole, prompt, head + tail)
    assert sum(ahead.n_used for ahead in made) > 160, "all but the first ones of 180 tokens, and of each epoch"


@pytest.mark.usefixtures("frames_come_to_a_sleeper")
@pytest.mark.parametrize(("draft", "n_drafted", "n_ahead"), [(DRAFT_AUTO, 0, 100), (1, 5, 80)])
async def test_drafts_and_penalties_work_with_rows_ahead(
    draft: int,
    n_drafted: int,
    n_ahead: int,
    artifacts: Artifacts,
    whole: ReferenceModel,
    made: list[RunAhead],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the placed prices no draft pays; measured ones depend on the host's load. Drafts of a fixed length leave
    wherever there are some, and rows ahead sit out for a while behind each one.
    """
    drafted = []
    monkeypatch.setattr(draft_flights, "best_counts", lambda planner, chances, *_: [0] * len(chances))
    push = Runner.push

    def noted(self: Runner, frames: list[QueuedFrame]) -> list[QueuedFrame]:
        drafted.extend(frame for frame in frames if frame.flags & Flag.DRAFTED)
        return push(self, frames)

    monkeypatch.setattr(Runner, "push", noted)
    prompt = prompt_of(3, 6) * 4
    async with fleet(artifacts([]), draft=draft, run_ahead="on") as running:
        plain, penalised = await asyncio.gather(
            tokens_of(running.pipeline.open(request(prompt, 60))),
            tokens_of(running.pipeline.open(request(prompt, 60, PENALISED))),
        )
    async with fleet(artifacts([]), run_ahead="off") as running:
        expected = await tokens_of(running.pipeline.open(request(prompt, 60, PENALISED)))
    assert_greedy(whole, prompt, plain)
    assert penalised == expected
    assert len(drafted) >= n_drafted, "so drafts and rows ahead were mixed"
    assert sum(ahead.n_used for ahead in made) > n_ahead, "of 120 tokens"


@pytest.mark.parametrize("run_ahead", ["on", "off"])
async def test_the_coordinator_knows_who_runs_ahead(run_ahead: str, artifacts: Artifacts) -> None:
    async with fleet(artifacts([]), run_ahead=run_ahead) as running:
        await tokens_of(running.pipeline.open(request(prompt_of(1, 9), 3)))
        (cost,) = running.pipeline.conductor.scheduler.planner.stages
        (status,) = [await stage.status(with_recent=False) for stage in running.pipeline.stages]
    assert status is not None
    assert cost.runs_ahead == status.runs_ahead == (run_ahead == "on")


async def test_several_stages_compute_nothing_ahead(artifacts: Artifacts, made: list[RunAhead]) -> None:
    async with fleet(artifacts([2]), run_ahead="on") as running:
        await tokens_of(running.pipeline.open(request(prompt_of(1, 9), 20)))
    assert len(made) == 2
    assert not any(ahead.n_used + ahead.n_dropped for ahead in made)
