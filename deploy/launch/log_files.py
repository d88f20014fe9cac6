"""Log files of launched processes: written line by line and rotated by size, read from the end, merged, followed."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import datetime
import heapq
import logging
import logging.handlers
import os
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

SUPERVISOR = "up"  # the name of the log of the launch itself
LOG_BYTES_MAX = 8 << 20  # of one file; then it becomes .1
LOG_OLD_FILES = 3  # .1 to .3; older ones are deleted
FOLLOW_INTERVAL_S = 0.2  # between looks at a followed file: log lines are for people
_CLOCK = re.compile(r'(?:\{"time": "(\d{4}-\d\d-\d\d)T)?(\d\d):(\d\d):(\d\d)')
_OUT_OF_ORDER_S = 3600  # an earlier line with a clock later by more is of the day before


class RotatedFile(logging.handlers.RotatingFileHandler):
    """Writes a rotated log file."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Lose the line: a full disk must not end the logged process."""

    def close(self) -> None:
        """Close the file, and lose the lines that a full disk did not take."""
        with contextlib.suppress(OSError):
            super().close()


class LogWriter:
    """Appends lines to one rotated file."""

    def __init__(self, path: Path, *, bytes_max: int = LOG_BYTES_MAX) -> None:
        self._handler = RotatedFile(
            path, maxBytes=bytes_max, backupCount=LOG_OLD_FILES, encoding="utf-8", errors="replace"
        )
        self._handler.setFormatter(logging.Formatter("%(message)s"))

    def write(self, line: str) -> None:
        """Append a line; it is in the file when this returns. A full disk loses the line, not the process."""
        self._handler.handle(logging.LogRecord("log", logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        """Close the file."""
        self._handler.close()


class LogReader:
    """Reads one log: the last lines once, then appended lines, with no line lost or shown twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._pending = ""  # the beginning of a line that is still being written

    def last_lines(self, n_lines: int) -> list[str]:
        """Return the last lines, oldest first, those of the rotated predecessor where the file itself has fewer."""
        found: collections.deque[str] = collections.deque(maxlen=n_lines)
        try:
            with self._path.with_name(self._path.name + ".1").open(encoding="utf-8", errors="replace") as file:
                found.extend(line.rstrip("\n") for line in file)
        except FileNotFoundError:
            pass
        if self._open():
            found.extend(self._read())
        return list(found)

    async def follow(self) -> AsyncIterator[str]:
        """Yield the lines that are written from here on, through rotations, until cancelled.

        Begins where `last_lines` ended, without it at the file's first line. The file may not exist yet.
        """
        while True:
            if not self._open():
                await asyncio.sleep(FOLLOW_INTERVAL_S)
                continue
            assert self._file is not None
            # Checked before reading: lines written before a rotation are still in the old file.
            rotated = not _is_still(self._path, self._file.fileno())
            for line in self._read():
                yield line
            if rotated:
                self.close()
            else:
                await asyncio.sleep(FOLLOW_INTERVAL_S)

    def changed_s(self) -> float:
        """Return the time of the last line, in seconds since 1970; 0 if there is none."""
        return os.fstat(self._file.fileno()).st_mtime if self._file is not None else 0.0

    def _open(self) -> bool:
        if self._file is None:
            try:
                self._file = self._path.open(encoding="utf-8", errors="replace")
            except FileNotFoundError:
                return False
        return True

    def _read(self) -> list[str]:
        assert self._file is not None
        *lines, self._pending = (self._pending + self._file.read()).split("\n")
        return lines

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def merged(logs: Iterable[tuple[str, Sequence[str], float]]) -> Iterator[tuple[str, str]]:
    """Yield a name and a line for each line of several logs, by time. A log: its name, its lines, when it changed last.

    Lines without a time, as those of tracebacks, stay behind the one before them.
    """
    dated = (
        [(when, name, line) for when, line in zip(_times(lines, at_s), lines, strict=True)]
        for name, lines, at_s in logs
    )
    for _, name, line in heapq.merge(*dated, key=lambda one: one[0]):
        yield name, line


def _times(lines: Sequence[str], changed_s: float) -> list[int]:
    """Return a time in seconds for each line of a log, which never goes back. Lines for people have no date."""
    end = datetime.datetime.fromtimestamp(changed_s)
    day, later_s = end.toordinal(), (end.hour * 60 + end.minute) * 60 + end.second
    found: list[int | None] = []
    for line in reversed(lines):
        if (clock := _CLOCK.match(line)) is None:
            found.append(None)
            continue
        date, *parts = clock.groups()
        hours, minutes, seconds = map(int, parts)
        clock_s = (hours * 60 + minutes) * 60 + seconds
        day = datetime.date.fromisoformat(date).toordinal() if date else day - (clock_s > later_s + _OUT_OF_ORDER_S)
        later_s = clock_s
        found.append(day * 86_400 + clock_s)
    latest = next((each for each in reversed(found) if each is not None), 0)
    return [latest := max(latest, each or 0) for each in reversed(found)]


def _is_still(path: Path, handle: int) -> bool:
    """Return whether the open file is the one at `path`."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    opened = os.fstat(handle)
    return (there.st_dev, there.st_ino) == (opened.st_dev, opened.st_ino)
