"""The life of every relayline process around its event loop: uvloop, its ready line, signals, a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import threading
import types
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import uvloop

Result = TypeVar("Result")

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
OPEN_FILES_MAX = 65_536  # a process raises its own limit to this at most; some systems allow a thousand million


YOUNG_OBJECTS_MAX = 2_000  # made and not freed, before Python looks for cycles among them; its own default is 700


def settle() -> None:
    """Call once all is loaded and the process begins to serve: Python's garbage collector then leaves that alone.

    A full collection of a coordinator visits the 110,000 objects of its modules, which takes 100 ms, and one came every
    few seconds at 64 streams. Nothing is served during that time. Most objects made for a token die by themselves, so
    looking at them less often finds fewer.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX)


async def first_of(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of the futures is done; raises none of their errors."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def raise_open_files() -> None:
    """Raise this process's limit of open files as far as it may, up to OPEN_FILES_MAX: every connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # the system's own limit is lower, so that one stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def announce(event: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print the ready line on stdout: `event` for a parent that reads JSON, `text` for a person."""
    print(json.dumps(event) if as_json else text, flush=True)


def end_with_stdin() -> None:
    """End this process, gracefully, when its parent closes the other end of stdin, however the parent ended."""

    def wait() -> None:
        # os.read, not sys.stdin: a thread inside a buffered read would hold its lock at interpreter shutdown.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt as SIGINT does, so that large files and processes go with a command.

    Only a main thread hears of signals; in another one it does nothing.
    """

    def interrupt(_number: int, _frame: types.FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal, which is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def may_hang_up() -> bool:
    """Return whether SIGHUP may say that a terminal has closed: not where it is ignored, as under `nohup`, nor in a
    session that began without one, as in the background or as a service.
    """
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and not is_in_background()


def is_in_background() -> bool:
    """Return whether this process began a session that has no terminal. SIGHUP is then sent by somebody, if at all."""
    return os.getsid(0) == os.getpid() and not has_terminal()


def run(main: Callable[[asyncio.Event], Awaitable[Result]]) -> Result:
    """Run `main(stopping)` under uvloop; `stopping` is set by the first SIGINT or SIGTERM.

    A second signal, of either kind, ends the process at once, with its default action. The limit of open files is
    raised.
    """
    raise_open_files()

    async def supervised() -> Result:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop() -> None:
            stopping.set()
            for number in ENDING_SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL)

        for number in ENDING_SIGNALS:
            loop.add_signal_handler(number, stop)
        return await main(stopping)

    return uvloop.run(supervised())
