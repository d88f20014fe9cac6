"""Sums of this stage's work for each open session, sent to the coordinator when the session ends. Pure.

Bounded by lanes: only frames of open sessions decode, and a close or the end of the route takes the totals away.
"""

from __future__ import annotations

from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps.step_types import StepResult
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry.session_sums import SessionSums


class Summaries:
    """Sums of every session that has decoded here, by QueuedFrame.session_key."""

    def __init__(self, stage_index: int) -> None:
        self._stage_index = stage_index
        self._totals: dict[tuple[int, int], SessionSums] = {}

    def __len__(self) -> int:
        return len(self._totals)

    def step_done(self, result: StepResult) -> list[tuple[QueuedFrame, pb.SessionSummary]]:
        """Count a step; returns its applied closes, each with the summary of the session it ended.

        A step applies its controls first, so a session that it closes and opens again starts from zero.
        """
        ended = [(close, self._end(close)) for close in result.closed]
        taken_ns, decode_ns, n_rows = result.step.taken_ns, result.decode_ns, result.n_rows
        handle_ns = result.handle_ns
        for frame in result.members:  # the only work per frame and step at level summary, hence no call in it
            totals = self._totals.get(frame.session_key)
            if totals is None:
                totals = self._totals[frame.session_key] = SessionSums()
            wait_ns = taken_ns - frame.arrived_ns
            if frame.is_prefill:
                totals.n_prefill_steps += 1
                totals.prefill_wait_ns += wait_ns
                totals.prefill_decode_ns += decode_ns
            else:
                totals.n_decode_steps += 1
                totals.decode_wait_ns += wait_ns
                totals.handle_ns += handle_ns
                if frame.sent_ns:
                    totals.hop_ns += frame.arrived_ns - frame.sent_ns
                    totals.n_hops += 1
                totals.batch_rows_sum += n_rows
                if n_rows > totals.batch_rows_max:
                    totals.batch_rows_max = n_rows
            if wait_ns > totals.wait_max_ns:
                totals.wait_max_ns = wait_ns
            totals.decode_ns += decode_ns
        return ended

    def forget(self, route_id: int | None = None) -> None:
        """Drop the sessions of a route whose epoch ended, or all, since they will not be closed."""
        self._totals = {} if route_id is None else {k: v for k, v in self._totals.items() if k[0] != route_id}

    def _end(self, close: QueuedFrame) -> pb.SessionSummary:
        totals = self._totals.pop(close.session_key, None) or SessionSums()
        return totals.message(close.session_id, self._stage_index)
