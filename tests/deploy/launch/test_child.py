"""A supervised child: its output is read to the end, even if the readers of it stop or fail."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from relayline.deploy.launch.child import Child, unstarted_text
from relayline.deploy.testing.processes import TIMEOUT_S

# Far more than a pipe and the reader's buffer hold, with an unreadable event in the middle.
CHATTY = """
import sys
print('{"event": "ready"}', flush=True)
for _ in range(1_000):
    print("x" * 10_000, file=sys.stderr)
    print('{"event": "told"}')
sys.exit(3)
"""
MOVED = """
print('{"event": "ready"}')
print("layers switched")
print('{"event": "ready"}')
"""


def refuse(kind: type[Exception]) -> Callable[..., None]:
    def refusing(*_: Any) -> None:
        raise kind("nobody takes this")

    return refusing


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every Child run a script in place of relayline."""
    start = asyncio.create_subprocess_exec

    async def start_script(program: str, *_: str, **settings: Any) -> asyncio.subprocess.Process:
        return await start(program, "-c", request.param, **settings)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_script)


@pytest.mark.parametrize("script", [CHATTY], indirect=True, ids=["chatty"])
@pytest.mark.parametrize("kind", [BrokenPipeError, RuntimeError])
async def test_a_child_is_not_held_up_by_the_reader_of_its_lines(
    script: None, kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    child = Child("stage-0", (), refuse(kind), refuse(kind))
    await child.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            assert await child.ready == {"event": "ready"}
            await child.exited.wait()
    finally:
        await child.stop(0)
    assert child.exit_code == 3
    assert child.cause_of_death().startswith("stage-0 ended with exit code 3: xxx"), "the last lines are kept"
    assert ("could not be handled" in caplog.text) is (kind is RuntimeError)


@pytest.mark.parametrize("script", [MOVED], indirect=True, ids=["moved"])
async def test_what_a_stage_says_again_after_its_layers_moved_is_no_line_of_its_log(script: None) -> None:
    lines: list[str] = []
    child = Child("stage-0", (), lambda _, line: lines.append(line))
    await child.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await child.exited.wait()
    finally:
        await child.stop(0)
    assert child.ready.result() == {"event": "ready"}
    assert lines == ["layers switched"]


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.EAGAIN, "this user may start no more processes; raise `ulimit -u`"),
        (errno.EMFILE, "this process may open no more files; raise `ulimit -n`"),
        (errno.ENOMEM, "Cannot allocate memory"),
        (-1, "`ulimit -n` or `ulimit -u` may be too low"),
    ],
)
def test_a_process_that_the_system_does_not_start_names_the_limit(number: int, why: str) -> None:
    assert unstarted_text(OSError(number, os.strerror(number))) == f"a process cannot be started: {why}"
