"""Tensors of tiny encoders of audio that are conformers (blocks that attend and look at their neighbours in time), of
MiMo's audio, and of the images in the file of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tests.support.tiny_shapes import Shape

WIDTH, N_FF, N_LAYERS, HEADS = 32, 64, 2, 2
N_MEL, CHANNELS, N_PLACES = 16, 8, 1_500
_SINES = 512  # values of lfm2a's places, whatever its width
_CONTEXT, _KERNEL, _WINDOW, _N_QUERIES = 25, 7, 15, 3  # of granite_speech: places that attend to each other
_N_CTC = 20
PATCH, SIDE = 7, 28
_N_FREQUENCIES, _N_WINDOW = 257, 400  # of parakeet
_MIMO_LAYERS, _CODES, _GROUP = 3, [16, 12], 4


class Conformer(NamedTuple):
    """What is different about a kind."""

    shapes: Callable[[int], dict[str, Shape]]  # width of rows -> tensors
    numbers: Mapping[str, int | list[int]]  # without the prefix; replace the common ones


def _norm(name: str, width: int = WIDTH) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _matrix(name: str, n_out: int, n_in: int, *, bias: bool = True) -> dict[str, Shape]:
    return {f"{name}.weight": (n_out, n_in)} | ({f"{name}.bias": (n_out,)} if bias else {})


def _block(block: str, kernel: int, *, bias: bool = True) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{block}.conv_dw.weight": (WIDTH, kernel)}
    for name in ("ffn_norm", "ffn_norm_1", "ln1", "ln2", "norm_conv", "conv_norm"):
        shapes |= _norm(f"{block}.{name}")
    for name in ("attn_q", "attn_k", "attn_v"):
        shapes |= _matrix(f"{block}.{name}", WIDTH, WIDTH, bias=bias)
    for name in ("attn_out", "conv_pw2"):
        shapes |= _matrix(f"{block}.{name}", WIDTH, WIDTH)
    for end in ("", "_1"):
        shapes |= _matrix(f"{block}.ffn_up{end}", N_FF, WIDTH) | _matrix(f"{block}.ffn_down{end}", WIDTH, N_FF)
    return shapes | _matrix(f"{block}.conv_pw1", 2 * WIDTH, WIDTH)


def _shrinking(n_mel: int) -> dict[str, Shape]:
    """Convolutions that make one place of eight."""
    shapes: dict[str, Shape] = {}
    for number, n_in, size in ((0, 1, 3), (2, 1, 3), (3, CHANNELS, 1), (5, 1, 3), (6, CHANNELS, 1)):
        shapes[f"a.conv1d.{number}.weight"] = (CHANNELS, n_in, size, size)
        shapes[f"a.conv1d.{number}.bias"] = (CHANNELS, 1, 1)
    return shapes | _matrix("a.pre_encode.out", WIDTH, CHANNELS * n_mel // 8)


def _lfm2a(n_embd: int) -> dict[str, Shape]:
    shapes = _shrinking(N_MEL)
    for layer in range(N_LAYERS):
        block = f"a.blk.{layer}"
        shapes |= _block(block, 9) | _matrix(f"{block}.linear_pos", WIDTH, _SINES, bias=False)
        shapes |= {f"{block}.pos_bias_{name}": (HEADS, WIDTH // HEADS) for name in "uv"}
        shapes[f"{block}.conv_dw.bias"] = (WIDTH,)
    shapes |= {"a.position_embd.weight": (N_PLACES, n_embd)} | _norm("mm.a.mlp.0")
    return shapes | _matrix("mm.a.mlp.1", N_FF, WIDTH) | _matrix("mm.a.mlp.3", n_embd, N_FF)


def _granite_speech(n_embd: int) -> dict[str, Shape]:
    shapes = _matrix("a.input_projection", WIDTH, N_MEL)
    shapes |= _matrix("a.enc_ctc_out", _N_CTC, WIDTH) | _matrix("a.enc_ctc_out_mid", WIDTH, _N_CTC)
    for layer in range(N_LAYERS):
        block = f"a.blk.{layer}"
        shapes |= _block(block, _KERNEL, bias=False)
        shapes[f"{block}.attn_rel_pos_emb"] = (2 * _CONTEXT + 1, WIDTH // HEADS)
    for layer in range(2):
        block = f"a.proj_blk.{layer}"
        for name in ("self_attn", "cross_attn"):
            shapes |= _norm(f"{block}.{name}_norm")
            for part in ("q", "k", "v", "out"):
                shapes |= _matrix(f"{block}.{name}_{part}", WIDTH, WIDTH)
        shapes |= _matrix(f"{block}.ffn_up", N_FF, WIDTH) | _matrix(f"{block}.ffn_down", WIDTH, N_FF)
        shapes |= _norm(f"{block}.ffn_norm")
    shapes |= {"a.proj_query": (_N_QUERIES, WIDTH)} | _norm("a.proj_norm")
    return shapes | _matrix("a.proj_linear", n_embd, WIDTH)


def _parakeet(n_embd: int) -> dict[str, Shape]:
    shapes = {"a.mel_filters": (N_MEL, _N_FREQUENCIES), "a.window": (_N_WINDOW,), **_shrinking(N_MEL)}
    for layer in range(N_LAYERS):
        block = f"a.blk.{layer}"
        shapes |= _block(block, _KERNEL, bias=False) | _matrix(f"{block}.linear_pos", WIDTH, WIDTH, bias=False)
        shapes |= {f"{block}.pos_bias_{name}": (HEADS, WIDTH // HEADS) for name in "uv"}
        shapes |= {f"{block}.conv_norm_{name}": (WIDTH,) for name in ("mean", "var")}
    shapes |= {"mm.a.norm_pre.weight": (WIDTH,), **_nemotron_merger(n_embd)}
    return shapes | _matrix("mm.a.mlp.1", N_FF, WIDTH, bias=False) | _matrix("mm.a.mlp.2", n_embd, N_FF, bias=False)


def _nemotron_merger(n_embd: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"mm.model.mlp.0.weight": (4 * WIDTH,), "mm.model.mlp.1.weight": (N_FF, 4 * WIDTH)}
    return shapes | {"mm.model.mlp.3.weight": (n_embd, N_FF)}


def _nemotron_v2_vl(n_embd: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"v.patch_embd.weight": (WIDTH, 3, PATCH, PATCH), "v.class_embd": (3, WIDTH)}
    shapes["v.position_embd.weight"] = ((SIDE // PATCH) ** 2, WIDTH)
    for layer in range(N_LAYERS):
        shapes |= _whisper_block(f"v.blk.{layer}")
    return shapes | _nemotron_merger(n_embd)


def _whisper_block(block: str) -> dict[str, Shape]:
    shapes = _norm(f"{block}.ln1") | _norm(f"{block}.ln2")
    for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
        shapes |= _matrix(f"{block}.{name}", WIDTH, WIDTH, bias=name != "attn_k")
    return shapes | _matrix(f"{block}.ffn_up", N_FF, WIDTH) | _matrix(f"{block}.ffn_down", WIDTH, N_FF)


def _mimo_audio(n_embd: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"a.downsample.conv.weight": (WIDTH, WIDTH, 2)}
    for number, n_in in ((1, N_MEL), (2, WIDTH)):
        shapes |= {f"a.conv1d.{number}.weight": (WIDTH, n_in, 3), f"a.conv1d.{number}.bias": (WIDTH, 1)}
    for layer in range(_MIMO_LAYERS):
        shapes |= _whisper_block(f"a.blk.{layer}")
    shapes |= _norm("a.post_ln") | _norm("a.downsample.norm")
    shapes["a.rvq.codebook.weight"] = shapes["mm.a.code_embd.weight"] = (len(_CODES), max(_CODES), WIDTH)
    block = "mm.a.local_blk.0"
    for name in ("attn_q", "attn_k", "attn_v"):
        shapes |= _matrix(f"{block}.{name}", WIDTH, WIDTH)
    shapes |= {f"{block}.attn_out.weight": (WIDTH, WIDTH), f"{block}.ffn_down.weight": (WIDTH, N_FF)}
    shapes |= {f"{block}.{name}.weight": (N_FF, WIDTH) for name in ("ffn_gate", "ffn_up")}
    shapes |= {f"{name}.weight": (WIDTH,) for name in (f"{block}.ln1", f"{block}.ln2", "mm.a.local_norm")}
    shapes |= _matrix("mm.a.mlp.1", N_FF, _GROUP * WIDTH, bias=False)
    return shapes | _matrix("mm.a.mlp.2", n_embd, N_FF, bias=False)


IMAGES = {"nemotron_v2_vl": Conformer(_nemotron_v2_vl, {"projector.scale_factor": 2})}
CONFORMERS = {
    "lfm2a": Conformer(_lfm2a, {}),
    "parakeet": Conformer(_parakeet, {"subsampling_factor": 8, "conv_kernel_size": _KERNEL}),
    "mimo_audio": Conformer(
        _mimo_audio,
        {
            "block_count": _MIMO_LAYERS,
            "rvq.num_quantizers": len(_CODES),
            "rvq.codebook_size": _CODES,
            "window_size": 8,
            "wa_pattern_mode": [0, -1, 0],
            "local_block_count": 1,
            "local_group_size": _GROUP,
        },
    ),
    "granite_speech": Conformer(
        _granite_speech,
        {
            "chunk_size": _CONTEXT,
            "conv_kernel_size": _KERNEL,
            "max_pos_emb": _CONTEXT,
            "projector.window_size": _WINDOW,
            "projector.downsample_rate": _WINDOW // _N_QUERIES,
            "projector.head_count": HEADS,
        },
    ),
}
