"""A command that changes a running gateway is killed: the next one can change it all the same."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from relayline.deploy.cli import apply_gateway
from relayline.deploy.cli.apply_gateway import change
from relayline.deploy.launch.control import Launched
from relayline.deploy.launch.gateway.change import GatewayDifference
from relayline.deploy.launch.gateway.keeper import Keeper
from relayline.deploy.launch.process_id import identify
from relayline.deploy.launch.state import STATE_VERSION, LaunchState, StateDir
from relayline.wire.common.errors import StartError
from relayline.wire.common.phase import Phase
from tests.support.polling import pause

WAITS = """
import sys
from pathlib import Path
from relayline.wire.common.use import Use
use = Use([Path(sys.argv[1])])
print("waits", flush=True)
sys.stdin.read()
"""
NOTHING = GatewayDifference((), (), (), (), (), ())


@pytest.fixture
def serving(tmp_path: Path) -> Launched:
    me = identify(os.getpid())
    assert me is not None
    state = LaunchState(STATE_VERSION, "house", "house.yaml", Phase.READY, me.pid, me.start_ticks)
    directory = StateDir(tmp_path)
    directory.store(state)
    return Launched(directory, state)


def changed(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let a supervisor take the order up at once; returns what it was."""
    orders = []

    def take(_supervisor: Any, _signal: int) -> bool:
        orders.append(launched.directory.more.read_text())
        launched.directory.more.unlink()
        return True

    monkeypatch.setattr(apply_gateway, "send_signal", take)
    monkeypatch.setattr(apply_gateway, "write_gateway", lambda text, path: path.write_text(text))
    plan: Any = SimpleNamespace(name="house", manifest="now")
    change(plan, launched, NOTHING, as_json=True)
    (order,) = orders
    return order


def test_an_order_whose_command_was_killed_does_not_keep_others_out(
    serving: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = serving.directory.more
    more.write_text("before")
    command = [sys.executable, "-c", WAITS, str(more)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waits\n"
        with pytest.raises(StartError, match="house is being changed already; wait for that `relayline up`"):
            changed(serving, monkeypatch)
        assert more.read_text() == "before"
        process.kill()
    assert changed(serving, monkeypatch) == "now"


async def test_an_order_that_comes_during_the_one_of_a_killed_command_is_taken_up(tmp_path: Path) -> None:
    keeper: Any = Keeper.__new__(Keeper)
    keeper._directory, keeper._asked = StateDir(tmp_path), asyncio.Event()
    taken: list[tuple[str, str]] = []

    async def take(_served: Any) -> None:
        taken.append((keeper._directory.restart.read_text(), keeper._directory.more.read_text()))
        if len(taken) == 1:
            order("second")

    def order(text: str) -> None:
        for path in (keeper._directory.restart, keeper._directory.more):
            path.with_suffix(".new").write_text(text)
            path.with_suffix(".new").replace(path)
        keeper._asked.set()

    keeper._change = take
    order("first")
    changing = asyncio.create_task(keeper._change_when_asked(mock.Mock()))
    async with asyncio.timeout(20):
        while keeper._directory.more.exists():
            await pause()
    changing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await changing
    assert taken == [("first", "first"), ("second", "second")]
    assert not keeper._directory.restart.exists()
