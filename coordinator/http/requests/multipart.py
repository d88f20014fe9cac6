"""Forms with files, multipart/form-data as RFC 7578 has them: a body becomes fields by their names. Pure."""

from __future__ import annotations

import re

from relayline.wire.common.errors import InvalidRequestError

FIELDS_MAX = 64
_BOUNDARY = re.compile(rb"--[\x21-\x7e][\x20-\x7e]{0,68}[\x21-\x7e]?\r\n")
_NAME = re.compile(rb'^content-disposition:[ \t]*form-data;.*?[; ]name="?([^";\r\n]{1,100})"?', re.IGNORECASE)
_WRONG = "the body must be multipart/form-data"


def fields_of(raw: bytes | bytearray) -> dict[str, bytes]:
    """Return the fields of a form; a file's is what is in it. The boundary is the body's own first line.

    Raises InvalidRequestError for another body, or a form that has a field twice.
    """
    if (first := _BOUNDARY.match(raw)) is None:
        raise InvalidRequestError(_WRONG)
    mark = b"\r\n" + first.group()[:-2]
    found: dict[str, bytes] = {}
    at = first.end() - 2
    while not raw.startswith(b"--", at):
        end = raw.find(mark, at)
        head = raw.find(b"\r\n\r\n", at, end)
        if end < 0 or head < 0 or not raw.startswith(b"\r\n", at):
            raise InvalidRequestError(f"{_WRONG}, and this one is cut or broken")
        lines = bytes(raw[at + 2 : head]).split(b"\r\n")
        name = next((match[1].decode("utf-8", "replace") for line in lines if (match := _NAME.match(line))), "")
        if not name or name in found or len(found) == FIELDS_MAX:
            what = f"the field {name[:40]!r} is given twice" if name in found else "a part has no name"
            raise InvalidRequestError(f"{_WRONG}, and in this one {what}" if len(found) < FIELDS_MAX else _WRONG)
        found[name] = bytes(raw[head + 4 : end])
        at = end + len(mark)
    return found
