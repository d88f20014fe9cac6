"""Goal: the relay's process comes when a stage asks for it, again when it dies, and goes with its coordinator."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import pytest

from relayline.coordinator.relay.child import RelayChild
from relayline.coordinator.relay.config import RelayConfig
from relayline.deploy.testing.processes import wait_gone
from relayline.stage.joining.tunnel import Tunnel
from relayline.wire.common import bounds
from relayline.wire.common.errors import NotReadyError
from relayline.wire.links.security import PLAINTEXT
from tests.coordinator.relay.test_relay import ask
from tests.support.polling import pause
from tests.support.relays import echo, serving


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the process may take longer to start than a stage waits for it."""
    monkeypatch.setattr(bounds, "RELAY_START_S", 120.0)


async def test_a_relay_that_dies_comes_back_and_stages_are_reached_where_they_were() -> None:
    child = RelayChild(RelayConfig(), PLAINTEXT)
    assert child.process_id is None, "nobody has asked for it"
    ports: asyncio.Queue[int] = asyncio.Queue()
    try:
        port = await child.port()
        first = child.process_id
        assert first is not None
        async with serving(echo) as target:
            tunnel = Tunnel(f"127.0.0.1:{port}", "a", PLAINTEXT, target)
            holding = asyncio.create_task(tunnel.keep_open(ports.put))
            try:
                stage_port = await ports.get()
                data = os.urandom(100_000)
                assert await ask(stage_port, data) == data
                while child.figures().get("a", {}).get("from_stage_bytes") != len(data):
                    await pause()
                os.kill(first, signal.SIGKILL)
                assert await ports.get() == stage_port
                assert child.process_id not in (None, first)
                assert await child.port() == port
                assert await ask(stage_port, data) == data
            finally:
                holding.cancel()
                await asyncio.gather(holding, return_exceptions=True)
        last = child.process_id
        assert last is not None
    finally:
        await child.close()
    await asyncio.to_thread(wait_gone, [last])


async def test_a_stage_hears_why_there_is_no_relay() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        child = RelayChild(RelayConfig(port=taken.getsockname()[1]), PLAINTEXT)
        try:
            with pytest.raises(NotReadyError, match="relay of this coordinator does not run: cannot listen on"):
                await child.port()
        finally:
            await child.close()
