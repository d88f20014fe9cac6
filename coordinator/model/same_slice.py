"""Whether two splits of a model have the same slice at one place: a stage that has loaded one has the other."""

from __future__ import annotations

from pathlib import Path

from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.wire.model_files.gguf_header import GgufFile, read_header

PIPELINE_ID = "relayline.pipeline_id"  # all in which the slices of two splits differ


def same_slices(one: tuple[Path, PipelineFile], other: tuple[Path, PipelineFile]) -> tuple[bool, ...]:
    """Return of each stage whether its artifacts differ in the split's name alone; each split with its directory.

    Reads headers, and no tensors: what these hold follows from model and layers. Raises ModelFileError.
    """
    (one_dir, one_file), (other_dir, other_file) = one, other
    if one_file.source.sha256 != other_file.source.sha256:
        return tuple(False for _ in other_file.stages)
    return tuple(
        (held.layer_start, held.layer_end, held.size_bytes) == (wanted.layer_start, wanted.layer_end, wanted.size_bytes)
        and _description(one_dir / held.file) == _description(other_dir / wanted.file)
        for held, wanted in zip(one_file.stages, other_file.stages, strict=True)
    )


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
