"""Tiny random projectors of further large models: what `tiny_projectors` needs to write each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tests.support.tiny_shapes import Shape, Value

WIDTH, N_FF, N_HEADS, N_LAYERS = 32, 64, 2, 3  # of the encoder
PATCH, IMAGE = 7, 28
HEAD = WIDTH // N_HEADS
N_PATCHES = (IMAGE // PATCH) ** 2
MERGED = 4 * WIDTH  # values of four patches, which become one row
PIXELS: dict[str, Value] = {"image_min_pixels": 4 * 14 * 14, "image_max_pixels": 1_024 * 14 * 14}  # of 4 to 1,024 rows


class Other(NamedTuple):
    """What is different about a kind."""

    shapes: Callable[[int], dict[str, Shape]]  # width of rows -> tensors
    values: Mapping[str, Value] = {}  # without the prefix; replace the common ones
    activation: str = "gelu"
    minicpmv: tuple[int, int] | None = None  # version of MiniCPM-V, and rows of an image
    tokens: tuple[str, ...] = ()  # that the vocabulary of a model must have

    @property
    def numbers(self) -> dict[str, Value]:
        """Its values, as keys of the encoder of images."""
        return {"block_count": N_LAYERS, **self.values}


def matrix(name: str, n_out: int, n_in: int, *, bias: bool = True) -> dict[str, Shape]:
    return {f"{name}.weight": (n_out, n_in)} | ({f"{name}.bias": (n_out,)} if bias else {})


def norm(name: str, width: int = WIDTH, *, bias: bool = True) -> dict[str, Shape]:
    return {f"{name}.weight": (width,)} | ({f"{name}.bias": (width,)} if bias else {})


def _patches(n_frames: int = 2, *, bias: bool = False, has_positions: bool = False) -> dict[str, Shape]:
    names = ("v.patch_embd.weight", "v.patch_embd.weight.1")[:n_frames]
    shapes: dict[str, Shape] = dict.fromkeys(names, (WIDTH, 3, PATCH, PATCH))
    if bias:
        shapes["v.patch_embd.bias"] = (WIDTH,)
    return shapes | ({"v.position_embd.weight": (N_PATCHES, WIDTH)} if has_positions else {})


def blocks(*, fused: bool = False, gate: bool = False, bias: bool = True, head_norms: bool = False,
            n_kv: int = N_HEADS, sinks: bool = False) -> dict[str, Shape]:  # fmt: skip
    shapes: dict[str, Shape] = {}
    for layer in range(N_LAYERS):
        block = f"v.blk.{layer}"
        if fused:
            shapes |= matrix(f"{block}.attn_qkv", (N_HEADS + 2 * n_kv) * HEAD, WIDTH, bias=bias)
        else:
            for part in "qkv":
                shapes |= matrix(f"{block}.attn_{part}", WIDTH, WIDTH, bias=bias)
        shapes |= matrix(f"{block}.attn_out", WIDTH, WIDTH, bias=bias)
        shapes |= norm(f"{block}.ln1", bias=bias) | norm(f"{block}.ln2", bias=bias)
        shapes |= matrix(f"{block}.ffn_up", N_FF, WIDTH, bias=bias)
        shapes |= matrix(f"{block}.ffn_down", WIDTH, N_FF, bias=bias)
        if gate:
            shapes |= matrix(f"{block}.ffn_gate", N_FF, WIDTH, bias=bias)
        if head_norms:
            shapes |= {f"{block}.attn_{part}_norm.weight": (HEAD,) for part in "qk"}
        if sinks:
            shapes[f"{block}.attn_sinks"] = (N_HEADS,)
    return shapes


def _glm_merger(n_embd: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"mm.patch_merger.weight": (n_embd, WIDTH, 2, 2), "mm.patch_merger.bias": (n_embd,)}
    shapes |= matrix("mm.model.fc", n_embd, n_embd, bias=False) | norm("mm.post_norm", n_embd)
    shapes |= matrix("mm.up", N_FF, n_embd, bias=False) | matrix("mm.gate", N_FF, n_embd, bias=False)
    return shapes | matrix("mm.down", n_embd, N_FF, bias=False)


def _glm4v(n_embd: int) -> dict[str, Shape]:
    shapes = _patches(bias=True, has_positions=True) | norm("v.norm_embd", bias=False)
    shapes |= blocks(fused=True, gate=True, bias=False) | norm("v.post_ln", bias=False)
    return shapes | _glm_merger(n_embd)


def _glm5v(n_embd: int) -> dict[str, Shape]:
    shapes = _patches(bias=True) | blocks(fused=True, gate=True, bias=False, head_norms=True)
    return shapes | norm("v.post_ln", bias=False) | _glm_merger(n_embd)


def merger(first: int, second: int, n_embd: int, *, bias: bool = True) -> dict[str, Shape]:
    return matrix(f"mm.{first}", N_FF, MERGED, bias=bias) | matrix(f"mm.{second}", n_embd, N_FF, bias=bias)


def _ling3vl(n_embd: int) -> dict[str, Shape]:
    shapes = _patches(bias=True, has_positions=True) | blocks(fused=True)
    return shapes | norm("mm.input_norm") | merger(0, 2, n_embd)


def _minimax_m3(n_embd: int) -> dict[str, Shape]:
    shapes = _patches() | norm("v.pre_ln") | blocks()
    shapes |= matrix("mm.1", N_FF, WIDTH) | matrix("mm.2", WIDTH, N_FF)
    return shapes | matrix("mm.merger.fc1", N_FF, MERGED) | matrix("mm.merger.fc2", n_embd, N_FF)


def _mimovl(n_embd: int) -> dict[str, Shape]:
    shapes = _patches() | blocks(fused=True, gate=True, n_kv=1, sinks=True) | norm("v.post_ln")
    return shapes | merger(0, 2, n_embd, bias=False)


def _paddleocr(n_embd: int) -> dict[str, Shape]:
    shapes = _patches(1, bias=True, has_positions=True) | blocks() | norm("v.post_ln")
    return shapes | norm("mm.input_norm") | merger(1, 2, n_embd)


def _dots_ocr(n_embd: int) -> dict[str, Shape]:
    shapes = _patches(1, bias=True) | blocks(fused=True, gate=True, bias=False)
    return shapes | norm("mm.post_norm", bias=False) | norm("mm.input_norm") | merger(0, 2, n_embd)


def _muse_glimmer(n_embd: int) -> dict[str, Shape]:
    shapes = _patches(1, has_positions=True) | norm("v.pre_ln") | blocks() | norm("v.post_ln")
    return shapes | merger(0, 1, N_FF, bias=False) | matrix("mm.2", n_embd, N_FF, bias=False)


def _youtuvl(n_embd: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"v.patch_embd.weight": (WIDTH, 3 * PATCH * PATCH), "v.patch_embd.bias": (WIDTH,)}
    shapes |= blocks() | norm("v.post_ln") | norm("mm.input_norm", bias=False)
    return shapes | merger(0, 2, n_embd)


WIDE_KINDS: dict[str, Other] = {
    "glm4v": Other(_glm4v, {"spatial_merge_size": 2}, "silu"),
    "glm5v": Other(_glm5v, {"spatial_merge_size": 2, "swiglu_clamp": 1.0, **PIXELS}, "silu"),
    "ling3vl": Other(_ling3vl, {"spatial_merge_size": 2}),
    "minimax_m3": Other(_minimax_m3, {"spatial_merge_size": 2}),
    "mimovl": Other(
        _mimovl,
        {"attention.head_count_kv": 1, "wa_pattern_mode": [0, 1, -1], "window_size": 2, **PIXELS},
        "silu",
    ),
    "paddleocr": Other(_paddleocr, PIXELS),
    "dots_ocr": Other(_dots_ocr, {"projector.scale_factor": 2, **PIXELS}, "silu"),
    "muse-glimmer": Other(_muse_glimmer, {"spatial_merge_size": 2}),
    "youtuvl": Other(_youtuvl, {"window_size": 2 * 2 * PATCH, "wa_layer_indexes": [1]}),
}
