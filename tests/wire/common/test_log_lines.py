"""Log lines: a printed line is not logged to a terminal again, and stays in files and in JSON."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from relayline.deploy.launch.run import log_file
from relayline.wire.common import logs


@pytest.fixture(autouse=True)
def _root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_printed_line_is_for_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], *, as_json: bool) -> None:
    logs.setup("up", as_json=as_json)
    with log_file(tmp_path / "up.log"):
        logging.getLogger("relayline.up").info("ready: %s", "http://x", extra=logs.PRINTED)
        logging.getLogger("relayline.up").info("another line")
    printed, kept = capsys.readouterr().err, (tmp_path / "up.log").read_text()
    assert ("ready: http://x" in printed) is as_json
    assert "ready: http://x" in kept
    assert "another line" in printed
    assert "another line" in kept
