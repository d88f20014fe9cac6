"""A random llama-architecture GGUF and stage artifacts of it, written by hand.

Deliberately independent of the splitter: the engine's tests must not pass because both have the same mistake. The
metadata keys are the contract of stage/engine/artifact.py.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from llama_cpp import llama_cpp as llama

from relayline.deploy.testing.vocabulary_files import add_vocabulary

EMBEDDING_ALIGN_BYTES = 32


@dataclasses.dataclass(frozen=True)
class TinyShape:
    """Sizes of a tiny llama."""

    n_layers: int = 4
    n_embd: int = 64
    n_heads: int = 4
    n_kv_heads: int = 2
    n_ff: int = 96
    n_vocab: int = 160
    type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32  # of every matrix
    n_positions: int = 4_096  # that it was trained for
    seed: int = 1
    has_text: bool = False  # n_vocab tokens as in vocabulary_files, if the slice has the head


def tiny_weights(shape: TinyShape) -> dict[str, np.ndarray]:
    """Every tensor of the model as f32, by its GGUF name."""
    rng = np.random.default_rng(shape.seed)

    def matrix(n_out: int, n_in: int) -> np.ndarray:
        return (rng.standard_normal((n_out, n_in), np.float32) / np.float32(np.sqrt(n_in))).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(shape.n_embd)).astype(np.float32)

    n_kv = shape.n_embd // shape.n_heads * shape.n_kv_heads
    weights = {"token_embd.weight": rng.standard_normal((shape.n_vocab, shape.n_embd), np.float32)}
    for layer in range(shape.n_layers):
        weights |= {
            f"blk.{layer}.attn_norm.weight": norm(),
            f"blk.{layer}.attn_q.weight": 2 * matrix(shape.n_embd, shape.n_embd),
            f"blk.{layer}.attn_k.weight": 2 * matrix(n_kv, shape.n_embd),
            f"blk.{layer}.attn_v.weight": matrix(n_kv, shape.n_embd),
            f"blk.{layer}.attn_output.weight": 2 * matrix(shape.n_embd, shape.n_embd),
            f"blk.{layer}.ffn_norm.weight": norm(),
            f"blk.{layer}.ffn_gate.weight": matrix(shape.n_ff, shape.n_embd),
            f"blk.{layer}.ffn_up.weight": matrix(shape.n_ff, shape.n_embd),
            f"blk.{layer}.ffn_down.weight": 2 * matrix(shape.n_embd, shape.n_ff),
        }
    weights["output_norm.weight"] = norm()
    weights["output.weight"] = 2 * matrix(shape.n_vocab, shape.n_embd)
    return weights


def quantized(data: np.ndarray, type_: gguf.GGMLQuantizationType) -> np.ndarray:
    """Rows of `data` (f32 [n, width]) in ggml's own quantisation: u8 [n, bytes of a row]."""
    n_rows, width = data.shape
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    out = np.zeros((n_rows, width // block_elements * block_bytes), np.uint8)
    quantize = llama._lib.ggml_quantize_chunk
    quantize.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    quantize.restype = ctypes.c_size_t
    source = np.ascontiguousarray(data)
    assert quantize(int(type_), source.ctypes.data, out.ctypes.data, 0, n_rows, width, None) == out.nbytes
    return out


def _write(
    path: Path,
    shape: TinyShape,
    tensors: Mapping[str, np.ndarray],
    n_layers: int,
    n_vocab: int,
    keys: Mapping[str, object],
) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(shape.n_positions)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(n_vocab)
    if shape.has_text and n_vocab == shape.n_vocab:
        add_vocabulary(writer)
    else:
        writer.add_tokenizer_model("none")
    for key, value in keys.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif key.endswith(("offset_bytes", "rows")):
            writer.add_uint64(key, int(str(value)))
        else:
            writer.add_uint32(key, int(str(value)))
    for name, data in tensors.items():
        if data.ndim == 1 or shape.type == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, quantized(data, shape.type), raw_dtype=shape.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_whole(path: Path, shape: TinyShape) -> Path:
    """The unsplit model."""
    _write(path, shape, tiny_weights(shape), shape.n_layers, shape.n_vocab, {})
    return path


def write_stage(path: Path, shape: TinyShape, index: int, cuts: list[int], *, scale: float | None = None) -> Path:
    """Artifact of stage `index` when the model is cut before each layer in `cuts`."""
    bounds = [0, *cuts, shape.n_layers]
    start, end, count = bounds[index], bounds[index + 1], len(bounds) - 1
    weights = tiny_weights(shape)
    tensors: dict[str, np.ndarray] = {}
    for layer in range(start, end):
        for name, data in weights.items():
            if name.startswith(f"blk.{layer}."):
                tensors[f"blk.{layer - start}.{name.split('.', 2)[2]}"] = data
    is_last = index == count - 1
    n_vocab = shape.n_vocab if is_last else 32
    tensors["token_embd.weight"] = np.zeros((n_vocab, shape.n_embd), np.float32)
    tensors["output_norm.weight"] = weights["output_norm.weight"]
    if is_last:
        tensors["output.weight"] = weights["output.weight"]
    keys: dict[str, object] = {
        "relayline.version": 1,
        "relayline.source_sha256": "0" * 64,
        "relayline.pipeline_id": "tiny",
        "relayline.stage_index": index,
        "relayline.stage_count": count,
        "relayline.layer_start": start,
        "relayline.layer_end": end,
        "relayline.source_layers": shape.n_layers,
        "relayline.n_embd": shape.n_embd,
        "relayline.n_vocab": shape.n_vocab,
    }
    if index != 0:
        _write(path, shape, tensors, end - start, n_vocab, keys)
        return path
    keys |= {"relayline.embedding.type": int(shape.type), "relayline.embedding.rows": shape.n_vocab}
    if scale is not None:
        keys["relayline.embedding.scale"] = scale
    # The offset has a fixed width, so a first writing gives the final size of the file.
    _write(path, shape, tensors, end - start, n_vocab, keys | {"relayline.embedding.offset_bytes": 0})
    offset_bytes = -(-path.stat().st_size // EMBEDDING_ALIGN_BYTES) * EMBEDDING_ALIGN_BYTES
    _write(path, shape, tensors, end - start, n_vocab, keys | {"relayline.embedding.offset_bytes": offset_bytes})
    table = quantized(weights["token_embd.weight"], shape.type)
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        file.write(table.tobytes())
    return path


def write_pipeline(directory: Path, shape: TinyShape, cuts: list[int]) -> list[Path]:
    """Every stage's artifact, and their pipeline.json."""
    bounds = [0, *cuts, shape.n_layers]
    paths = [write_stage(directory / f"stage-{index}.gguf", shape, index, cuts) for index in range(len(bounds) - 1)]
    stages = [
        {
            "index": index,
            "file": path.name,
            "size_bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "layer_start": bounds[index],
            "layer_end": bounds[index + 1],
        }
        for index, path in enumerate(paths)
    ]
    (directory / "pipeline.json").write_text(json.dumps({"version": 1, "pipeline_id": "tiny", "stages": stages}))
    return paths
