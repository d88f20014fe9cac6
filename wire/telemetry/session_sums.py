"""The sums of a stage's work for a session: counted there, sent as pb.SessionSummary, kept by the coordinator.

Fields have the names of the message. A new sum is a field here and there; the rest follows.
"""

from __future__ import annotations

import dataclasses

from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

_LARGEST = ("wait_max_ns", "batch_rows_max")  # of two summaries the larger one counts; other fields add up


@dataclasses.dataclass(slots=True)
class SessionSums:
    """Sums over the frames of one session at one stage."""

    n_prefill_steps: int = 0
    n_decode_steps: int = 0
    prefill_wait_ns: int = 0
    decode_wait_ns: int = 0
    wait_max_ns: int = 0
    batch_rows_sum: int = 0
    batch_rows_max: int = 0
    decode_ns: int = 0
    prefill_decode_ns: int = 0  # of decode_ns
    handle_ns: int = 0  # of its decode steps: placing rows, and encoding or sampling them
    hop_ns: int = 0  # of n_hops decode frames: arrival on the stage's clock less departure on the sender's
    n_hops: int = 0

    def message(self, session_id: int, stage_index: int) -> pb.SessionSummary:
        """Return the sums as a stage sends them."""
        sums = {name: getattr(self, name) for name in _NAMES}
        return pb.SessionSummary(session_id=session_id, stage_index=stage_index, **sums)

    def add(self, summary: pb.SessionSummary) -> None:
        """Add a summary; a stage sends several for a session that was replayed."""
        for name in _NAMES:
            before, more = getattr(self, name), getattr(summary, name)
            setattr(self, name, max(before, more) if name in _LARGEST else before + more)


_NAMES = tuple(field.name for field in dataclasses.fields(SessionSums))
