"""Sessions that wait for a disk hold up no others, and keep their order."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps.restores import Restores
from relayline.wire.envelopes.frames import Flag
from tests.support.fakes import ROUTE, control, rows_frame

READING, THERE = 5, 6  # keys


class World:
    def __init__(self) -> None:
        self.reading: Future[None] = Future()
        self.pushed: list[QueuedFrame] = []
        self.filling: dict[int, Future[None]] = {}  # by session
        self.restores = Restores(
            lambda key: self.reading if key == READING else None,
            self.pushed.extend,
            lambda control: self.filling.get(control.session_id),
        )

    def sift(self, *frames: QueuedFrame) -> list[QueuedFrame]:
        return self.restores.sift(list(frames))

    async def read(self) -> None:
        self.reading.set_result(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def restore(session_id: int, key: int) -> QueuedFrame:
    return control(session_id, Flag.RESTORE, 40, argument=key)


async def test_all_of_a_session_waits_behind_its_state_in_order() -> None:
    world = World()
    opening, wanted, rows, others = control(1, Flag.OPEN), restore(1, READING), rows_frame(1, 40), rows_frame(2, 0)
    assert world.sift(opening, wanted, rows, others) == [opening, others]
    copier = [control(3, Flag.COPY_PREFIX, 40, argument=1), rows_frame(3, 40)]
    assert world.sift(*copier) == [], "the content that it copies is not there yet"
    await world.read()
    assert world.pushed == [wanted, rows, *copier]
    assert world.sift(after := rows_frame(1, 41)) == [after]


async def test_a_state_in_memory_is_not_waited_for() -> None:
    world = World()
    frames = [control(1, Flag.OPEN), restore(1, THERE), rows_frame(1, 40)]
    assert world.sift(*frames) == frames


async def test_a_close_waits_for_no_disk() -> None:
    world = World()
    wanted, rows, close = restore(1, READING), rows_frame(1, 40), control(1, Flag.CLOSE)
    assert world.sift(wanted, rows) == []
    assert world.sift(close) == [wanted, rows, close]
    await world.read()
    assert world.pushed == []


async def test_an_epoch_that_is_over_leaves_nothing_waiting() -> None:
    world = World()
    assert world.sift(restore(1, READING)) == []
    world.restores.drop_route(ROUTE)
    await world.read()
    assert world.pushed == []


async def test_rows_wait_until_their_lane_is_filled_and_the_control_does_not() -> None:
    world = World()
    world.filling = {1: Future(), 2: Future()}
    frames = [control(1, Flag.OPEN), restore(1, THERE), rows_frame(1, 40), rows_frame(5, 0)]
    assert world.sift(*frames) == [*frames[:2], frames[3]]
    copier = [control(2, Flag.OPEN), control(2, Flag.COPY_PREFIX, 40, argument=1), rows_frame(2, 40)]
    assert world.sift(*copier) == copier[:1], "its source is not filled yet"
    assert world.restores.session_ids(ROUTE) == {1, 2}
    world.filling[1].set_result(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert world.pushed == [frames[2], copier[1]], "now its own lane is filled"
    world.filling[2].set_result(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert world.pushed[2:] == copier[2:]
    assert world.restores.session_ids(ROUTE) == set()


async def test_a_state_is_read_and_then_its_lane_is_filled() -> None:
    world = World()
    world.filling = {1: Future()}
    wanted, rows = restore(1, READING), rows_frame(1, 40)
    assert world.sift(wanted, rows) == []
    await world.read()
    assert world.pushed == [wanted]
    assert world.sift(control(1, Flag.CLOSE))[0] == rows, "the end of the session ends its wait"
