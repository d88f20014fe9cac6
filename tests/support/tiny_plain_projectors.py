"""Tiny random projectors of models whose images may be cut into tiles, or have rows with places like tokens."""

from __future__ import annotations

from tests.support.tiny_shapes import Shape, Value
from tests.support.tiny_wide_projectors import (
    IMAGE,
    MERGED,
    N_FF,
    N_PATCHES,
    PATCH,
    PIXELS,
    WIDTH,
    Other,
    blocks,
    matrix,
    merger,
    norm,
)

# llama.cpp cuts large images into tiles of so many pixels a side, whatever the file says:
_LFM2_TILE, _LFM2_PATCH = 512, 64
_STEP3_TILE, _STEP3_PATCH = 504, 63
_MINICPM = ("<image>", "</image>", "<slice>", "</slice>")
_PER_SIDE = IMAGE // PATCH
_BUCKETS = 70 * 70  # places of patches in MiniCPM-V, whatever an image's size is
_N_QUERIES = 6  # rows of an image or of a tile, as MiniCPM-V's resampler makes them
_MERGES: dict[str, Value] = {"projector.scale_factor": 2}  # patches of each side of a row


def _tower(n_positions: int = N_PATCHES, patch: int = PATCH) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"v.patch_embd.weight": (WIDTH, 3, patch, patch), "v.patch_embd.bias": (WIDTH,)}
    return shapes | {"v.position_embd.weight": (n_positions, WIDTH)} | blocks()


def _kimivl(n_embd: int) -> dict[str, Shape]:
    return _tower() | norm("v.post_ln") | norm("mm.input_norm") | merger(1, 2, n_embd)


def _kimik25(n_embd: int) -> dict[str, Shape]:
    return _kimivl(n_embd) | {"v.position_embd.weight": (_PER_SIDE, _PER_SIDE, WIDTH)}


def _llama4(n_embd: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"v.patch_embd.weight": (WIDTH, 3 * PATCH * PATCH), "v.class_embd": (WIDTH,)}
    shapes |= {"v.position_embd.weight": (N_PATCHES + 1, WIDTH)} | blocks() | norm("v.pre_ln") | norm("v.post_ln")
    shapes |= matrix("mm.model.mlp.1", N_FF, MERGED, bias=False) | matrix("mm.model.mlp.2", N_FF, N_FF, bias=False)
    return shapes | matrix("mm.model.fc", n_embd, N_FF, bias=False)


def _lightonocr(n_embd: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"v.patch_embd.weight": (WIDTH, 3, PATCH, PATCH)}
    shapes |= blocks(bias=False) | norm("v.pre_ln", bias=False) | norm("mm.input_norm", bias=False)
    shapes |= matrix("mm.patch_merger", WIDTH, MERGED, bias=False)
    return shapes | matrix("mm.1", N_FF, WIDTH) | matrix("mm.2", n_embd, N_FF)


def _step3vl(n_embd: int) -> dict[str, Shape]:
    shapes = _tower((_STEP3_TILE // _STEP3_PATCH) ** 2, _STEP3_PATCH) | norm("v.pre_ln")
    shapes |= {"mm.0.weight": (WIDTH, WIDTH, 3, 3), "mm.0.bias": (WIDTH,)}
    shapes |= {"mm.1.weight": (N_FF, WIDTH, 3, 3), "mm.1.bias": (N_FF,)}
    return shapes | matrix("mm.model.fc", n_embd, N_FF, bias=False)


def _lfm2(n_embd: int) -> dict[str, Shape]:
    shapes = _tower((_LFM2_TILE // _LFM2_PATCH) ** 2, _LFM2_PATCH) | norm("v.post_ln")
    return shapes | norm("mm.input_norm", MERGED) | merger(1, 2, n_embd)


def _janus_pro(n_embd: int) -> dict[str, Shape]:
    return _tower() | norm("v.post_ln") | matrix("mm.0", N_FF, WIDTH) | matrix("mm.1", n_embd, N_FF)


def _phi4(n_embd: int) -> dict[str, Shape]:
    return _tower() | norm("v.post_ln") | matrix("mm.0", N_FF, WIDTH) | matrix("mm.2", n_embd, N_FF)


def _minicpmv4_6(n_embd: int) -> dict[str, Shape]:
    shapes = _tower(_BUCKETS) | norm("v.post_ln") | norm("v.vit_merger.ln1")
    for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
        shapes |= matrix(f"v.vit_merger.{part}", WIDTH, WIDTH)
    shapes |= norm("v.vit_merger.ds_ln", MERGED)
    shapes |= matrix("v.vit_merger.ds_ffn_up", N_FF, MERGED) | matrix("v.vit_merger.ds_ffn_down", WIDTH, N_FF)
    return shapes | norm("mm.input_norm", MERGED) | matrix("mm.up", N_FF, MERGED) | matrix("mm.down", n_embd, N_FF)


def _resampler(n_embd: int) -> dict[str, Shape]:
    shapes = _tower(_BUCKETS) | norm("v.post_ln")
    shapes |= {"resampler.query": (_N_QUERIES, n_embd), "resampler.pos_embed_k": (N_PATCHES, n_embd)}
    shapes |= matrix("resampler.kv", n_embd, WIDTH, bias=False) | matrix("resampler.proj", n_embd, n_embd, bias=False)
    for part in ("q", "k", "v", "out"):
        shapes |= matrix(f"resampler.attn.{part}", n_embd, n_embd)
    for part in ("q", "kv", "post"):
        shapes |= norm(f"resampler.ln_{part}", n_embd)
    return shapes


PLAIN: dict[str, Other] = {
    "kimik25": Other(_kimik25, _MERGES),
    "kimivl": Other(_kimivl, _MERGES),
    "llama4": Other(_llama4, _MERGES),
    "lightonocr": Other(_lightonocr, {"spatial_merge_size": 2}),
    "step3vl": Other(
        _step3vl,
        {"patch_size": _STEP3_PATCH, "image_size": _STEP3_TILE, "projector.scale_factor": 4},
        tokens=("<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>"),
    ),
    "lfm2": Other(
        _lfm2,
        {"patch_size": _LFM2_PATCH, "image_size": _LFM2_TILE, **_MERGES},
        tokens=("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
    ),
    "janus_pro": Other(_janus_pro),
    # llama.cpp looks for these tokens where a model's name has "phi3".
    "phi4": Other(_phi4, PIXELS, tokens=("<unk>", "<s>", "</s>", "<|endoftext|>")),
    "minicpmv4_6": Other(
        _minicpmv4_6,
        {"image_size": 2 * IMAGE, "projector.scale_factor": 4, "wa_layer_indexes": [0]},
        tokens=_MINICPM,
    ),
    "resampler": Other(_resampler, minicpmv=(3, _N_QUERIES), tokens=_MINICPM),
}
