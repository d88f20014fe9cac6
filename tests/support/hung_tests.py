"""What becomes of a test that hangs, beyond pytest-timeout, which raises an exception once in the main thread.

* That shows the event loop, and no task: here the stack of each task goes to stderr first.
* Tests of whole pipelines have BOUND_S instead of the five minutes of pyproject.toml, where no other load slows them.
* A callback of the event loop may swallow the exception, C code may never come back to Python, and the teardown may
  hang as well. So the process ends GRACE_S later (and up to SLACK_S more), with the stacks of its threads.
  pytest-xdist then counts the test as failed, and starts another worker for the rest.
* The processes that a test had started would outlive such an end. A helper kills them once this process is gone.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

GRACE_S = 60.0
SLACK_S = 30.0
BOUND_S = 180.0
BUSY = 4.0  # processes a core, from which on a slow test is none that hangs
MARK = "RELAYLINE_TESTS_OF"  # in the environment of every process that the tests of one process start

_BOUNDED = pytest.StashKey[float]()  # in so many seconds after a test's start, or its failure
_STDERR = pytest.StashKey[int]()

# It is nobody's child, as tests count theirs. Once the process of the tests is gone it kills what has the mark: again
# and again, since these may be starting others.
_HELPER = """
import os, select, signal, sys
tests, mark = os.pidfd_open(int(sys.argv[1])), sys.argv[2].encode()
if os.fork():
    os._exit(0)
os.setsid()
select.select([tests], [], [])
found = True
while found:
    found = False
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\\0"):
                    os.kill(int(name), signal.SIGKILL)
                    found = True
        except OSError:
            pass
    select.select([], [], [], 0.1)
"""


def end_processes_with_this_one() -> None:
    """Let no process outlive this one that has been started from now on, on Linux, however this one ends."""
    if not sys.platform.startswith("linux"):
        return
    mark = uuid.uuid4().hex
    unmarked = {name: value for name, value in os.environ.items() if name != MARK}
    command = [sys.executable, "-I", "-S", "-c", _HELPER, str(os.getpid()), f"{MARK}={mark}"]
    nothing = subprocess.DEVNULL
    subprocess.run(command, env=unmarked, stdin=nothing, stdout=nothing, stderr=nothing, check=True)
    os.environ[MARK] = mark


def pytest_configure(config: pytest.Config) -> None:
    """Keep stderr as it is now: pytest captures the other during tests."""
    config.stash[_STDERR] = os.dup(2)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Bound tests of whole pipelines, but for those that have a bound of their own."""
    if config.getoption("timeout") is not None or os.getloadavg()[0] > BUSY * (os.cpu_count() or 1):
        return
    for item in items:
        if item.nodeid.startswith("tests/end_to_end/") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(BOUND_S))


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Iterator[None]:
    """pytest-timeout sets its timer: set the later one, too, and have tasks shown when the first one fires."""
    _end_after(item, settings.timeout + GRACE_S, SLACK_S)
    done = yield
    raises = signal.getsignal(signal.SIGALRM)

    def show_tasks(number: int, frame: FrameType | None) -> None:
        print(task_stacks(), file=sys.stderr)
        raises(number, frame)  # type: ignore[operator]

    if callable(raises):
        signal.signal(signal.SIGALRM, show_tasks)
    return done


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """A failure has ended the later timer (pytest does that, for debuggers): the teardown gets one of its own."""
    if isinstance(node, pytest.Item) and _BOUNDED in node.stash:
        _end_after(node, GRACE_S, slack_s=0.0)
        node.stash[_BOUNDED] = GRACE_S


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """No timer goes on behind the last test, nor a short one while a worker waits for the next test."""
    done = yield
    if nextitem is None or item.stash.get(_BOUNDED, 0.0) == GRACE_S:
        _timer.cancel()
    return done


def _end_after(item: pytest.Item, seconds: float, slack_s: float) -> None:
    item.stash[_BOUNDED] = seconds
    _timer.start(seconds, slack_s, item.config.stash[_STDERR])


class Timer:
    """Ends the process. It is a thread, which is slow to start and to end: so thousands of short tests share some."""

    def __init__(self) -> None:
        self._ends_s = 0.0

    def start(self, seconds: float, slack_s: float, stderr: int) -> None:
        """End the process in so many seconds, or up to `slack_s` later: then a timer that runs already may do."""
        ends_s = time.monotonic() + seconds
        if not ends_s <= self._ends_s < ends_s + slack_s:
            self._ends_s = ends_s + slack_s
            faulthandler.dump_traceback_later(seconds + slack_s, exit=True, file=stderr)

    def cancel(self) -> None:
        """Forget it."""
        self._ends_s = 0.0
        faulthandler.cancel_dump_traceback_later()


_timer = Timer()


def task_stacks() -> str:
    """Return where each task of the running event loop waits; nothing without one."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return ""
    return "\n".join(f"{task.get_name()}:\n" + "\n".join(_frames(task.get_coro())) for task in tasks)


def _frames(awaited: Any) -> Iterator[str]:
    while awaited is not None:
        kinds = [kind for kind in ("cr", "gi", "ag") if hasattr(awaited, f"{kind}_frame")]
        if not kinds:
            yield f"  {awaited!r}"
            return
        frame = getattr(awaited, f"{kinds[0]}_frame")
        if frame is not None:
            yield f"  {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
        awaited = getattr(awaited, f"{kinds[0]}_await", None) or getattr(awaited, f"{kinds[0]}_yieldfrom", None)
