"""The last stage's tokens for stage 0 while no link takes them: none is kept, and what is wrong is told once."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref
from typing import Any
from unittest import mock

import numpy as np
import pytest

from relayline.stage import sending_back
from relayline.stage.queue_types import QueuedFrame
from relayline.stage.sending_back import OPEN_TRIES_MAX, SendingBack
from relayline.wire.common.errors import InternalError, RelaylineError, StageLostError
from relayline.wire.envelopes.buffers import BufferPool
from relayline.wire.envelopes.dtypes import DTYPE_TOKENS
from relayline.wire.envelopes.frames import Flag, grant_argument
from tests.support.fakes import rows_frame

EPOCH = 9
GONE = StageLostError("stage 0 is gone")


def granted() -> list[tuple[QueuedFrame, int]]:
    frame = rows_frame(8, 3, np.array([[7]], np.int32), Flag.WANTS_SAMPLE)
    return [(dataclasses.replace(frame, argument=grant_argument(1, 20)), 42)]


class World:
    """A sender whose link opens unless `refusal` is given, and takes tokens unless `error` is."""

    def __init__(self, refusal: RelaylineError | None = None, error: Exception | None = None) -> None:
        self.refusal = refusal
        self.link: Any = mock.Mock(pool=BufferPool(DTYPE_TOKENS, 1), send=mock.AsyncMock(side_effect=error))
        self.link.close = mock.AsyncMock()
        self.n_tries = self.n_opened = 0
        self.lost: list[RelaylineError] = []
        self.sender = SendingBack(self.open, EPOCH, self.opened, self.lost.append)

    async def open(self) -> Any:
        self.n_tries += 1
        if self.refusal is not None:
            raise self.refusal
        return self.link

    def opened(self) -> None:
        self.n_opened += 1

    async def settle(self) -> None:
        """Let everything run that does not wait for a push."""
        for _ in range(10):
            await asyncio.sleep(0)


async def test_tokens_are_dropped_until_the_link_stands() -> None:
    world = World()
    world.sender.push(granted())
    await world.settle()
    assert world.sender.is_open
    assert world.n_opened == 1
    world.link.send.assert_not_called()
    world.sender.push(granted())
    world.link.send.assert_called_once()
    await world.sender.close()
    world.link.close.assert_awaited_once()


async def test_a_stage_0_that_takes_no_link_costs_the_epoch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending_back, "OPEN_AGAIN_S", 0.0)
    world = World(refusal=GONE)
    await asyncio.wait_for(asyncio.shield(world.sender._task), 20)
    world.sender.push(granted())
    assert not world.sender._waiting
    assert (world.n_tries, world.n_opened, world.lost) == (OPEN_TRIES_MAX, 0, [])
    await world.sender.close()


class Link:
    """One that only counts its ends."""

    n_closed = 0

    async def close(self) -> None:
        self.n_closed += 1


async def test_a_link_that_was_closed_is_kept_by_nobody() -> None:
    """Or its connection would stay until the collector of cycles looks, which an idle stage never lets it do."""
    gc.disable()
    try:
        world = World()
        world.link, sender = Link(), world.sender
        await world.settle()
        gone = weakref.ref(world.link)
        await sender.close()
        assert world.link.n_closed == 1
        del world.link
        assert (gone(), sender.is_open) == (None, False)
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [GONE, ValueError("a bug")])
async def test_a_link_that_fails_is_told_once_and_keeps_nothing(error: Exception) -> None:
    world = World(error=error)
    await world.settle()
    for _ in range(3):
        world.sender.push(granted())
        await world.settle()
    assert not world.sender._waiting
    assert len(world.lost) == 1
    assert isinstance(world.lost[0], StageLostError if error is GONE else InternalError)
    await world.sender.close()
