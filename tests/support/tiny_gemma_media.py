"""What is Gemma 4's own of tiny models that take images and audio: a wide E2B, and its encoders' tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tests.support.tiny_later_families import (
    GEMMA4_E,
    GEMMA4_E_LAYERS,
    GEMMA4_E_TOPS,
    GEMMA4_E_WINDOWS,
    INPUT_WIDTH,
    N_SHARING,
)
from tests.support.tiny_shapes import HEAD, N_HEADS, VOCABULARY, Recipe, Shape, Shapes

WIDTH, N_FF, N_LAYERS, HEADS = 32, 64, 2, 2  # of an encoder
PATCH, SIDE = 7, 28
N_MEL, CHANNELS, FRAME = 16, 8, 640  # FRAME: samples of a row of gemma4ua
KERNEL = 5  # of a convolution over time
WIDE, _WIDE_FF = 1_536, 32  # E2B's width: llama.cpp knows by it that rows of an image do not see each other


def _wide(layer: int) -> Shapes:
    head = HEAD if GEMMA4_E_WINDOWS[layer] else 2 * HEAD
    shapes: dict[str, Shape] = {
        f"{name}.weight": (WIDE,)
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm")
    }
    shapes |= {"attn_q.weight": (N_HEADS * head, WIDE), "attn_q_norm.weight": (head,)}
    if layer < GEMMA4_E_LAYERS - N_SHARING:
        shapes |= {f"attn_{name}.weight": (head, WIDE) for name in "kv"} | {"attn_k_norm.weight": (head,)}
    shapes |= {"attn_output.weight": (WIDE, N_HEADS * head), "layer_output_scale.weight": (1,)}
    shapes |= {f"ffn_{name}.weight": (_WIDE_FF, WIDE) for name in ("gate", "up")}
    shapes |= {"ffn_down.weight": (WIDE, _WIDE_FF)}
    return shapes | {"inp_gate.weight": (INPUT_WIDTH, WIDE), "proj.weight": (WIDE, INPUT_WIDTH)}


WIDE_E2B = Recipe(
    "gemma4",
    {**GEMMA4_E, "embedding_length": WIDE, "feed_forward_length": _WIDE_FF},
    _wide,
    {
        **GEMMA4_E_TOPS,
        "token_embd.weight": (VOCABULARY, WIDE),
        "output_norm.weight": (WIDE,),
        "per_layer_model_proj.weight": (INPUT_WIDTH * GEMMA4_E_LAYERS, WIDE),
    },
    n_layers=GEMMA4_E_LAYERS,
    always_tied=True,
)


class GemmaEncoder(NamedTuple):
    """An encoder of images or of audio."""

    shapes: Callable[[int], dict[str, Shape]]  # width of rows -> tensors
    numbers: Mapping[str, int]  # without the prefix; replace the common ones


_NO_BLOCKS = {"block_count": 0, "feed_forward_length": 0, "attention.head_count": 0}


def _gemma4uv(n_embd: int) -> dict[str, Shape]:
    n_pixels = 3 * (2 * PATCH) ** 2
    shapes: dict[str, Shape] = {"v.patch_embd.weight": (WIDTH, n_pixels), "v.patch_embd.bias": (WIDTH,)}
    shapes["v.position_embd.weight"] = (2, SIDE, WIDTH)
    for number, width in ((1, n_pixels), (2, WIDTH), (3, WIDTH)):
        shapes |= {f"v.patch_norm.{number}.{part}": (width,) for part in ("weight", "bias")}
    return shapes | {"mm.input_projection.weight": (n_embd, WIDTH)}


def _gemma4a(n_embd: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"a.input_projection.weight": (WIDTH, CHANNELS * N_MEL // 4)}
    for number, n_in in ((0, 1), (1, CHANNELS)):
        shapes |= {f"a.conv1d.{number}.weight": (CHANNELS, n_in, 3, 3), f"a.conv1d.{number}.norm.weight": (CHANNELS,)}
    for layer in range(N_LAYERS):
        block = f"a.blk.{layer}"
        shapes |= {
            f"{block}.{name}.weight": (WIDTH,)
            for name in ("ffn_norm", "ffn_post_norm", "attn_pre_norm", "attn_post_norm", "conv_norm", "norm_conv",
                         "ffn_norm_1", "ffn_post_norm_1", "ln2")
        }  # fmt: skip
        for name in ("attn_q", "attn_k", "attn_v", "attn_out", "attn_k_rel", "conv_pw2"):
            shapes[f"{block}.{name}.weight"] = (WIDTH, WIDTH)
        for up, down in (("ffn_up", "ffn_down"), ("ffn_up_1", "ffn_down_1")):
            shapes |= {f"{block}.{up}.weight": (N_FF, WIDTH), f"{block}.{down}.weight": (WIDTH, N_FF)}
        shapes |= {f"{block}.per_dim_scale.weight": (WIDTH // HEADS,), f"{block}.conv_pw1.weight": (2 * WIDTH, WIDTH)}
        shapes[f"{block}.conv_dw.weight"] = (WIDTH, KERNEL)
    shapes |= {"a.pre_encode.out.weight": (N_FF, WIDTH), "a.pre_encode.out.bias": (N_FF,)}
    return shapes | {"mm.a.input_projection.weight": (n_embd, N_FF)}


def _gemma4ua(n_embd: int) -> dict[str, Shape]:
    return {"mm.a.input_projection.weight": (n_embd, FRAME)}


IMAGES = {"gemma4uv": GemmaEncoder(_gemma4uv, {**_NO_BLOCKS, "projector.scale_factor": 2})}
AUDIO = {
    "gemma4a": GemmaEncoder(_gemma4a, {"num_mel_bins": N_MEL}),
    "gemma4ua": GemmaEncoder(_gemma4ua, {**_NO_BLOCKS, "num_mel_bins": FRAME}),
}
