"""The stages' measured step costs, passed on once all of them serve: for the next plan."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from relayline.wire.common.errors import RelaylineError
from relayline.wire.common.tasks import end_task
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

if TYPE_CHECKING:
    from relayline.coordinator.engine.pipeline import Pipeline

log = logging.getLogger("relayline.coordinator")


@dataclasses.dataclass(frozen=True, slots=True)
class StageCurves:
    """The cost of one stage's native steps with the layers that it has."""

    name: str
    layers: tuple[int, int]
    decode: tuple[tuple[int, float], ...]
    """(rows, ns), ascending; every row wants logits on the last stage."""
    prefill: tuple[tuple[int, float], ...]


OnCurves = Callable[[Sequence[StageCurves]], None]


class CurveTelling:
    """Passes a pipeline's curves on, once. Event loop only; the receiver runs on a separate thread."""

    def __init__(self, pipeline: Pipeline, on_curves: OnCurves | None) -> None:
        self._pipeline, self._on_curves = pipeline, on_curves
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Ask the stages, which all serve."""
        if self._on_curves is not None and self._task is None:
            self._task = asyncio.create_task(self._tell(self._on_curves))

    async def close(self) -> None:
        """Stop asking."""
        if self._task is not None:
            await end_task(self._task)

    async def _tell(self, on_curves: OnCurves) -> None:
        names, held = self._pipeline.config.stage_names, self._pipeline.file.stages
        statuses = await asyncio.gather(*(stage.status(with_recent=False) for stage in self._pipeline.stages))
        found = [
            StageCurves(name, (stage.layer_start, stage.layer_end), _points(status.decode_curve),
                        _points(status.prefill_curve))
            for name, stage, status in zip(names, held, statuses, strict=False)
            if status is not None and status.decode_curve
        ]  # fmt: skip
        if len(found) < len(held):
            return
        try:
            await asyncio.to_thread(on_curves, found)
        except (RelaylineError, OSError) as error:
            log.warning("the stages' measurements are not kept for the next plan: %s", error)
        except Exception:  # a bug of ours, of which nobody else would hear: nothing waits for this task
            log.exception("the stages' measurements are not kept for the next plan")


def _points(points: Iterable[pb.CostPoint]) -> tuple[tuple[int, float], ...]:
    return tuple((point.n_rows, float(point.cost_ns)) for point in points)
