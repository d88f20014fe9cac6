"""The files that processes use: each holds a shared lock (flock), so that others do not remove them meanwhile.

The system ends a lock with its process. A file system may have no locks; nothing is known of files there.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
from collections.abc import Collection, Iterable
from pathlib import Path

ASKED_FOR_S = 60.0  # how long a process may take from asking for a file to using it


class _State(enum.Enum):
    USED = "used"
    FREE = "free"
    UNKNOWN = "unknown"


class Use:
    """The files that this process uses, for as long as they are in use. May be changed from any one thread."""

    def __init__(self, paths: Collection[Path] = ()) -> None:
        self._handles: dict[Path, int] = {}
        self.become(paths)

    def become(self, paths: Collection[Path]) -> None:
        """Use these files and no others. One that cannot be locked is left out."""
        for path in set(paths) - self._handles.keys():
            with contextlib.suppress(OSError):
                self._handles[path] = _locked(path, fcntl.LOCK_SH)  # waits where another one looks just now
        for path in self._handles.keys() - set(paths):
            os.close(self._handles.pop(path))

    def close(self) -> None:
        """Use none of them any more."""
        self.become(())


def is_used(directory: Path) -> bool:
    """Return whether a process is known to use one of a directory's GGUF files."""
    return _state(directory.glob("*.gguf")) is _State.USED


def is_free(directory: Path) -> bool:
    """Return whether no process uses any of them, as far as locks can tell; False where there are none."""
    return _state(directory.glob("*.gguf")) is _State.FREE


def is_file_used(path: Path) -> bool:
    """Return whether a process is known to use a file."""
    return _state([path]) is _State.USED


def _state(paths: Iterable[Path]) -> _State:
    try:
        for path in paths:
            os.close(_locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except BlockingIOError:
        return _State.USED
    except OSError:
        return _State.UNKNOWN
    return _State.FREE


def _locked(path: Path, kind: int) -> int:
    """Open a file and lock it. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, kind)
    except BaseException:
        os.close(handle)
        raise
    return handle
