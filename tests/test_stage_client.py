"""The coordinator's ear at a stage: whatever ends the listening is told, once."""

from __future__ import annotations

from typing import Any

import pytest

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
