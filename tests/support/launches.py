"""The processes that `relayline up` would launch, without launching them."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayline.deploy.cli.up import up_command
from relayline.deploy.launch.run import Launch


def launched(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> Launch:
    """Return the processes that `relayline up ARGUMENTS` launches; models are files, which need not exist."""
    found: list[Launch] = []
    words = ["up", *map(str, arguments), "--http", "127.0.0.1:0"]
    monkeypatch.setattr("sys.argv", ["relayline", *words])  # which a new start has again
    monkeypatch.setattr("relayline.deploy.cli.up_launch.resolve_model", Path)
    monkeypatch.setattr("relayline.deploy.cli.up_manifest.launch", lambda what, *_, **__: found.append(what))
    up_command.main(words[1:], standalone_mode=False)
    (what,) = found
    return what
