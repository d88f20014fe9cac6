"""The sha256 of large files, remembered: a file is not read again while its status is as at the last hash.

Every process checks what it loads; without this each start would read all weights twice. Every write moves the file's
change time, even if its modification time is set back. Bit rot on the disk moves no time. So a hash is remembered for a
few days only, and `relayline doctor --deep` reads everything.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from relayline.wire.common.files import write_again
from relayline.wire.common.places import cache_dir

_HASH_CHUNK_BYTES = 1 << 20
REMEMBERED_S = 7 * 24 * 3600.0

Hashed = Callable[[float], None]  # gets the share of the file read so far; an exception from it ends the reading


class _Stamp(msgspec.Struct, frozen=True):
    """A file that once hashed to `sha256`, and how it looked on disk then."""

    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int
    hashed_s: float  # seconds since 1970
    sha256: str

    def is_of(self, status: os.stat_result) -> bool:
        """Return whether a file with this status is the one that was hashed, not long ago."""
        then = (self.size_bytes, self.mtime_ns, self.ctime_ns, self.inode, self.device)
        now = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)
        return then == now and 0 <= time.time() - self.hashed_s < REMEMBERED_S


def _stamp_path(path: Path) -> Path:
    return cache_dir() / "verified" / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"


def sha256_of(path: Path, hashed: Hashed = lambda share: None, *, afresh: bool = False) -> str:
    """Return the file's sha256, from the user's cache if the file looks as it did when it was last hashed.

    `afresh`: read the file in any case.
    """
    status = path.stat()
    try:
        stamp = msgspec.json.decode(_stamp_path(path).read_bytes(), type=_Stamp)
        if not afresh and stamp.is_of(status):
            return stamp.sha256
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        pass  # no stamp, or none that can be used: hash the file
    sha256 = _hash(path, status.st_size, hashed)
    remember_sha256(path, status, sha256)
    return sha256


def remember_sha256(path: Path, status: os.stat_result, sha256: str) -> None:
    """Record a file's hash and its `status` at that time, so that `sha256_of` need not read it again."""
    stamp = _Stamp(
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
        inode=status.st_ino,
        device=status.st_dev,
        hashed_s=time.time(),
        sha256=sha256,
    )
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time at the next start, nothing else
        stamp_path = _stamp_path(path)
        write_again(stamp_path, msgspec.json.encode(stamp))
        _forget_old(stamp_path.parent)


def _forget_old(directory: Path) -> None:
    """Remove the stamps that do not count any more: of files that have gone, nobody else would. Raises OSError."""
    with os.scandir(directory) as found:
        for entry in found:
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > REMEMBERED_S:
                Path(entry.path).unlink(missing_ok=True)


def note_sha256(path: Path, sha256: str) -> None:
    """Write down beside a file, as FILE.sha256, which hash it has: for one that came without any. Raises OSError."""
    write_again(_note_path(path), sha256.encode())


def noted_sha256(path: Path) -> str:
    """Return the hash that was written down beside a file; empty for none."""
    try:
        return _note_path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _note_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _hash(path: Path, size_bytes: int, hashed: Hashed) -> str:
    digest, buffer, done_bytes = hashlib.sha256(), bytearray(_HASH_CHUNK_BYTES), 0
    with path.open("rb", buffering=0) as file:
        while n_bytes := file.readinto(buffer):
            digest.update(memoryview(buffer)[:n_bytes])
            done_bytes += n_bytes
            hashed(min(1.0, done_bytes / max(1, size_bytes)))
    return digest.hexdigest()
