"""Layers move over mutual TLS while streams run: nothing is read again, and every token is the same as without a move.

Coordinator, join port and stages are real, in one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from relayline.coordinator.engine import moves, stage_client
from relayline.coordinator.engine.moves import MoveState
from relayline.coordinator.engine.pipeline import Pipeline, PipelineConfig
from relayline.coordinator.joining.config import JoinConfig, JoiningStage
from relayline.coordinator.joining.mover import LayerMover
from relayline.coordinator.joining.port import make_roster, serve_joining
from relayline.coordinator.model.split import split_model
from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.sessions.generation import SamplingParams
from relayline.deploy.launch.certificates import init_authority, issue
from relayline.deploy.testing.reference import ReferenceModel
from relayline.deploy.testing.tiny_slices import write_whole
from relayline.stage import hand_over
from relayline.stage.joining.config import JoinConfig as StageJoinConfig
from relayline.stage.joining.join import JoinedStage
from relayline.stage.steps.lane_states import LaneStates
from relayline.wire.envelopes.dtypes import DTYPE_F32
from relayline.wire.links.roles import Role
from relayline.wire.settings.table import EngineSettings, ServingSettings
from tests.stage.sampling.test_penalties import PENALISED, assert_penalised
from tests.support.fleet import (
    CTX,
    GREEDY,
    SHAPE,
    assert_greedy,
    assert_seeded,
    prompt_of,
    read,
    request,
    tokens_of,
    whole_fixture,
)
from tests.support.identities import NOW, security_of
from tests.support.polling import pause

FIXTURES = (whole_fixture,)  # pytest finds them in the modules that name them
NAMES = ("box1", "box2", "box3")
SEEDED = SamplingParams(temperature=0.9, seed=12)
SAMPLING = (GREEDY, SEEDED, PENALISED, GREEDY)
N_TOKENS, N_BEFORE, PROMPT_TOKENS = 100, 5, 80
WAIT_S = 150


class World:
    """A pipeline over stages that have joined, and what moves its layers."""

    def __init__(self, pipeline: Pipeline, mover: LayerMover, join: str, directory: Path) -> None:
        self.pipeline, self.mover, self._join, self._directory = pipeline, mover, join, directory
        self._stages: dict[str, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        self._is_prepared = asyncio.Event()
        self._reports: list[tuple[int, int]] = []
        self._note, mover.prepared = mover.prepared, self._hold  # type: ignore[method-assign]

    def start(self, name: str) -> None:
        host = f"127.0.0.{2 + NAMES.index(name)}"
        security = security_of(self._directory / "ca" / name)
        config = StageJoinConfig(self._join, name, self._directory / name, host=host, security=security)
        self._stages[name] = asyncio.create_task(JoinedStage(config, lambda *_: None).run(self._stopping))

    async def kill(self, name: str) -> None:
        self._stages[name].cancel()
        await asyncio.gather(self._stages[name], return_exceptions=True)

    async def stop(self) -> None:
        self._stopping.set()
        await asyncio.gather(*self._stages.values(), return_exceptions=True)

    def _hold(self, number: int, index: int) -> None:
        """Stages report that they have prepared; the change continues when the test says so."""
        self._reports.append((number, index))
        if len(self._reports) == len(NAMES):
            self._is_prepared.set()

    async def prepare(self, cuts: tuple[int, ...]) -> None:
        self.mover.move(cuts)
        await self._is_prepared.wait()

    def switch(self) -> None:
        for report in self._reports:
            self._note(*report)

    async def until_done(self) -> None:
        while self.pipeline.moves.latest is None or self.pipeline.moves.latest.state is not MoveState.DONE:
            await pause()


@contextlib.asynccontextmanager
async def world(directory: Path, kv_layout: str, grant_steps: int = 0) -> AsyncIterator[World]:
    authority = directory / "ca"
    init_authority(authority, "ours", NOW)
    issue(authority, "head", [], 90, authority / "head", NOW, role=Role.COORDINATOR)
    for at, name in enumerate(NAMES, 2):
        issue(authority, name, [f"127.0.0.{at}"], 90, authority / name, NOW, role=Role.STAGE, stage=name)
    model = write_whole(directory / "whole.gguf", SHAPE)
    file = split_model(model, directory / "split", cuts=(1, 3))
    engine = EngineSettings(
        n_lanes=8, ctx_tokens=CTX, n_threads=1, max_rows=64, kv_layout=kv_layout, kv_type="f32", calibrate=False
    )
    security = security_of(authority / "head")
    joining = JoinConfig(tuple(JoiningStage(name, engine) for name in NAMES))
    roster = make_roster(joining)
    serving = ServingSettings(prefix_lanes=0, share=False, lost_wait_s=WAIT_S)
    schedule = ScheduleConfig("auto", draft=0, chunk_rows=16, grant_steps=grant_steps)
    config = PipelineConfig((), DTYPE_F32, schedule, serving=serving, security=security)
    pipeline = Pipeline(config, file, lambda _: False, roster)

    async def cut(cuts: tuple[int, ...]) -> Path:
        await asyncio.to_thread(split_model, model, directory / "next", cuts=cuts)
        return directory / "next"

    mover, stopping = LayerMover(pipeline, cut), asyncio.Event()
    async with asyncio.timeout(WAIT_S), contextlib.AsyncExitStack() as stack:
        # A busy host takes longer for a step than a switch waits, or for the status of a stage than a picture does.
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(moves, "SETTLE_MAX_S", WAIT_S)
        patch.setattr(stage_client, "STATUS_TIMEOUT_S", WAIT_S)
        joined = serve_joining(joining, directory / "split", file, roster, security, mover.attach)
        address, _ = await stack.enter_async_context(joined)
        made = World(pipeline, mover, address, directory)
        for name in NAMES:
            made.start(name)
        stack.push_async_callback(made.stop)
        stack.push_async_callback(mover.close)
        run = asyncio.create_task(pipeline.run(stopping))
        try:
            await pipeline.ready.wait()
            yield made
        finally:
            stopping.set()
            await run


async def streams_over(
    made: World, whole: ReferenceModel, sampling: tuple[SamplingParams, ...] = SAMPLING, n_granted: int = 0
) -> None:
    """Streams run as the switch is made, and have the tokens of the whole model. n_granted: rows under grants before
    it.
    """
    prompts = [prompt_of(seed, PROMPT_TOKENS + seed) for seed in range(len(sampling))]
    wanted = [request(prompt, N_TOKENS, how) for prompt, how in zip(prompts, sampling, strict=True)]
    streams = [made.pipeline.open(each) for each in wanted]
    said = await asyncio.gather(*(read(stream, N_BEFORE) for stream in streams))
    while made.pipeline.conductor.grants.n_granted < n_granted:
        for stream, begun in zip(streams, said, strict=True):
            begun += await read(stream, 1)
    made.switch()
    rest = await asyncio.gather(*map(tokens_of, streams))
    await made.until_done()
    for prompt, how, first, then in zip(prompts, sampling, said, rest, strict=True):
        tokens = first + then
        assert len(tokens) == N_TOKENS
        if how is PENALISED:
            assert_penalised(whole, prompt, tokens)
        elif how is SEEDED:
            assert_seeded(whole, prompt, tokens, how)
        else:
            assert_greedy(whole, prompt, tokens)


async def lanes_used(made: World) -> list[int]:
    stages: Any = (await made.pipeline.describe())["stages"]
    return [stage["lanes_used"] + stage["lanes_kept"] for stage in stages]


async def until_free(made: World) -> None:
    while any(await lanes_used(made)):
        await pause()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kv_layout", ["unified", "per-lane"])
async def test_streams_keep_all_they_hold_and_all_their_tokens(
    kv_layout: str, tmp_path: Path, whole: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers 0, 1-2 and 3 become 0-1, 2 and 3: one stage takes from another and itself, one from itself, one keeps."""
    freed: list[LaneStates] = []
    monkeypatch.setattr(LaneStates, "give_back", lambda self: freed.append(self))
    async with world(tmp_path, kv_layout) as made:
        await made.prepare((2, 3))
        await streams_over(made, whole)
        move = made.pipeline.moves.latest
        assert move is not None
        assert move.keeps == (False, False, True)
        assert (move.n_replayed, move.n_kept > len(SAMPLING) * PROMPT_TOKENS) == (0, True)
        assert len(freed) == 2, "a stage that loads other layers gives spare memory back first"
        await until_free(made)


async def test_streams_under_grants_keep_all_their_tokens(tmp_path: Path, whole: ReferenceModel) -> None:
    """They are held for the move, and there are grants again behind it."""
    async with world(tmp_path, "unified", grant_steps=8) as made:
        grants = made.pipeline.conductor.grants
        await made.prepare((2, 3))
        while grants._fed_back != made.pipeline.epoch:
            await pause()
        await streams_over(made, whole, (GREEDY, SEEDED), n_granted=4)
        assert made.pipeline.moves.latest is not None
        assert made.pipeline.moves.latest.n_replayed == 0
        before = grants.n_granted
        while grants._fed_back != made.pipeline.epoch:
            await pause()
        assert len(await tokens_of(made.pipeline.open(request(prompt_of(9, 8), N_TOKENS)))) == N_TOKENS
        assert grants.n_granted > before
        await until_free(made)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("victim", ["box1", "box2"])
async def test_a_stage_that_dies_while_it_gives_or_takes_costs_no_token(
    victim: str, tmp_path: Path, whole: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """box2 gives box1 a layer. While its second lane is on the way one of them dies, and comes back."""
    given, pieces = itertools.count(1), hand_over.pieces
    is_due = asyncio.Event()

    def interrupted(lane: Any) -> Iterator[bytes]:
        if next(given) == 2:
            is_due.set()
        yield from pieces(lane)

    monkeypatch.setattr(hand_over, "pieces", interrupted)
    async with world(tmp_path, "unified") as made:

        async def die() -> None:
            await is_due.wait()
            await made.kill(victim)
            made.start(victim)

        dying = asyncio.create_task(die())
        await made.prepare((2, 3))
        await streams_over(made, whole)
        await dying
        move = made.pipeline.moves.latest
        assert move is not None
        assert move.n_replayed > 0
        await until_free(made)
