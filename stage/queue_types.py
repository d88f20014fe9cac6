"""Queued frames and steps, which move between the gRPC handlers, the batcher and the decode thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from relayline.wire.envelopes import trace_context
from relayline.wire.envelopes.frames import CONTROL, Flag
from relayline.wire.envelopes.session_ids import adapter_of
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb


@dataclasses.dataclass(slots=True, eq=False)
class QueuedFrame:
    """One frame waiting at this stage; its rows stay in the received message, which frames of one envelope share.

    It is a value: nothing of it changes once it was read. The type checker holds that, by `Final`. Making a frozen
    dataclass takes five times as long, and one is made for every frame.
    """

    route_id: Final[int]
    session_id: Final[int]
    epoch: Final[int]
    position: Final[int]
    n_rows: Final[int]
    flags: Final[int]
    argument: Final[int]
    payload: Final[
        npt.NDArray[Any] | None
    ]  # the message's rows (any, width): i32 tokens, f16 or f32; None for controls
    exponents: Final[npt.NDArray[np.int8] | None]  # (any,), of the same rows; None when none of them was scaled
    options: Final[pb.SessionOptions | None]  # with Flag.OPEN
    trace: Final[bytes]  # 25 bytes, see wire.envelopes.frames
    arrived_ns: Final[int]  # this process's monotonic clock
    upstream_wait_ns: Final[int]  # how long the frame had waited at the sender
    on_consumed: Final[Callable[[int], None] | None] = None  # gives payload bytes back to the link as credit
    first_row: Final[int] = 0  # where in the payload this frame's rows begin
    envelope: Final[int] = 0  # number of the message it came in, unique in this process: frames of one group share it
    upstream_trace: Final[bytes] = trace_context.NONE  # 25 bytes, of the batch that computed its rows upstream
    draft_tokens: Final[tuple[int, ...]] = ()  # with Flag.DRAFTED: the token of each row
    sent_ns: Final[int] = 0  # sender's monotonic clock when it left; 0: it came back under a grant, or is from here

    # Derived, and looked at several times for each frame:
    session_key: tuple[int, int] = dataclasses.field(init=False)  # (route_id, session_id), unique in this process

    def __post_init__(self) -> None:
        self.session_key = (self.route_id, self.session_id)

    @property
    def adapter(self) -> int:
        """The choice of LoRA adapters that its rows are computed with: frames of others may not be in its step."""
        return adapter_of(self.session_id)

    @property
    def is_control(self) -> bool:
        """Whether it carries no rows."""
        return self.flags & CONTROL != 0

    @property
    def is_prefill(self) -> bool:
        """Whether its rows belong to a prompt."""
        return self.flags & Flag.PREFILL != 0

    @property
    def is_mutual(self) -> bool:
        """Whether each of its rows attends to all of them: then no other frame may be in its step."""
        return self.flags & Flag.MUTUAL != 0

    @property
    def rows_bytes(self) -> int:
        """Bytes of its rows, as they count against a link's credit."""
        return self.n_rows * self.payload.strides[0] if self.payload is not None else 0

    def give_credit(self) -> None:
        """Give the bytes of its rows back to the link they came over."""
        if self.on_consumed is not None and self.n_rows:
            self.on_consumed(self.rows_bytes)


@dataclasses.dataclass(slots=True)
class Step:
    """The content of one native decode, and how it was chosen."""

    controls: list[QueuedFrame]  # applied first, in order
    frames: list[QueuedFrame]  # one per session; those with prompt rows come after the others
    close_reason: str  # why the batch took no more, see stage.steps.policy
    taken_ns: int
    queued_rows_before: int
    queued_rows_after: int

    @property
    def n_rows(self) -> int:
        """Rows of the native decode."""
        return sum(frame.n_rows for frame in self.frames)
