"""A command that follows a change of layers: who interrupts it learns that the change goes on."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from relayline.deploy.cli.console_http import Coordinator
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
