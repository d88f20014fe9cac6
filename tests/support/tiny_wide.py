"""Recipes of families whose hidden rows enter in the middle of the graph: hyper-connections, and embeddings that are
normed first.
"""

from __future__ import annotations

from tests.support.tiny_hybrids import EVERY_FOURTH, HOT, KDA_VALUES, N_LAYERS, feed_forward, kda
from tests.support.tiny_shapes import (
    BIASED_NORM,
    HEAD,
    INDEX_HEADS,
    INDEX_KEY,
    INDEXED,
    KV_RANK,
    LATENT,
    MOE,
    N_EMBD,
    N_EXPERTS,
    N_HEADS,
    NORM,
    Q_RANK,
    RMS,
    ROPE,
    VOCABULARY,
    Recipe,
    Shape,
    Shapes,
    Value,
    attention,
    dense,
    experts,
    head_norms,
    norms,
)

STREAMS = 4
HYPER: dict[str, Value] = {
    "hyper_connection.count": STREAMS,
    "hyper_connection.sinkhorn_iterations": 4,
    "hyper_connection.epsilon": 1e-6,
}


def _streams(n_mixes: int, n_scales: int) -> dict[str, Shape]:
    """The tensors that mix a row's streams before and after each half of a layer."""
    shapes: dict[str, Shape] = {}
    for half in ("hc_attn", "hc_ffn"):
        shapes[f"{half}_fn.weight"] = (n_mixes, STREAMS * N_EMBD)
        shapes |= {f"{half}_base.weight": (n_mixes,), f"{half}_scale.weight": (n_scales,)}
    return shapes


SINKHORN = _streams((2 + STREAMS) * STREAMS, 3)
STREAMS_HEAD: Shapes = {
    "output_hc_fn.weight": (STREAMS, STREAMS * N_EMBD),
    "output_hc_base.weight": (STREAMS,),
    "output_hc_scale.weight": (1,),
    "output_norm.weight": (N_EMBD,),
}

# deepseek4: every other layer compresses four tokens into one cell; others 128, or none.
RATIOS = [0, 4, 128, 4, 128, 4, 4, 128]
DS4_KEY, O_GROUPS, O_RANK = 2 * HEAD, 2, 32
DEEPSEEK4: dict[str, Value] = {
    **RMS, **MOE, **HYPER,
    "attention.head_count_kv": 1, "attention.key_length": DS4_KEY, "attention.value_length": DS4_KEY,
    "attention.q_lora_rank": Q_RANK, "attention.sliding_window": 8, "rope.dimension_count": ROPE,
    "attention.output_group_count": O_GROUPS, "attention.output_lora_rank": O_RANK,
    "attention.compress_rope_freq_base": 160000.0, "attention.compress_ratios": RATIOS,
    "attention.indexer.head_count": INDEX_HEADS, "attention.indexer.key_length": INDEX_KEY,
    "attention.indexer.top_k": 2,
    "expert_feed_forward_length": 32, "expert_shared_count": 1, "expert_weights_scale": 1.5,
    "expert_weights_norm": True, "expert_gating_func": 4, "swiglu_clamp_exp": 10.0, "hash_layer_count": 0,
}  # fmt: skip


def _deepseek4(layer: int) -> Shapes:
    shapes = norms("attn_norm", "ffn_norm") | SINKHORN | experts(32, shared=32) | {"exp_probs_b.bias": (N_EXPERTS,)}
    shapes |= {
        "attn_sinks.weight": (N_HEADS,),
        "attn_q_a.weight": (Q_RANK, N_EMBD), "attn_q_a_norm.weight": (Q_RANK,),
        "attn_q_b.weight": (N_HEADS * DS4_KEY, Q_RANK),
        "attn_kv.weight": (DS4_KEY, N_EMBD), "attn_kv_a_norm.weight": (DS4_KEY,),
        "attn_output_a.weight": (O_RANK * O_GROUPS, N_HEADS * DS4_KEY // O_GROUPS),
        "attn_output_b.weight": (N_EMBD, O_GROUPS * O_RANK),
    }  # fmt: skip
    ratio = RATIOS[layer]
    if not ratio:
        return shapes
    shapes |= _compressor("attn", DS4_KEY, ratio)
    if ratio == 4:
        shapes |= _compressor("indexer", INDEX_KEY, ratio) | {
            "indexer.proj.weight": (INDEX_HEADS, N_EMBD),
            "indexer.attn_q_b.weight": (INDEX_HEADS * INDEX_KEY, Q_RANK),
        }
    return shapes


N_HASHED = 3


def _deepseek4_hashed(layer: int) -> Shapes:
    shapes = dict(_deepseek4(layer))
    if layer < N_HASHED:
        del shapes["exp_probs_b.bias"]
        shapes["ffn_gate_tid2eid.weight"] = (VOCABULARY, 2)
    return shapes


def _compressor(name: str, width: int, ratio: int) -> dict[str, Shape]:
    overlapping = 2 * width if ratio == 4 else width
    return {
        f"{name}_compressor_kv.weight": (overlapping, N_EMBD), f"{name}_compressor_gate.weight": (overlapping, N_EMBD),
        f"{name}_compressor_ape.weight": (ratio, overlapping), f"{name}_compressor_norm.weight": (width,),
    }  # fmt: skip


# hy_v4: every other layer has an indexer.
HY_INDEXERS = [1, 0, 1, 0, 1, 0]


def _low_rank(n_rotated: int) -> dict[str, Shape]:
    """Latent attention with queries of low rank; the last values of a head are rotated."""
    return {
        "attn_q_a.weight": (Q_RANK, N_EMBD), "attn_q_a_norm.weight": (Q_RANK,),
        "attn_q_b.weight": (N_HEADS * (HEAD + n_rotated), Q_RANK),
        "attn_kv_a_mqa.weight": (KV_RANK + n_rotated, N_EMBD), "attn_kv_a_norm.weight": (KV_RANK,),
        "attn_k_b.weight": (N_HEADS, KV_RANK, HEAD), "attn_v_b.weight": (N_HEADS, HEAD, KV_RANK),
        "attn_output.weight": (N_EMBD, N_HEADS * HEAD),
    }  # fmt: skip


def _indexer() -> dict[str, Shape]:
    return {
        "indexer.k_norm.weight": (INDEX_KEY,), "indexer.k_norm.bias": (INDEX_KEY,),
        "indexer.proj.weight": (INDEX_HEADS, N_EMBD), "indexer.attn_k.weight": (INDEX_KEY, N_EMBD),
        "indexer.attn_q_b.weight": (INDEX_HEADS * INDEX_KEY, Q_RANK),
    }  # fmt: skip


def _hy_v4(layer: int, *, is_indexed: bool = True) -> Shapes:
    shapes = norms("attn_norm", "ffn_norm") | feed_forward(layer) | _streams(2 * STREAMS, 2) | _low_rank(ROPE)
    shapes |= {"attn_sinks.weight": (N_HEADS,), "attn_gate.weight": (N_HEADS * HEAD, N_EMBD)}
    return {**shapes, **(_indexer() if is_indexed and HY_INDEXERS[layer] else {})}


HY_V4: dict[str, Value] = {
    **RMS, **MOE, **LATENT,
    "hyper_connection.count": STREAMS, "hyper_connection.epsilon": 1e-6, "hyper_connection.magnitude": 2.0,
    "attention.q_lora_rank": Q_RANK, "expert_gating_func": 2,
}  # fmt: skip

# glm5-next: three layers with a state, then one that attends to the best-scored tokens, pool by pool.
POOL = 2
GLM5: dict[str, Value] = {
    **RMS, **NORM, **MOE, **KDA_VALUES, **HYPER, **INDEXED,
    "attention.key_length": KV_RANK, "attention.value_length": KV_RANK,
    "attention.key_length_mla": HEAD, "attention.value_length_mla": HEAD, "rope.dimension_count": 0,
    "attention.indexer.kpool": POOL, "attention.indexer.kpool_select_tail": True,
}  # fmt: skip


def _glm5_next(layer: int) -> Shapes:
    shapes = norms("attn_norm", "ffn_norm") | SINKHORN | feed_forward(layer)
    if EVERY_FOURTH[layer]:
        pooled = {
            "indexer_compressor_gate.weight": (INDEX_KEY, N_EMBD),
            "indexer_compressor_ape.weight": (POOL, INDEX_KEY),
        }
        return shapes | _low_rank(0) | _indexer() | pooled
    width = kda()["ssm_norm.weight"][0]
    inner = kda()["ssm_dt.bias"][0]
    shapes |= {f"ssm_{name}_a.weight": (width, N_EMBD) for name in "fg"}
    shapes |= {f"ssm_{name}_b.weight": (inner, width) for name in "fg"}
    return shapes | kda() | {"ssm_a": (N_HEADS,)}


def _bloom(_: int) -> Shapes:
    return norms("attn_norm", "ffn_norm", bias=True) | dense(gate=False, bias=True) | {
        "attn_qkv.weight": (3 * N_EMBD, N_EMBD), "attn_qkv.bias": (3 * N_EMBD,),
        "attn_output.weight": (N_EMBD, N_EMBD), "attn_output.bias": (N_EMBD,),
    }  # fmt: skip


def _muse_glimmer(_: int) -> Shapes:
    shapes = norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm") | attention() | dense()
    return shapes | head_norms() | {"attn_gate.weight": (N_HEADS * HEAD, N_EMBD)}


# With a state next to their cells, or cells that are a state.
WIDE_STATES: dict[str, Recipe] = {
    "deepseek4": Recipe("deepseek4", DEEPSEEK4, _deepseek4, tops=STREAMS_HEAD, n_layers=8, may_tie=False, gain=HOT),
    "deepseek4:hash": Recipe(
        "deepseek4",
        {**DEEPSEEK4, "hash_layer_count": N_HASHED},
        _deepseek4_hashed,
        tops=STREAMS_HEAD,
        n_layers=8,
        may_tie=False,
        gain=HOT,
    ),
    "glm5-next": Recipe("glm5-next", GLM5, _glm5_next, n_layers=N_LAYERS, may_tie=False, gain=HOT),
}
WIDE: dict[str, Recipe] = {
    **WIDE_STATES,
    "hy_v4": Recipe(
        "hy_v4", {**HY_V4, **INDEXED, "attention.indexer.types": HY_INDEXERS}, _hy_v4,
        tops=STREAMS_HEAD, n_layers=6, may_tie=False,
    ),
    "hy_v4:full": Recipe(
        "hy_v4", HY_V4, lambda layer: _hy_v4(layer, is_indexed=False), tops=STREAMS_HEAD, may_tie=False
    ),
    "bloom": Recipe(
        "bloom", {**NORM, "attention.head_count_kv": N_HEADS}, _bloom,
        tops=BIASED_NORM | norms("token_embd_norm", bias=True),
    ),
    "muse-glimmer": Recipe(
        "muse-glimmer",
        {**RMS, "attention.sliding_window": 8, "logit_scale": 0.5, "rope.freq_base_swa": 1e3,
         "final_logit_softcapping": 30.0},
        _muse_glimmer, n_layers=8, may_tie=False,
    ),
}  # fmt: skip
