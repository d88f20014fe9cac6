"""Ends tasks without a trace."""

from __future__ import annotations

import asyncio
import traceback
from typing import Any


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
        _let_go(error)


def _let_go(error: BaseException | None) -> None:
    seen: set[int] = set()  # an error may be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
