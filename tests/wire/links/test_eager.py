from __future__ import annotations

import asyncio

import pytest

from relayline.wire.links.eager import Begun


async def test_it_runs_to_where_it_first_waits_and_the_rest_when_awaited() -> None:
    gate, seen = asyncio.Event(), []

    async def work() -> str:
        seen.append("begun")
        await gate.wait()
        seen.append("going on")
        await asyncio.sleep(0)
        return "done"

    begun = Begun(work())
    assert seen == ["begun"]
    task = asyncio.create_task(_await(begun))
    await asyncio.sleep(0)
    assert seen == ["begun"]
    gate.set()
    assert await task == "done"
    assert seen == ["begun", "going on"]


async def test_a_coroutine_that_never_waits_ends_at_once() -> None:
    async def work() -> int:
        return 7

    async def broken() -> int:
        raise ZeroDivisionError

    assert await Begun(work()) == 7
    failed = Begun(broken())  # raised where it is awaited, not where it was begun
    with pytest.raises(ZeroDivisionError):
        await failed


async def test_an_error_while_it_waits_is_raised_inside() -> None:
    loop = asyncio.get_running_loop()
    waited: asyncio.Future[None] = loop.create_future()

    async def work() -> str:
        try:
            await waited
        except LookupError:
            await asyncio.sleep(0)
            return "caught"
        return "not"

    begun = Begun(work())
    waited.set_exception(LookupError())
    assert await begun == "caught"


async def test_cancelling_the_waiter_cancels_the_awaited_coroutine() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        finally:
            ended.append("cleaned up")

    task = asyncio.create_task(_await(Begun(work())))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cancelled", "cleaned up"]


async def test_a_coroutine_that_is_never_awaited_is_closed() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned up")

    begun = Begun(work())
    del begun
    assert ended == ["cleaned up"]


async def _await(begun: Begun[object]) -> object:
    return await begun
