"""Telemetry over all stages: one level for the whole pipeline, and the batches of a request from every stage's ring."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from relayline.coordinator.engine.stage_client import StageClient
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.observe.token_times import Known
from relayline.coordinator.observe.trace_view import view
from relayline.wire.common.errors import InvalidRequestError
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry.telemetry import LEVEL_NAMES, Level


@dataclasses.dataclass(frozen=True, slots=True)
class TelemetryControl:
    """The telemetry operations behind the HTTP routes for traces and levels."""

    observer: Observer
    stages: Callable[[], Sequence[StageClient]]
    """The stages that are connected now."""

    async def describe(self) -> dict[str, object]:
        """Return the settings that hold here and at every stage (None where one does not answer)."""
        return self._here() | {"stages": await push_level(self.stages(), None)}

    async def change(self, level: str | None, sample_ratio: float | None) -> dict[str, object]:
        """Change the given values, here and at every stage, now and whenever one connects; returns `describe`.

        Raises InvalidRequestError for values out of range; then nothing has changed.
        """
        if level is not None and level not in LEVEL_NAMES:
            text = f"level: {level[:40]!r} is unknown; choose one of {', '.join(LEVEL_NAMES)}"
            raise InvalidRequestError(text, param="level")
        if sample_ratio is not None and not 0.0 <= sample_ratio <= 1.0:
            raise InvalidRequestError.of_field("sample_ratio", f"{sample_ratio} is outside 0..1")
        if sample_ratio is not None:
            self.observer.tracing.sampler_ratio = sample_ratio
        if level is None:
            return await self.describe()
        self.observer.telemetry.level = self.observer.pushed_level = Level.named(level)
        return self._here() | {"stages": await push_level(self.stages(), self.observer.pushed_level)}

    def _here(self) -> dict[str, object]:
        telemetry = self.observer.telemetry
        return {
            "level": str(telemetry.level),
            "sample_ratio": self.observer.tracing.sampler_ratio,
            "exporting": telemetry.is_exporting,
            "exported_spans": telemetry.exported_spans,
            "dropped_spans": telemetry.dropped_spans,
            "remembered_requests": len(self.observer.log),
        }

    async def trace(self, wanted: str | None, now_ns: int) -> dict[str, object] | None:
        """Return the life of one request, or of the last one (None), with its batches at every stage.

        None when no such request is remembered.
        """
        log = self.observer.log
        record = log.last() if wanted is None else log.find(wanted)
        if record is None:
            return None
        session_ids = sorted({stream.session.session_id for stream in record.streams})
        if not session_ids:
            return view(record, [], log.owners(), now_ns)
        responses = await asyncio.gather(*(stage.batches(session_ids) for stage in self.stages()))
        known = Known(log.sessions(), list(self.observer.arrivals_ns))
        # Tens of thousands of batch members take a while: they are read in a thread, so that tokens keep flowing.
        return await asyncio.to_thread(view, record, responses, log.owners(), now_ns, known)


async def greet(stages: Sequence[StageClient], level: Level | None) -> None:
    """Set newly connected stages to the pipeline's level, if it has its own (otherwise None)."""
    if level is not None:
        await push_level(stages, level)


async def push_level(stages: Sequence[StageClient], level: Level | None) -> list[str | None]:
    """Set the level of every stage (None: no change); returns the present levels, None where a stage is silent."""
    wanted = pb.SetTelemetryRequest(level=None if level is None else level.to_wire())
    answers = await asyncio.gather(*(stage.set_telemetry(wanted) for stage in stages))
    levels = [None if answer is None else Level.from_wire(answer.level) for answer in answers]
    return [None if found is None else str(found) for found in levels]
