"""Takes the stages' fresh costs each second: the schedule plans with them, and a lasting imbalance is logged once.

Cuts are compared in a thread and only now and then. It takes tens of milliseconds with many stages or streams, and each
token of every stream would wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.planner.costs import Edges
from relayline.coordinator.planner.imbalance import LOOKS_APART_NS, Imbalance, ImbalanceWatch, faster_cut
from relayline.coordinator.schedule.overhead import Held
from relayline.coordinator.schedule.scheduler import Scheduler
from relayline.coordinator.schedule.stage_cost import StageCost

log = logging.getLogger("relayline.coordinator")

LOOK_EVERY_NS = LOOKS_APART_NS // 2


class Balance:
    """The balance of one pipeline's stages over all its epochs. Event loop only."""

    def __init__(self, stage_names: Callable[[], Sequence[str]]) -> None:
        self._stage_names = stage_names
        self._edges: Edges = ()
        self._watch = ImbalanceWatch()
        self.on_reported: Callable[[Imbalance], None] = lambda found: None
        """Called with all fresh costs for as long as another cut would be clearly faster."""
        self.moves_in_s: Callable[[int], float | None] = lambda now_ns: None
        """Tells in how many seconds layers move by themselves; None: never."""

    def refresh(
        self, scheduler: Scheduler, file: PipelineFile
    ) -> Callable[[list[StageCost], list[Held]], Awaitable[None]]:
        """Return what takes fresh costs for one epoch's scheduler.

        Since the epoch before, layers may have moved, and stages may have been started again.
        """
        edges = tuple((stage.layer_start, stage.layer_end) for stage in file.stages)
        if edges != self._edges:
            self._edges, self._watch = edges, ImbalanceWatch()
        else:
            self._watch.restarted()
        watch, n_seen, looked_ns = self._watch, scheduler.n_decode_landed, -LOOK_EVERY_NS

        async def refresh(costs: list[StageCost], held: list[Held]) -> None:
            nonlocal n_seen, looked_ns
            scheduler.refresh(costs, held)
            n_steps, n_seen = scheduler.n_decode_landed - n_seen, scheduler.n_decode_landed
            now_ns = time.monotonic_ns()
            if watch.stepped(n_steps) and now_ns - looked_ns >= LOOK_EVERY_NS:
                looked_ns, round_trip = now_ns, scheduler.planner.round_trip
                found = await asyncio.to_thread(faster_cut, costs, edges, scheduler.n_decoding, round_trip, now_ns)
                if (begun := watch.look(found, now_ns)) is not None:
                    log.warning("%s", begun.words(self._stage_names()))
            if (reported := watch.reported) is not None:
                self.on_reported(reported)

        return refresh

    def describe(self, now_ns: int) -> dict[str, object] | None:
        """Return the imbalance for GET /v1/pipeline; None if there is none."""
        found = self._watch.reported
        return {**found.describe(now_ns), "moves_in_s": self.moves_in_s(now_ns)} if found is not None else None
