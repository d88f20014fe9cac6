"""Remembers loads that ended their process, so that a stage is not restarted forever.

llama.cpp ends its process when an assertion fails, and the system ends it when memory runs out. The process cannot
report that, and its supervisor (ours, Compose, Kubernetes) knows nothing of artifacts. So each load holds a locked file
in the user's cache. A file that exists and is not locked belongs to a process that died during its load.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from relayline.wire.common.errors import ArtifactError
from relayline.wire.common.places import cache_dir
from relayline.wire.common.versions import version_of

DEATHS_MAX = 3  # of one artifact, in a row; then it is refused
FORGOTTEN_S = 15 * 60.0
_TRIES = 3  # to make a note


@contextlib.contextmanager
def attempt(artifact: Path) -> Iterator[None]:
    """Note for as long as this lasts that the artifact is being loaded. Blocks on the disk.

    Raises ArtifactError, one line, if its last DEATHS_MAX loads on this machine ended their processes.
    """
    directory = _directory(artifact)
    dead = _dead(directory)
    if len(dead) >= DEATHS_MAX:
        raise ArtifactError(
            f"{artifact}: loading it ended the process {len(dead)} times in a row; the file, the memory or the build of"
            f" llama.cpp is at fault (`relayline doctor`). To try again at once, remove {directory}"
        )
    note = directory / f"{os.getpid()}-{time.monotonic_ns()}"
    handle = _hold(note)
    try:
        yield
        for path in dead:
            path.unlink(missing_ok=True)
    finally:
        if handle is not None:
            note.unlink(missing_ok=True)
            os.close(handle)
            with contextlib.suppress(OSError):  # it has other notes
                directory.rmdir()


def _directory(artifact: Path) -> Path:
    """Return where loads of an artifact are noted: another file, or another llama.cpp, is another matter."""
    status = artifact.stat()
    facts = (artifact.resolve(), status.st_size, status.st_mtime_ns, version_of("llama-cpp-python"))
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    return cache_dir() / "loads" / name


def _dead(directory: Path) -> list[Path]:
    """Return the notes of processes that died not long ago; older ones are removed."""
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises for one that lives
            # A note of the future was made while the clock was wrong, and would not be forgotten for as long.
            if abs(time.time() - os.fstat(file.fileno()).st_mtime) > FORGOTTEN_S:
                path.unlink(missing_ok=True)
            else:
                found.append(path)
    return found


def _hold(note: Path) -> int | None:
    """Make a note and lock it. Returns None if the cache can't be written; that does not prevent loading."""
    for _ in range(_TRIES):
        with contextlib.suppress(OSError):  # another load may have removed the directory just now
            note.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(note, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError:
                os.close(handle)
                raise
            return handle
    return None
