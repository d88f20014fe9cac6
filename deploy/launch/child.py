"""One supervised child process: started with its output prefixed, its ready line read, ended without a trace.

A child never outlives its supervisor: it holds the read end of a pipe as stdin (`--exit-with-stdin`) and leaves when
that closes, however the supervisor ended.
"""

from __future__ import annotations

import asyncio
import collections
import errno
import json
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from relayline.deploy.machine.huge_pages import environment_of
from relayline.wire.common.child_command import module_command
from relayline.wire.common.errors import StartError
from relayline.wire.common.texts import file_error_text
from relayline.wire.links.security import TOKEN_VARIABLE

log = logging.getLogger("relayline.child")

LAST_LINES_MAX = 20  # kept to explain a death
LINE_BYTES_MAX = 1 << 20
NATIVE_FAULTS = {signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE}  # a library's, most likely
# A secret, which a supervisor cannot pass on as a flag, because other users would see it in the process list; and the
# switch of the kernels, which has no flag: their library reads it.
KEPT_VARIABLES = ("RELAYLINE_API_KEY", "RELAYLINE_KERNELS")


def child_environment(token: str = "") -> dict[str, str]:
    """Return the environment without the variables that replace the supervisor's flags, and with a child's own join
    token.

    Other users can read neither environment nor token, but anyone can read a command line. The supervisor has read the
    variables, and passes them to its children as flags or in the manifest. A child would take the variables for further
    flags, and `relayline serve` refuses flags that do not go with --stages.
    """
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("RELAYLINE_") or name in KEPT_VARIABLES
    }
    return kept | ({TOKEN_VARIABLE: token} if token else {})


class Child:
    """One `relayline` process. Event loop only."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        on_line: Callable[[str, str], None],
        on_event: Callable[[dict[str, Any]], None] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`on_line(name, text)` gets its output; `on_event` the JSON events on its stdout other than `ready`.

        Without `environment` it has the one that `child_environment` returns.
        """
        self.name, self.arguments = name, tuple(arguments)
        self._on_line, self._on_event = on_line, on_event
        self._environment = child_environment() if environment is None else environment
        self._process: asyncio.subprocess.Process | None = None
        self._spawning: asyncio.Task[None] | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._last_lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES_MAX)
        self.ready: asyncio.Future[dict[str, Any]]
        self.exited = asyncio.Event()

    @property
    def pid(self) -> int:
        """Process id of the current run."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the last run; negative for a signal, None while it runs or before it was started."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Start (or start again). `ready` is a fresh future: the ready event, or StartError if the child dies first.

        Raises OSError if the system starts no process. Cancelled, it may still start one, which `stop` ends.
        """
        self._spawning = asyncio.create_task(self._spawn())
        await asyncio.shield(self._spawning)

    async def _spawn(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *module_command("relayline.deploy.cli", *self.arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES_MAX,
            # Without this ggml starts a debugger on itself when it aborts, and the line that says why is lost in it.
            env=environment_of(self.arguments, {**self._environment, "GGML_NO_BACKTRACE": "1"}),
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which ends children in order
        )
        assert process.stdout is not None
        assert process.stderr is not None
        # Together, and not before there is a process: `stop` awaits the `exited` of the process that it sees.
        self._process = process
        self.ready = asyncio.get_running_loop().create_future()
        self.exited = asyncio.Event()
        self._readers = [
            asyncio.create_task(self._read(process.stdout, is_stdout=True)),
            asyncio.create_task(self._read(process.stderr, is_stdout=False)),
            asyncio.create_task(self._watch()),
        ]

    async def _read(self, stream: asyncio.StreamReader, *, is_stdout: bool) -> None:
        """Read to the end, even if a line fails: a full pipe would block the child."""
        while True:
            try:
                line = await stream.readline()
            except ValueError:
                continue  # longer than LINE_BYTES_MAX, and dropped
            if not line:
                return
            try:
                self._take_line(line.decode(errors="replace").rstrip(), is_stdout=is_stdout)
            except OSError:
                continue  # the reader of the lines has gone, such as a closed terminal; the child continues
            except Exception:
                log.exception("a line of %s could not be handled", self.name)

    def _take_line(self, text: str, *, is_stdout: bool) -> None:
        if is_stdout and text.startswith('{"event": ') and self._take_event(json.loads(text)):
            return
        self._last_lines.append(text)
        self._on_line(self.name, text)

    def _take_event(self, event: dict[str, Any]) -> bool:
        """Pass on an event; returns False if it has no handler and belongs in the log."""
        if event["event"] == "ready" and not self.ready.done():
            self.ready.set_result(event)
        elif self._on_event is not None:
            self._on_event(event)
        else:
            return str(event["event"]) == "ready"  # again, with other layers: its log says so
        return True

    async def _watch(self) -> None:
        assert self._process is not None
        await self._process.wait()
        await asyncio.gather(*self._readers[:2], return_exceptions=True)
        if not self.ready.done():
            self.ready.set_exception(StartError(self.cause_of_death()))
            self.ready.exception()  # a waiting caller gets the error; without a caller it is dropped
        self.exited.set()

    def cause_of_death(self) -> str:
        """Return one line: how the child ended, and the most telling line it printed."""
        assert self._process is not None
        code = self._process.returncode
        telling = [line for line in self._last_lines if "error" in line.lower() or "GGML_ASSERT" in line]
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
            if -code in NATIVE_FAULTS:
                how += " (`relayline doctor` tries the native libraries)"
            if not telling:  # output from before it was killed does not tell why
                return f"{self.name} ended with {how}"
        why = (telling or list(self._last_lines) or ["it printed nothing"])[-1]
        return f"{self.name} ended with {how}: {why.removeprefix('relayline: error: ')}"

    async def stop(self, timeout_s: float) -> None:
        """Ask the child to end; kill it if it has not within `timeout_s`. One that is being started is ended too."""
        if self._spawning is not None:
            await asyncio.wait({self._spawning})
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(timeout_s):
                    await self.exited.wait()
            except TimeoutError:
                self._process.kill()
        await self.exited.wait()


async def started(child: Child) -> None:
    """Start a child. Raises StartError where the system starts no process."""
    try:
        await child.start()
    except OSError as error:
        raise StartError(unstarted_text(error)) from error


def unstarted_text(error: OSError) -> str:
    """Return why the system starts no process, and what to do about a limit. uvloop has no reason at times: -1."""
    if error.errno == errno.EAGAIN:
        why = "this user may start no more processes; raise `ulimit -u`"
    elif error.errno is not None and error.errno < 0:
        why = "`ulimit -n` or `ulimit -u` may be too low"
    else:
        why = file_error_text(error)
    return f"a process cannot be started: {why}"
