"""Writing a file so that a reader sees all of it or nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

TRY_BYTES = 64 << 10  # written for a try
_PARTIAL_BYTES = 4  # random ones in the name of a file that is not whole yet


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the system say that it is about `path` where it names no file, as that of a full disk does."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def try_writing(directory: Path) -> None:
    """Write to a directory, wait for the disk, and leave nothing there. Raises OSError, as any later writer would."""
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(secrets.token_bytes(TRY_BYTES))  # which no file system can make smaller
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def clearing_up() -> Iterator[None]:
    """Remove within what is of no use any more: on a read-only disk it stays. Raises other errors of the system."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EROFS:
            raise


def write_file(path: Path, data: bytes, mode: int) -> None:
    """Write `data` to `path` with `mode`, whole or not at all, replacing any earlier file. Raises OSError."""
    with replaced(path, mode) as file:
        file.write(data)


@contextlib.contextmanager
def replaced(path: Path, mode: int) -> Iterator[BinaryIO]:
    """Give an open file to write, with `mode`; it takes the place of `path` at the end, on the disk, and goes after an
    error. Raises OSError.
    """
    with _replacing(path) as partial:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)  # with any umask
            yield file
            file.flush()
            os.fsync(file.fileno())


def remove_partials(path: Path) -> None:
    """Remove what writers of `path` that were killed have left beside it. No writer may be at work. Raises OSError."""
    left = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{{2 * _PARTIAL_BYTES}}}")
    with os.scandir(path.parent) as found:
        for entry in found:
            if left.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                Path(entry.path).unlink(missing_ok=True)


def write_again(path: Path, data: bytes) -> None:
    """Write a file that can be made again, and its directory: whole or not at all as `write_file` does.

    It does not wait for the disk, so a power cut may take the file. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(path) as partial:
        partial.write_bytes(data)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give a name for the new file; it takes the place of the old one at the end, and goes after an error."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(_PARTIAL_BYTES)}")
    try:
        with naming(path):
            yield partial
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
