"""Takes the stages' fresh costs each second: the schedule plans with them, and a lasting imbalance is logged once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.planner.costs import Edges
from relayline.coordinator.planner.imbalance import Imbalance, ImbalanceWatch
from relayline.coordinator.schedule.overhead import Held
from relayline.coordinator.schedule.scheduler import Scheduler
from relayline.coordinator.schedule.stage_cost import StageCost

log = logging.getLogger("relayline.coordinator")


class Balance:
    """The balance of one pipeline's stages over all its epochs. Event loop only."""

    def __init__(self, stage_names: Callable[[], Sequence[str]]) -> None:
        self._stage_names = stage_names
        self._edges: Edges = ()
        self._watch = ImbalanceWatch(())
        self.on_reported: Callable[[Imbalance], None] = lambda found: None
        """Called at each look for as long as another cut would be clearly faster."""
        self.moves_in_s: Callable[[int], float | None] = lambda now_ns: None
        """Tells in how many seconds layers move by themselves; None: never."""

    def refresh(self, scheduler: Scheduler, file: PipelineFile) -> Callable[[list[StageCost], list[Held]], None]:
        """Return what takes fresh costs for one epoch's scheduler.

        Since the epoch before, layers may have moved, and stages may have been started again.
        """
        edges = tuple((stage.layer_start, stage.layer_end) for stage in file.stages)
        if edges != self._edges:
            self._edges, self._watch = edges, ImbalanceWatch(edges)
        else:
            self._watch.restarted()
        n_seen = scheduler.n_decode_landed

        def refresh(costs: list[StageCost], held: list[Held]) -> None:
            nonlocal n_seen
            scheduler.refresh(costs, held)
            n_steps, n_seen = scheduler.n_decode_landed - n_seen, scheduler.n_decode_landed
            round_trip, now_ns = scheduler.planner.round_trip, time.monotonic_ns()
            found = self._watch.look(costs, scheduler.n_decoding, n_steps=n_steps, round_trip=round_trip, now_ns=now_ns)
            if found is not None:
                log.warning("%s", found.words(self._stage_names()))
            if (reported := self._watch.reported) is not None:
                self.on_reported(reported)

        return refresh

    def describe(self, now_ns: int) -> dict[str, object] | None:
        """Return the imbalance for GET /v1/pipeline; None if there is none."""
        found = self._watch.reported
        return {**found.describe(now_ns), "moves_in_s": self.moves_in_s(now_ns)} if found is not None else None
