"""A GGUF model as its one file or as a sharded set: the headers of all files, joined.

This module does not know families, cuts or stages. It lists a model's keys and tensors and the places of their bytes,
so that they can be copied unchanged. wire/model_files/gguf_header.py reads one file.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from relayline.wire.common.errors import ModelFileError
from relayline.wire.common.texts import printable
from relayline.wire.model_files.gguf_header import GgufFile, HeaderBudget, KeyValue, Tensor, Value, read_header

SHARDS_MAX = 4_096

SHARD_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclasses.dataclass(frozen=True, slots=True)
class GgufModel:
    """A whole model: the metadata of the first file and the tensors of all files, in order."""

    files: tuple[GgufFile, ...]
    tensors: Mapping[str, Tensor]

    @property
    def entries(self) -> Mapping[str, KeyValue]:
        """Return the metadata entries by key; llama.cpp too reads them from the first file only."""
        return self.files[0].entries

    @property
    def path(self) -> Path:
        """Return the path that names the model: its only file or its first shard."""
        return self.files[0].path

    @property
    def name(self) -> str:
        """Return the model's name for people: printable text of one line, the file's name where it has none."""
        return printable(self.text("general.name", self.path.stem))

    def value(self, key: str) -> Value | None:
        """Return a decoded metadata value, or None."""
        return self.files[0].value(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer value.

        Raises ModelFileError when it has another type, or is absent and there is no default.
        """
        found = self.value(key)
        if found is None and key not in self.entries and default is not None:
            return default
        if isinstance(found, bool) or not isinstance(found, int):
            what = "is missing" if key not in self.entries else "is not an integer"
            raise ModelFileError(f"{self.path}: metadata key {key} {what}; the file is not a complete language model")
        return found

    def text(self, key: str, default: str = "") -> str:
        """Return a string value, or the default when it is absent or of another type."""
        found = self.value(key)
        return found if isinstance(found, str) else default


_States = list[tuple[int, ...]]
_opened: contextvars.ContextVar[dict[Path, tuple[_States, GgufModel]] | None] = contextvars.ContextVar(
    "opened", default=None
)


@contextlib.contextmanager
def headers_read_once() -> Iterator[None]:
    """During a with block `open_model` reads a model again only if a file of it has changed.

    A plan opens its model a dozen times, and each time a vocabulary of 150,000 tokens takes tenths of a second. The end
    of the outermost block forgets all headers.
    """
    outer = _opened.get()
    token = _opened.set({} if outer is None else outer)
    try:
        yield
    finally:
        _opened.reset(token)


def open_model(path: Path) -> GgufModel:
    """Read the headers of a model given as its only file or as the first file of a sharded set.

    Raises ModelFileError: no such file, not a GGUF, truncated, inconsistent, or a shard missing or out of place.
    """
    opened = _opened.get()
    if opened is None:
        return _read(path)
    if path in opened:
        states, model = opened[path]
        if states == _states(model):
            return model
    model = _read(path)
    states = _states(model)
    if [state[:2] for state in states] == [(file.size_bytes, file.mtime_ns) for file in model.files]:
        opened[path] = states, model  # otherwise it changed in the meantime
    return model


def _states(model: GgufModel) -> _States:
    """Return what changes when a file of a model is written or replaced."""
    try:
        found = [os.stat(file.path) for file in model.files]
    except OSError:
        return []
    return [(state.st_size, state.st_mtime_ns, state.st_dev, state.st_ino, state.st_ctime_ns) for state in found]


def _read(path: Path) -> GgufModel:
    budget = HeaderBudget()
    first = read_header(path, budget=budget)
    count = first.value("split.count")
    named = SHARD_NAME.match(path.name)
    if not isinstance(count, int) or count <= 1:
        if named and int(named["count"]) > 1:
            raise ModelFileError(f"{path}: named like a shard, but its metadata names no shards; rename it")
        return _joined((first,))
    if named is None or int(named["count"]) != count:
        raise ModelFileError(f"{path}: holds 1 of {count} shards, so its name must end in -00001-of-{count:05d}.gguf")
    if int(named["number"]) != 1:
        raise ModelFileError(f"{path}: is not the first shard; give {named['stem']}-00001-of-{count:05d}.gguf")
    if count > SHARDS_MAX:
        raise ModelFileError(f"{path}: {count} shards; at most {SHARDS_MAX} are read")
    shards = [first]
    for number in range(2, count + 1):
        shard_path = path.with_name(f"{named['stem']}-{number:05d}-of-{count:05d}.gguf")
        if not shard_path.is_file():
            raise ModelFileError(
                f"{shard_path}: shard {number} of {count} is missing; put all shards into one directory"
            )
        shards.append(read_header(shard_path, number - 1, budget))
    for index, shard in enumerate(shards):
        if shard.value("split.no") != index or shard.value("split.count") != count:
            raise ModelFileError(
                f"{shard.path}: says it is shard {_one_based(shard.value('split.no'))} of {shard.value('split.count')},"
                f" but its name says {index + 1} of {count}; give it its old name, or download it again"
            )
    model = _joined(tuple(shards))
    expected = first.value("split.tensors.count")
    if isinstance(expected, int) and expected != len(model.tensors):
        raise ModelFileError(
            f"{path}: the shards hold {len(model.tensors)} tensors, the first announces {expected}; download them again"
        )
    return model


def _one_based(number: Value | None) -> str:
    return str(number + 1) if isinstance(number, int) else "?"


def _joined(files: tuple[GgufFile, ...]) -> GgufModel:
    tensors: dict[str, Tensor] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in tensors:
                raise ModelFileError(f"{file.path}: tensor {tensor.name} appears twice")
            tensors[tensor.name] = tensor
    return GgufModel(files, tensors)


def read_entries(model: GgufModel, keys: list[str]) -> list[bytes]:
    """Return the bytes of metadata entries as in the file, in the order of `keys`."""
    with model.path.open("rb") as file:
        return [
            os.pread(file.fileno(), model.entries[key].end - model.entries[key].start, model.entries[key].start)
            for key in keys
        ]
