"""Holds tasks until they end, ends them without a trace, and lets work end that must."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def start_among(tasks: set[asyncio.Task[T]], work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start work as a task that is among these until it ends: the event loop itself holds tasks only weakly."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their ends, however they end. Their errors stay whole, for one may be raised."""
    ending = tuple(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end, however it ends; raises no error of the task.

    Its frames then release their references. Otherwise the traceback of its end keeps its frames, they keep the object
    that owns the task, and that keeps the task. In such a cycle, connections would stay open until the cyclic garbage
    collector finds it.
    """
    task.cancel()
    await asyncio.wait({task})
    try:
        task.result()  # a cancelled task keeps its error until it is asked for
    except BaseException as error:
        let_go(error)


async def set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event, up to a bound; return whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Do work that nothing may interrupt, such as closing; a cancellation that comes meanwhile is raised at its end.

    Raises the errors of the work. The work is a task of its own, so what it calls can neither leave half of it undone
    nor lose the cancellation. In Python 3.11 `asyncio.wait_for`, which stops gRPC's servers, loses one that comes as
    the time ends.
    """
    task, cancelled = asyncio.create_task(work), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        task.exception()  # it is not lost, it only counts less
        raise cancelled
    task.result()


def let_go(error: BaseException | None) -> None:
    """Let an error that somebody keeps hold nothing: neither the frames that it passed nor those of its causes."""
    seen: set[int] = set()  # an error may be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
