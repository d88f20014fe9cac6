"""States of lanes as files: one directory for each engine that can read them, one file for each state. Any thread.

A file's name is its key; it begins with a head that states its length and hash, and has a hash of its own. So a cut or
changed file is detected when it is read, reported in one line, and removed. Files are written under another name and
renamed, without waiting for the disk. Damage from a power cut is detected in the same way. A coordinator's note on a
state lies beside it; who reads it checks it. What the stage's engines before have left counts against the same bound,
see `stage.engine.tier_left`.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import logging
import os
import struct
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from relayline.stage.engine.tier_left import Left, hold, let_go
from relayline.stage.engine.tier_notes import TierNotes
from relayline.wire.common.bounds import NOTE_BYTES_MAX, STORED_STATES_MAX, STORED_WRITES_MAX

log = logging.getLogger("relayline.stage")

_FACTS = struct.Struct("<8sQQQQ")  # magic, key, tokens, bytes of the state, their xxh3-64
_SUM = struct.Struct("<Q")  # xxh3-64 of these: a stage tells of the tokens before it reads the state
_HEAD_BYTES = _FACTS.size + _SUM.size
_MAGIC = b"rlstate2"
_SUFFIX, _NOTE_SUFFIX = ".state", ".note"
State = npt.NDArray[np.uint8]


class TierDisk:
    """The files of one engine."""

    def __init__(self, directory: Path, identity: str, bytes_max: int, owner: str = "") -> None:
        """Open the directory, with the files of engines of this identity.

        Raises OSError where the directory cannot be used. `identity` names everything that a state depends on: model,
        layers, types. `owner`: the stage that all its engines are of. BlockingIOError: another process has it.
        """
        self._bytes_max = bytes_max
        self._directory = directory / hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        self._lock_file = hold(self._directory, owner)
        self._lock = threading.Lock()
        self._files: collections.OrderedDict[int, tuple[int, int]] = collections.OrderedDict()  # key -> tokens, bytes
        self._writing: set[int] = set()
        self._noting: set[int] = set()  # keys whose notes are to be written
        self.notes = TierNotes()
        self._has_failed = False
        self.on_gone: Callable[[int], None] = lambda key: None
        """Called with the key of each file that is gone unasked, or could not be written; in any thread, without a
        lock."""
        self.n_bytes = 0
        try:
            self._take_up()
            self._left = Left(self._directory, owner)
            self._left.make_room(bytes_max - self.n_bytes)  # from here on of the writer's thread
        except BaseException:
            let_go(self._lock_file)
            raise
        self._writer = ThreadPoolExecutor(1, "tier-write")
        self._reader = ThreadPoolExecutor(1, "tier-read")

    def _path(self, key: int, suffix: str = _SUFFIX) -> Path:
        return self._directory / f"{key:016x}{suffix}"

    def _take_up(self) -> None:
        """List the files of an earlier process, the last used one at the end; remove files that are no states."""
        for path in self._directory.glob(".*.part"):
            path.unlink(missing_ok=True)
        paths = sorted(self._directory.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        for path in paths:
            with path.open("rb") as file:
                read = _read_head(file.read(_HEAD_BYTES))
            if read is None or path != self._path(read[0]) or read[2] + _HEAD_BYTES != path.stat().st_size:
                _remove_damaged(path)
                continue
            self._files[read[0]] = (read[1], path.stat().st_size)
            self.n_bytes += path.stat().st_size
        self._make_room()
        for key in self._files:
            with contextlib.suppress(OSError), self._path(key, _NOTE_SUFFIX).open("rb") as file:
                self.notes.put(key, file.read(NOTE_BYTES_MAX + 1))
        for path in self._directory.glob(f"*{_NOTE_SUFFIX}"):
            if not path.with_suffix(_SUFFIX).exists():
                path.unlink(missing_ok=True)

    def _make_room(self) -> list[int]:
        gone = []
        while self.n_bytes > self._bytes_max or len(self._files) > STORED_STATES_MAX:
            gone.append(next(iter(self._files)))
            self._drop(gone[-1])
        return gone

    def _drop(self, key: int) -> None:
        if (known := self._files.pop(key, None)) is not None:
            self.n_bytes -= known[1]
            for suffix in (_SUFFIX, _NOTE_SUFFIX):
                with contextlib.suppress(OSError):
                    self._path(key, suffix).unlink()

    def stored(self) -> dict[int, int]:
        """Return the tokens of each key, the one used last at the end."""
        with self._lock:
            return {key: n_tokens for key, (n_tokens, _) in self._files.items()}

    def fits(self, n_bytes: int) -> bool:
        """Return whether a state of this size could have a file."""
        return _HEAD_BYTES + n_bytes <= self._bytes_max

    def keys(self) -> set[int]:
        """Return the keys of all states that have a file, or will have one."""
        with self._lock:
            return self._writing | self._files.keys()

    def has(self, key: int) -> bool:
        """Return whether a state has a file; then it counts as used."""
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
            return key in self._files

    def write(self, key: int, n_tokens: int, state: State) -> bool:
        """Write a state in the background, unless too many wait; returns whether it has a file, or will have one."""
        with self._lock:
            if key in self._files or key in self._writing:
                return True
            if not self.fits(state.nbytes) or len(self._writing) >= STORED_WRITES_MAX:
                return False
            self._writing.add(key)
        self._writer.submit(self._write, key, n_tokens, state)
        return True

    def _write(self, key: int, n_tokens: int, state: State) -> None:
        partial = self._directory / f".{key:016x}.part"
        facts = _FACTS.pack(_MAGIC, key, n_tokens, state.nbytes, xxhash.xxh3_64_intdigest(state.data))
        gone: list[int] = []
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(facts + _SUM.pack(xxhash.xxh3_64_intdigest(facts)))
                file.write(state.data)
            self._left.make_room(self._bytes_max - self.n_bytes - _HEAD_BYTES - state.nbytes)
            with self._lock:
                partial.replace(self._path(key))
                self._drop_known(key)
                self._files[key] = (n_tokens, _HEAD_BYTES + state.nbytes)
                self.n_bytes += _HEAD_BYTES + state.nbytes
                gone = self._make_room()
            self._write_note(key)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            if not self._has_failed:  # each answer would tell it again
                log.warning("prefixes cannot be kept in %s: %s", self._directory, error.strerror or error)
            self._has_failed, gone = True, [key]
        finally:
            with self._lock:
                self._writing.discard(key)
            for each in gone:
                self.on_gone(each)

    def note(self, key: int, note: bytes, stored: Collection[int] = ()) -> None:
        """Keep a note on a state that has a file or will have one; it is written in the background. `stored`: see
        `TierNotes.put`.
        """
        if not self.notes.put(key, note, stored):
            return
        with self._lock:
            if key not in self._files or key in self._noting:
                return
            self._noting.add(key)
        with contextlib.suppress(RuntimeError):  # the stage ends
            self._writer.submit(self._write_note, key)

    def _write_note(self, key: int) -> None:
        with self._lock:
            self._noting.discard(key)
        if (note := self.notes.get(key)) is None:
            return
        partial = self._directory / f".{key:016x}{_NOTE_SUFFIX}.part"
        with contextlib.suppress(OSError):  # of a full disk the next state tells
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(note)
            with self._lock:
                if key in self._files:
                    partial.replace(self._path(key, _NOTE_SUFFIX))
        with contextlib.suppress(OSError):
            partial.unlink()

    def _drop_known(self, key: int) -> None:
        if (known := self._files.pop(key, None)) is not None:
            self.n_bytes -= known[1]

    def read(self, key: int, take: Callable[[int, int, State], None]) -> Future[None] | None:
        """Read a state in the background and pass it to `take(key, n_tokens, state)`; None if there is no file."""
        with self._lock:
            if key not in self._files:
                return None
            self._files.move_to_end(key)
        return self._reader.submit(self._read, key, take)

    def _read(self, key: int, take: Callable[[int, int, State], None]) -> None:
        path = self._path(key)
        try:
            data = np.fromfile(path, np.uint8)
        except OSError as error:
            log.warning("%s cannot be read: %s", path, error.strerror or error)
            self.forget(key)
            self.on_gone(key)
            return
        read = _read_head(data[:_HEAD_BYTES].tobytes())
        state = data[_HEAD_BYTES:]
        if read is None or read[0] != key or read[2:] != (state.nbytes, xxhash.xxh3_64_intdigest(state.data)):
            self.forget(key)
            _remove_damaged(path)
            self.on_gone(key)
            return
        with contextlib.suppress(OSError):
            os.utime(path)  # the next process takes it for the one used last
        take(key, read[1], state)

    def forget(self, key: int) -> None:
        """Remove a state's file; one that is being written stays until its place is needed."""
        with self._lock:
            self._drop(key)

    def close(self) -> None:
        """Wait for unfinished writes, at most STORED_WRITES_MAX states, and release the directory."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()
        let_go(self._lock_file)


def _read_head(head: bytes) -> tuple[int, int, int, int] | None:
    """Return key, tokens, bytes and hash; None if it is not a head."""
    facts, of_facts = head[: _FACTS.size], head[_FACTS.size :]
    if len(head) != _HEAD_BYTES or _SUM.pack(xxhash.xxh3_64_intdigest(facts)) != of_facts:
        return None
    magic, key, n_tokens, n_bytes, digest = _FACTS.unpack(facts)
    return (key, n_tokens, n_bytes, digest) if magic == _MAGIC else None


def _remove_damaged(path: Path) -> None:
    log.warning("%s is damaged and was removed; its prompt is computed again", path)
    with contextlib.suppress(OSError):
        path.unlink()
