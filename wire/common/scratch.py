"""Directories that are needed for a while. What a killed process has left of them goes when the next one is made.

The maker of a directory holds the lock of a file in it (flock), which the system ends with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

LOCK = ".lock"
UNLOCKED_S = 24 * 3600.0  # how old one without a lock is before it goes: its removal was cut short, or an older
# relayline made it
_RANDOM = "?" * 8  # what `tempfile` puts behind a prefix


@contextlib.contextmanager
def scratch_directory(prefix: str, where: Path | None = None) -> Iterator[Path]:
    """Give a new directory that this user alone may read, until the end of the with block.

    `where` it is made, None for the system's place for temporary files, others of this prefix and user go, unless their
    makers live. Raises OSError.
    """
    place = Path(tempfile.gettempdir()) if where is None else where
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True) as made:
        directory = Path(made)
        lock = _lock(directory)
        try:
            _remove_left(place, prefix, directory)
            yield directory
        finally:
            os.close(lock)


def _lock(directory: Path) -> int:
    """Put a lock into a new directory that is held from its first moment on; returns its handle."""
    new = directory / f"{LOCK}.new"
    handle = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: then nobody else can lock it either
            fcntl.flock(handle, fcntl.LOCK_EX)
        new.rename(directory / LOCK)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _remove_left(place: Path, prefix: str, own: Path) -> None:
    """Remove the directories of this prefix and user that nobody holds."""
    made = own.stat()  # its time is by the file system's clock
    for path in place.glob(f"{prefix}{_RANDOM}"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue  # of another user, where root could make a lock as well
            is_old = made.st_mtime - found.st_mtime > UNLOCKED_S and found.st_mode == made.st_mode  # made as this one
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if is_old else 0)
            lock = os.open(path / LOCK, flags, 0o600)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
