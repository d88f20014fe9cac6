"""What every process does: its garbage collector leaves loaded objects alone, and signals end it in order."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

CODE = """
import gc
from relayline.wire.common.process import YOUNG_OBJECTS_MAX, settle
n_known = len(gc.get_objects())
settle()
assert len(gc.get_objects()) < n_known / 10, "a full collection would look at all of them"
assert gc.get_threshold()[0] == YOUNG_OBJECTS_MAX
"""


def test_loaded_objects_are_no_longer_looked_at() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)


WAIT_S = 60
ENDLESS = """
import asyncio
from relayline.wire.common.process import run

async def main(stopping):
    print("serves", flush=True)
    await stopping.wait()
    print("drains", flush=True)
    await asyncio.Event().wait()

run(main)
"""


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_drains_and_a_second_ends_at_once(first: signal.Signals, second: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "serves\n"
            process.send_signal(first)
            assert process.stdout.readline() == "drains\n"
            process.send_signal(second)
            assert process.wait(WAIT_S) == -second
        finally:
            process.kill()
