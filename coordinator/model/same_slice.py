"""Tells whether two splits of a model have the same slice at one place: a stage that has loaded one has the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from relayline.coordinator.model.pipeline_file import PipelineFile, StageFile
from relayline.wire.model_files.gguf_header import GgufFile, read_header

PIPELINE_ID = "relayline.pipeline_id"  # all in which the slices of two splits differ


def same_slices(
    one: tuple[Path, PipelineFile], other: tuple[Path, PipelineFile], before: Sequence[int | None] | None = None
) -> tuple[bool, ...]:
    """Return of each stage whether its artifacts differ in the split's name alone; each split with its directory.

    `before`: of each stage of `other`, which one of `one` its process has loaded, if any; by default the same.
    Reads headers, and no tensors: what these hold follows from model and layers. Raises ModelFileError.
    """
    (one_dir, one_file), (other_dir, other_file) = one, other
    if one_file.source.sha256 != other_file.source.sha256:
        return tuple(False for _ in other_file.stages)
    places = range(len(other_file.stages)) if before is None else before
    return tuple(
        at is not None and _is_same(one_dir, one_file.stages[at], other_dir, wanted)
        for at, wanted in zip(places, other_file.stages, strict=True)
    )


def _is_same(one_dir: Path, held: StageFile, other_dir: Path, wanted: StageFile) -> bool:
    return (held.layer_start, held.layer_end, held.size_bytes) == (
        wanted.layer_start,
        wanted.layer_end,
        wanted.size_bytes,
    ) and _description(one_dir / held.file) == _description(other_dir / wanted.file)


def _description(path: Path) -> object:
    header = read_header(path)
    tensors = [(tensor.name, tensor.dims, tensor.type_id, tensor.offset) for tensor in header.tensors]
    return _entries(header), tensors


def _entries(header: GgufFile) -> dict[str, bytes]:
    with header.path.open("rb") as file:
        found = {}
        for key, entry in header.entries.items():
            if key != PIPELINE_ID:
                file.seek(entry.start)
                found[key] = file.read(entry.end - entry.start)
    return found
