"""Random LoRA adapters for tests and benches, as llama.cpp's converter writes them."""

from __future__ import annotations

import fnmatch
import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from relayline.coordinator.model.gguf_file import open_model
from relayline.wire.model_files.adapters import Adapter

RANK = 4  # unless another is asked for


def adapter_of(path: Path, name: str = "", scale: float = 1.0) -> Adapter:
    """A file as an adapter of a pipeline."""
    return Adapter(name, path, scale, hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size)


def make_adapter(
    model: Path,
    path: Path,
    *,
    seed: int = 1,
    strength: float = 0.3,
    rank: int = RANK,
    changes: Sequence[str] = ("blk.*.attn_q.weight", "blk.*.attn_output.weight", "blk.*.ffn_*.weight"),
    dtype: type = np.float32,
    extra: dict[str, object] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write an adapter that changes the model's matrices of these names, and return its path.

    `strength`: how large the changes are beside the rows that go in. `extra` replaces metadata; `tensors` is added.
    """
    source = open_model(model)
    values: dict[str, object] = {
        "general.type": "adapter",
        "general.architecture": source.text("general.architecture"),
        "adapter.type": "lora",
        "adapter.lora.alpha": float(rank),
        **(extra or {}),
    }
    writer = gguf.GGUFWriter(None, str(values.pop("general.architecture")))
    for key, value in values.items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_string(key, str(value))
    for tensor in source.tensors.values():
        if not any(fnmatch.fnmatch(tensor.name, pattern) for pattern in changes) or len(tensor.dims) < 2:
            continue
        rng = np.random.default_rng(zlib.crc32(f"{seed} {tensor.name}".encode()))
        inner, outer, *experts = tensor.dims
        a = rng.standard_normal((*experts, rank, inner)) * inner**-0.5
        b = rng.standard_normal((*experts, outer, rank)) * strength * rank**-0.5
        writer.add_tensor(f"{tensor.name}.lora_a", a.astype(dtype))
        writer.add_tensor(f"{tensor.name}.lora_b", b.astype(dtype))
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
