"""The output of a batch as a file: what it has already, and lines that are added as requests end.

A line is written with one call, so after any end of this process at most the last line is half there. It is cut off
when the batch goes on, and its request is sent again.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from relayline.coordinator.batches.input_file import Known
from relayline.coordinator.batches.lines import ANSWER_BYTES_MAX, LineError, read_answer
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.common.files import naming, remove_partials, replaced

SYNC_S = 5.0  # a power cut loses the answers of so many seconds, which are then asked again
_BLOCK_BYTES = 1 << 20


class OutputFile:
    """One output file that this process alone writes. A context manager.

    `mode`: of a file that is made. Raises UsageError where another process writes it, unless `waits` for its end, and
    OSError.
    """

    def __init__(self, path: Path, *, mode: int = 0o666, waits: bool = False) -> None:
        self.path = path
        self._synced_s = time.monotonic()
        with naming(path):
            self._file: BinaryIO = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode), "r+b", 0)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            except BlockingIOError:
                self._file.close()
                raise UsageError(f"{path}: another batch is writing it") from None

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def mend(self) -> bool:
        """Cut off a last line that is half written, or give a whole one its end; returns whether one was cut off."""
        size = self._file.seek(0, os.SEEK_END)
        whole = _end_of_lines(self._file, size)
        if whole == size:
            return False
        self._file.seek(whole)
        tail = _read(self._file, min(size - whole, ANSWER_BYTES_MAX))
        try:
            read_answer(tail)
        except LineError:
            self._file.truncate(whole)
            return True
        self.add(b"\n")
        return False

    def note_done(self, known: Known) -> tuple[int, int]:
        """Mark the requests that have a line here; returns how many are answered, and how many failed.

        Raises UsageError for a file that is not this input's output.
        """
        n_answered = n_failed = 0
        for number, raw in self.lines():
            try:
                custom_id, is_failed = read_answer(raw)
            except LineError as error:
                raise UsageError(f"{self.path}, line {number}: {error}; name another output file") from None
            place = known.place_of(custom_id)
            if place is None:
                raise UsageError(
                    f"{self.path}, line {number}: the input has no request {custom_id!r}, so this is the output of "
                    "another one; name another output file"
                )
            if not known.is_done[place]:
                known.is_done[place] = True
                n_failed += is_failed
                n_answered += not is_failed
        return n_answered, n_failed

    def add(self, line: bytes) -> None:
        """Write one line, which has its end. Raises OSError."""
        with naming(self.path):
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._file.fileno(), rest) :]

    def is_unsynced(self) -> bool:
        """Return whether the disk should be waited for again."""
        return time.monotonic() - self._synced_s >= SYNC_S

    def sync(self) -> None:
        """Wait until all lines are on the disk. Blocks: call it in a thread."""
        self._synced_s = time.monotonic()
        with naming(self.path):
            os.fsync(self._file.fileno())

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield (number from 1, text with its end) of each line. Raises OSError, and StartError for one too long."""
        with naming(self.path), self.path.open("rb") as file:
            number = 0
            while raw := file.readline(ANSWER_BYTES_MAX + 1):
                number += 1
                if len(raw) > ANSWER_BYTES_MAX:
                    raise StartError(f"{self.path}, line {number}: it has more than {ANSWER_BYTES_MAX >> 20} MiB")
                yield number, raw


def count_lines(path: Path) -> int:
    """Return how many lines a file has. Raises OSError."""
    with naming(path), path.open("rb", 0) as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK_BYTES), b""))


def drop_failed(path: Path) -> int:
    """Take the lines of failed requests out of an output, whole or not at all; returns how many.

    The file keeps its permissions, and a link to it stays one. Raises UsageError for a file that is no output, or that
    another process writes, and OSError.
    """
    place, n_dropped = path.resolve(), 0
    with OutputFile(path) as output:
        remove_partials(place)  # of a run that was killed here; its lock is ours
        with replaced(place, stat.S_IMODE(place.stat().st_mode)) as kept:
            output.mend()
            for number, raw in output.lines():
                try:
                    _, is_failed = read_answer(raw)
                except LineError as error:
                    raise UsageError(f"{path}, line {number}: {error}; name another output file") from None
                n_dropped += is_failed
                if not is_failed:
                    kept.write(raw)
    return n_dropped


def _end_of_lines(file: BinaryIO, size: int) -> int:
    """Return the place after the last line end of a file, 0 for none."""
    end = size
    while end > 0:
        begin = max(0, end - _BLOCK_BYTES)
        file.seek(begin)
        at = _read(file, end - begin).rfind(b"\n")
        if at >= 0:
            return begin + at + 1
        end = begin
    return 0


def _read(file: BinaryIO, n_bytes: int) -> bytes:
    found = bytearray()
    while len(found) < n_bytes and (block := file.read(n_bytes - len(found))):
        found += block
    return bytes(found)
