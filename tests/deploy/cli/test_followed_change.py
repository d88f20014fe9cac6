"""Commands that follow a change of layers: who interrupts one learns that it goes on; an earlier one is not theirs."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from click.testing import CliRunner

from relayline.deploy.cli.console_http import Coordinator
from relayline.deploy.cli.drain import drain_command
from relayline.deploy.cli.move import STATE_LINES, followed

MOVING = {"move": {"number": 3, "state": "preparing"}}


class Unending:
    """A coordinator whose change does not end. `asked` is set once somebody follows it."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def get(self, *_: object) -> dict[str, Any]:
        self.asked.set()
        return MOVING


@pytest.mark.parametrize("tell", [True, False])
async def test_an_interrupt_ends_the_command_and_not_the_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, tell: bool
) -> None:
    monkeypatch.setattr("relayline.deploy.cli.move.LOOK_EVERY_S", 0)
    coordinator = Unending()
    following = asyncio.create_task(followed(cast("Coordinator", coordinator), MOVING, (), tell=tell))
    await coordinator.asked.wait()
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    told = capsys.readouterr()
    progress = [STATE_LINES["preparing"]] if tell else []
    assert told.out == ""
    assert told.err.splitlines() == [
        *progress, "the change goes on without this command; `relayline move` shows the layers",
    ]  # fmt: skip


async def test_what_keeps_new_layers_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def moving(trouble: str) -> dict[str, Any]:
        fetches = {"box2": {"done_bytes": 1, "total_bytes": 9, "trouble": trouble}}
        return {"move": {**MOVING["move"], "fetches": fetches}}

    told = ["the hub stalls", "", "the hub stalls", "the hub is gone"]
    answers = iter([*map(moving, told), {"move": {"number": 3, "state": "done"}}])

    class Stalling:
        async def get(self, *_: object) -> dict[str, Any]:
            return next(answers)

    monkeypatch.setattr("relayline.deploy.cli.move.LOOK_EVERY_S", 0)
    await followed(cast("Coordinator", Stalling()), MOVING, (), tell=True)
    assert capsys.readouterr().err.splitlines() == [
        STATE_LINES["preparing"],
        "box2: nothing comes just now: the hub stalls",
        "box2: nothing comes just now: the hub is gone",
    ]


class Drained:
    """A coordinator that has drained a stage at once. Its latest change of layers is an old one."""

    def __init__(self, *_: object) -> None:
        pass

    async def __aenter__(self) -> Drained:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def put(self, *_: object) -> dict[str, Any]:
        move = {"number": 3, "state": "done", "stages": ["a", "b"], "keep": [], "took_s": 9.0, "paused_s": 1.0}
        return {"cuts": [4], "layers": [[0, 4], [4, 8]], "stages": ["a", "b"], "move": move, "hosts": {}}


def test_a_spare_that_is_drained_reports_no_earlier_change_as_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayline.deploy.cli.drain.Coordinator", Drained)
    done = CliRunner().invoke(drain_command, ["spare", "--url", "http://127.0.0.1:1"])
    assert (done.output, done.exit_code) == ("spare is drained; it held no layers\n", 0)
    shown = CliRunner().invoke(drain_command, ["spare", "--url", "http://127.0.0.1:1", "--json"])
    assert set(json.loads(shown.output)) == {"cuts", "layers", "stages", "move", "hosts"}
