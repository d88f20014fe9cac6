"""`relayline up --detach`: the supervisor in its own session, watched by its starter until it is ready.

The supervisor reports over a pipe, one JSON event a line, and closes it with `ready` or `failed`. A pipe that closes
with neither means that it died.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from relayline.deploy.launch.state import StateDir
from relayline.deploy.launch.supervisor import Emit
from relayline.wire.common.child_command import module_command
from relayline.wire.common.errors import RelaylineError, StartError, UsageError

STOP_TIMEOUT_S = 60.0  # of a supervisor whose starter was interrupted: a drain and the stages' end


class Report:
    """The supervisor's end of the pipe."""

    def __init__(self, handle: int) -> None:
        self._handle: int | None = handle

    def send(self, event: dict[str, Any]) -> None:
        """Tell the starter; `ready` and `failed` end the report. A starter that has gone is not an error."""
        if self._handle is None:
            return
        try:
            os.write(self._handle, json.dumps(event).encode() + b"\n")
            is_last = event["event"] in ("ready", "failed")
        except BrokenPipeError:
            is_last = True
        if is_last:
            os.close(self._handle)
            self._handle = None

    def fail(self, error: RelaylineError) -> None:
        """Tell the starter why there is no pipeline."""
        self.send({"event": "failed", "message": error.message, "usage": isinstance(error, UsageError)})


@contextlib.contextmanager
def reporting(handle: int) -> Iterator[Emit]:
    """Give what tells the starter of events, and tell it of the error that ends the context."""
    report = Report(handle)
    os.set_inheritable(handle, False)  # no child of this supervisor holds the report open
    try:
        yield report.send
    except RelaylineError as error:
        report.fail(error)
        raise


def start_detached(arguments: Sequence[str], directory: StateDir, emit: Emit) -> None:
    """Start `relayline up ARGUMENTS` in the background and return once it is ready.

    Raises its failure, and StartError if it dies silently. If interrupted, it stops the supervisor too.
    """
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, encoding="utf-8") as reports:
        try:
            process = subprocess.Popen(
                module_command("relayline.deploy.cli", "up", *arguments, "--report-fd", str(write_end)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(write_end,),
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        try:
            for line in reports:
                event = json.loads(line)
                if event["event"] == "failed":
                    process.wait(STOP_TIMEOUT_S)
                    raise (UsageError if event["usage"] else StartError)(event["message"])
                emit(event)
                if event["event"] == "ready":
                    process.returncode = 0  # it runs on without us: nothing waits for it, so no warning
                    return
        except KeyboardInterrupt:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_TIMEOUT_S)
            raise
        code = process.wait(STOP_TIMEOUT_S)
    raise StartError(f"the supervisor ended with exit code {code}; its log is {directory.log('up')}")
