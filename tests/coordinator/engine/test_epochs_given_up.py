"""Goal: an attempt to begin an epoch ends when the stages are to sleep, and nothing of it counts afterwards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from relayline.coordinator.engine.pipeline import Pipeline, PipelineConfig
from relayline.wire.envelopes.dtypes import DTYPE_F32
from tests.coordinator.engine.test_reconnect import WAIT_S, joined
from tests.support.fakes import pipeline_file


class World:
    """A pipeline whose stages rest, and are looked for, as the test says."""

    def __init__(self) -> None:
        self.pipeline = Pipeline(PipelineConfig((), DTYPE_F32), pipeline_file(1), lambda _: False, joined("a"))
        self.events: asyncio.Queue[str] = asyncio.Queue()
        self.connection: Any = None  # found at once, and given up in the same moment
        self.epochs: Any = self.pipeline.epochs
        self.epochs.rested = self._rested
        self.epochs._reconnector = SimpleNamespace(connect=self._connect)

    async def _rested(self) -> None:
        self.events.put_nowait("rested")

    async def _connect(self, *, is_first: bool) -> Any:
        self.events.put_nowait("looks for stages")
        if self.connection is not None:
            found, self.connection = self.connection, None
            self.epochs.give_up()
            return found
        try:
            return await asyncio.Event().wait()
        finally:
            self.events.put_nowait("looks no more")

    async def sees(self, *events: str) -> None:
        assert [await self.events.get() for _ in events] == [*events]


@contextlib.asynccontextmanager
async def running(world: World) -> AsyncIterator[None]:
    stopping = asyncio.Event()
    task = asyncio.create_task(world.pipeline.run(stopping))
    async with asyncio.timeout(WAIT_S):
        yield
        stopping.set()
        await task


@pytest.fixture
async def world() -> World:
    return World()


async def test_the_next_attempt_begins_from_the_start_and_once_stages_have_rested(world: World) -> None:
    async with running(world):
        await world.sees("rested", "looks for stages")
        world.epochs.give_up()
        world.epochs.give_up()
        await world.sees("looks no more", "rested", "looks for stages")
    await world.sees("looks no more")
    world.epochs.give_up()
    assert world.events.empty(), "there is nothing to give up any more"


async def test_a_connection_that_stands_in_the_moment_it_is_given_up_is_closed(world: World) -> None:
    async def close() -> None:
        world.events.put_nowait("closed")

    world.connection = SimpleNamespace(facts=(), stages=(), close=close)
    async with running(world):
        await world.sees("rested", "looks for stages", "closed", "rested", "looks for stages")
        assert not world.pipeline.is_ready()
