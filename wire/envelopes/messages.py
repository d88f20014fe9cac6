"""Reads protobuf messages of peers: none is parsed before its size and its cost in memory are known.

Two bytes of a message may become a hundred in the protobuf library's memory, as an empty message within it does. So
every message of a link is weighed first (`_weigh.c` walks over the bytes), and refused where reading would take more
than MESSAGE_COST_BYTES_MAX beyond its own size. Small messages can't cost that much and are read at once.
"""

from __future__ import annotations

import array
import functools
from typing import Any, Protocol, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from relayline.wire.common import bounds
from relayline.wire.common.errors import ProtocolError
from relayline.wire.envelopes import _weigh

_UNKNOWN, _SINGLE, _REPEATED, _TEXT, _MESSAGE = range(5)  # as in _weigh.c
# An element of the worst type takes so much for the two bytes that it has in a message.
_COST_PER_BYTE_MAX = 136
_UNWEIGHED_BYTES_MAX = bounds.MESSAGE_COST_BYTES_MAX // _COST_PER_BYTE_MAX
_ELEMENT_BYTES = 16  # as in _weigh.c
_HEAD_BYTES = 32  # of a message in memory, without its fields
_MAP_ENTRY_BYTES = 224  # of an entry of a map with its place in a hash table that grows by doubling

_VARINT, _FIXED32, _FIXED64 = 0, 4, 8
_FORMS: dict[int, tuple[int, int]] = {  # field type -> (bytes of a value in memory, how it travels)
    FieldDescriptor.TYPE_DOUBLE: (8, _FIXED64),
    FieldDescriptor.TYPE_FLOAT: (4, _FIXED32),
    FieldDescriptor.TYPE_INT64: (8, _VARINT),
    FieldDescriptor.TYPE_UINT64: (8, _VARINT),
    FieldDescriptor.TYPE_INT32: (4, _VARINT),
    FieldDescriptor.TYPE_FIXED64: (8, _FIXED64),
    FieldDescriptor.TYPE_FIXED32: (4, _FIXED32),
    FieldDescriptor.TYPE_BOOL: (1, _VARINT),
    FieldDescriptor.TYPE_UINT32: (4, _VARINT),
    FieldDescriptor.TYPE_ENUM: (4, _VARINT),
    FieldDescriptor.TYPE_SFIXED32: (4, _FIXED32),
    FieldDescriptor.TYPE_SFIXED64: (8, _FIXED64),
    FieldDescriptor.TYPE_SINT32: (4, _VARINT),
    FieldDescriptor.TYPE_SINT64: (8, _VARINT),
}
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


class _Parsed(Protocol):
    """Any generated message class."""

    @classmethod
    def FromString(cls, s: bytes) -> Any: ...


M = TypeVar("M", bound=_Parsed)


def read(
    kind: type[M], data: Any, what: str, *, bytes_max: int = bounds.UNARY_BYTES_MAX, who: str = "the other end"
) -> M:
    """Parse bytes of another process as a message of a type, once they are known to be few and cheap.

    `what` names the message and `who` its sender in the error. Raises ProtocolError, never anything else.
    """
    if not isinstance(data, bytes):
        raise ProtocolError(f"{who} closed without {what}")
    if len(data) > bytes_max:
        raise ProtocolError(f"{who}: {what} of {len(data)} bytes is over the limit of {bytes_max}")
    check_cost(kind, data, what, who)
    try:
        parsed: M = kind.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"{who}: {what} cannot be read") from error
    return parsed


def check_cost(kind: type[Any], data: bytes, what: str, who: str = "the other end") -> None:
    """Raise ProtocolError if reading a message would take more memory than its size allows."""
    if len(data) <= _UNWEIGHED_BYTES_MAX:
        return
    cost_max = len(data) + bounds.MESSAGE_COST_BYTES_MAX
    table, root = _table(kind.DESCRIPTOR)
    if _weigh.weigh(data, table, root, cost_max, bounds.MESSAGE_FIELDS_MAX) > cost_max:
        raise ProtocolError(f"{who}: {what} of {len(data)} bytes has more fields than allowed")


def split(data: bytes, number: int) -> tuple[memoryview, bytes] | None:
    """Take the one length-delimited field of a number out of a message; returns its data, uncopied, and the rest.

    The data are empty if there is no such field. None if there are several or the message is not well formed.
    """
    found = _weigh.find(data, number)
    if found is False:
        return None
    if found is None:
        return memoryview(b""), data
    tag_at, at, end = found
    return memoryview(data)[at:end], data[:tag_at] + data[end:]


@functools.cache
def _table(root: Descriptor) -> tuple[bytes, int]:
    """Return the table of _weigh.c for a message type and all types in it, and the place of the type itself."""
    known: list[Descriptor] = [root]
    rows = array.array("I")
    assert rows.itemsize == 4
    for descriptor in known:  # grows meanwhile
        row = [0] * (_weigh.FIELD_NUMBER_MAX + 1)
        row[0] = _MAP_ENTRY_BYTES if descriptor.GetOptions().map_entry else _HEAD_BYTES
        for field in descriptor.fields:
            if field.message_type is not None and field.message_type not in known:
                known.append(field.message_type)
            assert field.number <= _weigh.FIELD_NUMBER_MAX, field.full_name
            place_bytes, row[field.number] = _entry(field, known)
            row[0] += place_bytes
        assert descriptor is root or row[0] + _ELEMENT_BYTES <= 2 * _COST_PER_BYTE_MAX, descriptor.full_name
        rows.extend(row)
    return rows.tobytes(), 0


def _entry(field: FieldDescriptor, known: list[Descriptor]) -> tuple[int, int]:
    """Return how many bytes a field takes in its message, and its row of the table."""
    if field.message_type is not None:
        is_map = field.message_type.GetOptions().map_entry
        return 16 if is_map else 8, _MESSAGE | known.index(field.message_type) << 16
    if field.type in _TEXTS:
        return 16, _TEXT
    item_bytes, how = _FORMS[field.type]
    if field.is_repeated:
        return 8, _REPEATED | item_bytes << 8 | how << 16
    return item_bytes, _SINGLE | item_bytes << 8 | how << 16
