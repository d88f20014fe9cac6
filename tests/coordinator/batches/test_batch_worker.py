"""The process of a batch whose predecessor still has the lock of the output."""

from __future__ import annotations

import asyncio
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from relayline.coordinator.batches.output_file import OutputFile
from relayline.coordinator.batches.worker import Order
from relayline.wire.common.child_command import module_command
from tests.support.batch_world import request_lines
from tests.support.polling import pause

LOCKS = Path("/proc/locks")  # of Linux: who waits for one, too
WAIT_S = 60.0

pytestmark = pytest.mark.skipif(not LOCKS.exists(), reason="this system does not tell who waits for a lock")


@pytest.fixture
def output(tmp_path: Path) -> OutputFile:
    """The output with its lock, taken before the worker begins."""
    return OutputFile(tmp_path / "out")


@pytest.fixture
def worker(tmp_path: Path, output: OutputFile) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "in").write_bytes(request_lines("a", "b"))
    order = Order(
        input=str(tmp_path / "in"), output=str(output.path), errors=str(tmp_path / "err"), url="/v1/completions",
        socket="", headers={}, n_streams=1, n_max=9, wait_s=1.0, mark="batch_expired",
    )  # fmt: skip
    command = module_command("relayline.coordinator.batches.worker")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()
        yield process
        process.kill()


def waits(process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, process.stdout and process.stdout.read()
    return any("->" in line.split() and str(process.pid) in line.split() for line in LOCKS.read_text().splitlines())


async def waiting(process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not waits(process):
            await pause()


def test_it_waits_for_the_lock(tmp_path: Path, output: OutputFile, worker: subprocess.Popen[bytes]) -> None:
    with output:
        asyncio.run(waiting(worker))
    assert worker.stdout is not None
    assert msgspec.json.decode(worker.stdout.readlines()[-1]) == {"ended": ""}
    assert (tmp_path / "err").read_bytes().count(b"batch_expired") == 2
    assert stat.S_IMODE((tmp_path / "err").stat().st_mode) == 0o600
    assert worker.wait() == 0


def test_it_ends_with_its_coordinator_whatever_it_does(output: OutputFile, worker: subprocess.Popen[bytes]) -> None:
    with output:
        asyncio.run(waiting(worker))
        assert worker.stdin is not None
        worker.stdin.close()
        assert worker.wait(WAIT_S) != 0
