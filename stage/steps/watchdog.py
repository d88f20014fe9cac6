"""Notices a native step that never ends.

A device or driver that hangs, or weights on a disk that went away, leave the process alive. It answers health checks
and keepalives, recovery notices nothing, and every stream of the pipeline waits forever. Only the stage knows how long
a step should take. So it ends itself, and its supervisor restarts it. Time is counted in polls, not read from a clock:
a process that was stopped for a while and continues has not been stuck.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from relayline.stage.queue_types import Step
from relayline.stage.speed.curves import StepShape, shape_of
from relayline.wire.common.errors import NativeError

LOOK_EVERY_S = 5.0
STUCK_AFTER_S = 120.0  # no step of known cost is given up sooner: machines that swap are slow, not stuck
STUCK_AFTER_PREDICTED = 20.0  # times the predicted time of the step
STUCK_AFTER_UNKNOWN_S = 1_800.0  # of a step of which nothing is known, as before the first one without calibration


class StepWatch:
    """Counts how often the same step was found running."""

    def __init__(self, predict_ns: Callable[[StepShape], float]) -> None:
        self._predict_ns = predict_ns
        self._step: Step | None = None
        self._n_looks = self._n_looks_max = 0

    def look(self, step: Step | None) -> NativeError | None:
        """Report the present step; call it every LOOK_EVERY_S. Returns why the stage should end, once it should."""
        if step is None or step is not self._step:
            self._step, self._n_looks = step, 0
            self._n_looks_max = math.ceil(self._limit_s(step) / LOOK_EVERY_S) if step else 0
            return None
        self._n_looks += 1
        if self._n_looks < self._n_looks_max:
            return None
        n_rows, ran_s = shape_of(step.frames).n_rows, self._n_looks * LOOK_EVERY_S
        return NativeError(
            f"one native step has run for {ran_s:.0f} s (rows: {n_rows}): the device, its driver or the disk with the "
            "weights hangs. The stage ends, so that it can be started again"
        )

    def _limit_s(self, step: Step) -> float:
        predicted_ns = self._predict_ns(shape_of(step.frames))
        if not predicted_ns:
            return STUCK_AFTER_UNKNOWN_S
        return max(STUCK_AFTER_S, STUCK_AFTER_PREDICTED * predicted_ns / 1e9)


async def watch_steps(
    running: Callable[[], Step | None],
    watch: StepWatch,
    on_stuck: Callable[[NativeError], None],
    look_every_s: float = LOOK_EVERY_S,
) -> None:
    """Look at the running step for ever; call `on_stuck` once, then return."""
    while True:
        if (error := watch.look(running())) is not None:
            on_stuck(error)
            return
        await asyncio.sleep(look_every_s)
