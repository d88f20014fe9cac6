"""Writing a file so that a reader sees all of it or nothing."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the system say that it is about `path` where it names no file, as that of a full disk does."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def write_file(path: Path, data: bytes, mode: int) -> None:
    """Write `data` to `path` with `mode`, whole or not at all, replacing any earlier file. Raises OSError."""
    with _replacing(path) as partial:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)  # with any umask
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


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
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with naming(path):
            yield partial
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
