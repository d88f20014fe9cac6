"""Runs a module of this package in a new process, from any working directory.

`python -m` alone would look for modules in the current directory first: a user's `grpc.py` there would be imported in
place of the library. The package itself is found where it is installed, or by PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import subprocess
import sys

from relayline.wire.common.errors import RelaylineError, StartError, UsageError


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `python -m module arguments` with the package's own modules."""
    return [sys.executable, "-P", "-m", module, *arguments]


def code_command(code: str, *arguments: str) -> list[str]:
    """Return the command that runs `python -c code arguments` with the package's own modules."""
    return [sys.executable, "-P", "-c", code, *arguments]


EXIT_WAIT_S = 5.0  # from the end of a process's pipe to its exit; then it is killed


def end_process(process: subprocess.Popen[bytes], wait_s: float = 0.0) -> int:
    """Return the exit code of a process, killed if it has not ended by itself after so many seconds. Blocks."""
    if wait_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(wait_s)
    process.kill()
    return process.wait()


def is_passing(error: RelaylineError | OSError) -> bool:
    """Return whether what could not be loaded because of this may load the next time: memory was missing."""
    return isinstance(error, StartError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def ended_loading(what: str, exit_code: int | None) -> RelaylineError:
    """Return the error of a process that ended while it loaded a file, without a word; `what` names the file.

    What was killed (memory ran out, or it took too long) may load the next time: that is a StartError, after which a
    supervisor tries again. Anything else would only happen again: a UsageError.
    """
    if exit_code == -signal.SIGKILL:
        return StartError(f"{what}: the process that loads it was killed, or took too long")
    return UsageError(f"{what}: loading it ended the process")
