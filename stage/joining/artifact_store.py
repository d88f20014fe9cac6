"""Fetched artifacts on this machine's disk, one directory per content: `CACHE/SHA256/{FILE, pipeline.json}`.

A file gets its final name only when it is complete and its hash is right. Until then it is `FILE.partial`, from which a
later attempt resumes. Where nobody has read a file's bytes before, the hash of those that came is noted in
`FILE.sha256`, and the directory has the name that the coordinator gave that content. Such a file resumes from what
survived, see `survivors`.

A finished directory can be given to `relayline stage --artifact`. `relayline cache --clear` removes what no stage uses.
Only slices that were fetched to move layers are removed automatically, see `replaced`: the user knows best which models
are needed again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from relayline.stage.engine.artifact import PIPELINE_FILE
from relayline.stage.engine.loading import CHECKING, Load
from relayline.stage.joining import survivors
from relayline.wire.common.errors import ArtifactError, ProtocolError, StartError
from relayline.wire.common.file_hash import note_sha256, noted_sha256, remember_sha256, sha256_of
from relayline.wire.common.files import write_again
from relayline.wire.common.units import bytes_text
from relayline.wire.pb.relayline.v1 import join_pb2 as pb

USED = "used"  # its time says when a file without a pipeline.json was asked for last
FOR_MOVE = "for-move"  # a file beside slices that were fetched because layers moved
DISK_RESERVE_BYTES = 64 * 1024 * 1024  # left free besides the artifact, for logs and the disk's other uses
READ_BYTES = 1 << 20
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Slot:
    """The place of one artifact in the cache. Everything here may block; call it in a thread.

    Methods with a `Load` read whole files, report their progress to it, and raise LoadStoppedError once it is stopped.
    """

    def __init__(self, cache: Path, artifact: pb.ArtifactFile) -> None:
        """Raise ProtocolError when the order's names could lead out of the cache."""
        if not _FILE.fullmatch(artifact.file) or not _SHA256.fullmatch(artifact.sha256):
            raise ProtocolError(
                f"the coordinator's order names an artifact {artifact.file!r}, which is not a valid name"
            )
        self.artifact = artifact
        self.directory = cache / artifact.sha256
        self.path = self.directory / artifact.file
        self.partial = self.directory / f"{artifact.file}.partial"
        self._lock: int | None = None

    def prepare(self, pipeline_json: bytes = b"", *, for_move: bool = False) -> None:
        """Make the directory and put the description of the split into it, if there is one. Raises StartError.

        One that is there is only noted as used: a stage that has all it needs comes back on a full or read-only disk,
        too. Of a new one it is noted whether it is `for_move`.
        """
        try:
            if for_move and not self.directory.exists():
                self.directory.mkdir(parents=True, exist_ok=True)  # another stage may want it at the same moment
                (self.directory / FOR_MOVE).touch()
            mark = self.directory / (PIPELINE_FILE if pipeline_json else USED)
            if _has(mark, pipeline_json):
                with contextlib.suppress(OSError):  # then it seems to have been used longer ago
                    os.utime(mark)
            elif not pipeline_json:
                self.directory.mkdir(parents=True, exist_ok=True)
                mark.touch()
            else:
                write_again(self.directory / PIPELINE_FILE, pipeline_json)
        except OSError as error:
            raise StartError(
                f"the cache {self.directory.parent} cannot be written: {error.strerror}; give another with --cache"
            ) from error

    def try_lock(self) -> bool:
        """Take this artifact for writing; False while another process has it. The lock ends with the process.

        On a read-only disk there is nothing to lock, since nobody writes. Raises OSError.
        """
        try:
            handle = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            return True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        self._lock = handle
        return True

    def unlock(self) -> None:
        """Give the lock back, if it was taken."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def is_complete(self, load: Load) -> bool:
        """Return whether the artifact is here, whole and unaltered; an altered one is removed."""
        if not has_content(self.path, self.artifact, load):
            self.path.unlink(missing_ok=True)
            return False
        return True

    def has_room(self) -> bool:
        """Return whether the missing bytes fit the disk."""
        missing_bytes, free_bytes = self._missing_and_free_bytes()
        return missing_bytes + DISK_RESERVE_BYTES <= free_bytes

    def check_space(self) -> None:
        """Raise StartError unless the missing bytes fit the disk."""
        if self.has_room():
            return
        missing_bytes, free_bytes = self._missing_and_free_bytes()
        raise StartError(
            f"{self.directory.parent} has {bytes_text(free_bytes)} free, and {self.artifact.file} needs "
            f"{bytes_text(missing_bytes)} more and {bytes_text(DISK_RESERVE_BYTES)} to spare; free space there "
            "or give another directory with --cache"
        )

    @contextlib.contextmanager
    def using_disk(self) -> Iterator[None]:
        """Raise StartError for an error of the disk within."""
        try:
            yield
        except OSError as error:
            raise self.disk_error(error) from error

    def disk_error(self, error: OSError) -> StartError:
        """Return what to raise where the disk cannot take the file."""
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):  # whatever is free there
            text = f"{self.artifact.file} cannot be put there; give another directory with --cache"
            return StartError(f"{self.directory.parent}: {error.strerror}; {text}")
        missing = bytes_text(self.artifact.size_bytes - self.partial_bytes())
        return StartError(
            f"{self.directory.parent}: {error.strerror}; {self.artifact.file} needs {missing} more; free space there "
            "or give another directory with --cache"
        )

    def _missing_and_free_bytes(self) -> tuple[int, int]:
        return self.artifact.size_bytes - self.partial_bytes(), shutil.disk_usage(self.directory).free

    def partial_bytes(self) -> int:
        """Return how much an earlier attempt left."""
        try:
            return self.partial.stat().st_size
        except FileNotFoundError:
            return 0


class Writer:
    """Appends to a slot's partial file and keeps its hash. Blocks; call it in a thread."""

    def __init__(self, slot: Slot, load: Load) -> None:
        """Open the partial file and hash its present bytes; one that is too long starts from zero.

        Raises StartError for a full disk, and OSError.
        """
        self._slot = slot
        self._digest = hashlib.sha256()
        self._survivors = survivors.Survivors(slot.partial) if slot.artifact.unread else None
        self._file = slot.partial.open("a+b")
        n_present = slot.partial_bytes()
        if n_present > slot.artifact.size_bytes:
            self._file.truncate(0)
        elif self._survivors is not None:
            self._file.truncate(self._survivors.good_bytes(n_present))
        self._file.seek(0)
        self.n_bytes = self._n_synced = 0
        try:
            while data := self._file.read(READ_BYTES):
                self._digest.update(data)
                self.n_bytes += len(data)
                load.at(CHECKING, self.n_bytes / slot.artifact.size_bytes)
            self._sync()
        except BaseException:
            self._file.close()
            raise

    def append(self, offset: int, data: bytes) -> None:
        """Add the bytes of `offset`. Raises ProtocolError where others come next, StartError for a full disk."""
        if offset != self.n_bytes or offset + len(data) > self._slot.artifact.size_bytes:
            raise ProtocolError(f"bytes for offset {offset} came where {self.n_bytes} was next")
        try:
            self._file.write(data)
        except OSError as error:
            raise self._slot.disk_error(error) from error
        self._digest.update(data)
        self.n_bytes += len(data)
        if self.n_bytes - self._n_synced >= survivors.SYNC_BYTES:
            self._sync()

    def _sync(self) -> None:
        """Have the disk confirm all bytes of a file whose hash nobody knows. Raises StartError."""
        self._n_synced = self.n_bytes
        if self._survivors is None:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._survivors.note(self.n_bytes)
        except OSError as error:
            raise self._slot.disk_error(error) from error

    def flush(self) -> None:
        """Have all bytes in the file, for another reader. Raises StartError for a full disk."""
        try:
            self._file.flush()
        except OSError as error:
            raise self._slot.disk_error(error) from error

    def finish(self) -> None:
        """Give the file its final name. Raises ArtifactError, and forgets the bytes, when they are the wrong ones."""
        slot, sha256 = self._slot, self._digest.hexdigest()
        if not slot.artifact.unread and sha256 != slot.artifact.sha256:
            self.close()
            slot.partial.unlink(missing_ok=True)
            raise ArtifactError(f"{slot.artifact.file} came damaged: its sha256 is not the one in the order")
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self.close()
            if slot.artifact.unread:
                note_sha256(slot.path, sha256)
            slot.partial.replace(slot.path)
            if self._survivors is not None:
                self._survivors.remove()
        except OSError as error:
            raise slot.disk_error(error) from error
        remember_sha256(slot.path, slot.path.stat(), sha256)

    def close(self) -> None:
        """Close the file; its bytes stay for the next attempt. Raises StartError."""
        try:
            self._file.close()
        except OSError as error:
            raise self._slot.disk_error(error) from error


def _has(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError:
        return False


def has_content(path: Path, artifact: pb.ArtifactFile, load: Load) -> bool:
    """Return whether a file has an artifact's size and sha256. One that is not there, or cannot be read, has not."""
    expected = noted_sha256(path) if artifact.unread else artifact.sha256
    try:
        if not expected or path.stat().st_size != artifact.size_bytes:
            return False
        return sha256_of(path, lambda share: load.at(CHECKING, share)) == expected
    except OSError:
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class Cached:
    """One artifact in the cache, whole or partly fetched."""

    directory: Path
    file: str
    size_bytes: int
    is_whole: bool
    used_s: float  # when a stage last asked for it, seconds since 1970


def cached(cache: Path) -> list[Cached]:
    """Return the cache's entries, the least recently used first."""
    found = []
    for directory in cache.iterdir() if cache.is_dir() else ():
        if not _SHA256.fullmatch(directory.name):
            continue
        for path in (*directory.glob("*.gguf"), *directory.glob("*.partial")):
            marks = (directory / PIPELINE_FILE, directory / USED, path)
            used_s = next(mark.stat().st_mtime for mark in marks if mark.exists())
            name = path.name.removesuffix(".partial")
            found.append(Cached(directory, name, path.stat().st_size, path.suffix == ".gguf", used_s))
    return sorted(found, key=lambda entry: entry.used_s)


def remove(entry: Cached) -> bool:
    """Remove one artifact; False when a process is fetching it just now. Whether one uses it is not looked at."""
    slot = Slot(entry.directory.parent, pb.ArtifactFile(file=entry.file, sha256=entry.directory.name))
    if not slot.try_lock():
        return False
    try:
        shutil.rmtree(entry.directory)
    finally:
        slot.unlock()
    return True


def shared_path(artifact: pb.ArtifactFile, load: Load) -> Path | None:
    """Return the coordinator's own copy if this machine sees the same file, with its pipeline.json, else None."""
    if not artifact.path:
        return None
    path = Path(artifact.path)
    if path.name != artifact.file or not (path.parent / PIPELINE_FILE).is_file():
        return None
    return path if has_content(path, artifact, load) else None
