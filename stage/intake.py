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
from relayline.wire.envelopes.envelope import EnvelopeView
from relayline.wire.links.shortcut import Pipe

# Waiting frames past which no link is read: controls carry no rows, so credits alone would not bound them.
QUEUED_FRAMES_MAX = 4 * bounds.FRAMES_PER_ENVELOPE_MAX


class Intake:
    """The frames that have come to one engine and wait: before the gate, or in the decode thread's queue."""

    def __init__(self, sessions: Sessions, stats: StageStats) -> None:
        self._gate, self._stats = Gate(sessions, self._push), stats
        self._room = asyncio.Event()  # set by every step: readers wait for room in the queue
        self._paused: set[Pipe] = set()  # shortcuts that wait for it
        self.runner: Runner  # set by StageService.attach, before the server starts

    @property
    def is_full(self) -> bool:
        """Whether no link is read for now."""
        return self.runner.snapshot.queued_frames > QUEUED_FRAMES_MAX

    async def read(self, inbound: Inbound) -> None:
        """Take envelopes of one link until its neighbour closes it or its epoch ends. Raises as `Inbound.take`."""
        await inbound.accept()
        while (view := await inbound.next()) is not None and not inbound.route.ended.is_set():
            self._add(inbound, view)
            await asyncio.sleep(0)  # results of finished steps leave first
            while self.is_full:
                self._room.clear()
                await self._room.wait()
        if inbound.pipe is not None:
            await self._read_pipe(inbound, inbound.pipe)

    async def _read_pipe(self, inbound: Inbound, pipe: Pipe) -> None:
        """Take envelopes as they come by a shortcut: no task wakes for one. Raises as `Inbound.take`."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take(message: bytes) -> None:
            try:
                view = inbound.take(message)
                if view is not None and not inbound.route.ended.is_set():
                    self._add(inbound, view)
            except Exception as error:  # a bug of ours too ends the link
                pipe.close()
                end(error)
            if self.is_full:
                self._paused.add(pipe)
                pipe.pause()

        def end(error: Exception | None) -> None:
            if over.done():
                return
            if error is None:
                over.set_result(None)
            else:
                over.set_exception(error)

        pipe.receive(take, end)
        try:
            await over
        finally:
            self._paused.discard(pipe)

    def _add(self, inbound: Inbound, view: EnvelopeView) -> None:
        route, frames = inbound.route, inbound.frames(view)
        self._stats.envelopes["in"] += 1
        self._stats.payload_bytes["in"] += view.payload_bytes
        if inbound.is_back:
            self._push(route.grants.fed_back(frames))
        else:
            route.envelopes_in += 1
            self._push(self._gate.sift(route.grants.came(frames), opens=bool(view.options)))

    def stepped(self) -> None:
        """A step is over, or frames were dropped: there may be room in the queue again."""
        self._room.set()
        if self._paused and not self.is_full:
            for pipe in self._paused:
                pipe.resume()
            self._paused.clear()

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
        self.stepped()  # a reader of another route may wait for these frames to be gone, and no step may follow
