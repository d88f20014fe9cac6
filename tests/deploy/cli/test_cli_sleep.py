"""What `relayline sleep` says, and how a pipeline of this machine is named."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import click
import pytest

from relayline.deploy.cli.move import move_command
from relayline.deploy.cli.sleep import sleep_command, sleep_line, wake_command
from relayline.deploy.cli.top import top_command
from relayline.deploy.launch import control
from relayline.wire.common.errors import StartError, UsageError


def test_it_says_that_memory_is_free_only_if_it_is() -> None:
    assert sleep_line({"is_sleeping": True, "state": "asleep", "requests": 0}).startswith("sleeps: the memory is free")
    assert sleep_line({"is_sleeping": False, "state": "waking", "requests": 1}).startswith("it wakes: it sleeps again")
    assert sleep_line({"is_sleeping": False, "state": "awake", "requests": 1}).startswith("1 request runs or wait")
    assert sleep_line({"is_sleeping": False, "state": "awake", "requests": 2}).startswith("2 requests run or wait")
    assert sleep_line({"is_sleeping": False, "state": "awake", "requests": 0}).startswith("no request runs: ")


@pytest.fixture
def pipeline_here(monkeypatch: pytest.MonkeyPatch) -> str:
    """A pipeline of this machine, at whose port nobody listens; returns its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"

    def find(name: str | None, _: object, *, by_url: bool) -> Any:
        assert by_url, "these commands have no --state-dir"
        state = SimpleNamespace(name=name, url=url, shown_url=url)
        return SimpleNamespace(is_running=True, state=state) if name == "mine" else None

    monkeypatch.setattr(control, "find", find)
    monkeypatch.setattr(control, "key_of", lambda _: "")
    return url


@pytest.mark.parametrize("command", [sleep_command, wake_command, move_command, top_command])
def test_a_pipeline_of_this_machine_is_named_with_or_without_a_flag(command: click.Command, pipeline_here: str) -> None:
    more = ["--once"] if command is top_command else []
    for words in (["mine"], ["--pipeline", "mine"]):
        with pytest.raises(StartError, match=pipeline_here):
            command.main([*words, *more], standalone_mode=False)
    with pytest.raises(UsageError, match="other does not run here"):
        command.main(["other", *more], standalone_mode=False)
    for words in (["mine", "--url", pipeline_here], ["mine", "--pipeline", "mine"]):
        with pytest.raises(UsageError, match="give only one of NAME, --url and --pipeline"):
            command.main([*words, *more], standalone_mode=False)
