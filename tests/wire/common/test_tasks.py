"""A task that is ended leaves nothing behind, however its errors hang together; work that must end does."""

from __future__ import annotations

import asyncio
import weakref

import pytest

from relayline.wire.common.errors import StageLostError
from relayline.wire.common.tasks import end_task, to_its_end


class _Owner:
    """Something that a task's frame refers to."""


async def _wait_in_an_error(refers: list[_Owner], begun: asyncio.Event, *, is_own_cause: bool) -> None:
    owner = refers.pop()
    error = StageLostError("it is lost")
    try:
        raise error from (error if is_own_cause else OSError("it is refused"))
    except StageLostError:
        begun.set()
        await asyncio.Event().wait()  # as one that tries again in a while
    assert owner


@pytest.mark.timeout(30)  # a chain without an end would be followed for ever, and the event loop with it
@pytest.mark.parametrize("is_own_cause", [False, True])
async def test_frames_of_an_ended_task_let_go(is_own_cause: bool) -> None:
    owner = _Owner()
    gone, begun, refers = weakref.ref(owner), asyncio.Event(), [owner]
    del owner
    task = asyncio.create_task(_wait_in_an_error(refers, begun, is_own_cause=is_own_cause))
    await begun.wait()
    await end_task(task)
    assert task.cancelled()
    assert gone() is None, "the error's traceback keeps the task's frame"


async def test_a_cancellation_comes_after_the_work() -> None:
    begun, may_end, ended = asyncio.Event(), asyncio.Event(), []

    async def work() -> None:
        begun.set()
        await may_end.wait()
        ended.append(True)

    task = asyncio.create_task(to_its_end(work()))
    for _ in range(2):
        await begun.wait()
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_work_that_fails_says_so() -> None:
    async def work() -> None:
        raise StageLostError("it is lost")

    with pytest.raises(StageLostError):
        await to_its_end(work())
