"""Ends tasks so that nothing of them is left."""

from __future__ import annotations

import asyncio
import traceback
from typing import Any


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended, however; raises nothing of its own.

    Its frames let go of what they held. Else the traceback of its end keeps them, they keep the object that the task
    belongs to, and that keeps the task: a circle, in which connections would stay open until the cyclic garbage
    collector finds it.
    """
    task.cancel()
    await asyncio.wait({task})
    try:
        task.result()  # a task that was cancelled keeps its error until somebody asks
    except BaseException as error:
        _let_go(error)


def _let_go(error: BaseException | None) -> None:
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
