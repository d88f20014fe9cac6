"""Small files of what can be measured again, each for one key, which nobody else removes once the key means nothing any
more. In a directory of them, those used longest ago go beyond a bound.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from relayline.wire.common.files import write_again

REMEMBERED_MAX = 1_024  # files of a directory, of 1 to 2 kB


def remember(path: Path, data: bytes) -> None:
    """Write a file, and its directory, as `write_again` does. Raises OSError."""
    write_again(path, data)
    with contextlib.suppress(OSError):  # another process does the same just now
        _forget(path.parent)


def recall(path: Path) -> bytes:
    """Return what a file holds, which uses it. Raises OSError."""
    data = path.read_bytes()
    with contextlib.suppress(OSError):  # a full or read-only disk
        os.utime(path)
    return data


def _forget(directory: Path) -> None:
    with os.scandir(directory) as found:
        files = [each for each in found if each.is_file(follow_symlinks=False)]
        used = sorted((each.stat(follow_symlinks=False).st_mtime_ns, each.path) for each in files)
    for _, path in used[:-REMEMBERED_MAX]:
        Path(path).unlink(missing_ok=True)
