"""Rewrites a GGUF as a sharded set, in the layout of llama.cpp's own splitting tool."""

from __future__ import annotations

from pathlib import Path

from relayline.coordinator.model.gguf_file import open_model, read_entries
from relayline.wire.model_files.gguf_write import TensorSlot, encode_entry, encode_header

U16, I32 = 2, 5


def shard(model_path: Path, directory: Path, n_shards: int) -> Path:
    """Write the shards and return the first one's path."""
    model = open_model(model_path)
    raw = model_path.read_bytes()
    tensors = list(model.tensors.values())
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"big-{number:05d}-of-{n_shards:05d}.gguf" for number in range(1, n_shards + 1)]
    for number, path in enumerate(paths):
        mine = tensors[number * len(tensors) // n_shards : (number + 1) * len(tensors) // n_shards]
        entries = read_entries(model, list(model.entries)) if number == 0 else []
        entries += [
            encode_entry("split.no", U16, number),
            encode_entry("split.count", U16, n_shards),
            encode_entry("split.tensors.count", I32, len(tensors)),
        ]
        slots = [TensorSlot(tensor.name, tensor.dims, tensor.type_id, tensor.size_bytes) for tensor in mine]
        content = bytearray(encode_header(entries, slots))
        for tensor in mine:
            content += raw[tensor.offset : tensor.offset + tensor.size_bytes]
            content += bytes(-len(content) % 32)
        path.write_bytes(content)
    return paths[0]
