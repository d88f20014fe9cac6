"""Envelopes that are larger than a message may be, in parts.

gRPC's Python binding holds a message up to three times before it hands it over. That is memory which no check of ours
comes before, so no message is longer than MESSAGE_BYTES_MAX. A larger envelope, as of a prompt through a wide model, is
cut: each message holds up to PART_BYTES_MAX of its bytes, and its parts follow directly upon one another. Checksums
are those of the whole envelope, which is read once it is complete.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

from relayline.wire.common import bounds
from relayline.wire.common.errors import ProtocolError
from relayline.wire.envelopes import messages
from relayline.wire.envelopes.envelope import lead_of
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

PART_NUMBER = pb.RelayRequest.PART_FIELD_NUMBER
_PART_TAG = PART_NUMBER << 3 | 2  # length-delimited
# Every protobuf library writes fields by their numbers, so a part begins with `part_of_bytes` (fixed32).
_FIRST_TAG = lead_of(pb.RelayRequest.PART_OF_BYTES_FIELD_NUMBER << 3 | 5, 0)[:-1]


def parts_of(envelope: bytes) -> Iterator[bytes]:
    """Cut an envelope into messages, each made when it is asked for."""
    whole = memoryview(envelope)
    for at in range(0, len(envelope), bounds.PART_BYTES_MAX):
        data = whole[at : at + bounds.PART_BYTES_MAX]
        head = pb.RelayRequest(part_of_bytes=len(envelope), part_at=at).SerializeToString()
        yield b"".join((head, lead_of(_PART_TAG, len(data)), data))


class PartReader:
    """Joins the parts of one link's envelopes. Memory grows with the received parts, not with the announced size."""

    def __init__(self, envelope_bytes_max: int) -> None:
        self._envelope_bytes_max = envelope_bytes_max
        self._of_bytes = 0  # of the envelope that has begun; 0: none
        self._data = io.BytesIO()

    def take(self, message: bytes) -> bytes | None:
        """Take the next message of a link; return a whole envelope, None where parts are still to come.

        Raises ProtocolError for a part that does not fit those before it, and for anything else between parts.
        """
        if message[: len(_FIRST_TAG)] != _FIRST_TAG:
            if self._of_bytes:
                raise ProtocolError("a message came where a further part of an envelope was due")
            return message
        of_bytes, at, data = _read(message)
        if not self._of_bytes:
            if of_bytes > self._envelope_bytes_max:
                raise ProtocolError(f"envelope of {of_bytes} bytes is over the limit of {self._envelope_bytes_max}")
            self._of_bytes = of_bytes
        have = self._data.tell()
        if of_bytes != self._of_bytes or at != have or len(data) > of_bytes - have:
            raise ProtocolError(f"a part of an envelope does not fit: {len(data)} bytes at {at} of {of_bytes}")
        self._data.write(data)
        if have + len(data) < of_bytes:
            return None
        whole, self._data, self._of_bytes = self._data, io.BytesIO(), 0
        return whole.getvalue()  # its own storage, not a copy


def _read(message: bytes) -> tuple[int, int, memoryview]:
    """Return the length of the whole, where the data begin in it, and the data uncopied. Raises ProtocolError."""
    found = messages.split(message, PART_NUMBER)
    if found is None:
        raise ProtocolError("a part of an envelope cannot be read")
    data, rest = found
    fields = messages.read(pb.RelayRequest, rest, "part of an envelope")
    of_bytes, at = fields.part_of_bytes, fields.part_at
    fields.ClearField("part_of_bytes")
    fields.ClearField("part_at")
    if fields.ByteSize():
        raise ProtocolError("a part of an envelope holds other fields too")
    if not 0 < len(data) <= bounds.PART_BYTES_MAX:
        raise ProtocolError(f"a part of an envelope has {len(data)} bytes, not 1 to {bounds.PART_BYTES_MAX}")
    return of_bytes, at, data
