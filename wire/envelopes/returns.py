"""Messages of the return stream: each has a number, a checksum and a bounded size.

A token altered on the way would stay in the answer, and a lost one would be awaited forever. So the last nine bytes of
a message are the xxh3-64 of all before them, as field 15, and every message has its number in the stream. The results
of one step go in one message; only longer ones than RETURN_SPLIT_BYTES are split.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import xxhash

from relayline.wire.common import bounds
from relayline.wire.common.errors import ChecksumError, ProtocolError
from relayline.wire.common.texts import tidy
from relayline.wire.envelopes import messages
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

_CHECKSUM = struct.Struct("<BQ")  # tag and value of ReturnResponse.checksum
_CHECKSUM_TAG = 0x79
_LISTS = ("samples", "faults", "progress", "summaries", "dropped_keys")


class ReturnWriter:
    """The sending end of one return stream."""

    def __init__(self) -> None:
        self.n_messages = 0  # that have been written

    def write(self, message: pb.ReturnResponse) -> list[bytes]:
        """Return a message's bytes as they go over the stream: nearly always one piece, which is the whole."""
        message.sequence = self.n_messages + 1
        body = message.SerializeToString()
        if len(body) <= bounds.RETURN_SPLIT_BYTES:
            self.n_messages += 1
            return [_sealed(body)]
        return [self._numbered(part) for part in _parts(message)]

    def _numbered(self, part: pb.ReturnResponse) -> bytes:
        self.n_messages += 1
        part.sequence = self.n_messages
        return _sealed(part.SerializeToString())


class ReturnReader:
    """The receiving end of one return stream."""

    def __init__(self, who: str) -> None:
        """`who` names the sender in errors."""
        self.n_messages = 0  # that have come
        self._who = who

    def read(self, data: Any) -> pb.ReturnResponse:
        """Read the next message. Raises ProtocolError, and ChecksumError for one that was altered."""
        if not isinstance(data, bytes) or len(data) < _CHECKSUM.size:
            raise ProtocolError(f"{self._who} sent a return message that cannot be read")
        tag, total = _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
        if tag != _CHECKSUM_TAG or total != xxhash.xxh3_64_intdigest(memoryview(data)[: -_CHECKSUM.size]):
            raise ChecksumError(f"a return message of {self._who} does not match its checksum")
        message = messages.read(
            pb.ReturnResponse, data, "return message", bytes_max=bounds.RETURN_BYTES_MAX, who=self._who
        )
        for fault in message.faults:
            tidy(fault, bounds.PEER_TEXT_CHARS_MAX)
        self.n_messages += 1
        if message.sequence != self.n_messages:
            raise ProtocolError(
                f"{self._who} sent return message {message.sequence} where {self.n_messages} was due: one was lost or "
                "doubled"
            )
        return message


def _sealed(body: bytes) -> bytes:
    return b"".join((body, _CHECKSUM.pack(_CHECKSUM_TAG, xxhash.xxh3_64_intdigest(body))))


def _parts(message: pb.ReturnResponse) -> Iterator[pb.ReturnResponse]:
    """Take a long message apart, with everything in its order."""
    part, part_bytes = _empty(message), 0
    for name in _LISTS:
        for item in getattr(message, name):
            item_bytes = item.ByteSize()
            if part_bytes and part_bytes + item_bytes > bounds.RETURN_SPLIT_BYTES:
                yield part
                part, part_bytes = _empty(message), 0
            getattr(part, name).append(item)
            part_bytes += item_bytes
    yield part


def _empty(message: pb.ReturnResponse) -> pb.ReturnResponse:
    return pb.ReturnResponse(epoch=message.epoch, stage_index=message.stage_index)
