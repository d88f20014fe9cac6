"""Goals: a `relayline` process that starts others never hangs because numpy computes at the same time; and none trips
over a standard stream that is closed.
"""

import os
import subprocess
from pathlib import Path

import pytest

from relayline.wire.common.child_command import code_command, module_command

TIMEOUT_S = 120.0
# As the coordinator: one thread estimates this machine's speed, while the event loop starts processes.
STARTS_PROCESSES = """
import asyncio, os, threading
from relayline.deploy.cli import entry
from relayline.deploy.machine import facts
import uvloop

def compute():
    while True:
        facts._one_core_flops.__wrapped__()

async def main():
    for _ in range(5):
        process = await asyncio.create_subprocess_exec("true")
        await process.wait()

threading.Thread(target=compute, daemon=True).start()
uvloop.run(main())
os._exit(0)
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="OpenBLAS has no threads of its own on one core")
@pytest.mark.parametrize("given", [{}, {"OPENBLAS_NUM_THREADS": "4"}], ids=["unset", "of the user"])
def test_a_process_is_started_while_numpy_computes(given: dict[str, str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"} | given
    done = subprocess.run(code_command(STARTS_PROCESSES), env=environment, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("closed", "command", "code", "says"),
    [
        (">&-", ("status",), 0, ""),
        ("<&- >&-", ("chat",), 2, "relayline: error: there is no question"),
        ("2>&-", ("status", "nosuch"), 2, ""),
    ],
)
def test_a_closed_stream_is_as_the_null_device(
    closed: str, command: tuple[str, ...], code: int, says: str, tmp_path: Path
) -> None:
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "RELAYLINE_URL": "http://127.0.0.1:1"}
    shell = ("sh", "-c", f'exec "$@" {closed}', "sh")
    done = subprocess.run(
        (*shell, *module_command("relayline.deploy.cli", *command)),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(says) if says else done.stderr == ""
