"""The decode time of an ended request by what it was spent on, in sums that cost its tokens nearly nothing. Pure.

Every stage sums up what its frames of the session took, and how long they were under way to it. The coordinator sums
up the ways back of its answers. Departure and arrival of such a way are times of two clocks. Their difference is
summed as it is, and the offset of the clocks is taken off once, at the end. On the whole circle the offsets cancel
out.

The rest of the decode time is the coordinator's: its turns, and waiting for the other streams of a group. It is below
zero if the request was in several passes at once, because it had drafts. `coordinator.observe.token_times` has
the exact account, from more than these sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from relayline.coordinator.sessions.request_log import SessionRecord
from relayline.wire.telemetry import names


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeSums:
    """Parts of a decode phase, in nanoseconds; those of stages in layer order."""

    queue_ns: Sequence[int]
    compute_ns: Sequence[int]
    handle_ns: Sequence[int]
    """Placing rows, and encoding them for the next stage; at the last stage sampling."""
    hop_ns: Sequence[int]
    """From the stage before, or the coordinator, to this one."""
    back_ns: int
    """From the last stage to the coordinator."""
    took_ns: int

    @property
    def coordinator_ns(self) -> int:
        """The rest."""
        return (
            self.took_ns - self.back_ns - sum(map(sum, (self.queue_ns, self.compute_ns, self.handle_ns, self.hop_ns)))
        )


def decode_sums(session: SessionRecord, offsets_ns: Sequence[int | None]) -> DecodeSums | None:
    """Return the sums of an ended session; None if they do not cover all of its decode phase.

    offsets_ns: what to add to each stage's clock to get this process's (None: not known).
    """
    stages = [session.stages.get(index) for index in range(len(offsets_ns))]
    known = [stage for stage in stages if stage is not None]
    offsets = [offset_ns for offset_ns in offsets_ns if offset_ns is not None]
    is_whole = len(known) == len(offsets) == len(offsets_ns) > 0 and all(stage.n_decode_steps for stage in known)
    if not is_whole or session.n_tokens < 2 or any(event.name == names.EVENT_RESUMED for event in session.events):
        return None
    senders = [0, *offsets]
    moved = zip(known, offsets, senders, strict=False)
    return DecodeSums(
        queue_ns=[stage.decode_wait_ns for stage in known],
        compute_ns=[stage.decode_ns - stage.prefill_decode_ns for stage in known],
        handle_ns=[stage.handle_ns for stage in known],
        hop_ns=[max(0, stage.hop_ns + stage.n_hops * (own - sender)) for stage, own, sender in moved],
        back_ns=max(0, session.trace.back_ns - session.trace.n_back * offsets[-1]),
        took_ns=session.last_token_ns - session.first_token_ns,
    )
