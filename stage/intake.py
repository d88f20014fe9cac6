"""The way of frames from a stage's upstream links to the queue before its decode thread. Event loop only."""

from __future__ import annotations

import asyncio

from relayline.stage.inbound import Inbound
from relayline.stage.observe.stats import StageStats
from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps.gate import Gate
from relayline.stage.steps.runner import Runner
from relayline.stage.steps.sessions import Sessions
from relayline.wire.common import bounds

# Waiting frames past which no link is read: controls carry no rows, so credits alone would not bound them.
QUEUED_FRAMES_MAX = 4 * bounds.FRAMES_PER_ENVELOPE_MAX


class Intake:
    """The frames that have come to one engine and wait: before the gate, or in the decode thread's queue."""

    def __init__(self, sessions: Sessions, stats: StageStats) -> None:
        self._gate, self._stats = Gate(sessions, self._push), stats
        self.stepped = asyncio.Event()  # set by every step: readers wait for room in the queue
        self.runner: Runner  # set by StageService.attach, before the server starts

    @property
    def is_full(self) -> bool:
        """Whether no link is read for now."""
        return self.runner.snapshot.queued_frames > QUEUED_FRAMES_MAX

    async def read(self, inbound: Inbound) -> None:
        """Take envelopes of one link until its neighbour closes it or its epoch ends. Raises as `Inbound.next`."""
        await inbound.accept()
        stats = self._stats
        while True:
            view = await inbound.next()
            if view is None or inbound.route.ended.is_set():
                return
            stats.envelopes["in"] += 1
            stats.payload_bytes["in"] += view.payload_bytes
            route, frames = inbound.route, inbound.frames(view)
            if inbound.is_back:
                self._push(route.grants.fed_back(frames))
            else:
                route.envelopes_in += 1
                if route.stage_index == 0:  # later stages compute what comes
                    frames = route.grants.came(frames)
                self._push(self._gate.sift(frames, opens=bool(view.options)))
            await asyncio.sleep(0)  # results of finished steps leave first
            while self.is_full:
                self.stepped.clear()
                await self.stepped.wait()

    def _push(self, frames: list[QueuedFrame]) -> None:
        for frame in self.runner.push(frames):
            frame.give_credit()

    def session_ids(self, route_id: int) -> set[int]:
        """Return the sessions of a route that wait before the queue, or wait or run behind it."""
        return self._gate.session_ids(route_id) | self.runner.session_ids(route_id)

    def drop_route(self, route_id: int) -> None:
        """Drop the waiting frames of a route whose epoch has ended."""
        self._gate.drop_route(route_id)
        self.runner.drop_route(route_id)
        self.stepped.set()  # a reader of another route may wait for these frames to be gone, and no step may follow
