"""Goal: a message of the return stream arrives as it was sent, in its order, or its stream ends with one error."""

from __future__ import annotations

import copy

import pytest

from relayline.wire.common import bounds
from relayline.wire.common.errors import ChecksumError, ProtocolError
from relayline.wire.envelopes.returns import ReturnReader, ReturnWriter
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

SAID = pb.ReturnResponse(
    epoch=3,
    stage_index=1,
    samples=[pb.Sampled(session_id=7, position=9, token=5, logprob=-0.5)],
    progress=[pb.Progress(session_id=8, position=64)],
)


def content(message: pb.ReturnResponse) -> pb.ReturnResponse:
    """A step's results, without the stream's additions."""
    plain = copy.deepcopy(message)
    plain.sequence = plain.checksum = 0
    return plain


def test_messages_arrive_as_they_were_sent_and_say_their_number() -> None:
    writer, reader = ReturnWriter(), ReturnReader("stage")
    for number in range(1, 5):
        (data,) = writer.write(copy.deepcopy(SAID))
        found = reader.read(data)
        assert content(found) == SAID
        assert (found.sequence, reader.n_messages, writer.n_messages) == (number, number, number)
        assert pb.ReturnResponse.FromString(data) == found, "any protobuf library reads it"


def test_every_altered_byte_is_noticed() -> None:
    (data,) = ReturnWriter().write(copy.deepcopy(SAID))
    for at in range(len(data)):
        for bit in range(8):
            altered = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            with pytest.raises(ChecksumError):
                ReturnReader("stage").read(altered)


@pytest.mark.parametrize("n_bytes", range(40))
def test_a_truncated_return_is_refused(n_bytes: int) -> None:
    (data,) = ReturnWriter().write(copy.deepcopy(SAID))
    with pytest.raises(ProtocolError):
        ReturnReader("stage").read(data[:n_bytes])


def test_a_lost_or_doubled_message_is_noticed_by_the_next() -> None:
    writer, reader = ReturnWriter(), ReturnReader("stage")
    first, second, third = (writer.write(copy.deepcopy(SAID))[0] for _ in range(3))
    reader.read(first)
    with pytest.raises(ProtocolError, match="message 3 where 2 was due"):
        reader.read(third)
    reader = ReturnReader("stage")
    reader.read(first)
    reader.read(second)
    with pytest.raises(ProtocolError, match="message 2 where 3 was due"):
        reader.read(second)


@pytest.mark.parametrize("data", [None, b"", bytes(8), b"\xff" * 40])
def test_a_malformed_return_is_refused(data: object) -> None:
    with pytest.raises(ProtocolError):
        ReturnReader("stage").read(data)


def test_a_step_with_much_to_say_says_it_in_several_messages() -> None:
    response = pb.ReturnResponse(
        epoch=3,
        stage_index=1,
        samples=[pb.Sampled(session_id=at, token=at, logits=bytes(600_000)) for at in range(40)],
        faults=[pb.SessionFault(session_id=30, label="native")],
        summaries=[pb.SessionSummary(session_id=at) for at in range(60)],
    )
    writer, reader = ReturnWriter(), ReturnReader("stage")
    parts = writer.write(response)
    assert len(parts) == writer.n_messages > 8
    assert max(map(len, parts)) <= bounds.RETURN_BYTES_MAX
    together = pb.ReturnResponse()
    for data in parts:
        together.MergeFrom(content(reader.read(data)))
    assert together == content(response)
    (data,) = writer.write(copy.deepcopy(SAID))
    assert reader.read(data).sequence == len(parts) + 1


def test_one_sample_with_all_logits_of_a_large_vocabulary_fits() -> None:
    (data,) = ReturnWriter().write(pb.ReturnResponse(samples=[pb.Sampled(logits=bytes(4 * 1_000_000))]))
    assert len(data) <= bounds.RETURN_BYTES_MAX
    assert ReturnReader("stage").read(data).samples[0].logits == bytes(4 * 1_000_000)
