"""Starts relayline's processes as forks of one process that has imported them: importing takes most of a short life.

A fork has the same parent, arguments, environment, directory, streams, session and exit code as a new process. A
process needs a new interpreter if its environment has a variable that Python or a library reads at start.

The fork server forks twice and the process between ends at once. The kernel then gives the new process to the nearest
ancestor that adopts orphans, which is the one that asked. That one can wait for the process and signal it like any
child. A command that starts processes gets its own fork server, made before it has threads.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from relayline.deploy.machine.huge_pages import environment_of
from relayline.wire.common.child_command import code_command, module_command

COMMAND = "relayline.deploy.cli"  # run by name, as a new process would be: the layers forbid an import
# Modules that are started with `python -m`, in addition to the command.
WORKERS = (
    "relayline.coordinator.batches.worker",
    "relayline.coordinator.drafting.process",
    "relayline.coordinator.http.workers.fork_server",
    "relayline.coordinator.media.encoding",
    "relayline.coordinator.relay.process",
    "relayline.coordinator.text.grammar_worker",
    "relayline.deploy.certify.whole_process",
    "relayline.stage.engine.probe",
    "relayline.stage.speed.host_probe",
)
# What commands import once they have read their flags. Together it is a tenth of the life of a short process.
LATER = (
    "relayline.coordinator.serve",
    "relayline.deploy.cli.survey",
    "relayline.deploy.cli.up_manifest",
    "relayline.stage.joining.join",
    "relayline.stage.process",
)
# Commands that start no process, and so need no fork server. If one does, it starts a new interpreter.
ALONE = frozenset(
    ("--help", "--version", "batch", "cache", "cancel", "certs", "chat", "completion", "drain", "invite", "logs",
     "move", "nearby", "render", "report", "sleep", "stage", "status", "top", "trace", "trace-level", "uncordon",
     "wake")
)  # fmt: skip
FORK_SERVER = b"relayline-forks"  # the command line of one below the first
_START = "from relayline.deploy.testing.zygote import main; main()"
_READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "GLIBC_", "MALLOC_", "OMP_", "OPENBLAS_", "GRPC_", "OTEL_")
# Variables of these that make no difference to a test, or that a process only reads when it uses them.
_READ_LATER = ("GLIBC_TUNABLES", "OPENBLAS_NUM_THREADS", "OTEL_BSP_", "OTEL_EXPORTER_OTLP_", "OTEL_TRACES_EXPORTER")
_MESSAGE_BYTES_MAX = 1 << 20
_STREAMS_MAX = 16
_TITLE_BYTES = 8_192  # space for a command line
_N_STANDARD = 3
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNET = 0x4000_0000
_IGNORED_AT_EXIT = 120  # exit code of an interpreter that could not flush its streams


class Zygote:
    """The fork server, started with the first process. It ends when its owner does."""

    def __init__(self, control: socket.socket | None = None) -> None:
        """`control` is a socket of an existing fork server with this process's environment."""
        self._lock = threading.Lock()  # one at a time: each waits for its answer
        self._control = control
        self._began_with = dict(os.environ)
        self._owner_pid = os.getpid()  # the parent of every fork: no other process could wait for one

    def fits(self, words: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Whether a fork can replace a new process with this command line."""
        known = (COMMAND, *WORKERS)
        if os.getpid() != self._owner_pid:
            return False
        if not sys.platform.startswith("linux") or [*words[:3]] != module_command("")[:3] or words[3] not in known:
            return False
        return self._control is None or _at_start(self._began_with) == _at_start(environment)

    def fork(self, request: Mapping[str, Any], streams: Sequence[int]) -> int | None:
        """Return the process id of a fork, a child of this process. None if there is no server, or the request is too
        large.

        `request`: `words`, `environment`, `directory`, `namespace` (of the network; "" for the own one), `targets` (the
        number that each of `streams` has in the fork) and `is_session` (whether it leads a session).
        """
        with self._lock, contextlib.suppress(OSError):
            control = self._control or self._start()
            socket.send_fds(control, [json.dumps(request).encode()], list(streams))
            if answer := control.recv(_MESSAGE_BYTES_MAX):
                pid: int = json.loads(answer)["pid"]
                return pid
        return None

    def _start(self) -> socket.socket:
        self._began_with = dict(os.environ)
        take_orphans_in()
        ours, theirs = _pair()
        with theirs:
            process = subprocess.Popen(
                code_command(_START, str(theirs.fileno()), "-" * _TITLE_BYTES),
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
        self._control = ours
        atexit.register(_end, ours, process)
        return ours


def take_orphans_in() -> None:
    """Make this process the parent of its descendants' orphans."""
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("this kernel gives orphans to the first process alone")


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.wait()


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_START) and not name.startswith(_READ_LATER)
    }


def main() -> None:
    """Fork until the other end of the socket is closed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    before = dict(os.environ)
    _import_all()
    set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.collect()
    gc.freeze()
    _serve(control, set_by_imports)


def _import_all() -> None:
    commands = importlib.import_module(f"{COMMAND}.main").COMMANDS
    for module in (*LATER, *(name for name, _ in commands.values())):
        importlib.import_module(module)
    for module in WORKERS:
        importlib.import_module(module)
        del sys.modules[module]  # the main module must not be imported before
    _know_the_machine()


def _know_the_machine() -> None:
    """Compute what most commands would compute: versions, the checks of a manifest, how fast this machine is."""
    versions = importlib.import_module("relayline.wire.common.versions")
    for package in ("relayline", "llama-cpp-python"):
        versions.version_of(package)
    importlib.import_module("relayline.deploy.manifest.model").Manifest.model_rebuild()
    facts = importlib.import_module("relayline.deploy.machine.facts")
    facts.bandwidth_bytes_per_s(1)
    facts.flops(1)


def _serve(control: socket.socket, set_by_imports: Mapping[str, str]) -> NoReturn:
    while True:
        message, streams, _, _ = socket.recv_fds(control, _MESSAGE_BYTES_MAX, _STREAMS_MAX)
        if not message:
            os._exit(0)
        request = json.loads(message)
        request["environment"] = {**set_by_imports, **request["environment"]}
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                _become(request, streams, set_by_imports)
            os.write(write, str(pid).encode())
            os._exit(0)
        for handle in (write, *streams):
            os.close(handle)
        with open(read, "rb") as pipe:
            pid = int(pipe.read())
        os.waitpid(between, 0)  # before the answer: until then the new process has another parent
        control.send(json.dumps({"pid": pid}).encode())


def _become(request: Mapping[str, Any], streams: Sequence[int], set_by_imports: Mapping[str, str]) -> NoReturn:
    """Become the requested process."""
    words, targets = request["words"], request["targets"]
    code: int | None = 1
    try:
        _take_streams(streams, targets)
        if request["namespace"]:
            _enter(request["namespace"])
        if request["is_session"]:
            os.setsid()
        os.environ.clear()
        arguments = words[4:] if words[3] == COMMAND else []
        os.environ.update(environment_of(arguments, request["environment"]))  # else it starts itself again
        tempfile.tempdir = None  # it is read from the environment once
        os.chdir(request["directory"])
        sys.argv, sys.orig_argv = [words[3], *words[4:]], words
        _show(words)
        if starts_processes(words):
            _have_forks(set_by_imports)
        runpy.run_module(words[3], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        code = None
    except BaseException:
        sys.excepthook(*sys.exc_info())
    _leave(code)


def _enter(namespace: str) -> None:
    """Move to a network namespace that `ip netns add` made."""
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(handle, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    os.close(handle)


def _leave(code: int | None) -> NoReturn:
    """End as an interpreter does; without an exit code, by SIGINT."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = _IGNORED_AT_EXIT if stream is sys.stdout else code
    if code is None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code or 0)


def _take_streams(streams: Sequence[int], targets: Sequence[int]) -> None:
    """Have only the requested streams, under the requested numbers."""
    above = max(*targets, *streams) + 1
    for moved, target in [(fcntl.fcntl(stream, fcntl.F_DUPFD, above), target) for stream, target in
                          zip(streams, targets, strict=True)]:  # fmt: skip
        os.dup2(moved, target)
    _close_all_but(targets)
    sys.stdin, sys.stdout = _text(0, "r", sys.stdin.errors), _text(1, "w", sys.stdout.errors)
    sys.stderr = _text(2, "w", "backslashreplace", buffering=1)


def _text(number: int, mode: str, errors: str | None, buffering: int = -1) -> Any:
    return open(number, mode, buffering, sys.stdout.encoding, errors, closefd=False)


def _close_all_but(kept: Iterable[int]) -> None:
    for handle in {int(name) for name in os.listdir("/proc/self/fd")} - {*kept}:
        with contextlib.suppress(OSError):
            os.close(handle)


def _show(words: Sequence[str]) -> None:
    """Set the command line that other processes see: it overwrites the old one."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    text = b"\0".join(map(os.fsencode, words))[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def starts_processes(words: Sequence[str]) -> bool:
    """Whether a command line is of a command that may start processes."""
    return words[3] == COMMAND and not ALONE.issuperset(words[4:5])


def _have_forks(set_by_imports: Mapping[str, str]) -> None:
    """Let this process start its children as forks, too."""
    take_orphans_in()
    ours, theirs = _pair()
    if os.fork() == 0:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in range(_N_STANDARD):
            os.dup2(nowhere, number)
        _close_all_but((*range(_N_STANDARD), theirs.fileno()))
        _show([FORK_SERVER.decode()])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its owner
        _serve(theirs, set_by_imports)
    theirs.close()
    importlib.import_module("relayline.deploy.testing.forked").install(Zygote(ours))
