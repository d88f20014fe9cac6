"""A stage's records of its steps: summaries of sessions, the ring of batches, spans. Event loop only.

At level off none of it is kept. Nothing here is on the way of an envelope: the ring and the spans of a step are made
in a later turn of the loop than its sends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from relayline.stage.config import StageConfig
from relayline.stage.engine.artifact import StageArtifact
from relayline.stage.observe.batch_spans import BatchSpans
from relayline.stage.observe.ring import BatchRing, Entry
from relayline.stage.observe.summaries import Summaries
from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps.step_types import StepResult
from relayline.wire.common.logs import recent_lines
from relayline.wire.model_files.adapters import names as adapter_names
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry import names
from relayline.wire.telemetry.clock import Clock
from relayline.wire.telemetry.telemetry import Level, Telemetry

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

BATCHES_PER_TURN = 16  # of an answer: a millisecond or less of the loop that envelopes wait for


class StageObserver:
    """One per stage process."""

    def __init__(
        self,
        telemetry: Telemetry,
        artifact: StageArtifact,
        config: StageConfig,
        instance_id: str,
        lanes_used: Callable[[], int],
    ) -> None:
        self.telemetry, self.ring = telemetry, BatchRing()
        self._stage_index, self._instance_id, self._lanes_used = artifact.stage_index, instance_id, lanes_used
        self._layers = artifact.layer_start, artifact.layer_end
        self._summaries = Summaries(artifact.stage_index)
        self._constants = _constants(artifact, config)
        self.spans = BatchSpans(telemetry, artifact.stage_index, self._constants, adapter_names(config.adapters))

    def renamed(self, artifact: StageArtifact) -> None:
        """The same slice belongs to another split from now on."""
        self._constants[names.ATTR_PIPELINE_ID] = artifact.pipeline_id[:12]

    def configured(self, request: pb.ConfigureRequest) -> None:
        """Hear by which names people know this stage; before any of its frames comes."""
        self.telemetry.identify(
            stage_index=self._stage_index,
            layers=self._layers,
            pipeline_name=request.pipeline_name or None,
            stage_name=request.stage_name or None,
        )

    def step_done(self, result: StepResult) -> list[tuple[QueuedFrame, pb.SessionSummary]]:
        """Take note of a step; returns the summaries of the sessions that it closed."""
        if self.telemetry.level is Level.OFF:
            return []
        if result.number or result.closed:
            # After the sends of this step, which are the loop's next work.
            asyncio.get_running_loop().call_soon(self._remember, result)
        return self._summaries.step_done(result)

    def _remember(self, result: StepResult) -> None:
        if result.number:
            self.ring.add(Entry.of(result))
        self.spans.step_done(result, self._lanes_used())

    def route_ended(self, route_id: int) -> None:
        """Forget the sessions of a route."""
        self._summaries.forget(route_id)
        self.spans.finish(route_id)
        # The last steps of the route may still be on their way to `_remember`, two turns of the loop at most.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self.spans.finish, route_id)

    # --- calls --------------------------------------------------------------------------------------------------------

    async def batches(self, request: pb.BatchesRequest, context: Any) -> pb.BatchesResponse:
        """Answer with recent batches, put together while envelopes continue in between."""
        began_ns = time.monotonic_ns()
        response = pb.BatchesResponse(stage_index=self._stage_index, instance_id=self._instance_id)
        recent = self.ring.recent(request.session_ids, request.limit, request.after_step)
        for number, entry in enumerate(recent, start=1):
            response.batches.append(entry.message())
            if number % BATCHES_PER_TURN == 0:
                await asyncio.sleep(0)
        # The caller takes it for the middle between question and answer, and thousands of batches take a while.
        response.now_ns = (began_ns + time.monotonic_ns()) // 2
        response.n_forgotten = self.ring.n_forgotten
        return response

    async def set_telemetry(self, request: pb.SetTelemetryRequest, context: Any) -> pb.SetTelemetryResponse:
        """Change the level, or leave it if none is named; answers with the present one."""
        level = Level.from_wire(request.level)
        if level is not None:
            self.telemetry.level = level
            if level < Level.BATCHES:
                self.spans.finish()
            if level is Level.OFF:
                self._summaries.forget()
        return pb.SetTelemetryResponse(level=self.telemetry.level.to_wire())

    async def logs(self, request: pb.LogsRequest, context: Any) -> pb.LogsResponse:
        """Answer with the latest lines of this process's log."""
        lines = [pb.LogLine(**line._asdict()) for line in recent_lines(request.limit)]
        return pb.LogsResponse(lines=lines)

    async def beat(self, request: pb.BeatRequest, context: Any) -> pb.BeatResponse:
        """Answer with this host's clock, and take the coordinator's estimate of it."""
        now_ns = time.monotonic_ns()
        if request.knows_clock:
            self.telemetry.set_clock(Clock(request.unix_offset_ns, request.uncertainty_ns))
        return pb.BeatResponse(now_ns=now_ns)


def _constants(artifact: StageArtifact, config: StageConfig) -> dict[str, AttributeValue]:
    """Return the attributes that every batch of a stage shares: its place in the pipeline and its policy's settings."""
    return {
        names.ATTR_STAGE_INDEX: artifact.stage_index,
        names.ATTR_STAGE_NAME: config.name or f"stage-{artifact.stage_index}",
        names.ATTR_STAGE_COUNT: artifact.stage_count,
        names.ATTR_LAYER_START: artifact.layer_start,
        names.ATTR_LAYER_END: artifact.layer_end,
        names.ATTR_PIPELINE_ID: artifact.pipeline_id[:12],
        names.ATTR_POLICY: config.engine.policy,
        names.ATTR_POLICY_MAX_ROWS: config.engine.max_rows,
        names.ATTR_POLICY_PREFILL_ROWS: config.engine.prefill_rows,
    }
