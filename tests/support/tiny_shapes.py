"""The parts of tiny models: a recipe, and the shapes that many families share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

N_EMBD, N_HEADS, N_KV_HEADS, HEAD, N_FF, N_EXPERTS = 64, 4, 2, 16, 96, 4
Q_RANK, KV_RANK, ROPE = 32, 32, 16  # latent attention
INDEX_KEY, INDEX_HEADS = 64, 8  # of an indexer that chooses the attended tokens
CTX = 512
VOCABULARY = 0  # in a shape: as many as the model has tokens

Shape = tuple[int, ...]  # numpy order: (outputs, inputs), experts first
Shapes = Mapping[str, Shape]
Value = int | float | str | bool | list[int] | list[float] | list[bool] | list[str]

RMS = {"attention.layer_norm_rms_epsilon": 1e-5}
NORM = {"attention.layer_norm_epsilon": 1e-5}
MOE: dict[str, Value] = {"expert_count": N_EXPERTS, "expert_used_count": 2}
LATENT: dict[str, Value] = {
    "attention.head_count_kv": 1,
    "attention.key_length": KV_RANK + ROPE,
    "attention.value_length": KV_RANK,
    "attention.key_length_mla": HEAD + ROPE,
    "attention.value_length_mla": HEAD,
    "attention.kv_lora_rank": KV_RANK,
    "rope.dimension_count": ROPE,
    "expert_feed_forward_length": 32,
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.5,
    "expert_weights_norm": True,
}

RANKING: dict[str, Value] = {"pooling_type": 4, "classifier.output_labels": ["yes", "no"]}
RANK_TOPS: Shapes = {"output_norm.weight": (N_EMBD,), "cls.output.weight": (2, N_EMBD)}
INDEXED: dict[str, Value] = {
    "attention.q_lora_rank": Q_RANK,
    "attention.indexer.head_count": INDEX_HEADS,
    "attention.indexer.key_length": INDEX_KEY,
    "attention.indexer.top_k": 8,
    "expert_gating_func": 2,
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The recipe of one family, or of one variant of it."""

    architecture: str
    values: Mapping[str, Value]  # without the architecture's prefix; replace the common ones
    block: Callable[[int], Shapes]  # layer -> tensors, without "blk.N."
    # Tensors outside the blocks, besides the embedding table and the head.
    tops: Shapes = dataclasses.field(default_factory=lambda: {"output_norm.weight": (N_EMBD,)})
    n_layers: int = 5
    may_tie: bool = True
    always_tied: bool = False
    per_layer: tuple[str, ...] = ()  # keys written as one value per layer
    gain: float = 1.0  # of the blocks' matrices, beyond the usual


def attention(bias: bool = False, n_kv: int = N_KV_HEADS, out_bias: bool = False) -> dict[str, Shape]:
    widths = {"q": N_HEADS * HEAD, "k": n_kv * HEAD, "v": n_kv * HEAD}
    shapes: dict[str, Shape] = {f"attn_{name}.weight": (width, N_EMBD) for name, width in widths.items()}
    if bias:
        shapes |= {f"attn_{name}.bias": (width,) for name, width in widths.items()}
    shapes["attn_output.weight"] = (N_EMBD, N_HEADS * HEAD)
    return shapes | ({"attn_output.bias": (N_EMBD,)} if out_bias else {})


def fused(bias: bool = False) -> dict[str, Shape]:
    width = (N_HEADS + 2 * N_KV_HEADS) * HEAD
    shapes: dict[str, Shape] = {"attn_qkv.weight": (width, N_EMBD), "attn_output.weight": (N_EMBD, N_EMBD)}
    return shapes | ({"attn_qkv.bias": (width,), "attn_output.bias": (N_EMBD,)} if bias else {})


def norms(*names: str, bias: bool = False) -> dict[str, Shape]:
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"{name}.{kind}": (N_EMBD,) for name in names for kind in kinds}


def dense(gate: bool = True, bias: bool = False) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"ffn_up.weight": (N_FF, N_EMBD), "ffn_down.weight": (N_EMBD, N_FF)}
    if gate:
        shapes["ffn_gate.weight"] = (N_FF, N_EMBD)
    return shapes | ({"ffn_up.bias": (N_FF,), "ffn_down.bias": (N_EMBD,)} if bias else {})


def experts(n_ff: int = N_FF, shared: int = 0) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {
        "ffn_gate_inp.weight": (N_EXPERTS, N_EMBD),
        "ffn_gate_exps.weight": (N_EXPERTS, n_ff, N_EMBD),
        "ffn_up_exps.weight": (N_EXPERTS, n_ff, N_EMBD),
        "ffn_down_exps.weight": (N_EXPERTS, N_EMBD, n_ff),
    }
    if shared:
        shapes |= {f"ffn_{name}_shexp.weight": (shared, N_EMBD) for name in ("gate", "up")}
        shapes["ffn_down_shexp.weight"] = (N_EMBD, shared)
    return shapes


def plain(_: int) -> Shapes:
    return norms("attn_norm", "ffn_norm") | attention() | dense()


def plain_moe(_: int) -> Shapes:
    return norms("attn_norm", "ffn_norm") | attention() | experts()


def head_norms() -> dict[str, Shape]:
    return {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}


def after_dense(layer: int, shared: int = 32) -> dict[str, Shape]:
    """One dense layer, then experts that are chosen with a bias."""
    return dense() if layer < 1 else experts(32, shared=shared) | {"exp_probs_b.bias": (N_EXPERTS,)}


def prediction() -> Shapes:
    normed = norms("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
    return {**normed, "nextn.eh_proj.weight": (N_EMBD, 2 * N_EMBD)}


BIASED_NORM = norms("output_norm", bias=True)
ROPE_TOPS: Shapes = {"rope_factors_long.weight": (HEAD // 2,), "rope_factors_short.weight": (HEAD // 2,)}
LONG_ROPE: dict[str, Value] = {"rope.scaling.original_context_length": 16, "rope.scaling.attn_factor": 1.2}
YARN: dict[str, Value] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}
SIGMOID: dict[str, Value] = {
    "expert_feed_forward_length": 32,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
    "leading_dense_block_count": 1,
}
