"""Runs `relayline` commands in forks of one process that has imported them: importing takes most of a short command.

What a command meets is what it would meet alone: its own process, arguments, environment, directory, streams and exit
code. Commands that replace their process, and environments that Python reads as it starts, get a new interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from relayline.wire.common.child_command import module_command

COMMAND = "relayline.deploy.cli.main"  # run by name, as a process of its own would be: this room is below that one
# What a command replaces its process for, see deploy/machine/huge_pages.py.
UNFORKABLE = ("stage", "calibrate")
_READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "GLIBC_", "MALLOC_", "OMP_", "OPENBLAS_", "GRPC_", "OTEL_")
_MESSAGE_BYTES_MAX = 1 << 20
_N_STREAMS = 3


class Zygote:
    """The process that forks, started with the first command. It ends when its owner does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # one command at a time: each waits for its answer
        self._control: socket.socket | None = None
        self._began_with: dict[str, str] = {}

    def fits(self, arguments: Sequence[str]) -> bool:
        """Whether a fork would do what a new process does."""
        if not sys.platform.startswith("linux") or not arguments or arguments[0] in UNFORKABLE:
            return False
        return self._control is None or _at_start(self._began_with) == _at_start(os.environ)

    def run(self, arguments: Sequence[str], stdout: IO[str], stderr: IO[str], timeout_s: float) -> int:
        """Run a command to its end and return its exit code. Raises TimeoutExpired, and the command is ended."""
        with self._lock:
            control = self._control or self._start()
            told = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}
            with open(os.devnull, "rb") as stdin:
                streams = [stdin.fileno(), stdout.fileno(), stderr.fileno()]
                _send(control, {**told, "timeout_s": timeout_s}, streams)
            code = json.loads(control.recv(_MESSAGE_BYTES_MAX))["code"]
        if code is None:
            raise subprocess.TimeoutExpired(["relayline", *arguments], timeout_s)
        assert isinstance(code, int)
        return code

    def _start(self) -> socket.socket:
        self._began_with = dict(os.environ)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = module_command("relayline.deploy.testing.zygote", str(theirs.fileno()))
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._control = ours
        atexit.register(_end, ours, process)
        return ours


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.wait()


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}


def _send(control: socket.socket, message: object, streams: Sequence[int]) -> None:
    socket.send_fds(control, [json.dumps(message).encode()], list(streams))


def main() -> None:
    """Fork until the other end of the socket is closed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    before = dict(os.environ)
    _import_all()
    set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.collect()
    gc.freeze()
    while True:
        message, streams, _, _ = socket.recv_fds(control, _MESSAGE_BYTES_MAX, _N_STREAMS)
        if not message:
            break
        told = json.loads(message)
        child = os.fork()
        if child == 0:
            control.close()
            _become(told, streams, set_by_imports)
        for stream in streams:
            os.close(stream)
        control.send(json.dumps({"code": _wait(child, told["timeout_s"])}).encode())


def _import_all() -> None:
    commands = importlib.import_module(COMMAND).COMMANDS
    for module in ("relayline.stage.process", "relayline.coordinator.serve", *(name for name, _ in commands.values())):
        importlib.import_module(module)


def _become(told: Mapping[str, Any], streams: Sequence[int], set_by_imports: Mapping[str, str]) -> None:
    """Be the command. Does not return."""
    code = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdin, sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(number, mode, closefd=False), line_buffering=number == 2)
            for number, mode in ((0, "rb"), (1, "wb"), (2, "wb"))
        )
        os.environ.clear()
        os.environ.update({**set_by_imports, **told["environment"]})
        os.chdir(str(told["directory"]))
        sys.argv = ["relayline", *told["arguments"]]
        importlib.import_module(COMMAND).main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(child: int, timeout_s: float) -> int | None:
    """Return the exit code of a child as subprocess gives it; None if it had to be ended."""
    handle = os.pidfd_open(child)
    try:
        is_over = bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)
    if not is_over:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if is_over else None


if __name__ == "__main__":
    main()
