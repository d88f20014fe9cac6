"""The coordinator's heartbeat to each stage. It measures each stage's clock offset, which the stage needs for its
spans.

Clocks of two hosts differ by more than the length of a step. Every beat is a round trip, from which
`wire.telemetry.clock` estimates the offset of a link. A beat also carries the result of earlier beats: the number to
add to the stage's monotonic clock to get the coordinator's wall clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence, Sized

from relayline.coordinator.engine.stage_client import StageClient
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry.clock import Clock, OffsetEstimate
from relayline.wire.telemetry.telemetry import own_offset_ns

BEAT_S = 1.0  # while anything runs
IDLE_BEAT_S = 10.0
FIRST_BEATS = 4  # before the first frame: the shortest of these few round trips is close to the shortest of many


class Heartbeat:
    """The beats of one epoch. Event loop only."""

    def __init__(self, stages: Sequence[StageClient]) -> None:
        self._stages = stages

    async def first(self) -> None:
        """Learn every stage's clock and tell it. A stage that does not answer is left at its own."""
        await asyncio.gather(*(self._meet(index) for index in range(len(self._stages))))

    async def _meet(self, index: int) -> None:
        for _ in range(FIRST_BEATS):
            if not await self._beat(index):
                return
        await self._beat(index)  # sends the best of those

    def offsets_ns(self) -> list[int | None]:
        """Return what to add to each stage's clock to get this process's; None where that is not known."""
        now_ns = time.monotonic_ns()
        bests = [stage.clock.best(now_ns) for stage in self._stages]
        return [best[0] if best is not None else None for best in bests]

    async def keep(self, audiences: Sized) -> None:
        """Beat for as long as the connection is used; ends only by being cancelled."""
        beat_at = time.monotonic() + BEAT_S
        while True:
            await asyncio.sleep(BEAT_S)
            if audiences or time.monotonic() >= beat_at:
                await asyncio.gather(*(self._beat(index) for index in range(len(self._stages))))
                beat_at = time.monotonic() + IDLE_BEAT_S

    async def _beat(self, index: int) -> bool:
        estimate, sent_ns = self._stages[index].clock, time.monotonic_ns()
        answer = await self._stages[index].beat(_beat_of(estimate, sent_ns))
        if answer is None:
            return False
        estimate.heard(answer.sent_ns, answer.received_ns, answer.theirs_ns)
        return True


def _beat_of(estimate: OffsetEstimate, now_ns: int) -> pb.BeatRequest:
    """Return the clock offset that a stage is sent."""
    best = estimate.best(now_ns)
    if best is None:
        return pb.BeatRequest()
    offset_ns, uncertainty_ns = best
    clock = Clock(offset_ns + own_offset_ns(), uncertainty_ns)
    return pb.BeatRequest(knows_clock=True, unix_offset_ns=clock.unix_offset_ns, uncertainty_ns=clock.uncertainty_ns)
