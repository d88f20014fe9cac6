"""Models whose weights are elsewhere, made of models that are here."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from relayline.coordinator.model.gguf_file import GgufModel, open_model
from relayline.coordinator.model.origin import Origin, store_origin
from relayline.wire.model_files.gguf_header import Tensor

COMMIT = "c0ffee"


def hollowed(model: Path, directory: Path) -> Path:
    """Write a model's headers into a directory, with their origin on a hub, and return the first file."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in open_model(model).files:
        content = file.path.read_bytes()
        path = Path(shutil.copyfile(file.path, directory / file.path.name))
        with path.open("r+b") as out:
            out.truncate(min((tensor.offset for tensor in file.tensors), default=len(content)))
            out.truncate(len(content))
        sha256 = hashlib.sha256(content).hexdigest()
        store_origin(path, Origin("org/repo", path.name, COMMIT, sha256, len(content)))
    return directory / model.name


class ReadInOneGo:
    """The files of a model as they would be read over a network: `asked` lists each request, (file, start, end)."""

    def __init__(self, model: GgufModel, piece_bytes: int = 1_000) -> None:
        self._content = [file.path.read_bytes() for file in model.files]
        self._piece_bytes = piece_bytes
        self._until: tuple[int, int, int] = (-1, 0, 0)  # the file, the next byte and the end of the open request
        self.asked: list[tuple[int, int, int]] = []

    def read(self, tensor: Tensor, start: int, end: int, run_end: int) -> Iterator[bytes | memoryview]:
        index, at, open_end = self._until
        if index != tensor.file_index or not at <= start < open_end:
            self.asked.append((tensor.file_index, start, run_end))
            open_end = run_end
        assert end <= open_end
        self._until = (tensor.file_index, end, open_end)
        for first in range(start, end, self._piece_bytes):
            yield self._content[tensor.file_index][first : min(end, first + self._piece_bytes)]

    @property
    def asked_bytes(self) -> int:
        return sum(end - start for _, start, end in self.asked)


def joined(pieces: Iterator[bytes | memoryview] | Sequence[bytes]) -> bytes:
    return b"".join(bytes(piece) for piece in pieces)
