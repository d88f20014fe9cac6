"""A directory that one process at a time keeps things in, and that no other user of the machine may read.

The system may have made its disk read-only, as after an error. What is there can be read all the same.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from relayline.wire.common.errors import UsageError

OWN_FILE_MODE, OWN_DIRECTORY_MODE = 0o600, 0o700


class OwnDirectory:
    """A directory, its parts, and its `lock`, which is held until `close` or the end of the process."""

    def __init__(self, path: Path, parts: Sequence[str], what: str) -> None:
        """Make and lock it. `what` is in it, for people: "batches".

        Raises UsageError where another coordinator has it, or it cannot be used.
        """
        self.path = path
        try:
            if not path.exists():
                path.mkdir(parents=True, exist_ok=True, mode=OWN_DIRECTORY_MODE)
            is_read_only = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
            for part in parts:
                (path / part).mkdir(exist_ok=True, mode=OWN_DIRECTORY_MODE)
                if not is_read_only and not os.access(path / part, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            lock = path / "lock"
            self._lock: BinaryIO = lock.open("rb" if is_read_only and lock.exists() else "wb")
        except OSError as error:
            raise UsageError(f"{path} cannot hold {what}: {error.strerror}") from None
        with self.loading():
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"{path} holds the {what} of another coordinator; give each its own") from None
            except OSError:
                if not is_read_only:  # as of a share, where the lock is for writers
                    raise

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Read what is there within: after an error it is nobody's again. Raises UsageError for one of the system."""
        try:
            yield
        except OSError as error:
            self.close()
            raise UsageError(f"{error.filename or self.path} cannot be used: {error.strerror}") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another process have it."""
        self._lock.close()
