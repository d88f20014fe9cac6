"""Goal: the event loop, which carries heartbeats and tokens, never waits for the end of an engine that nobody wants."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from relayline.stage.config import StageConfig
from relayline.stage.engine.loading import Load
from relayline.stage.loaded_engine import close_unused, load_engine

ANYTHING = cast(Any, None)


class Loaded:
    """An engine; it notes the threads that close it."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def close(self) -> None:
        self.threads.append(threading.current_thread())

    def assert_closed_once_in_another_thread(self) -> None:
        assert len(self.threads) == 1
        assert self.threads[0] is not threading.current_thread()


@pytest.mark.parametrize("has_loaded", [False, True], ids=["while it loads", "as it has loaded"])
async def test_a_load_that_is_cancelled_is_closed_in_a_thread(has_loaded: bool) -> None:
    loaded, load, goes_on, begun = Loaded(), Load(), threading.Event(), asyncio.Event()
    loop, one_thread = asyncio.get_running_loop(), ThreadPoolExecutor(1)
    loop.set_default_executor(one_thread)

    def load_stage(config: StageConfig, load: Load, curves: object) -> Any:
        loop.call_soon_threadsafe(begun.set)
        goes_on.wait()
        return None, loaded

    loading = asyncio.create_task(load_engine(load_stage, ANYTHING, load, None))
    await begun.wait()
    if has_loaded:
        goes_on.set()
        one_thread.submit(int).result()  # the load has ended, and the loop does not know it yet
    loading.cancel()
    await asyncio.wait({loading})
    assert loading.cancelled()
    assert load.is_stopped
    goes_on.set()
    await asyncio.to_thread(int)  # behind all that was to be done
    loaded.assert_closed_once_in_another_thread()


async def test_one_that_nothing_has_used_is_closed_in_a_thread() -> None:
    loaded = Loaded()
    await close_unused(ANYTHING, cast(Any, loaded))
    loaded.assert_closed_once_in_another_thread()
