"""Real stages on tiny artifacts in one event loop, which can be stopped and started one by one, and their pipeline."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from relayline.coordinator.engine import stage_client
from relayline.coordinator.engine.draft_seam import drafting
from relayline.coordinator.engine.pipeline import Pipeline, PipelineConfig
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams, TokenEvent
from relayline.coordinator.sessions.streams import SessionStream
from relayline.deploy.machine.ports import free_port
from relayline.deploy.testing.engines import stage_config
from relayline.deploy.testing.reference import ReferenceModel
from relayline.deploy.testing.tiny_slices import TinyShape, write_pipeline, write_whole
from relayline.stage.engine.saved_lanes import SavedLanes
from relayline.stage.process import serve
from relayline.stage.sampling.sampler import SamplingOptions, SessionSampler
from relayline.wire.common.errors import (
    RelaylineError,
)
from relayline.wire.common.process import first_of
from relayline.wire.envelopes.dtypes import DTYPE_F32
from relayline.wire.model_files.adapters import Adapter
from relayline.wire.model_files.eagle3 import InnerRows
from relayline.wire.settings.table import ServingSettings
from tests.support.cutting_proxy import CuttingProxy, cutting_proxy
from tests.support.fakes import pipeline_file
from tests.support.polling import pause

SHAPE = TinyShape(n_layers=4)
CTX = 256
GREEDY = SamplingParams(temperature=0.0)
# Company in a step moves the logits of these f32 weights (their deviation is about 2), with our attention as with
# llama.cpp's: see tests/stage/engine/test_near_ties.py. So a token may be any whose logit is as close to the largest as
# two logits can move together.
LOGIT_MOVE = 0.02
NEAR_TIE = 2 * LOGIT_MOVE
# Number of draws for a seeded token. Logits are moved by about what one in 1,000 moves, since on the border between two
# tokens a draw may get either.
N_DRAWS, DRAWS_SIGMA = 32, 0.006
Artifacts = Callable[[Sequence[int]], list[Path]]
request_ids = itertools.count()


@pytest.fixture(scope="module", name="artifacts")
def artifacts_fixture(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    """Artifacts for given cuts, each split made once."""

    @functools.cache
    def made(cuts: tuple[int, ...]) -> list[Path]:
        return write_pipeline(tmp_path_factory.mktemp("split"), SHAPE, list(cuts))

    return lambda cuts: made(tuple(cuts))


@pytest.fixture(scope="module", name="whole")
def whole_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceModel]:
    """The same model in one piece."""
    with ReferenceModel(write_whole(tmp_path_factory.mktemp("whole") / "whole.gguf", SHAPE), CTX, 1) as model:
        yield model


def prompt_of(seed: int, n_tokens: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, SHAPE.n_vocab, n_tokens).tolist())


def request(prompt: tuple[int, ...], max_tokens: int, sampling: SamplingParams = GREEDY) -> GenerationRequest:
    return GenerationRequest(f"r{next(request_ids)}", prompt, max_tokens, sampling)


def logits_along(whole: ReferenceModel, prompt: tuple[int, ...], tokens: list[int]) -> npt.NDArray[np.float32]:
    """The unsplit model's logits at the position of each of `tokens`: f32 [len(tokens), n_vocab]."""
    whole.drop_from(0, 0)
    return whole.read([*prompt, *tokens[:-1]], 0)[len(prompt) - 1 :]


def assert_greedy(
    whole: ReferenceModel, prompt: tuple[int, ...], tokens: list[int], near_tie: float = NEAR_TIE
) -> None:
    """Every token is the unsplit model's choice after the tokens before it, or nearly."""
    logits = logits_along(whole, prompt, tokens)
    behind = logits.max(axis=1) - logits[np.arange(len(tokens)), tokens]
    assert behind.max() <= near_tie, f"token {int(behind.argmax())} of {len(tokens)} is {behind.max()} behind"


def assert_seeded(
    whole: ReferenceModel,
    prompt: tuple[int, ...],
    tokens: list[int],
    sampling: SamplingParams,
    sigma: float = DRAWS_SIGMA,
) -> None:
    """Every token is one that its draw picks from the unsplit model's logits, give or take `sigma`."""
    sampler = SessionSampler(
        SamplingOptions(**dataclasses.asdict(sampling) | {"numbers": dict(sampling.numbers)}), whole.n_vocab
    )
    noise = np.random.default_rng(1).normal(0.0, sigma, (N_DRAWS, whole.n_vocab)).astype(np.float32)
    noise[0] = 0.0
    try:
        rows = zip(logits_along(whole, prompt, tokens), tokens, strict=True)
        n_certain = 0
        for position, (logits, token) in enumerate(rows, len(prompt)):
            picked = {sampler.sample(logits + moved, position).token for moved in noise}
            n_certain += len(picked) == 1
            assert token in picked, f"position {position} has {token}, drawn from {picked}"
        assert n_certain >= len(tokens) / 2, "most draws leave no choice"
    finally:
        sampler.close()


class Fleet:
    """Stages that can be stopped and started one by one, and the pipeline over them."""

    def __init__(
        self,
        paths: Sequence[Path],
        n_lanes: int,
        kv_layout: str = "auto",
        tier_bytes: int = 0,
        rewind_rows: int = 0,
        max_rows: int = 64,
        run_ahead: str = "auto",
        ctx_tokens: int = CTX,
        window_cells: str = "auto",
        tier_dir: Path | None = None,
        adapters: tuple[Adapter, ...] = (),
        mtp_drafts: int = 0,
        inner: InnerRows | None = None,
    ) -> None:
        self._inner = inner
        self._tier_dir, self._adapters, self._mtp_drafts = tier_dir, adapters, mtp_drafts
        self._run_ahead, self._window_cells = run_ahead, window_cells
        self._paths, self.n_lanes, self.ctx_tokens, self._kv_layout = paths, n_lanes, ctx_tokens, kv_layout
        self._tier_bytes, self._rewind_rows, self._max_rows = tier_bytes, rewind_rows, max_rows
        self._running: dict[int, contextlib.AsyncExitStack] = {}
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in paths]
        self.pipeline: Pipeline
        self.recovering = asyncio.Event()
        self.proxies: list[CuttingProxy] = []  # one before each stage, if requested

    async def start(self, index: int) -> None:
        """Start a stage, always at the same address."""
        port = int(self.addresses[index].rsplit(":", 1)[1])
        config = stage_config(
            self._paths[index],
            port=port,
            n_lanes=self.n_lanes,
            ctx_tokens=self.ctx_tokens,
            n_threads=1,
            max_rows=self._max_rows,
            kv_layout=self._kv_layout,
            prefix_memory_bytes=self._tier_bytes,
            prefix_disk_bytes=self._tier_bytes if self._tier_dir is not None else 0,
            prefix_disk_dir=str(self._tier_dir / str(index)) if self._tier_dir is not None else "",
            rewind_rows=self._rewind_rows,
            mtp_drafts=self._mtp_drafts,
            run_ahead=self._run_ahead,
            window_cells=self._window_cells,
            adapters=self._adapters,
            inner=self._inner,
            verify=False,
            calibrate=False,
        )
        stack = self._running[index] = contextlib.AsyncExitStack()
        self.addresses[index], _, _ = await stack.enter_async_context(serve(config))

    async def stop(self, index: int) -> None:
        await self._running.pop(index).aclose()

    async def lose(self, index: int) -> None:
        """Stop a stage; returns when the pipeline has noticed."""
        self.recovering.clear()
        await self.stop(index)
        await self._noticed()

    async def cut(self, link: int) -> None:
        """Cut the connections through a proxy; returns when the pipeline has noticed."""
        self.recovering.clear()
        self.proxies[link].cut()
        await self._noticed()

    async def _noticed(self) -> None:
        async with asyncio.timeout(60):
            await self.recovering.wait()

    async def stop_all(self) -> None:
        for index in list(self._running):
            await self.stop(index)

    async def lanes_used(self) -> list[int]:
        """Per stage, as reported by the stages."""
        stages = (await self.pipeline.describe())["stages"]
        assert isinstance(stages, list)
        return [stage["lanes_used"] for stage in stages]

    async def lanes_kept(self) -> list[int]:
        """Per stage, those without a reader."""
        stages = (await self.pipeline.describe())["stages"]
        assert isinstance(stages, list)
        return [stage["lanes_kept"] for stage in stages]

    async def until_free(self) -> None:
        """Wait until no stage holds a lane: closes are under way when the last token arrives."""
        async with asyncio.timeout(60):
            while any(await self.lanes_used()):
                await pause()


@contextlib.asynccontextmanager
async def fleet(
    paths: Sequence[Path],
    *,
    n_lanes: int = 8,
    waiting_max: int = 64,
    recovery_timeout_s: float = 60.0,
    lost_wait_s: float = 60.0,
    mode: str = "auto",
    share: bool = False,
    prefix_lanes: int | None = 0,
    kv_layout: str = "auto",
    tier_bytes: int = 0,
    proxied: bool = False,
    n_vocab: int = SHAPE.n_vocab,
    is_end: Callable[[int], bool] = lambda _: False,
    file: PipelineFile | None = None,
    draft: int = 0,
    rewind_rows: int = 0,
    max_rows: int = 64,
    run_ahead: str = "auto",
    grant_steps: int = 0,
    ctx_tokens: int = CTX,
    window_cells: str = "auto",
    tier_dir: Path | None = None,
    adapters: tuple[Adapter, ...] = (),
    draft_model: Path | None = None,
    mtp_drafts: int = 0,
    inner: InnerRows | None = None,
) -> AsyncIterator[Fleet]:
    """A ready pipeline, of the model in `file` or the tiny one; at its end it drains, and everything must be gone.

    `draft_model`: the file of a model that drafts in a process of its own; it has the vocabulary of the tiny one.
    `inner`: an EAGLE-3 model on the last stage, with the rows that it reads.
    """
    made = Fleet(
        paths, n_lanes, kv_layout, tier_bytes, rewind_rows, max_rows, run_ahead, ctx_tokens, window_cells, tier_dir,
        adapters, mtp_drafts, inner)  # fmt: skip
    proxies = contextlib.AsyncExitStack()
    _measure_nothing(proxies.enter_context(pytest.MonkeyPatch.context()))
    try:
        for index in range(len(paths)):
            await made.start(index)
            if proxied:
                made.proxies.append(await proxies.enter_async_context(cutting_proxy(made.addresses[index], 1 << 40)))
    except BaseException:  # a server that outlives its event loop takes the process with it
        await proxies.aclose()
        await made.stop_all()
        raise
    serving = ServingSettings(
        queue=waiting_max, lost_wait_s=lost_wait_s, share=share, prefix_lanes=prefix_lanes,
        draft_model=str(draft_model or ""), draft_threads=1)  # fmt: skip
    schedule = ScheduleConfig(
        mode, n_groups=1, group_rows=8, chunk_rows=16, draft=draft, grant_steps=grant_steps,
        draft_model_tokens=16_384 if draft_model is not None else 0)  # fmt: skip
    addresses = tuple(proxy.address for proxy in made.proxies) or tuple(made.addresses)
    config = PipelineConfig(
        addresses, DTYPE_F32, schedule, serving=serving, recovery_timeout_s=recovery_timeout_s, adapters=adapters,
        inner_layers=inner.layers if inner is not None else ())  # fmt: skip
    file = file or pipeline_file(len(paths), pipeline_id="tiny", n_embd=SHAPE.n_embd, n_vocab=n_vocab)
    pipeline = made.pipeline = Pipeline(config, file, is_end)
    disconnect = pipeline.epochs.disconnect

    async def noticed(error: RelaylineError) -> None:
        made.recovering.set()
        await disconnect(error)

    pipeline.epochs.disconnect = noticed  # type: ignore[method-assign]
    async with _running(made, proxies, serving, draft_model):
        yield made


def _measure_nothing(free: pytest.MonkeyPatch) -> None:
    """What comes back is no question of measured prices: a tiny model may read a prompt in the time of a copy."""
    free.setattr(SavedLanes, "token_ns", 0.0)
    free.setattr(stage_client, "STATUS_TIMEOUT_S", 60.0)  # no stage is left out of a picture because the host is busy


@contextlib.asynccontextmanager
async def _running(
    made: Fleet, proxies: contextlib.AsyncExitStack, serving: ServingSettings, draft_model: Path | None
) -> AsyncIterator[None]:
    """Run the pipeline of a fleet; at the end it drains."""
    pipeline = made.pipeline
    stopping, helpers = asyncio.Event(), contextlib.AsyncExitStack()
    if draft_model is not None:
        await helpers.enter_async_context(drafting(pipeline, serving, draft_model))
    run = asyncio.create_task(pipeline.run(stopping))
    ready = asyncio.create_task(pipeline.ready.wait())
    try:
        await asyncio.wait_for(first_of(ready, run), 60)
        if run.done():
            run.result()
        yield
    finally:
        ready.cancel()
        stopping.set()
        async with asyncio.timeout(60):
            try:
                await run
            finally:  # a server that outlives its event loop takes the process with it
                await helpers.aclose()
                await proxies.aclose()
                await made.stop_all()


async def tokens_of(stream: SessionStream) -> list[int]:
    """Read a stream to its end and check it."""
    events: list[TokenEvent] = []
    async with asyncio.timeout(60):
        async for event in stream:
            events.append(event)
    await stream.aclose()
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    return [event.token for event in events]


async def answers_over_losses(
    running: Fleet, prompts: Sequence[tuple[int, ...]], n_tokens: int, adapters: Sequence[int] = ()
) -> list[list[int]]:
    """Ask for greedy answers while each stage is lost and comes back in turn; return their tokens.

    adapters: each prompt's choice; empty: none.
    """
    asked = [
        dataclasses.replace(request(prompt, n_tokens), adapter=adapter)
        for prompt, adapter in zip(prompts, adapters or [0] * len(prompts), strict=True)
    ]
    streams = [running.pipeline.open(each) for each in asked]
    tokens = [await read(stream, 3) for stream in streams]
    for lost in range(len(running.addresses)):
        await running.lose(lost)
        await running.start(lost)
        async with asyncio.timeout(60):  # tokens from before the loss may still wait to be read
            await running.pipeline.ready.wait()
        for stream, begun in zip(streams, tokens, strict=True):
            begun += await read(stream, 3)
    for stream, begun in zip(streams, tokens, strict=True):
        begun += await tokens_of(stream)
        assert len(begun) == n_tokens
    return tokens


async def read(stream: SessionStream, n_tokens: int) -> list[int]:
    async with asyncio.timeout(60):
        return [(await anext(stream)).token for _ in range(n_tokens)]
