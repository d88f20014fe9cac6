"""The garbage collector leaves a process's loaded objects alone once it serves."""

from __future__ import annotations

import subprocess
import sys

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
