"""Live counters of one stage: what batches formed, how long frames waited, how busy the engine was.

Event loop only: steps are counted when their results have been handed over.
"""

from __future__ import annotations

import bisect
import collections

from relayline.stage.steps.step_types import StepResult
from relayline.wire.common import memory
from relayline.wire.envelopes import trace_context
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

RECENT_WAITS_MAX = 8_192  # frame waits kept for percentiles
RECENT_STEPS_MAX = 1_024  # step intervals kept for the overlap figure
# Upper ends of the wait histogram's buckets: from a fifth of a decode step on a fast stage to a long queue.
WAIT_BUCKETS_NS = tuple(
    round(seconds * 1e9)
    for seconds in (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
)  # fmt: skip


class StageStats:
    """Counters since the process started."""

    def __init__(self) -> None:
        self.metrics_address = ""  # host:port of /metrics; empty for none
        self.steps_by_rows: collections.Counter[int] = collections.Counter()
        self.steps_by_sessions: collections.Counter[int] = collections.Counter()
        self.close_reasons: collections.Counter[str] = collections.Counter()
        self.faults_by_label: collections.Counter[str] = collections.Counter()
        self.recent_wait_ns: collections.deque[int] = collections.deque(maxlen=RECENT_WAITS_MAX)
        self.recent_steps_ns: collections.deque[tuple[int, int]] = collections.deque(maxlen=RECENT_STEPS_MAX)
        self.waits_by_bucket = [0] * (len(WAIT_BUCKETS_NS) + 1)  # the last one has no upper end
        # The latest recorded batch whose longest wait fell into each bucket: its trace, and that wait.
        self.exemplars: list[tuple[str, int] | None] = [None] * (len(WAIT_BUCKETS_NS) + 1)
        self.wait_sum_ns = self.encode_ns = 0
        self.predicted_ns = self.measured_ns = 0  # of the steps for which the cost curves said anything
        self.n_decode_frames = self.decode_held_ns = 0  # held: waiting and in native steps
        self.n_rows_dropped = 0  # computed ahead in vain
        self.n_rows_ahead = 0  # computed before they were asked for, see stage.steps.run_ahead
        self.n_epochs = 0  # times that a coordinator connected this stage
        self.n_steps = self.n_rows = self.n_frames = self.busy_ns = self.n_padded_rows = self.n_micro_batches = 0
        self.tier_lookups = {"hit": 0, "miss": 0}  # as of the latest scrape; the tier counts them
        self.envelopes = {"in": 0, "out": 0}  # of neighbours' links, by direction
        self.payload_bytes = {"in": 0, "out": 0}

    def step_done(self, result: StepResult) -> None:
        """Count one step. A batch of only controls, or with all frames refused, is not a native step."""
        self.n_rows_dropped += result.n_dropped
        waits_ns = result.waits_ns
        self.recent_wait_ns.extend(waits_ns)
        for wait_ns in waits_ns:
            self.waits_by_bucket[bisect.bisect_left(WAIT_BUCKETS_NS, wait_ns)] += 1
        self.wait_sum_ns += sum(waits_ns)
        if not result.number:
            return
        if result.context != trace_context.NONE:
            longest_ns = max(waits_ns)
            trace_id = result.context[: trace_context.TRACE_ID_BYTES].hex()
            self.exemplars[bisect.bisect_left(WAIT_BUCKETS_NS, longest_ns)] = (trace_id, longest_ns)
        self.n_rows += result.n_rows
        self.n_frames += len(waits_ns)
        self.encode_ns += result.encode_ns
        arrived_ns = [frame.arrived_ns for frame in result.members if not frame.is_prefill]
        self.n_decode_frames += len(arrived_ns)
        self.decode_held_ns += len(arrived_ns) * result.held_until_ns - sum(arrived_ns)
        if result.is_ahead:
            self.n_rows_ahead += result.n_rows
        if result.computed_in:  # an earlier result has counted the decode
            return
        self.steps_by_rows[result.n_rows] += 1
        self.steps_by_sessions[len(waits_ns)] += 1
        self.close_reasons[result.close_reason] += 1
        self.recent_steps_ns.append((result.started_ns, result.started_ns + result.decode_ns))
        self.n_steps += 1
        self.n_padded_rows += result.padded_rows
        self.n_micro_batches += result.n_micro_batches
        self.busy_ns += result.decode_ns
        if result.predicted_ns:
            self.predicted_ns += result.predicted_ns
            self.measured_ns += result.decode_ns

    def message(self, *, with_recent: bool, with_steps: bool = False, with_memory: bool = False) -> pb.StatusResponse:
        """Return the counters in wire form; the caller adds those of lanes and queues."""
        message = pb.StatusResponse(
            steps_by_rows=dict(self.steps_by_rows),
            steps_by_sessions=dict(self.steps_by_sessions),
            n_steps=self.n_steps,
            n_rows=self.n_rows,
            n_frames=self.n_frames,
            busy_ns=self.busy_ns,
            envelopes_in=self.envelopes["in"],
            envelopes_out=self.envelopes["out"],
            payload_bytes_in=self.payload_bytes["in"],
            payload_bytes_out=self.payload_bytes["out"],
            faults_by_label=dict(self.faults_by_label),
            close_reasons=dict(self.close_reasons),
            n_padded_rows=self.n_padded_rows,
            n_micro_batches=self.n_micro_batches,
            n_decode_frames=self.n_decode_frames,
            decode_held_ns=self.decode_held_ns,
        )
        if with_memory:
            message.resident_bytes = memory.resident_bytes() or 0
            message.memory_bytes = memory.total_memory_bytes() or 0
            message.memory_free_bytes = memory.available_memory_bytes() or 0
        if with_recent:
            message.recent_wait_ns.extend(self.recent_wait_ns)
        if with_recent or with_steps:
            message.step_start_ns.extend(start_ns for start_ns, _ in self.recent_steps_ns)
            message.step_end_ns.extend(end_ns for _, end_ns in self.recent_steps_ns)
        return message
