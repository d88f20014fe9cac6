"""Models of real shapes with random weights, made on this machine: `python -m benches.models --help`. Nothing is
downloaded. A model is a GGUF that llama.cpp and relayline load like any other. Its widths, layers, heads and vocabulary
size are real. Its byte-level tokenizer has unique strings as filler tokens, so that prompts go in as token ids and
different answers are different texts. Weights are drawn block by block (see blocks.py) and streamed to the file.

Why the scales matter: a random network is easily degenerate. It repeats one token, or its answers depend on the last
token alone, and then greedy parity proves nothing. Weights have standard deviation 1 / sqrt(inputs); Queries and keys
are a little larger, so that attention selects. Each block adds a visible part to the residual stream, so that the
answer depends on the whole history. The head is not tied and its rows differ in length, as in trained models, so that
the best token is usually well ahead of the second. `--check` shows the result.

One type is used for the whole file, embedding table and head included; `q4_k_m` is a mix as llama.cpp makes it. Models
of the types that only the quantisation bench uses have a Q6_K head.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from benches.blocks import Bytes, random_rows
from relayline.wire.common.places import cache_dir

RECIPE: Final = 2  # raised whenever the bytes for a shape and type change
SEED: Final = 20_25
N_BYTE_TOKENS: Final = 256
CHUNK_BYTES: Final = 32 << 20  # of one tensor drawn at a time
CTX_TRAIN: Final = 8_192
ATTENDS_EVERY: Final = 4  # layers of a hybrid; the others are gated delta nets
CONV_WIDTH: Final = 4
FADING: Final = -3.0  # softplus of it is how much of a state one token fades: a memory of about 20 tokens
QK_GAIN: Final = 1.6  # scores with a deviation of 2.6: attention is neither flat nor stuck on one token
RESIDUAL_GAIN: Final = 0.6  # of the two matrices that write into the residual stream
HEAD_GAIN: Final = 4.0
HEAD_SPREAD: Final = 0.35  # deviation of the logarithm of the head's row lengths


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The hyperparameters of one model."""

    name: str
    architecture: str  # llama, qwen3, qwen3moe, qwen35 or gemma3
    n_embd: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_ff: int
    n_vocab: int
    window: int = 0  # tokens that five of six layers read; 0: all layers read all
    residual_gain: float = RESIDUAL_GAIN  # how much blocks change what the next token depends on
    n_experts: int = 0  # of each layer, each n_ff wide; 0: one dense network
    n_used: int = 0  # experts of a token

    @property
    def is_hybrid(self) -> bool:
        """Whether most layers keep a recurrent state."""
        return self.architecture == "qwen35"

    @property
    def n_state_heads(self) -> int:
        """Heads of a delta net: together as wide as those of attention, and half as wide each."""
        return 2 * self.n_heads


SHAPES: Final[dict[str, Shape]] = {
    shape.name: shape
    for shape in (
        Shape("toy", "llama", 256, 8, 4, 2, 64, 768, 4_096),
        Shape("llama-1b", "llama", 2_048, 16, 32, 8, 64, 8_192, 128_256),
        Shape("qwen3-0.6b", "qwen3", 1_024, 28, 16, 8, 128, 3_072, 151_936),
        Shape("toy-hybrid", "qwen35", 256, 8, 4, 2, 64, 768, 4_096),
        Shape("qwen35-0.8b", "qwen35", 1_024, 24, 8, 2, 256, 3_584, 248_320),
        Shape("llama-8b", "llama", 4_096, 32, 32, 8, 128, 14_336, 128_256),
        Shape("toy-windows", "gemma3", 256, 12, 4, 1, 64, 768, 4_096, 32),
        Shape("gemma3-1b", "gemma3", 1_152, 26, 4, 1, 256, 6_912, 262_144, 512),
        Shape("toy-experts", "qwen3moe", 256, 8, 4, 2, 64, 256, 4_096, n_experts=32, n_used=4),
        Shape("experts-1b", "qwen3moe", 1_024, 8, 16, 4, 64, 512, 32_000, n_experts=64, n_used=8),
    )
}

T = GGMLQuantizationType
# name -> (most matrices, attn_v and ffn_down of every second layer, embedding table, head)
MIXES: Final[dict[str, tuple[GGMLQuantizationType, ...]]] = {
    "q4_0": (T.Q4_0, T.Q4_0, T.Q4_0, T.Q4_0),
    "q8_0": (T.Q8_0, T.Q8_0, T.Q8_0, T.Q8_0),
    "f16": (T.F16, T.F16, T.F16, T.F16),
    "q4_k_m": (T.Q4_K, T.Q6_K, T.Q4_K, T.Q6_K),
    "q4_k": (T.Q4_K, T.Q4_K, T.Q4_K, T.Q6_K),
    "iq2_xxs": (T.IQ2_XXS, T.IQ2_XXS, T.Q4_0, T.Q6_K),
    "mxfp4": (T.MXFP4, T.MXFP4, T.Q4_0, T.Q6_K),
    "nvfp4": (T.NVFP4, T.NVFP4, T.Q4_0, T.Q6_K),
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Matrix:
    """One tensor to draw: (n_out, n_in) values of standard deviation `gain` / sqrt(n_in)."""

    name: str
    n_out: int
    n_in: int
    kind: GGMLQuantizationType
    gain: float = 1.0
    spread: float = 0.0  # deviation of the logarithm of the rows' lengths
    constant: float | None = None  # a norm: f32, this value everywhere
    is_head: bool = False
    n_experts: int = 0  # whose matrices, n_out rows together, are one tensor

    @property
    def dims(self) -> tuple[int, ...]:
        """The tensor's sizes, the outermost first."""
        if self.n_experts:
            return self.n_experts, self.n_out // self.n_experts, self.n_in
        return (self.n_in,) if self.n_out == 1 and self.constant is not None else (self.n_out, self.n_in)

    @property
    def row_bytes(self) -> int:
        block_values, block_bytes = GGML_QUANT_SIZES[self.kind]
        return self.n_in // int(block_values) * int(block_bytes)

    @property
    def size_bytes(self) -> int:
        return self.n_out * self.row_bytes


def _attention(
    shape: Shape, prefix: str, plain: GGMLQuantizationType, better: GGMLQuantizationType
) -> Iterator[_Matrix]:
    width, heads, kv = shape.n_embd, shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    if shape.architecture != "llama":  # queries and keys are normalised, so their size is set here
        yield _Matrix(f"{prefix}attn_q_norm.weight", 1, shape.head_dim, T.F32, constant=QK_GAIN)
        yield _Matrix(f"{prefix}attn_k_norm.weight", 1, shape.head_dim, T.F32, constant=QK_GAIN)
    n_queries = 2 * heads if shape.is_hybrid else heads  # a hybrid's also have gates
    yield _Matrix(f"{prefix}attn_q.weight", n_queries, width, plain, QK_GAIN)
    yield _Matrix(f"{prefix}attn_k.weight", kv, width, plain, QK_GAIN)
    yield _Matrix(f"{prefix}attn_v.weight", kv, width, better)
    yield _Matrix(f"{prefix}attn_output.weight", width, heads, plain, shape.residual_gain)


def _delta_net(
    shape: Shape, prefix: str, plain: GGMLQuantizationType, better: GGMLQuantizationType
) -> Iterator[_Matrix]:
    width, inner, n_heads = shape.n_embd, shape.n_heads * shape.head_dim, shape.n_state_heads
    yield _Matrix(f"{prefix}attn_qkv.weight", 3 * inner, width, plain)
    yield _Matrix(f"{prefix}attn_gate.weight", inner, width, plain)
    yield _Matrix(f"{prefix}ssm_conv1d.weight", 3 * inner, CONV_WIDTH, T.F32)
    yield _Matrix(f"{prefix}ssm_alpha.weight", n_heads, width, plain, 0.1)
    yield _Matrix(f"{prefix}ssm_beta.weight", n_heads, width, plain)
    yield _Matrix(f"{prefix}ssm_dt.bias", 1, n_heads, T.F32, constant=FADING)
    yield _Matrix(f"{prefix}ssm_a", 1, n_heads, T.F32, constant=-1.0)
    yield _Matrix(f"{prefix}ssm_norm.weight", 1, shape.head_dim // 2, T.F32, constant=1.0)
    yield _Matrix(f"{prefix}ssm_out.weight", width, inner, better, shape.residual_gain)


def _block(shape: Shape, layer: int, mix: tuple[GGMLQuantizationType, ...]) -> Iterator[_Matrix]:
    width, out = shape.n_embd, shape.residual_gain
    plain, better = mix[0], mix[1] if layer % 2 else mix[0]
    prefix = f"blk.{layer}."
    yield _Matrix(f"{prefix}attn_norm.weight", 1, width, T.F32, constant=1.0)
    attends = not shape.is_hybrid or layer % ATTENDS_EVERY == ATTENDS_EVERY - 1
    yield from (_attention if attends else _delta_net)(shape, prefix, plain, better)
    norms = ["post_attention_norm" if shape.is_hybrid else "ffn_norm"]
    if shape.window:
        norms += ["post_attention_norm", "post_ffw_norm"]
    for norm in norms:
        yield _Matrix(f"{prefix}{norm}.weight", 1, width, T.F32, constant=1.0)
    n, suffix = max(1, shape.n_experts), "_exps" if shape.n_experts else ""
    if shape.n_experts:
        yield _Matrix(f"{prefix}ffn_gate_inp.weight", n, width, T.F32)
    gain = 2 * out  # silu(gate) * up is about half
    yield _Matrix(f"{prefix}ffn_gate{suffix}.weight", n * shape.n_ff, width, plain, n_experts=shape.n_experts)
    yield _Matrix(f"{prefix}ffn_up{suffix}.weight", n * shape.n_ff, width, plain, n_experts=shape.n_experts)
    yield _Matrix(f"{prefix}ffn_down{suffix}.weight", n * width, shape.n_ff, better, gain, n_experts=shape.n_experts)


def matrices(shape: Shape, mix_name: str) -> list[_Matrix]:
    """Return every tensor of a model in file order."""
    mix = MIXES[mix_name]
    width = shape.n_embd
    # An embedding of deviation 1: the gain undoes the 1 / sqrt(n_in) that all matrices have.
    found = [_Matrix("token_embd.weight", shape.n_vocab, width, mix[2], float(np.sqrt(width)))]
    for layer in range(shape.n_layers):
        found += _block(shape, layer, mix)
    found.append(_Matrix("output_norm.weight", 1, width, T.F32, constant=1.0))
    found.append(_Matrix("output.weight", shape.n_vocab, width, mix[3], HEAD_GAIN, HEAD_SPREAD, is_head=True))
    return found


def _draw(rng: np.random.Generator, matrix: _Matrix) -> Iterator[Bytes]:
    """Yield the tensor's bytes in pieces of whole rows."""
    if matrix.constant is not None:
        yield np.full((matrix.n_out, matrix.n_in), matrix.constant, np.float32).view(np.uint8)
        return
    n_rows = max(1, CHUNK_BYTES // matrix.row_bytes)
    for first in range(0, matrix.n_out, n_rows):
        count = min(n_rows, matrix.n_out - first)
        std = np.full(count, matrix.gain / np.sqrt(matrix.n_in), np.float32)
        if matrix.spread:
            std *= np.exp(rng.standard_normal(count, np.float32) * np.float32(matrix.spread))
        if matrix.is_head:
            # No answer may hold the end token, since servers treat `ignore_eos` differently. Nor may it hold a piece of
            # a character: llama-server holds it back, and leaves it out of the token ids that it returns.
            ids = np.arange(first, first + count)
            std[(ids < N_BYTE_TOKENS) | (ids == matrix.n_out - 1)] = 0.0
        yield random_rows(rng, matrix.kind, std, matrix.n_in)


def _byte_pieces() -> list[str]:
    """Return how the byte-level vocabularies of the GPT-2 line spell each of the 256 bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    spelled = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [spelled[byte] for byte in range(256)]


def vocabulary(n_vocab: int) -> tuple[list[str], list[int], list[str]]:
    """Return (tokens, their gguf types, merges): 256 bytes, unique fillers, and an end token as the last.

    Rows of the head for bytes and for the end token are zero, so that no answer contains them.
    """
    pieces = _byte_pieces()
    space = pieces[ord(" ")]
    fillers = [f"{space}w{index}" for index in range(N_BYTE_TOKENS, n_vocab - 1)]
    kinds = [int(gguf.TokenType.NORMAL)] * (n_vocab - 1) + [int(gguf.TokenType.CONTROL)]
    return [*pieces, *fillers, "<|end|>"], kinds, [f"{space} w"]


def _metadata(writer: gguf.GGUFWriter, shape: Shape, mix_name: str) -> None:
    writer.add_name(f"random-{shape.name}-{mix_name}")
    writer.add_context_length(CTX_TRAIN)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(shape.head_dim // 4 if shape.is_hybrid else shape.head_dim)
    writer.add_vocab_size(shape.n_vocab)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if shape.is_hybrid:
        _state_metadata(writer, shape)
    if shape.n_experts:
        writer.add_expert_count(shape.n_experts)
        writer.add_expert_used_count(shape.n_used)
        writer.add_expert_feed_forward_length(shape.n_ff)
    tokens, kinds, merges = vocabulary(shape.n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(shape.n_vocab - 1)
    writer.add_add_bos_token(False)


def _state_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_ssm_conv_kernel(CONV_WIDTH)
    writer.add_ssm_state_size(shape.head_dim // 2)
    writer.add_ssm_group_count(shape.n_state_heads)
    writer.add_ssm_time_step_rank(shape.n_state_heads)
    writer.add_ssm_inner_size(shape.n_heads * shape.head_dim)
    writer.add_full_attention_interval(ATTENDS_EVERY)
    rotated = shape.head_dim // 8  # pairs
    writer.add_rope_dimension_sections([rotated - 2 * (rotated // 3), rotated // 3, rotated // 3, 0])


def write_model(path: Path, shape: Shape, mix_name: str, seed: int = SEED) -> None:
    """Write one model; `path` appears only once the file is complete. The same arguments give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    rng = np.random.Generator(np.random.SFC64(seed))
    tensors = matrices(shape, mix_name)
    writer = gguf.GGUFWriter(unfinished, shape.architecture)
    try:
        _metadata(writer, shape, mix_name)
        for matrix in tensors:
            writer.add_tensor_info(matrix.name, matrix.dims, np.dtype(np.float32), matrix.size_bytes, matrix.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        with unfinished.open("ab") as file:
            file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
            for matrix in tensors:
                for piece in _draw(rng, matrix):
                    piece.tofile(file)
                file.write(bytes(-matrix.size_bytes % gguf.GGUF_DEFAULT_ALIGNMENT))
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def model_path(shape: Shape, mix_name: str) -> Path:
    """Return where a model is cached; the name changes with everything that its bytes depend on."""
    sizes = dataclasses.astuple(shape)[:9] + ((shape.window,) if shape.window else ())
    sizes += (shape.n_experts, shape.n_used) if shape.n_experts else ()
    facts = repr((RECIPE, SEED, sizes, mix_name, QK_GAIN, shape.residual_gain, HEAD_GAIN, HEAD_SPREAD))
    digest = hashlib.sha256(facts.encode()).hexdigest()[:10]
    return cache_dir() / "bench-models" / f"{shape.name}-{mix_name}-{digest}.gguf"


def model(shape: Shape, mix_name: str) -> Path:
    """Return the path of a model, making it first if it does not exist."""
    path = model_path(shape, mix_name)
    if not path.exists():
        started_s = time.monotonic()
        write_model(path, shape, mix_name)
        size_mib, took_s = path.stat().st_size / 2**20, time.monotonic() - started_s
        print(f"made {path.name}: {size_mib:.0f} MiB in {took_s:.1f} s", file=sys.stderr, flush=True)
    return path


def main() -> None:
    """Make one model and print its path; with --check, show properties of its greedy answers."""
    parser = argparse.ArgumentParser(prog="python -m benches.models", description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-1b")
    parser.add_argument("--type", choices=list(MIXES), default="q4_0")
    parser.add_argument("--check", action="store_true", help="greedy answers: variety and margins")
    options = parser.parse_args()
    path = model(SHAPES[options.shape], options.type)
    print(path)
    if options.check:
        from benches.reference import describe_model

        print(describe_model(path))


if __name__ == "__main__":
    main()
