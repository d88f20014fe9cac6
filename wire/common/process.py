"""What every relayline process does around its event loop: uvloop, signals, a graceful end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import uvloop

Result = TypeVar("Result")


async def first_of(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of the futures is done; raises nothing of theirs."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def run(main: Callable[[asyncio.Event], Awaitable[Result]]) -> Result:
    """Run `main(stopping)` under uvloop; `stopping` is set by the first SIGINT or SIGTERM.

    A second signal ends the process at once, with its default action.
    """

    async def supervised() -> Result:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop(number: signal.Signals) -> None:
            stopping.set()
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        return await main(stopping)

    return uvloop.run(supervised())
