"""Tries artifacts in a child process, because llama.cpp ends the process when one of its assertions fails."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from relayline.wire.common.child_command import module_command

PROBE_TIMEOUT_S = 600.0  # loading one stage of a very large model from a cold disk


def probe_artifact(path: Path) -> str | None:
    """Run one artifact in a child process. Return None if it runs, else the reason as one line."""
    return _in_child(str(path))


def try_artifacts(paths: Sequence[Path]) -> str | None:
    """Have llama.cpp make artifacts without their weights, in a child process. Return None or the reason, one line."""
    return _in_child("--dry", *map(str, paths))


def _in_child(*arguments: str) -> str | None:
    # Without this ggml starts a debugger on itself to print where it aborted.
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    try:
        ended = subprocess.run(
            module_command("relayline.stage.engine.probe", *arguments),
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it did not answer within {PROBE_TIMEOUT_S:.0f} s"
    if ended.returncode == 0:
        return None
    return why_it_ended(ended.returncode, ended.stderr)


def why_it_ended(returncode: int, errors: bytes) -> str:
    """Return one line on a child process that failed, from its exit code and its stderr."""
    lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
    asserted = [line[line.index("GGML_ASSERT") :] for line in lines if "GGML_ASSERT" in line]
    if asserted:
        return f"llama.cpp aborted: {asserted[-1]}"
    if returncode < 0:
        return f"llama.cpp ended with {signal.Signals(-returncode).name}: {lines[-1] if lines else 'no word'}"
    return lines[-1] if lines else f"it ended with exit code {returncode}"
