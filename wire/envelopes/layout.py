"""Derives the canonical layout of an envelope, the offset of each field, from the contract in proto/.

If all fields of a message have a fixed width and are present, the message has a constant size, tags included. So the
header of an envelope and the record of a frame are read and written at known offsets. Names, numbers and types of the
fields come from the contract. This module adds their order and describes the layout once for numpy, `struct`, the C
readers (`_layout.h`) and the documentation. `make proto` writes the last two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

TRACE_BYTES = 25  # trace id (16), span id (8), flags (1); the only length that a field of bytes has here
_FIXED64, _LENGTH, _FIXED32 = 1, 2, 5  # protobuf's name for the kind of a field's value
# field type -> how it travels, the code that struct has for it, that of numpy, bytes
_FORMS = {
    FieldDescriptor.TYPE_FIXED64: (_FIXED64, "Q", "<u8", 8),
    FieldDescriptor.TYPE_FIXED32: (_FIXED32, "I", "<u4", 4),
    FieldDescriptor.TYPE_BYTES: (_LENGTH, f"{TRACE_BYTES}s", f"V{TRACE_BYTES}", TRACE_BYTES),
}


def tag_of(message: Descriptor, name: str) -> int:
    """Return the tag of a field, which has one byte: every field of the canonical layout has a number below 16."""
    field = message.fields_by_name[name]
    tag = field.number << 3 | (_FORMS[field.type][0] if field.type in _FORMS and not field.is_repeated else _LENGTH)
    assert tag < 0x80
    return tag


@dataclasses.dataclass(frozen=True)
class Place:
    """One field of a layout."""

    name: str
    number: int
    constants: tuple[int, ...]  # the bytes before the value: its tag, and for bytes their length
    at: int  # where those begin
    code: str  # as struct has the value
    numpy_code: str
    n_bytes: int  # of the value

    @property
    def value_at(self) -> int:
        """Where the value begins."""
        return self.at + len(self.constants)


class Layout:
    """Fields one behind the other, each always there; before them maybe the constant tag and length of the whole."""

    def __init__(self, message: Descriptor, names: Iterable[str], lead_tag: int | None = None) -> None:
        self.places: list[Place] = []
        at = self.lead_bytes = 0 if lead_tag is None else 2
        for name in names:
            field = message.fields_by_name[name]
            _, code, numpy_code, n_bytes = _FORMS[field.type]
            length = (n_bytes,) if field.type == FieldDescriptor.TYPE_BYTES else ()
            constants = (tag_of(message, name), *length)
            self.places.append(Place(name, field.number, constants, at, code, numpy_code, n_bytes))
            at += len(constants) + n_bytes
        self.n_bytes = at
        self.lead = () if lead_tag is None else (lead_tag, at - self.lead_bytes)

    @property
    def constants(self) -> list[tuple[int, int]]:
        """Where each constant byte stands, and which it is."""
        places = ((place.at, place.constants) for place in self.places)
        return [(at + n, byte) for at, some in ((0, self.lead), *places) for n, byte in enumerate(some)]

    def struct_form(self, *, with_constants: bool) -> str:
        """Return the format for `struct`; constants are values of their own there, or are passed over."""
        codes = ("B" if with_constants else "x") * self.lead_bytes
        for place in self.places:
            codes += ("B" if with_constants else "x") * len(place.constants) + place.code
        return f"<{codes}"

    def dtype(self) -> np.dtype[np.void]:
        """Return the numpy form: the fields by name, without the constants between them."""
        form: Any = {
            "names": [place.name for place in self.places],
            "formats": [place.numpy_code for place in self.places],
            "offsets": [place.value_at for place in self.places],
            "itemsize": self.n_bytes,
        }
        made: np.dtype[np.void] = np.dtype(form)
        return made


_ENVELOPE: Any = pb.RelayRequest.DESCRIPTOR
_FRAME: Any = pb.Frame.DESCRIPTOR
# The number of batch_trace is higher than that of frames, but here it has the same place in every envelope.
HEADER = Layout(_ENVELOPE, ("epoch", "sequence", "dtype", "n_rows", "width", "sent_ns", "n_frames", "batch_trace"))
FRAME = Layout(_FRAME, (field.name for field in _FRAME.fields), tag_of(_ENVELOPE, "frames"))
TAGS = {
    name: tag_of(_ENVELOPE, name) for name in ("payload", "row_exponents", "options", "draft_tokens", "checksum")
}  # of what follows the frames
CHECKSUM_FORM = "<BQ"  # tag and value: the last bytes of every canonical message


def c_header() -> str:
    """Return _layout.h."""
    lines = [
        "/* Made by `make proto` from wire/envelopes/layout.py: where the fields of an envelope stand. */",
        "#include <stdint.h>",
        "",
        f"#define TRACE_BYTES {TRACE_BYTES}",
        *(f"#define {name.upper()}_TAG {tag:#04x}" for name, tag in TAGS.items()),
    ]
    for name, layout in (("HEADER", HEADER), ("FRAME", FRAME)):
        lines += ["", f"#define {name}_BYTES {layout.n_bytes}"]
        lines += [f"#define {name}_{place.name.upper()}_AT {place.value_at}" for place in layout.places]
        lines += ["static const struct {", "    uint8_t at, byte;", f"}} {name}_CONSTANTS[] = {{"]
        lines += [f"    {{{at}, {byte:#04x}}}," for at, byte in layout.constants]
        lines += ["};"]
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return docs/reference/envelopes.md."""
    tag = {name: f"`{value:#04x}`" for name, value in TAGS.items()}
    lines = [
        "# Envelopes, byte by byte",
        "",
        "Made by `make proto` from `proto/relayline/v1/relayline.proto`. An envelope is a `RelayRequest`. Any protobuf",
        "library reads and writes it. Encoders of relayline write the layout below, which is read without parsing.",
        "Numbers are little endian. An envelope is, in this order:",
        "",
        "1. the header;",
        "2. one record for each frame;",
        f"3. `payload`: tag {tag['payload']}, length, the rows;",
        f"4. `row_exponents` (tag {tag['row_exponents']}) of f16 rows; `options` ({tag['options']}) and `draft_tokens`",
        f"   ({tag['draft_tokens']}) where there are some;",
        f"5. `checksum`: tag {tag['checksum']}, 8 bytes: the xxh3-64 of 4, seeded by the xxh3-64 of 1 and 2.",
        "",
        "An envelope of more than 4 MiB is sent in several messages, each with `part_of_bytes`, `part_at` and `part`.",
    ]
    for title, layout in (("Header", HEADER), ("Frame", FRAME)):
        lines += ["", f"## {title}, {layout.n_bytes} bytes", "", "| at | before it | field | number | bytes |"]
        lines += ["|---:|---|---|---:|---:|"]
        if layout.lead:
            lines += [f"| 0 | {_hex(layout.lead)} | the record, as a field of the envelope | | {layout.lead[1]} |"]
        lines += [
            f"| {place.value_at} | {_hex(place.constants)} | `{place.name}` | {place.number} | {place.n_bytes} |"
            for place in layout.places
        ]
    return "\n".join(lines) + "\n"


def _hex(some: tuple[int, ...]) -> str:
    return " ".join(f"`{byte:#04x}`" for byte in some)
