"""Goal: a `relayline` process that starts others never hangs because numpy computes at the same time."""

import os
import subprocess

import pytest

from relayline.wire.common.child_command import code_command

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
