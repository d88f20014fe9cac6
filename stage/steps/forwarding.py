"""Writes a step's rows into the envelopes that travel to the next stage, one for each route."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps.outputs import StepOutputs
from relayline.stage.steps.picking import drafts_of
from relayline.stage.steps.placement import Placed, heads_of
from relayline.wire.common.errors import NumericError
from relayline.wire.envelopes.buffers import BufferPool, with_extras
from relayline.wire.envelopes.frames import Flag
from relayline.wire.envelopes.rows import RowEncoder
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb


class Forwarding:
    """The rows of one engine that is not the last stage's. Decode thread only."""

    def __init__(self, output_rows: npt.NDArray[np.float32], max_rows: int, stage_index: int) -> None:
        """`output_rows`: f32 [max_rows, width_out], which every step fills anew."""
        self._rows, self._stage_index = output_rows, stage_index
        self._encoder = RowEncoder(max_rows, output_rows.shape[1])

    def write(
        self, outputs: StepOutputs, controls: Sequence[QueuedFrame], placed: Sequence[Placed], context: bytes
    ) -> None:
        """Write the envelope of each route that has a next stage. `context`: of the batch's span.

        A session whose rows hold NaN or infinity gets a fault, and no row of it travels.
        """
        routes = outputs.routes
        is_only = len(routes) == 1  # nearly always
        for route_id in routes if is_only else {f.route_id for f in (*controls, *(item.frame for item in placed))}:
            pool = routes[route_id].pool
            if pool is None:
                continue
            mine = placed if is_only else [item for item in placed if item.frame.route_id == route_id]
            heads = controls if is_only else [frame for frame in controls if frame.route_id == route_id]
            if not self._write_route(outputs, pool, route_id, heads, mine, context):
                finite = self._finite(outputs, mine)
                self._write_route(outputs, pool, route_id, heads, finite, context)

    def _write_route(
        self,
        outputs: StepOutputs,
        pool: BufferPool,
        route_id: int,
        controls: Sequence[QueuedFrame],
        placed: Sequence[Placed],
        context: bytes,
    ) -> bool:
        """Write one route's envelope into its output; false, and nothing written, if a row is not finite."""
        forwarded = [*controls, *[item.frame for item in placed]]
        if not forwarded:
            return True
        rows = self._rows_of(placed)
        buffer = pool.lease(len(forwarded), len(rows))
        encoded = self._encoder.encode(rows, buffer.payload)
        if not encoded.all_finite:
            pool.give_back(buffer)
            return False
        wiring = outputs.routes[route_id]
        wiring.sequence += 1
        output = outputs.of(route_id)
        output.sent_ns = time.monotonic_ns()
        buffer.seal(wiring.epoch, wiring.sequence, output.sent_ns, context, heads_of(forwarded))
        options = [frame.options or pb.SessionOptions() for frame in controls if frame.flags & Flag.OPEN]
        drafts = drafts_of(forwarded)
        output.buffer, output.message = buffer, with_extras(buffer, encoded.exponents, options, drafts)
        return True

    def _rows_of(self, placed: Sequence[Placed]) -> npt.NDArray[np.float32]:
        """Return the output rows of frames: a view where they stand together, which is always but after a fault."""
        if not placed:
            return self._rows[:0]
        first, last = placed[0], placed[-1]
        end = last.row + last.frame.n_rows
        if end - first.row == sum([item.frame.n_rows for item in placed]):
            return self._rows[first.row : end]
        return np.concatenate([self._rows[i.row : i.row + i.frame.n_rows] for i in placed])

    def _finite(self, outputs: StepOutputs, placed: Sequence[Placed]) -> list[Placed]:
        """Fault the sessions whose rows hold NaN or infinity; returns the others."""
        good: list[Placed] = []
        for item in placed:
            if np.isfinite(self._rows[item.row : item.row + item.frame.n_rows]).all():
                good.append(item)
            else:
                problem = NumericError(f"stage {self._stage_index} computed NaN or infinity for this session")
                outputs.fault(item.frame, problem)
        return good
