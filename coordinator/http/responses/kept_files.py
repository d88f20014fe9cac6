"""Files of responses and conversations in a directory: each says its version, and is named after its id. One of a
response is one msgpack object.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from relayline.wire.common.bounds import STORED_RESPONSES_BYTES_MAX
from relayline.wire.common.files import clearing_up, naming, replaced
from relayline.wire.common.own_directory import OWN_FILE_MODE
from relayline.wire.common.texts import counted, plural

log = logging.getLogger("relayline.http")

VERSION = 1  # of the files; those of another one are left out
FILE_BYTES_MAX = STORED_RESPONSES_BYTES_MAX + (1 << 20)  # of one, with what surrounds its contents
LONG_BYTES = 256 * 1024  # copied in some 0.1 ms
ENTRIES_AT_ONCE = 64  # of a list
_ID = re.compile(r"(resp|conv)_[0-9a-f]{48}")
_PARTIAL = re.compile(r"\.(resp|conv)_[0-9a-f]{48}\.[0-9a-f]{8}")

T = TypeVar("T")


class BadFileError(Exception):
    """A file that is left out; the text says why."""


class _OtherVersionError(Exception):
    """A file of another version of relayline."""

    def __init__(self, version: int) -> None:
        super().__init__(f"it has version {version}, and this relayline reads {VERSION}")
        self.version = version


class _Head(msgspec.Struct):
    version: int
    id: str


def read(path: Path, kind: type[T]) -> T:
    """Return what is in a file. Raises OSError, and others for one that cannot be read."""
    return checked(path, contents(path), kind)


def read_all(
    directory: Path, kind: type[T], what: str = "response", reader: Callable[[Path, type[T]], T] = read
) -> Iterator[T]:
    """Return what is in the files of a directory, the one used last first. Files that cannot be read are left out, with
    one line in the log, and those of another version with another line; `what` they hold is for people. Raises OSError.
    """
    paths = [path for path in directory.iterdir() if _ID.fullmatch(path.name) and path.is_file()]
    left_out: list[str] = []
    others: list[int] = []
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            found = reader(path, kind)
        except _OtherVersionError as error:
            others.append(error.version)
            continue
        except (BadFileError, msgspec.MsgspecError, UnicodeDecodeError, PermissionError) as error:
            left_out.append(f"{path}: {getattr(error, 'strerror', None) or error}")
            continue
        yield found
    if others:
        versions = ", ".join(str(version) for version in sorted(set(others)))
        text = "%s has %ss in files of version %s, and this relayline reads version %d; left out: %d"
        advice = ". They stay there: start the relayline that wrote them, or remove these files"
        log.warning(text + advice, directory, what, versions, VERSION, len(others))
    if left_out:
        n = len(left_out)
        text = "%s cannot be read and %s left out, the first is %s"
        log.warning(text, counted(n, what), plural(n, "is", "are"), left_out[0])


class _Kept(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def n_bytes(self) -> int: ...


K = TypeVar("K", bound=_Kept)


def load(
    directory: Path,
    kind: type[T],
    made_of: Callable[[T], K],
    bounds: tuple[int, int],
    drop: Callable[[str], None],
    what: str = "response",
    reader: Callable[[Path, type[T]], T] = read,
) -> list[K]:
    """Return what is made of the files in a directory, the one used last at the end. Raises OSError.

    `bounds`: how many, and their bytes; what is above these is dropped by its id, the one used longest ago first.
    """
    n_max, bytes_max = bounds
    remove_torn(directory)
    found: list[K] = []
    n_bytes = 0
    for each in map(made_of, read_all(directory, kind, what, reader)):
        n_bytes += each.n_bytes
        if len(found) >= n_max or n_bytes > bytes_max:
            with clearing_up():
                drop(each.id)
        else:
            found.append(each)
    return found[::-1]


def contents(path: Path) -> bytes:
    """Return a file's bytes. Raises OSError and BadFileError."""
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise BadFileError(f"it is larger than {FILE_BYTES_MAX} bytes")
    return data


def checked(path: Path, data: bytes, kind: type[T]) -> T:
    """Return what is in a file's first bytes, if it belongs there. Raises MsgspecError, BadFileError and others."""
    head = msgspec.msgpack.decode(data, type=_Head)
    if head.version != VERSION:
        raise _OtherVersionError(head.version)
    if head.id != path.name:
        raise BadFileError("it is not named after what it holds")
    return msgspec.msgpack.decode(data, type=kind)


def in_pieces(found: object) -> Iterator[bytes]:
    """Yield something as msgpack: long byte strings as they are, long lists some entries at a time.

    A copy of all of it holds the interpreter, and so every token, for as long as it takes: 0.1 s for images of 20 MB.
    """
    if not _has_long(found):
        yield msgspec.msgpack.encode(found)
    elif isinstance(found, bytes):
        yield b"\xc6" + len(found).to_bytes(4)
        yield found
    elif isinstance(found, msgspec.Struct):
        yield b"\xde" + len(found.__struct_fields__).to_bytes(2)
        for name in found.__struct_fields__:
            yield msgspec.msgpack.encode(name)
            yield from in_pieces(getattr(found, name))
    else:
        assert isinstance(found, list | tuple)
        yield b"\xdd" + len(found).to_bytes(4)
        for begin in range(0, len(found), ENTRIES_AT_ONCE):
            some = found[begin : begin + ENTRIES_AT_ONCE]
            if any(map(_has_long, some)):
                for each in some:
                    yield from in_pieces(each)
            else:
                yield msgspec.msgpack.encode(some)[1 if len(some) < 16 else 3 :]  # without the head of a list


def _has_long(found: object) -> bool:
    if isinstance(found, bytes):
        return len(found) >= LONG_BYTES
    if isinstance(found, msgspec.Struct):
        return any(_has_long(getattr(found, name)) for name in found.__struct_fields__)
    return isinstance(found, list | tuple) and (len(found) > ENTRIES_AT_ONCE or any(map(_has_long, found)))


def write(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file whole or not at all. Raises OSError."""
    with replaced(path, OWN_FILE_MODE) as file:
        for piece in pieces:
            file.write(piece)


def append(path: Path, data: bytes, *, waits: bool = False, bytes_max: int = FILE_BYTES_MAX) -> int:
    """Add to a file, or make it; return its size, then. `waits`: for the disk. Raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    with naming(path), os.fdopen(os.open(path, flags, OWN_FILE_MODE), "wb", buffering=0) as file:
        n_bytes = os.fstat(file.fileno()).st_size + len(data)
        if n_bytes > bytes_max:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if waits:
            os.fsync(file.fileno())
    return n_bytes


def remove_torn(directory: Path, suffixes: Collection[str] = ()) -> None:
    """Remove what processes that were killed have left: files that are not whole, and files with these suffixes beside
    one that is gone. What somebody else keeps here stays. Raises OSError.
    """
    for path in directory.iterdir():
        is_left = path.suffix in suffixes and _ID.fullmatch(path.stem) and not path.with_suffix("").exists()
        if (is_left or _PARTIAL.fullmatch(path.name)) and path.is_file() and not path.is_symlink():
            with clearing_up():
                path.unlink()
