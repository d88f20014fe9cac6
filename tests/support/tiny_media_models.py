"""Tiny models as wide as some encoders of images make their rows."""

from __future__ import annotations

from tests.support.tiny_shapes import HEAD, N_FF, N_HEADS, N_KV_HEADS, RMS, VOCABULARY, Recipe, Shapes, head_norms

WIDE = 128  # MiniCPM-V's resampler has heads of so many values, and rows of as many as all its heads together


def _qwen3(_: int) -> Shapes:
    shapes = {f"attn_{name}.weight": (heads * HEAD, WIDE) for name, heads in
              (("q", N_HEADS), ("k", N_KV_HEADS), ("v", N_KV_HEADS))}  # fmt: skip
    shapes |= {"attn_output.weight": (WIDE, N_HEADS * HEAD), **head_norms()}
    shapes |= {f"ffn_{name}.weight": (N_FF, WIDE) for name in ("gate", "up")} | {"ffn_down.weight": (WIDE, N_FF)}
    return {**shapes, "attn_norm.weight": (WIDE,), "ffn_norm.weight": (WIDE,)}


MEDIA_MODELS = {
    "qwen3:wide": Recipe(
        "qwen3",
        {**RMS, "embedding_length": WIDE, "attention.key_length": HEAD, "attention.value_length": HEAD},
        _qwen3,
        {"output_norm.weight": (WIDE,), "token_embd.weight": (VOCABULARY, WIDE)},
        always_tied=True,
    )
}
