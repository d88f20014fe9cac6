"""Directories of states that a stage's engines before have left, beside the one that it uses now.

An engine with other layers, of another model or with other settings has a directory of its own. The one before it
stays, since layers may come back, and a new model may be given up. But it counts against the stage's bound, and goes
before any state of today. Directories of other stages go once nobody has used them for UNUSED_S.

A directory whose `lock` is held is in use, and left alone. `stage` says whose it is; those of before have none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from pathlib import Path

from relayline.wire.common.files import write_again

UNUSED_S = 30 * 24 * 3600.0
LOOK_S = 60.0  # between two looks at the other directories: that of the engine before is in use until this one serves
LOCK, OWNER = "lock", "stage"
_HOLD_TRIES = 8  # to lock a directory that others remove at the same moment
_NAME = re.compile(r"[0-9a-f]{32}")
_OURS = re.compile(r"[0-9a-f]{16}\.(state|note)|\..*\.part|" + rf"{OWNER}|\.{OWNER}\.[0-9a-f]+")


def hold(directory: Path, owner: str) -> int:
    """Make a directory of this owner's and lock it; returns the handle of its lock.

    Raises OSError where it cannot be used; BlockingIOError: another process has it.
    """
    for _ in range(_HOLD_TRIES):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # it was removed just now
            handle = _locked(directory, os.O_CREAT)
            if handle is not None:
                with contextlib.suppress(OSError):  # a full disk: what is there can be read all the same
                    os.utime(handle)
                    write_again(directory / OWNER, owner.encode())
                return handle
    raise BlockingIOError


def _locked(directory: Path, flags: int = 0) -> int | None:
    """Lock a directory; None if it was removed meanwhile. Raises OSError; BlockingIOError: another process has it."""
    path = directory / LOCK
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), path.stat()):
            return handle
    except FileNotFoundError:
        pass
    except OSError:
        os.close(handle)
        raise
    os.close(handle)
    return None


def let_go(handle: int) -> None:
    """Unlock a directory that was used until now."""
    with contextlib.suppress(OSError):
        os.utime(handle)
    os.close(handle)


class Left:
    """What engines before have left. One thread at a time."""

    def __init__(self, own: Path, owner: str) -> None:
        """`own`: the directory that this owner's engine uses now, beside which the others are."""
        self._own, self._owner = own, owner
        self._left: list[tuple[Path, int]] = []  # of this owner's, the one used longest ago first, with its bytes
        self._looked_s = -LOOK_S

    def make_room(self, bytes_max: int) -> None:
        """Remove what nobody has used for long, and of this owner's what was used longest ago until the rest has this
        size.
        """
        if time.monotonic() - self._looked_s >= LOOK_S:
            self._looked_s = time.monotonic()
            with contextlib.suppress(OSError):  # what cannot be read cannot be removed either
                self._look()
        while sum(n_bytes for _, n_bytes in self._left) > max(0, bytes_max):
            _remove_unused(self._left.pop(0)[0])

    def _look(self) -> None:
        found = []
        for path in self._own.parent.iterdir():
            if path == self._own or not _NAME.fullmatch(path.name) or path.is_symlink():
                continue
            with contextlib.suppress(OSError):  # one without a lock is not ours
                used_s = max((path / LOCK).stat().st_mtime, path.stat().st_mtime)
                if time.time() - used_s > UNUSED_S:
                    _remove_unused(path)
                elif self._owner and _owner_of(path) == self._owner:
                    found.append((used_s, path, _n_bytes(path)))
        self._left = [(path, n_bytes) for _, path, n_bytes in sorted(found)]


def _n_bytes(directory: Path) -> int:
    n_bytes = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                n_bytes += entry.stat(follow_symlinks=False).st_size
    return n_bytes


def _owner_of(directory: Path) -> str:
    try:
        return (directory / OWNER).read_text(errors="replace")
    except OSError:
        return ""


def _remove_unused(directory: Path) -> None:
    """Remove a directory unless somebody has it, the lock last. What somebody else keeps there stays.

    It is held for no other reason: its stage may be starting.
    """
    with contextlib.suppress(OSError):
        handle = _locked(directory)
        if handle is None:
            return
        try:
            for path in directory.iterdir():
                if _OURS.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            if [path.name for path in directory.iterdir()] == [LOCK]:
                (directory / LOCK).unlink()
                directory.rmdir()
        finally:
            os.close(handle)
