"""The sender towards stage 0: a bug in one envelope must not make later requests wait in silence."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from relayline.coordinator.engine import token_sender
from relayline.coordinator.engine.token_sender import TokenSender, write_tokens
from relayline.coordinator.sessions.frame import Frame
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import Session
from relayline.wire.common.errors import InternalError, RelaylineError
from relayline.wire.envelopes.buffers import Buffer, BufferPool
from relayline.wire.envelopes.dtypes import DTYPE_F32, DTYPE_TOKENS


async def test_an_unexpected_failure_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    lost: asyncio.Future[RelaylineError] = asyncio.get_running_loop().create_future()
    link: Any = SimpleNamespace(pool=BufferPool(DTYPE_TOKENS, 1))  # without `send`: a bug as good as any
    sender = TokenSender(link, 1, lost.set_result)
    session = Session(1, GenerationRequest("r", (1, 2), 1, SamplingParams()), lambda _: False)
    with caplog.at_level(logging.ERROR, logger="relayline.coordinator"):
        sender.push([frame.leave() for frame in session.start()])
        error = await asyncio.wait_for(lost, 60)
    assert isinstance(error, InternalError)
    assert "sending to stage 0 failed" in error.message
    assert caplog.records[0].exc_info is not None
    await sender.close()


async def test_many_rows_of_images_are_written_beside_the_event_loop_and_stay_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens, rows = BufferPool(DTYPE_TOKENS, 1), BufferPool(DTYPE_F32, 1_024)
    here, sent, writers = threading.get_ident(), list[tuple[int, float]](), list[bool]()

    async def send(buffer: Buffer, message: bytes) -> None:
        sent.append((int(buffer.frames["session_id"][0]), float(buffer.payload[0, 0])))

    def written(buffer: Buffer, *others: Any) -> bytes:
        writers.append(threading.get_ident() == here)
        return write_tokens(buffer, *others)

    monkeypatch.setattr(token_sender, "write_tokens", written)
    link: Any = SimpleNamespace(pool=tokens, row_pool=rows, send=send, handed_ns=0)
    sender = TokenSender(link, 1, pytest.fail)
    for session_id, n_rows in ((1, 65), (2, 0), (3, 64)):
        image = np.full((n_rows, 1_024), session_id, np.float32) if n_rows else None
        sender.push([Frame(session_id, 0, tuple(range(5, 5 + max(1, n_rows))), 0, rows=image)])
    await sender.flush(10)
    assert sent == [(1, 1.0), (2, 5.0), (3, 3.0)]
    assert writers == [False, True, True]
    await sender.close()


async def test_pushed_frames_are_sent_before_anything_else_runs() -> None:
    """Stages wait for it; the readers of the tokens before, whose turn comes next, do not."""
    pool, sent, may_go = BufferPool(DTYPE_TOKENS, 1), list[int](), asyncio.Event()

    async def send(buffer: Buffer, message: bytes) -> None:
        sent.append(int(buffer.frames["session_id"][0]))
        await may_go.wait()
        pool.give_back(buffer)

    link: Any = SimpleNamespace(pool=pool, send=send, handed_ns=0)
    sender = TokenSender(link, 1, pytest.fail)
    for session_id in (1, 2, 3):
        session = Session(session_id, GenerationRequest("r", (1, 2), 1, SamplingParams()), lambda _: False)
        sender.push([frame.leave() for frame in session.start()])
    assert sent == [1]
    assert not sender.is_idle()
    may_go.set()
    await sender.flush(10)
    assert sent == [1, 2, 3]
    assert sender.is_idle()
    await sender.close()
