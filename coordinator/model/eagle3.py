"""Fits an EAGLE-3 model to the model that is served: whether it can draft for it, and a file with all that it needs.

Such models mostly have no token table. The model's own is in stage 0's artifact, and the last stage, which drafts, is
elsewhere. So the table is added to the draft model's file once, in the directory of the split.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.wire.common.errors import ArtifactError, ModelFileError, StartError, UsageError
from relayline.wire.common.file_hash import sha256_of
from relayline.wire.common.files import replaced
from relayline.wire.model_files.eagle3 import TABLE, Drafter, Eagle3File
from relayline.wire.model_files.gguf_header import TENSOR_TYPES, read_header
from relayline.wire.model_files.gguf_write import ALIGNMENT, TensorSlot, encode_header

# Families in whose slices the input of every layer can be taken out of the graph: those whose whole models llama.cpp
# can (`t_layer_inp` in its graphs), without rows that have other parts, and without states that cannot go back.
FAMILIES = frozenset({
    "bailingmoe3", "gemma4", "gpt-oss", "hunyuan_vl", "lfm2", "lfm2moe", "llama", "mimo2", "minimax-m2", "nanbeige",
    "nemotron_h", "nemotron_h_moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe",
})  # fmt: skip
_CHUNK_BYTES = 1 << 20
_MODE = 0o644
ReadStage = Callable[[int, int, threading.Event], Iterator[bytes | memoryview]]
"""Yields the bytes of stage 0's artifact from one offset up to another."""


class Target(NamedTuple):
    """What must be known of the model that is served."""

    architecture: str
    n_layers: int
    n_embd: int
    n_vocab: int
    has_plain_rows: bool
    """Rows between stages are hidden rows and nothing else."""


def target_of(file: PipelineFile) -> Target:
    """Return what a split says of its model."""
    is_plain = all(stage.row_width in (0, file.n_embd) for stage in file.stages) and not file.deepstack_layers
    return Target(file.architecture, file.n_layers, file.n_embd, file.n_vocab, is_plain)


def check_target(eagle: Eagle3File, target: Target) -> None:
    """Raise UsageError or ModelFileError unless the draft model can draft for a model in stages."""
    path = eagle.file.path
    if target.architecture not in FAMILIES or not target.has_plain_rows:
        text = f"an EAGLE-3 model reads inner rows, which stages of {target.architecture} cannot hand on"
        raise UsageError(f"{path}: {text}")
    eagle.check_target(target.n_layers, target.n_embd, target.n_vocab)


def served(eagle: Eagle3File, directory: Path, file: PipelineFile, read_unread: ReadStage | None) -> Drafter:
    """Return the draft model to give to the last stage: the file itself, or one with the model's token table. Blocks.

    `directory`: of the split `file`. `read_unread` reads stage 0's artifact where it is on the hub; None: it is here.
    Raises ModelFileError, ArtifactError, and StartError where the disk cannot take it.
    """
    path = eagle.file.path
    try:
        if not eagle.has_table:
            path = _completed(eagle, directory, file, read_unread)
        return Drafter(path.absolute(), eagle.layers, path.stat().st_size, sha256_of(path))
    except OSError as error:
        raise StartError(f"{error.filename or path}: the draft model's file: {error.strerror or error}") from error


def _completed(eagle: Eagle3File, directory: Path, file: PipelineFile, read_unread: ReadStage | None) -> Path:
    source, stage = eagle.file, file.stages[0]
    header = read_header(directory / stage.file, size_bytes=stage.size_bytes)
    offset, type_id, n_rows = (header.value(f"relayline.embedding.{key}") for key in ("offset_bytes", "type", "rows"))
    if not (isinstance(offset, int) and isinstance(type_id, int) and n_rows == file.n_vocab):
        raise ArtifactError(f"{directory / stage.file}: has no token table for the draft model; split the model again")
    if type_id not in TENSOR_TYPES:
        raise ArtifactError(f"{directory / stage.file}: its token table is of an unknown type")
    _, block, block_bytes = TENSOR_TYPES[type_id]
    size_bytes = file.n_vocab * file.n_embd // block * block_bytes
    table = TensorSlot(TABLE, (file.n_embd, file.n_vocab), type_id, size_bytes)
    slots = [TensorSlot(each.name, each.dims, each.type_id, each.size_bytes) for each in source.tensors]
    key = hashlib.sha256(f"{sha256_of(source.path)} {file.source.sha256}".encode()).hexdigest()[:16]
    path = directory / f"eagle3-{key}.gguf"
    with source.path.open("rb") as opened:
        entries = [entry for entry in source.entries.values() if entry.key != "general.alignment"]
        head = encode_header(
            [os.pread(opened.fileno(), entry.end - entry.start, entry.start) for entry in entries], [table, *slots]
        )
        total = len(head) + sum(_padded(slot.size_bytes) for slot in (table, *slots))
        if path.is_file() and path.stat().st_size == total:
            return path
        with replaced(path, _MODE) as out:
            out.write(head)
            pieces = _read(directory / stage.file, offset, offset + size_bytes)
            if stage.unread:
                if read_unread is None:
                    raise ArtifactError("the token table is on the hub; give the coordinator the manifest or --model")
                pieces = read_unread(offset, offset + size_bytes, threading.Event())
            _put(out, pieces, size_bytes, TABLE)
            for tensor in source.tensors:
                pieces = _read(source.path, tensor.offset, tensor.offset + tensor.size_bytes)
                _put(out, pieces, tensor.size_bytes, tensor.name)
    return path


def _padded(size_bytes: int) -> int:
    return size_bytes + -size_bytes % ALIGNMENT


def _read(path: Path, offset: int, end: int) -> Iterator[bytes | memoryview]:
    with path.open("rb") as file:
        while offset < end and (data := os.pread(file.fileno(), min(_CHUNK_BYTES, end - offset), offset)):
            yield data
            offset += len(data)


def _put(out: BinaryIO, pieces: Iterator[bytes | memoryview], size_bytes: int, name: str) -> None:
    n_bytes = 0
    for piece in pieces:
        part = memoryview(piece)[: size_bytes - n_bytes]
        out.write(part)
        n_bytes += len(part)
    if n_bytes < size_bytes:
        raise ModelFileError(f"{name}: ended after {n_bytes} of {size_bytes} bytes")
    out.write(bytes(-size_bytes % ALIGNMENT))
