"""Leak checks around every test: no thread or task of ours may outlive the test that started it."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest
import pytest_asyncio

from relayline.deploy.machine.gpus import devices_here
from relayline.deploy.testing import forked
from relayline.deploy.testing.engines import TEST_DEVICE
from relayline.deploy.testing.zygote import Zygote
from tests.support import hung_tests, surroundings

THREADS_OF_OURS = ("decode",)

# No example has a deadline: on a busy machine any of them can take long.
hypothesis.settings.register_profile("house", deadline=None)
# Under sanitizers (deploy/build/check_native.py) everything takes many times as long, and a fuzz follows.
hypothesis.settings.register_profile("sanitized", max_examples=20, deadline=None)
hypothesis.settings.load_profile("sanitized" if "RELAYLINE_SANITIZED" in os.environ else "house")

surroundings.forget_users()

# The record of running pipelines that `relayline up` keeps belongs to this run alone: a user's own is neither seen nor
# changed.
_STATE = tempfile.TemporaryDirectory(prefix="relayline-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name

# Threads of llama.cpp that wait for each other spin for milliseconds, on cores that the workers share: a fifth of the
# processor time of some tests. The library reads it when it loads, in workers and in the processes that they start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A worker of pytest-xdist ignores Ctrl-C, and so would every process that a test starts in it.
signal.signal(signal.SIGINT, signal.default_int_handler)

hung_tests.end_processes_with_this_one()

# Processes of relayline are forks of one that has imported all of it, but where a test says `own_processes`. Drivers of
# GPUs do not survive a fork.
if "RELAYLINE_OWN_PROCESSES" not in os.environ and TEST_DEVICE not in os.environ:
    forked.install(Zygote())

# Containers often tell Python not to keep compiled files. Then each worker compiles all tests again, and each process
# all of relayline: a second and more of processor time at every start.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Thousands of tests are collected and stay: searching them for garbage repeatedly takes a third as long.
gc.disable()

# Rooms whose files take longest, first: with `--no-loadscope-reorder` no worker is left alone with one at the end.
LONGEST = (
    "end_to_end/",
    "deploy/certify/",
    "benches/",
    "deploy/",
    "stage/",
    "wire/",
    "test_architecture.py",
    "coordinator/model/",
    "coordinator/engine/",
)

OURS = tuple(f"{Path(__file__).parents[1] / name}/" for name in ("stage", "coordinator", "wire"))


def pytest_configure(config: pytest.Config) -> None:
    """Bound tests that hang. Refuse a device for the tests that this machine lacks, and have processes of tests compute
    there, too.
    """
    config.pluginmanager.register(hung_tests)
    name = os.environ.get(TEST_DEVICE, "")
    if not name:
        return
    os.environ |= {"RELAYLINE_DEVICE": name, "RELAYLINE_GPU_LAYERS": "-1"}
    if not hasattr(config, "workerinput"):  # once, not in each worker
        names = [device.name for device in devices_here() or () if device.is_gpu]
        if name not in names:
            raise pytest.UsageError(f"{TEST_DEVICE}={name}: llama.cpp finds here {', '.join(names) or 'no GPU'}")


@pytest.fixture(autouse=True)
def no_stray_threads() -> Iterator[None]:
    """Every decode thread has ended when its test ends."""
    before = set(threading.enumerate())
    yield
    stray = [thread for thread in threading.enumerate() if thread not in before and thread.name in THREADS_OF_OURS]
    for thread in stray:
        thread.join(20)  # a thread that was asked to stop may still be on its way out
    left = [thread.name for thread in stray if thread.is_alive()]
    assert not left, f"threads outlived the test: {left}"


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """A command that a test runs in this process may leave SIGHUP ignored, as it should; the next test hears it."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    if signal.getsignal(signal.SIGHUP) is not before:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture
def own_processes() -> Iterator[None]:
    """The processes of this test are new interpreters, as a user's are."""
    with forked.own_processes():
        yield


@pytest.hookimpl(tryfirst=True)  # before pytest applies `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every coroutine test the check for tasks, and leave most cases of large grids to the nightly run.

    A plain test needs no event loop for the check. Rooms come in the order of LONGEST, then the others.
    """
    items.sort(key=_rank)
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.fixturenames.insert(0, "no_stray_tasks")
        if item.get_closest_marker("sampled"):
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in grids.items():
        _leave_to_the_night(name, cases)


def _rank(item: pytest.Item) -> int:
    return next((rank for rank, room in enumerate(LONGEST) if item.nodeid.startswith(f"tests/{room}")), len(LONGEST))


def pytest_collection_finish() -> None:
    """Look for garbage again, but not among the objects already collected."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _leave_to_the_night(name: str, cases: list[pytest.Item]) -> None:
    """Mark all cases but N of a test that is `sampled(N)` as nightly. The same N each time: a failure stays."""
    marker = cases[0].get_closest_marker("sampled")
    assert marker is not None
    n_kept = marker.args[0]
    for case in random.Random(name).sample(cases, max(0, len(cases) - n_kept)):
        case.add_marker(pytest.mark.nightly)


@pytest_asyncio.fixture
async def no_stray_tasks() -> AsyncIterator[None]:
    """Every asyncio task of ours has ended when its test ends; one that was cancelled gets a few turns to notice."""
    before = asyncio.all_tasks()
    yield
    stray: set[asyncio.Task[object]] = set()
    for _ in range(20):
        stray = {task for task in asyncio.all_tasks() - before if _is_ours(task)}
        if not stray:
            break
        await asyncio.sleep(0)
    assert not stray, f"tasks outlived the test: {stray}"


def _is_ours(task: asyncio.Task[object]) -> bool:
    """Whether a package of this repository wrote the coroutine; grpc and pytest keep their own tasks."""
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and code.co_filename.startswith(OURS)
