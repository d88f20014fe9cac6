"""Real relayline processes for tests: started, awaited by their ready line, ended and checked for leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from relayline.deploy.testing.zygote import FORK_SERVER
from relayline.wire.common.child_command import code_command, module_command

TIMEOUT_S = 120.0  # of a machine that is busy with other tests
COMMAND = module_command("relayline.deploy.cli")
# The same with clocks that run ahead, as another host's may: both are read through the module `time`.
SKEWED = """
import sys, time
skew_ns, monotonic_ns, time_ns = int(sys.argv.pop(1)), time.monotonic_ns, time.time_ns
time.monotonic_ns, time.time_ns = lambda: monotonic_ns() + skew_ns, lambda: time_ns() + skew_ns
from relayline.deploy.cli.main import main
sys.exit(main())
"""


def relayline(*arguments: str | Path, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


class Running:
    """One long-running command. `event` is its ready line; `stderr` is its log until now."""

    def __init__(
        self, arguments: Sequence[str | Path], prefix: Sequence[str] = (), skew_s: float = 0.0, *, is_ready: bool = True
    ) -> None:
        """`prefix` is a command that runs another one, such as `ip netns exec`. Its clocks are ahead by `skew_s`.

        Without `is_ready` an `up` that waits for other hosts is not awaited: `event` is its first one.
        """
        command = COMMAND if not skew_s else code_command(SKEWED, str(round(skew_s * 1e9)))
        self.process = subprocess.Popen(
            [*prefix, *command, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self._new_line = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self._first_line(is_up=is_ready and arguments[0] == "up")
        if not line:
            self.process.wait(TIMEOUT_S)
            self._reader.join(TIMEOUT_S)
            self.process.stdout.close()
            self.process.stderr.close()
            raise AssertionError(f"not ready, exit code {self.process.returncode}: {self.stderr}")
        self.event = json.loads(line)

    def _first_line(self, *, is_up: bool) -> str:
        """Return the ready line: the first of every command but `up`, which prints one event for each process first."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        while is_up and line and json.loads(line)["event"] != "ready":
            line = self.process.stdout.readline()
        return line

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._new_line:
                self.lines.append(line)
                self._new_line.notify_all()

    @property
    def stderr(self) -> str:
        """Return everything that the process has written to stderr."""
        return "".join(self.lines)

    def wait_for_log(self, text: str, count: int = 1) -> None:
        """Block until `text` was logged `count` times."""
        with self._new_line:
            found = self._new_line.wait_for(lambda: sum(text in line for line in self.lines) >= count, TIMEOUT_S)
        assert found, f"{text!r} was not logged {count} times:\n{self.stderr}"

    def next_event(self, kind: str) -> dict[str, object]:
        """Block until the next event of this kind on stdout; earlier ones of other kinds are skipped."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, object] = json.loads(line)
            if event["event"] == kind:
                return event
        raise AssertionError(f"ended before {kind!r}: {self.stderr}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal the process and return its exit code."""
        self.process.send_signal(number)
        code = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code


def stop_all(*processes: Running) -> None:
    """Stop those that have not ended, in this order."""
    for each in processes:
        if each.process.poll() is None:
            each.stop()


@contextlib.contextmanager
def running(*arguments: str | Path, skew_s: float = 0.0) -> Iterator[Running]:
    """Run a command for the length of a with block."""
    started = Running(arguments, skew_s=skew_s)
    try:
        yield started
    finally:
        stop_all(started)


def children(pid: int) -> list[int]:
    """Return the direct children of a process, except the fork server that tests give it."""
    found = [int(part) for part in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in found if not _command_line(child).startswith(FORK_SERVER)]


def child_running(pid: int, argument: str) -> int:
    """Return the child of `pid` whose command line mentions `argument`."""
    return next(child for child in children(pid) if argument.encode() in _command_line(child))


def _command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def wait_gone(pids: Sequence[int]) -> None:
    """Block until every process has ended; fails after TIMEOUT_S."""
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)  # type: ignore[attr-defined, unused-ignore]
        except ProcessLookupError:
            continue
        try:
            assert select.select([handle], [], [], TIMEOUT_S)[0], f"process {pid} is still there"
        finally:
            os.close(handle)
