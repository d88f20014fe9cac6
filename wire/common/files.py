"""Writing a file so that a reader sees all of it or nothing."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_file(path: Path, data: bytes, mode: int) -> None:
    """Write `data` to `path` with `mode`, whole or not at all, replacing any earlier file."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)  # with any umask
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
