"""The inner door of a coordinator: its socket goes with it, or with the next coordinator if it was killed."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

import pytest
from aiohttp import web

from relayline.coordinator.http.edge.inside import Inside


def left_by_a_killed_one(directory: Path) -> Path:
    """What is left of a socket: the file, to which nobody listens."""
    directory.mkdir()
    path = directory / "api"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    return path


async def test_left_sockets_go_and_used_ones_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    app = web.Application()
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        async with Inside(app).listening(runner) as first:
            killed = left_by_a_killed_one(first.parent.with_name(f"{first.parent.name}-k"))
            elsewhere = left_by_a_killed_one(tmp_path / "elsewhere")
            killed.parent.with_name(f"{first.parent.name}-l").symlink_to(elsewhere.parent)
            async with Inside(app).listening(runner) as second:
                assert first.exists()
                assert second.exists()
                assert not killed.parent.exists()
                assert elsewhere.exists(), "a link leads to what is somebody else's"
                lock = os.open(second.parent, os.O_RDONLY)
                with pytest.raises(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.close(lock)
        assert not first.parent.exists()
        assert not second.parent.exists()
    finally:
        await runner.cleanup()
