"""Ends a bench in order: it ends everything that it started before it exits, even if it is interrupted again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

INTERRUPTED = 130  # exit code of a process that SIGINT ended


async def _supervised(main: Coroutine[Any, Any, int]) -> int:
    work = asyncio.create_task(main)

    def stop() -> None:
        if not work.cancelling():  # a second one would interrupt the clean-up
            work.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        return await work
    except asyncio.CancelledError:
        return INTERRUPTED


def run(main: Coroutine[Any, Any, int], new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None) -> int:
    """Run a bench under a new event loop; the first SIGINT or SIGTERM cancels it, further ones do nothing.

    `new_loop` makes the loop, asyncio's own unless given.
    """
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(_supervised(main))
