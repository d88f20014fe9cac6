"""What the coordinator hears of a stage: whatever ends the listening is told, once, and speeds are made safe to use."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.connection import HOST_STEP_NS, stage_cost
from coordinator.stage_client import StageClient
from wire.errors import InternalError, ProtocolError, RelaylineError, StageLostError
from wire.pb.relayline.v1 import relayline_pb2 as pb


class Call:
    """Gives messages, then the end of the stream."""

    def __init__(self, *messages: bytes) -> None:
        self._messages = list(messages)

    async def read(self) -> Any:
        return self._messages.pop(0) if self._messages else None


def stumble(message: pb.ReturnEnvelope) -> None:
    raise ZeroDivisionError("a bug of ours")


@pytest.mark.parametrize(
    ("messages", "error", "text"),
    [
        ((), StageLostError, "closed its return stream"),
        ((b"\xff",), ProtocolError, "cannot be read"),
        ((pb.ReturnEnvelope(epoch=1).SerializeToString(),), InternalError, "a bug of ours"),
    ],
)
async def test_every_end_of_the_return_stream_is_told(
    messages: tuple[bytes, ...], error: type[RelaylineError], text: str
) -> None:
    client = StageClient("127.0.0.1:1")
    lost: list[RelaylineError] = []
    await client._read(Call(*messages), stumble, lost.append)  # type: ignore[arg-type]
    await client.close()
    (told,) = lost
    assert type(told) is error
    assert text in told.message


@pytest.mark.parametrize(
    ("said", "taken"), [(13_000.0, 13_000.0), (-1.0, 0.0), (float("nan"), 0.0), (float("inf"), 0.0)]
)
def test_what_a_stage_says_of_its_speed_is_safe_to_plan_with(said: float, taken: float) -> None:
    point = pb.CostPoint(n_rows=1, cost_ns=7)
    cost = stage_cost(pb.StatusResponse(decode_curve=[point], prefill_curve=[point], context_ns=said), 64)
    assert cost.context_ns == taken
    assert cost.decode_ns(1) == 7 + HOST_STEP_NS
