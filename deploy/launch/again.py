"""One pipeline starts again in place: what `relayline restart` asks of the supervisor, and how that does it.

The command leaves `restart.json` in the state directory and sends MORE_SIGNAL. The supervisor runs `up --check` with
its own arguments: that reads the manifest of now, and downloads a model of the hub that is not here yet. If there is a
mistake, the supervisor writes it into the file, and the pipeline goes on. Else all processes end in order, as after
SIGTERM, and the supervisor becomes a new `up` by exec. So it keeps its arguments, process id, terminal and working
directory; and its name and place, whatever the manifest's name is now. The new one removes the file. If it does not
come to serve, or its manifest has a mistake by then, it writes why into the file, and starts the manifest of before,
which `before.json` holds. An answer stays until the next order or process: several commands may wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from relayline.deploy.launch.child import unstarted_text
from relayline.deploy.launch.process_id import identify
from relayline.deploy.launch.state import MORE_SIGNAL, LaunchState, StateDir
from relayline.wire.common.child_command import module_command
from relayline.wire.common.errors import RelaylineError, StartError
from relayline.wire.common.files import write_again
from relayline.wire.common.texts import file_error_text

log = logging.getLogger("relayline.up")

CHECK = "--check"
REPORT = "--report-fd"
OR_BEFORE = "--or-before"  # a start that fails starts as it was before
DETACH_VARIABLE = "RELAYLINE_DETACH"
ERROR_PREFIX = "relayline: error: "
REASON_BYTES_MAX = 8192  # of what a check writes, its end
_CHUNK_BYTES = 4096


def arguments_again(arguments: Sequence[str]) -> list[str]:
    """Return a command's arguments without the pipe to the starter, which has gone since, and without OR_BEFORE."""
    kept = [each for each in arguments if each != OR_BEFORE]
    while REPORT in kept:
        at = kept.index(REPORT)
        del kept[at : at + 2]
    return kept


def check_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a process that checks what these would start; arguments: `up` and all behind it."""
    command, *rest = arguments_again(arguments)
    return [command, CHECK, *rest]


def placed(arguments: Sequence[str], name: str, path: Path) -> list[str]:
    """Return the arguments of `up` that start this pipeline in this state directory, whatever its manifest says then.

    What the user gave follows, so that it holds.
    """
    command, *rest = arguments_again(arguments)
    flags = ["--state-dir", str(path.absolute()), "--name", name]
    return [command, *rest] if rest[: len(flags)] == flags else [command, *flags, *rest]


def refusal(path: Path) -> str:
    """Return why the supervisor does not start again, as it wrote into `path`; empty while there is no answer."""
    try:
        answer = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return ""
    return str(answer.get("refused", "")) if isinstance(answer, dict) else ""


def refuse(path: Path, reason: str) -> None:
    """Answer the order in `path`, which may be another user's file. Where that cannot be, the log alone says it."""
    try:
        write_again(path, json.dumps({"refused": reason}).encode())
    except OSError as error:
        log.warning("%s: the answer cannot be written: %s", path, error.strerror)


def is_ordered(path: Path) -> bool:
    """Return whether `path` holds an order that has no answer yet."""
    return path.exists() and not refusal(path)


def forget_ended(directory: StateDir, last: LaunchState | None, *, but_before: bool = False) -> None:
    """Remove an order, and the manifest of before, where they are those of another process than this one.

    `but_before`: this one is in the place of that process, and wants its manifest.
    """
    if last is not None and last.supervisor != identify(os.getpid()):
        for left in (directory.restart, *(() if but_before else (directory.before,))):
            left.unlink(missing_ok=True)


@contextlib.contextmanager
def failures_in(file: logging.Handler, directory: StateDir) -> Iterator[None]:
    """Note a failure in the supervisor's log, and for a `relayline restart` that waits: the command itself says it on
    stderr, which may be a closed terminal.
    """
    try:
        yield
    except RelaylineError as error:
        if is_ordered(directory.restart):
            refuse(directory.restart, error.message)
        file.handle(log.makeRecord(log.name, logging.ERROR, "", 0, error.message, (), None))
        raise
    except Exception as error:
        # In the background nothing else would keep what went wrong.
        file.handle(log.makeRecord(log.name, logging.ERROR, "", 0, "the supervisor failed", (), sys.exc_info()))
        if not isinstance(error, OSError) or isinstance(error, BrokenPipeError):
            raise
        failed = StartError(file_error_text(error))
        if is_ordered(directory.restart):
            refuse(directory.restart, failed.message)
        raise failed from error


class Again:
    """The supervisor's part. Event loop only."""

    def __init__(self, directory: StateDir, arguments: Sequence[str]) -> None:
        """`arguments`: the command line of this process, `up` first."""
        self.wanted = asyncio.Event()
        """Set when the pipeline is to end and start again."""
        self._directory, self._arguments = directory, arguments
        self._checking: asyncio.Task[None] | None = None

    def ask(self, stopping: asyncio.Event) -> None:
        """Check, then set `wanted`. Does nothing while a check runs, or once the pipeline ends, as after `stopping`."""
        is_ending = stopping.is_set() or self.wanted.is_set()
        if not is_ending and (self._checking is None or self._checking.done()):
            self._checking = asyncio.ensure_future(self._check())

    async def close(self) -> None:
        """End a check that still runs."""
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)

    async def _check(self) -> None:
        if reason := await self._problem():
            log.warning("the pipeline does not start again: %s", reason)
            refuse(self._directory.restart, reason)
            return
        log.info("the pipeline ends in order and starts again, as `relayline restart` asked")
        self.wanted.set()

    async def _problem(self) -> str:
        """Return why a new start would fail, as far as that is known beforehand; empty for no reason."""
        command = module_command("relayline.deploy.cli", *check_arguments(self._arguments))
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            return unstarted_text(error)
        assert process.stderr is not None, "it is a pipe"
        try:
            said = b""
            while part := await process.stderr.read(_CHUNK_BYTES):
                said = (said + part)[-REASON_BYTES_MAX:]
            code = await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if code == 0:
            return ""
        lines = said.decode(errors="replace").strip().splitlines()
        return lines[-1].removeprefix(ERROR_PREFIX) if lines else f"its check ended with exit code {code}"


def become_new(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by one that begins anew with these arguments, `up` first."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(MORE_SIGNAL, signal.SIG_IGN)  # until the new one hears it: by default it would end a process
    os.environ.pop(DETACH_VARIABLE, None)  # this one is in the background already, and is to stay the same process
    first, *rest = arguments_again(arguments)
    command = module_command("relayline.deploy.cli", first, OR_BEFORE, *rest)
    os.execv(command[0], command)
