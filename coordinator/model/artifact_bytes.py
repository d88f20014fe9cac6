"""The bytes of a planned artifact, in order and from any offset on, wherever its model's bytes are.

Tensors are copied in pieces, never decoded. Only small vectors that slices of a family carry multiplied
(`Family.factors`) are read as numbers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import BinaryIO, Protocol

from relayline.coordinator.model.gguf_file import GgufModel
from relayline.coordinator.model.origin import Origin
from relayline.coordinator.model.slices import PlannedArtifact
from relayline.wire.common.errors import ModelFileError
from relayline.wire.model_files.gguf_header import Tensor
from relayline.wire.model_files.gguf_write import ALIGNMENT

CHUNK_BYTES = 8 * 1024 * 1024
GAP_BYTES_MAX = 1 << 20  # between two tensors that are read in one go: skipping so little beats asking anew
UNREAD_VERSION = 1


class WeightSource(Protocol):
    """The bytes of a model's files."""

    def read(self, tensor: Tensor, start: int, end: int, run_end: int) -> Iterator[bytes | memoryview]:
        """Yield a tensor's bytes from one offset in its file up to another, in pieces of any size.

        A piece is good until the next one. Up to `run_end` further bytes will be read next, but for small gaps. Raises
        RelaylineError.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """A stretch of an artifact: some bytes, a tensor of the model, or zeros."""

    size_bytes: int
    data: bytes = b""
    tensor: Tensor | None = None
    factor: float = 1.0
    row_order: tuple[int, ...] = ()
    run_end: int = 0  # of the tensor's file: where the reading ends that begins with this tensor, or goes on with it

    @property
    def is_plain(self) -> bool:
        """Whether its bytes are the tensor's own, in their order."""
        return self.tensor is not None and self.factor == 1.0 and not self.row_order


def artifact_bytes(
    artifact: PlannedArtifact, source: WeightSource, offset: int = 0, end: int = 0
) -> Iterator[bytes | memoryview]:
    """Yield an artifact's bytes from an offset on, in pieces of any size, each good until the next one.

    `end`: no bytes from there on are needed, but some may come; 0: all are. Raises ModelFileError where the model has
    ended too early, and what the source raises.
    """
    start = 0
    for piece in _with_runs(_until(_pieces(artifact), end or artifact.size_bytes)):
        skipped = min(max(0, offset - start), piece.size_bytes)
        if skipped < piece.size_bytes:
            yield from _bytes_of(piece, source, skipped)
        start += piece.size_bytes


def unread_name(artifact: PlannedArtifact, origins: Sequence[Origin]) -> str:
    """Return a name of an artifact's content, as 64 hex digits, that is known before anybody has read its bytes.

    It covers the header, and of each tensor the content that the hub promises for its file, and the tensor's place.
    """
    digest = hashlib.sha256(f"relayline unread {UNREAD_VERSION}\n".encode() + artifact.header)
    for piece in _pieces(artifact):
        if piece.tensor is not None:
            origin = origins[piece.tensor.file_index]
            place = f"{origin.etag} {piece.tensor.offset} {piece.size_bytes} {piece.factor} {piece.row_order}\n"
            digest.update(place.encode())
    return digest.hexdigest()


def _pieces(artifact: PlannedArtifact) -> list[_Piece]:
    found = [_Piece(len(artifact.header), artifact.header)]
    for planned in artifact.tensors:
        size_bytes = planned.slot.size_bytes
        found.append(_Piece(size_bytes, b"", planned.source, planned.factor, planned.row_order))
        found.append(_Piece(-size_bytes % ALIGNMENT))
    for index, trailer in enumerate(artifact.trailers):
        if index:
            found.append(_Piece(-artifact.trailers[index - 1].size_bytes % ALIGNMENT))
        found.append(_Piece(trailer.size_bytes, b"", trailer))
    return found


def _until(pieces: list[_Piece], end: int) -> list[_Piece]:
    """Return the pieces that begin before an offset in the artifact, the last one up to there if it can be cut."""
    starts = itertools.accumulate((piece.size_bytes for piece in pieces), initial=0)
    found = [(piece, start) for piece, start in zip(pieces, starts, strict=False) if start < end]
    return [
        dataclasses.replace(piece, size_bytes=min(piece.size_bytes, end - start)) if piece.is_plain else piece
        for piece, start in found
    ]


def _with_runs(pieces: list[_Piece]) -> list[_Piece]:
    """Return the same with the end of each reading: tensors that follow each other in a file are read in one go."""
    found = []
    after: _Piece | None = None
    for piece in reversed(pieces):
        if piece.tensor is not None:
            end = piece.tensor.offset + piece.size_bytes
            is_next = (
                after is not None
                and after.tensor is not None
                and after.tensor.file_index == piece.tensor.file_index
                and 0 <= after.tensor.offset - end <= GAP_BYTES_MAX
            )
            piece = dataclasses.replace(piece, run_end=after.run_end if is_next and after is not None else end)
            after = piece
        found.append(piece)
    return found[::-1]


def _bytes_of(piece: _Piece, source: WeightSource, skipped: int) -> Iterator[bytes | memoryview]:
    """Yield a piece's bytes but for the first ones."""
    if piece.tensor is None:
        yield from [piece.data[skipped:]] if piece.data else _zeros(piece.size_bytes - skipped)
    elif piece.factor != 1.0:
        yield _multiplied(source, piece, piece.tensor)[skipped:]
    elif piece.row_order:
        yield from _reordered(source, piece, piece.tensor, skipped)
    else:
        start, end = piece.tensor.offset, piece.tensor.offset + piece.size_bytes
        yield from source.read(piece.tensor, start + skipped, end, piece.run_end)


def _zeros(size_bytes: int) -> Iterator[memoryview]:
    zeros = memoryview(bytes(min(size_bytes, CHUNK_BYTES)))
    while size_bytes > 0:
        yield zeros[:size_bytes]
        size_bytes -= len(zeros)


def _reordered(source: WeightSource, piece: _Piece, tensor: Tensor, skipped: int) -> Iterator[bytes]:
    """Yield a matrix or vector head by head, the rows of each head in another order. A row of a vector is a value."""
    row_bytes = tensor.size_bytes // tensor.dims[-1]
    head_bytes = len(piece.row_order) * row_bytes
    for start in range(skipped - skipped % head_bytes, tensor.size_bytes, head_bytes):
        at = tensor.offset + start
        head = b"".join(source.read(tensor, at, at + head_bytes, piece.run_end))
        ordered = b"".join(head[row * row_bytes : (row + 1) * row_bytes] for row in piece.row_order)
        yield ordered[max(0, skipped - start) :]


def _multiplied(source: WeightSource, piece: _Piece, tensor: Tensor) -> bytes:
    """Return a small F32 tensor with every value multiplied."""
    found = b"".join(source.read(tensor, tensor.offset, tensor.offset + tensor.size_bytes, piece.run_end))
    layout = f"<{len(found) // 4}f"
    return struct.pack(layout, *(value * piece.factor for value in struct.unpack(layout, found)))


class _LocalFiles:
    """The files of a model on this machine."""

    def __init__(self, files: Sequence[BinaryIO]) -> None:
        self._files = files
        self._buffer = memoryview(bytearray(CHUNK_BYTES))

    def read(self, tensor: Tensor, start: int, end: int, run_end: int) -> Iterator[bytes | memoryview]:
        file = self._files[tensor.file_index]
        while start < end:
            piece = self._buffer[: min(len(self._buffer), end - start)]
            n_read = os.preadv(file.fileno(), [piece], start)
            if n_read == 0:
                text = "split it again when nothing writes to it"
                raise ModelFileError(f"{file.name}: ended inside tensor {tensor.name} while it was being split; {text}")
            yield piece[:n_read]
            start += n_read


@contextmanager
def local_files(model: GgufModel) -> Iterator[WeightSource]:
    """Open the files of a model that is here. Raises OSError."""
    with ExitStack() as stack:
        yield _LocalFiles([stack.enter_context(file.path.open("rb", buffering=0)) for file in model.files])
