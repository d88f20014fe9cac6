"""The files and batches of a coordinator, as a directory: they outlive the process.

* `files/ID`: what is in a file.
* `files/ID.json`: what is known of it, written last. A file without it is a torn upload, and goes at the next start.
* `batches/ID.json`: a batch.
* `work/ID.out` and `work/ID.err`: the answers and errors of a batch that is not finished.
* `work/ID.room`: disk that a batch holds, and gives back before its end is written. Its own answers may fill the disk.
* `lock`: held by the coordinator that uses the directory.

A .json that cannot be read is left out and stays, with what it may be of: one damaged file keeps no pipeline from
serving. Everything here blocks: call it in a thread, one call at a time. Times are Unix seconds and come as arguments.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from relayline.coordinator.batches.message_lines import is_unasked
from relayline.coordinator.batches.output_file import OutputFile, count_lines
from relayline.wire.common.files import clearing_up, naming, write_file
from relayline.wire.common.own_directory import OWN_FILE_MODE, OwnDirectory
from relayline.wire.common.texts import counted, plural

log = logging.getLogger("relayline.batches")

FILES, BATCHES, WORK = "files", "batches", "work"
_NAMES = {FILES: "file-*.json", BATCHES: "*batch_*.json"}
META_BYTES_MAX = 1 << 20  # of one .json: 16 fields of a client, and 20 problems
ROOM_BYTES = 64 << 10  # that a batch holds: for its own .json twice, and for those of its two files
MODE = OWN_FILE_MODE
Purpose = Literal["batch", "batch_output"]
Form = Literal["openai", "messages"]  # whose API made a batch: of /v1/batches, or of /v1/messages/batches
Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]
_OWN = re.compile(r"file-[0-9a-f]{24}(\.json)?|\.(file-|(msg)?batch_)[0-9a-f]{24}\.json\.[0-9a-f]{8}")
_ROOM = re.compile(r"\.?((?:msg)?batch_[0-9a-f]{24})\.room(\.[0-9a-f]{8})?")
ENDED: frozenset[Status] = frozenset({"completed", "failed", "expired", "cancelled"})


class StoredFile(msgspec.Struct, kw_only=True):
    """What is known of a file."""

    id: str
    owner: str
    filename: str
    purpose: Purpose
    n_bytes: int
    created_at: int
    expires_at: int | None = None


class Problem(msgspec.Struct, frozen=True):
    """Why a batch failed, as OpenAI says it."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class StoredBatch(msgspec.Struct, kw_only=True):
    """One batch. The `_at` fields say when it came to a state."""

    id: str
    form: Form = "openai"
    owner: str
    client: str
    """Of the key that made it, as stored responses know it."""
    models: tuple[str, ...]
    """Names that this key might use then; empty: all."""
    payer: str = ""
    """`ApiKey.lasting_name` of the key that was shown; empty where none was demanded."""
    behalf: str = ""
    """For whom a gateway showed it, as the gateway said it."""
    endpoint: str
    input_id: str
    output_id: str
    error_id: str
    """Of the files that it will have, if anything is in them."""
    window: str
    metadata: dict[str, str] | None
    status: Status = "validating"
    created_at: int
    expires_at: int
    moments: dict[str, int] = msgspec.field(default_factory=dict)
    """When it came to a state, by the state."""
    problems: list[Problem] = msgspec.field(default_factory=list)
    n_requests: int = 0
    n_answered: int = 0
    n_failed: int = 0
    n_unasked: int = 0
    """Of the failed requests of a message batch that has ended, those that were cancelled, or expired."""
    has_output: bool = False
    has_errors: bool = False
    ending: Status | None = None
    """How it ends, from then on when nothing more is asked: its files are made, once or again."""

    @property
    def is_ended(self) -> bool:
        """Whether nothing more happens to it."""
        return self.status in ENDED

    @property
    def is_ending(self) -> bool:
        """Whether none of its requests is asked any more."""
        return self.ending is not None or self.status == "cancelling" or self.is_ended


class BatchStore:
    """One directory. Raises UsageError where it is another coordinator's or cannot be used."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files: dict[str, StoredFile] = {}  # in the order in which they were made
        self.batches: dict[str, StoredBatch] = {}
        self.files_of: defaultdict[str, dict[str, StoredFile]] = defaultdict(dict)  # by the owner
        self.batches_of: defaultdict[str, dict[str, StoredBatch]] = defaultdict(dict)
        self.unended: dict[str, StoredBatch] = {}
        self.n_bytes = 0  # of all files together
        self.bytes_of: defaultdict[str, int] = defaultdict(int)
        self._own = OwnDirectory(directory, (FILES, BATCHES, WORK), "batches")
        with self._own.loading():
            self._load()

    def close(self) -> None:
        """Let another coordinator have the directory."""
        self._own.close()

    def path_of(self, file_id: str) -> Path:
        """Return where the content of a file is."""
        return self.directory / FILES / file_id

    def work_paths(self, batch: StoredBatch) -> tuple[Path, Path]:
        """Return the files in which answers and errors are collected."""
        return self.directory / WORK / f"{batch.id}.out", self.directory / WORK / f"{batch.id}.err"

    def keep_file(self, file: StoredFile) -> None:
        """Keep a file whose content lies at its path, and is on the disk. Raises OSError."""
        write_file(self._meta(FILES, file.id), msgspec.json.encode(file), MODE)
        self._unshelve_file(file.id)
        self._shelve_file(file)

    def drop_unkept(self, file_id: str) -> None:
        """Take away what was received under an id that was not kept. Raises OSError."""
        if file_id not in self.files:
            self._meta(FILES, file_id).unlink(missing_ok=True)
            self.path_of(file_id).unlink(missing_ok=True)

    def delete_file(self, file_id: str) -> None:
        """Forget a file. Raises OSError."""
        self._meta(FILES, file_id).unlink(missing_ok=True)  # first: what is left is a torn upload
        self.path_of(file_id).unlink(missing_ok=True)
        self._unshelve_file(file_id)

    def keep_new_batch(self, batch: StoredBatch) -> None:
        """Write a new batch, and take the room that its end needs. Raises OSError, and then keeps nothing of it."""
        try:
            room = secrets.token_bytes(ROOM_BYTES)  # which no file system can make smaller
            write_file(self._room(batch.id), room, MODE)
            self.keep_batch(batch)
        except OSError:
            with contextlib.suppress(OSError):
                self._room(batch.id).unlink(missing_ok=True)
            raise

    def keep_batch(self, batch: StoredBatch) -> None:
        """Write a batch as it is now. Raises OSError."""
        if batch.is_ending:
            self._room(batch.id).unlink(missing_ok=True)
        write_file(self._meta(BATCHES, batch.id), msgspec.json.encode(batch), MODE)
        self._shelve_batch(batch)

    def delete_batch(self, batch_id: str) -> None:
        """Forget a batch; its files stay, except those of a message batch. Raises OSError."""
        known = self.batches.get(batch_id)
        if known is not None and known.form == "messages":
            for file_id in (known.input_id, known.output_id, known.error_id):
                self.delete_file(file_id)
        self._meta(BATCHES, batch_id).unlink(missing_ok=True)
        self._room(batch_id).unlink(missing_ok=True)
        batch = self.batches.pop(batch_id, None)
        if batch is not None:
            del self.batches_of[batch.owner][batch_id]
            if not self.batches_of[batch.owner]:
                del self.batches_of[batch.owner]
            self.unended.pop(batch_id, None)

    def publish(self, batch: StoredBatch, now_s: int) -> None:
        """Make files of what a batch has collected. May be called again after any end of the process. Raises OSError.

        A last line that is half written is cut off. A file with nothing in it is none. The counts become those of the
        files: the process that worked on the batch may have ended before it told of its last lines.
        """
        n_lines: list[int] = []
        for work, file_id, what in zip(
            self.work_paths(batch), (batch.output_id, batch.error_id), ("output", "error"), strict=True
        ):
            path = self.path_of(file_id)
            if work.exists() and work.stat().st_size:
                with OutputFile(work, mode=MODE, waits=True) as output:  # which also waits for the disk
                    output.mend()
                if work.stat().st_size:
                    work.replace(path)
            work.unlink(missing_ok=True)
            n_lines.append(count_lines(path) if path.exists() else 0)
            if path.exists():
                file = StoredFile(
                    id=file_id, owner=batch.owner, filename=f"{batch.id}_{what}.jsonl", purpose="batch_output",
                    n_bytes=path.stat().st_size, created_at=now_s,
                )  # fmt: skip
                self.keep_file(file)
        batch.has_output, batch.has_errors = batch.output_id in self.files, batch.error_id in self.files
        batch.n_answered, batch.n_failed = n_lines
        if batch.form == "messages" and batch.has_errors:
            with self.path_of(batch.error_id).open("rb") as lines:
                batch.n_unasked = sum(map(is_unasked, lines))

    def _load(self) -> None:
        left_out: dict[Path, str] = {}
        known = {batch.id: batch for batch in self._read(BATCHES, StoredBatch, left_out)}
        has_all = not left_out  # else nobody knows whose output a file is
        for batch in sorted(known.values(), key=_age):
            self._shelve_batch(batch)
        for file in sorted(self._read(FILES, StoredFile, left_out), key=_age):
            self._shelve_file(file)
        for batch in self.unended.values():
            self._count(batch)
        awaited = {each for batch in known.values() if not batch.is_ended for each in (batch.output_id, batch.error_id)}
        for path in (*(self.directory / FILES).iterdir(), *(self.directory / BATCHES).iterdir()):
            is_ours = _OWN.fullmatch(path.name) and path.is_file() and not path.is_symlink()
            name = path.name.removesuffix(".json")
            is_left_out = not has_all or self._meta(FILES, name) in left_out
            if is_ours and name not in self.files and name not in awaited and not is_left_out:
                with clearing_up():
                    path.unlink()  # a torn upload; what somebody else keeps here stays
        for path in (self.directory / WORK).iterdir():
            if (found := _ROOM.fullmatch(path.name)) and found[1] not in self.unended:
                with clearing_up():
                    path.unlink()  # of a batch that was not kept, or that has ended
        if left_out:
            n, (path, why) = len(left_out), next(iter(left_out.items()))
            text = "%s cannot be read and %s left out, the first is %s: %s. Restore %s, or remove %s"
            them = plural(n, "it", "them")
            log.warning(
                text, counted(n, "batch or file", "batches or files"), plural(n, "is", "are"), path, why, them, them
            )

    def _count(self, batch: StoredBatch) -> None:
        """Take the counts of a batch from its answers so far. Those in its .json are of its last change of state."""
        found = [
            next((count_lines(path) for path in (work, self.path_of(file_id)) if path.exists()), 0)
            for work, file_id in zip(self.work_paths(batch), (batch.output_id, batch.error_id), strict=True)
        ]
        batch.n_answered, batch.n_failed = found

    def _shelve_file(self, file: StoredFile) -> None:
        self.files[file.id] = self.files_of[file.owner][file.id] = file
        self.n_bytes += file.n_bytes
        self.bytes_of[file.owner] += file.n_bytes

    def _unshelve_file(self, file_id: str) -> None:
        file = self.files.pop(file_id, None)
        if file is not None:
            self.n_bytes -= file.n_bytes
            self.bytes_of[file.owner] -= file.n_bytes
            del self.files_of[file.owner][file_id]
            if not self.files_of[file.owner]:
                del self.files_of[file.owner], self.bytes_of[file.owner]

    def _shelve_batch(self, batch: StoredBatch) -> None:
        self.batches[batch.id] = self.batches_of[batch.owner][batch.id] = batch
        if batch.is_ended:
            self.unended.pop(batch.id, None)
        else:
            self.unended[batch.id] = batch

    def _read(self, part: str, kind: type[Any], left_out: dict[Path, str]) -> Iterator[Any]:
        """Yield what can be read; why the rest cannot goes to `left_out`. Raises OSError."""
        for path in sorted((self.directory / part).glob(_NAMES[part])):
            with naming(path), path.open("rb") as file:
                text = file.read(META_BYTES_MAX + 1)
            try:
                found = msgspec.json.decode(text, type=kind)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                left_out[path] = str(error)
                continue
            if self._meta(part, found.id) == path:
                yield found
            else:
                left_out[path] = "it is not named after what it holds"

    def _room(self, batch_id: str) -> Path:
        return self.directory / WORK / f"{batch_id}.room"

    def _meta(self, part: str, id: str) -> Path:
        return self.directory / part / f"{id}.json"


def _age(kept: StoredFile | StoredBatch) -> tuple[int, str]:
    return kept.created_at, kept.id


def new_id(prefix: str) -> str:
    """Return a name that nobody can guess."""
    return f"{prefix}{secrets.token_hex(12)}"


def sync_file(path: Path) -> None:
    """Wait until a file is on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
