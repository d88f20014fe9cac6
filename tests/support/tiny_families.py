"""The hyperparameters and tensors of every supported family, at a few hundred KiB: see tiny_models."""

from __future__ import annotations

from tests.support.tiny_hybrids import HYBRIDS
from tests.support.tiny_later_families import LATER
from tests.support.tiny_shapes import (
    BIASED_NORM,
    HEAD,
    INDEX_HEADS,
    INDEX_KEY,
    INDEXED,
    KV_RANK,
    LATENT,
    LONG_ROPE,
    MOE,
    N_EMBD,
    N_EXPERTS,
    N_FF,
    N_HEADS,
    N_KV_HEADS,
    NORM,
    Q_RANK,
    RANK_TOPS,
    RANKING,
    RMS,
    ROPE,
    ROPE_TOPS,
    SIGMOID,
    YARN,
    Recipe,
    Shape,
    Shapes,
    Value,
    after_dense,
    attention,
    dense,
    experts,
    fused,
    head_norms,
    norms,
    plain,
    plain_moe,
    prediction,
)
from tests.support.tiny_wide import WIDE


def _qwen2moe(_: int) -> Shapes:
    gate: Shapes = {"ffn_gate_inp_shexp.weight": (N_EMBD,)}
    return norms("attn_norm", "ffn_norm") | attention(bias=True) | experts(32, shared=64) | gate


def _gpt_oss(_: int) -> Shapes:
    shapes = norms("attn_norm", "post_attention_norm") | attention(bias=True, out_bias=True) | experts()
    shapes |= {f"ffn_{name}_exps.bias": (N_EXPERTS, width) for name, width in
               (("gate", N_FF), ("up", N_FF), ("down", N_EMBD))}  # fmt: skip
    return shapes | {"attn_sinks.weight": (N_HEADS,), "ffn_gate_inp.bias": (N_EXPERTS,)}


def _gemma3(_: int) -> Shapes:
    normed = norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    return normed | attention() | head_norms() | dense()


def _gemma3_narrow(_: int) -> Shapes:
    """With heads narrower than their part of a row."""
    n_q, n_kv = N_HEADS * HEAD // 2, N_KV_HEADS * HEAD // 2
    shapes: dict[str, Shape] = {"attn_q.weight": (n_q, N_EMBD), "attn_k.weight": (n_kv, N_EMBD)}
    shapes |= {"attn_v.weight": (n_kv, N_EMBD), "attn_output.weight": (N_EMBD, n_q)}
    return {**_gemma3(0), **shapes, "attn_q_norm.weight": (HEAD // 2,), "attn_k_norm.weight": (HEAD // 2,)}


def _olmo2(_: int) -> Shapes:
    normed = norms("attn_q_norm", "post_attention_norm", "post_ffw_norm") | {"attn_k_norm.weight": (N_KV_HEADS * HEAD,)}
    return normed | attention() | dense()


MIMO2_WINDOWS, STEP35_WINDOWS = [0, 1, 1, 0, 1, 1], [0, 1, 1, 1, 0, 1]
MIMO2_KV_HEADS, STEP35_HEADS = [2, 4, 4, 2, 4, 4], [4, 6, 6, 6, 4, 6]


def _mimo2(layer: int) -> Shapes:
    n_kv, value = MIMO2_KV_HEADS[layer], HEAD // 2
    shapes = norms("attn_norm", "ffn_norm") | attention(n_kv=n_kv) | after_dense(layer, shared=0)
    shapes |= {"attn_v.weight": (n_kv * value, N_EMBD), "attn_output.weight": (N_EMBD, N_HEADS * value)}
    return shapes | ({"attn_sinks.weight": (N_HEADS,)} if MIMO2_WINDOWS[layer] else {})


def _step35(layer: int) -> Shapes:
    n_heads = STEP35_HEADS[layer]
    shapes = norms("attn_norm", "ffn_norm") | attention() | head_norms() | after_dense(layer)
    shapes |= {"attn_q.weight": (n_heads * HEAD, N_EMBD), "attn_output.weight": (N_EMBD, n_heads * HEAD)}
    return shapes | {"attn_gate.weight": (n_heads, N_EMBD)}


def _phi3(_: int) -> Shapes:
    feed: Shapes = {"ffn_up.weight": (2 * N_FF, N_EMBD), "ffn_down.weight": (N_EMBD, N_FF)}
    return norms("attn_norm", "ffn_norm") | fused() | feed


def _phimoe(_: int) -> Shapes:
    return norms("attn_norm", "ffn_norm", bias=True) | attention(bias=True, out_bias=True) | experts()


def _latent(layer: int, *, low_rank_queries: bool = True, absorbed: bool = True) -> Shapes:
    width = N_HEADS * (HEAD + ROPE)
    shapes = norms("attn_norm", "ffn_norm") | {
        "attn_kv_a_norm.weight": (KV_RANK,),
        "attn_kv_a_mqa.weight": (KV_RANK + ROPE, N_EMBD),
        "attn_output.weight": (N_EMBD, N_HEADS * HEAD),
    }
    if low_rank_queries:
        shapes |= {"attn_q_a.weight": (Q_RANK, N_EMBD), "attn_q_a_norm.weight": (Q_RANK,)}
        shapes["attn_q_b.weight"] = (width, Q_RANK)
    else:
        shapes["attn_q.weight"] = (width, N_EMBD)
    if absorbed:
        shapes["attn_k_b.weight"] = (N_HEADS, KV_RANK, HEAD)
        shapes["attn_v_b.weight"] = (N_HEADS, HEAD, KV_RANK)
    else:
        shapes["attn_kv_b.weight"] = (N_HEADS * 2 * HEAD, KV_RANK)
    bias: dict[str, Shape] = {"exp_probs_b.bias": (N_EXPERTS,)}
    return shapes | (dense() if layer < 1 else experts(32, shared=32) | bias)


INDEXERS = [1, 1, 0, 0, 1, 0, 1]  # others attend to the tokens chosen by the layer before


def _indexed(layer: int, *, is_full: bool = True) -> Shapes:
    """Latent attention to the tokens that an indexer scores highest."""
    indexer: Shapes = {
        "indexer.k_norm.weight": (INDEX_KEY,),
        "indexer.k_norm.bias": (INDEX_KEY,),
        "indexer.proj.weight": (INDEX_HEADS, N_EMBD),
        "indexer.attn_k.weight": (INDEX_KEY, N_EMBD),
        "indexer.attn_q_b.weight": (INDEX_HEADS * INDEX_KEY, Q_RANK),
    }
    return {**_latent(layer), **(indexer if is_full else {})}


def _glm4moe(layer: int) -> Shapes:
    shapes = norms("attn_norm", "post_attention_norm") | attention(bias=True) | head_norms()
    bias: dict[str, Shape] = {"exp_probs_b.bias": (N_EXPERTS,)}
    shapes |= dense() if layer < 2 else experts(32, shared=32) | bias
    if layer == 5:  # the prediction block after the decoded ones
        shapes |= prediction()
    return shapes


GEMMA3: dict[str, Value] = {
    **RMS,
    "attention.sliding_window": 8,
    "rope.freq_base": 1e6,
    "rope.scaling.type": "linear",
    "rope.scaling.factor": 8.0,
}
GRANITE: dict[str, Value] = {
    **RMS,
    "embedding_scale": 3.0,
    "residual_scale": 0.6,
    "logit_scale": 2.0,
    "attention.scale": 0.2,
}

RECIPES: dict[str, Recipe] = {
    "llama": Recipe("llama", RMS, plain, norms("output_norm") | {"rope_freqs.weight": (HEAD // 2,)}, n_layers=6),
    "llama:moe": Recipe("llama", {**RMS, **MOE}, plain_moe),
    "llama:arrays": Recipe(
        "llama", RMS, plain, per_layer=("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    ),
    "mistral3": Recipe(
        "mistral3",
        {**RMS, "attention.temperature_scale": 0.3, "rope.scaling.original_context_length": 8},
        plain,
    ),
    "qwen2": Recipe("qwen2", RMS, lambda _: norms("attn_norm", "ffn_norm") | attention(bias=True) | dense()),
    "qwen2moe": Recipe(
        "qwen2moe",
        {**RMS, **MOE, "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 64},
        _qwen2moe,
        may_tie=False,
    ),
    "qwen3": Recipe("qwen3", RMS, lambda layer: {**plain(layer), **head_norms()}),
    "qwen3:reranker": Recipe(
        "qwen3", {**RMS, **RANKING}, lambda layer: {**plain(layer), **head_norms()}, RANK_TOPS
    ),
    "qwen3moe": Recipe(
        "qwen3moe",
        {**RMS, **MOE, "expert_feed_forward_length": N_FF},
        lambda layer: {**plain_moe(layer), **head_norms()},
    ),
    "phi3": Recipe(
        "phi3", {**RMS, **LONG_ROPE, "attention.sliding_window": 8}, _phi3, norms("output_norm") | ROPE_TOPS
    ),
    "phimoe": Recipe(
        "phimoe", {**RMS, **MOE, **LONG_ROPE}, _phimoe, BIASED_NORM | ROPE_TOPS | {"output.bias": (0,)}, may_tie=False
    ),
    "granite": Recipe("granite", GRANITE, plain),
    "granitemoe": Recipe(
        "granitemoe",
        {**GRANITE, **MOE, "expert_shared_feed_forward_length": 32},
        lambda _: norms("attn_norm", "ffn_norm") | attention() | experts(shared=32),
    ),
    "deepseek2": Recipe("deepseek2", {**RMS, **MOE, **LATENT, "attention.q_lora_rank": Q_RANK}, _latent),
    "deepseek32": Recipe("deepseek32", {**RMS, **MOE, **LATENT, **INDEXED}, _indexed),
    "glm-dsa": Recipe(
        "glm-dsa",
        {**RMS, **MOE, **LATENT, **INDEXED, "nextn_predict_layers": 1},
        lambda layer: {**_indexed(layer), **(prediction() if layer == 5 else {})},
        n_layers=6,
    ),
    "glm-dsa:5.2": Recipe(
        "glm-dsa",
        {**RMS, **MOE, **LATENT, **INDEXED, "context_length": 1 << 20},
        lambda layer: _indexed(layer, is_full=layer < 2 or layer % 4 == 2),
        n_layers=7,
    ),
    "glm-dsa:shared": Recipe(
        "glm-dsa",
        {**RMS, **MOE, **LATENT, **INDEXED, "attention.indexer.types": INDEXERS},
        lambda layer: _indexed(layer, is_full=bool(INDEXERS[layer])),
        n_layers=7,
    ),
    "deepseek2:legacy": Recipe(
        "deepseek2",
        {**RMS, **MOE, **LATENT, "attention.q_lora_rank": Q_RANK, "attention.head_count_kv": N_HEADS,
         "attention.key_length": HEAD + ROPE, "attention.value_length": HEAD, "attention.key_length_mla": 0,
         "attention.value_length_mla": 0},
        lambda layer: _latent(layer, absorbed=False),
    ),
    "deepseek2:lite": Recipe(
        "deepseek2", {**RMS, **MOE, **LATENT}, lambda layer: _latent(layer, low_rank_queries=False), n_layers=27
    ),
    "glm4moe": Recipe(
        "glm4moe",
        {**RMS, **MOE, "expert_feed_forward_length": 32, "expert_shared_count": 1, "leading_dense_block_count": 2,
         "expert_weights_scale": 1.5, "expert_weights_norm": True, "nextn_predict_layers": 1},
        _glm4moe,
        n_layers=6,
    ),
    "olmo": Recipe("olmo", {**NORM, "attention.clamp_kqv": 2.0}, lambda _: attention() | dense(), {}),
    "olmoe": Recipe(
        "olmoe",
        {**RMS, **MOE, "attention.head_count_kv": N_HEADS},
        lambda _: norms("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm") | attention(n_kv=N_HEADS) | experts(),
        may_tie=False,
    ),
    "falcon": Recipe(
        "falcon", NORM, lambda _: norms("attn_norm", "attn_norm_2", bias=True) | fused() | dense(gate=False),
        BIASED_NORM,
    ),
    "stablelm": Recipe(
        "stablelm",
        {**NORM, "rope.dimension_count": HEAD // 2},
        lambda _: norms("attn_norm", "ffn_norm", bias=True) | attention(bias=True) | dense(),
        BIASED_NORM,
        may_tie=False,
    ),
    "starcoder2": Recipe(
        "starcoder2",
        NORM,
        lambda _: norms("attn_norm", "ffn_norm", bias=True) | attention(bias=True, out_bias=True)
        | dense(gate=False, bias=True),
        BIASED_NORM,
    ),
    "smollm3": Recipe("smollm3", RMS, plain, n_layers=10),
    "command-r": Recipe(
        "command-r", {**NORM, "logit_scale": 0.5}, lambda _: norms("attn_norm") | attention() | dense(),
        always_tied=True,
    ),
    "internlm2": Recipe("internlm2", RMS, plain, may_tie=False),
    "gptneox": Recipe(
        "gptneox",
        {**NORM, "use_parallel_residual": True, "rope.dimension_count": HEAD // 2},
        lambda _: norms("attn_norm", "ffn_norm", bias=True) | fused(bias=True) | dense(gate=False, bias=True),
        BIASED_NORM,
        may_tie=False,
    ),
    "gptneox:serial": Recipe(
        "gptneox",
        {**NORM, "use_parallel_residual": False},
        lambda _: norms("attn_norm", "ffn_norm", bias=True) | fused(bias=True) | dense(gate=False, bias=True),
        BIASED_NORM,
        may_tie=False,
    ),
    "arcee": Recipe(
        "arcee",
        RMS,
        lambda _: norms("attn_norm", "ffn_norm") | attention() | dense(gate=False),
        norms("output_norm") | {"rope_freqs.weight": (HEAD // 2,)},
    ),
    "deepseek": Recipe(
        "deepseek",
        {**RMS, **MOE, "expert_feed_forward_length": 32, "expert_shared_count": 1, "leading_dense_block_count": 1,
         "expert_weights_scale": 1.5},
        lambda layer: norms("attn_norm", "ffn_norm") | attention()
        | (dense() if layer < 1 else experts(32, shared=32)),
    ),
    "dots1": Recipe(
        "dots1",
        {**RMS, **MOE, "attention.head_count_kv": N_HEADS, "expert_feed_forward_length": 32, "expert_shared_count": 1,
         "leading_dense_block_count": 2, "expert_gating_func": 2, "expert_weights_norm": True},
        lambda layer: norms("attn_norm", "ffn_norm") | attention(n_kv=N_HEADS) | head_norms()
        | (dense() if layer < 2 else experts(32, shared=32) | {"exp_probs_b.bias": (N_EXPERTS,)}),
        may_tie=False,
    ),
    "ernie4_5": Recipe("ernie4_5", RMS, plain),
    "exaone": Recipe("exaone", RMS, plain, norms("output_norm") | {"rope_freqs.weight": (HEAD // 2,)}),
    "hunyuan-moe": Recipe(
        "hunyuan-moe",
        {**RMS, **MOE, "expert_feed_forward_length": N_FF, "expert_shared_feed_forward_length": 32},
        lambda _: norms("attn_norm", "ffn_norm") | attention() | head_norms() | experts(shared=32),
    ),
    "minimax-m2": Recipe(
        "minimax-m2",
        {**RMS, **MOE, "expert_feed_forward_length": N_FF, "expert_gating_func": 2},
        lambda layer: {
            **plain_moe(layer), "attn_q_norm.weight": (N_HEADS * HEAD,), "attn_k_norm.weight": (N_KV_HEADS * HEAD,),
            "exp_probs_b.bias": (N_EXPERTS,),
        },
        may_tie=False,
    ),
    "nemotron": Recipe(
        "nemotron",
        NORM,
        lambda _: norms("attn_norm", "ffn_norm", bias=True) | attention() | dense(gate=False),
        BIASED_NORM,
        may_tie=False,
    ),
    "orion": Recipe(
        "orion", NORM, lambda _: norms("attn_norm", "ffn_norm", bias=True) | attention() | dense(), BIASED_NORM,
        may_tie=False,
    ),
    "seed_oss": Recipe(
        "seed_oss", RMS, lambda _: norms("attn_norm", "post_attention_norm") | attention(bias=True) | dense()
    ),
    "xverse": Recipe("xverse", RMS, plain, may_tie=False),
    "gpt-oss": Recipe(
        "gpt-oss",
        {**RMS, **MOE, **YARN, "expert_feed_forward_length": N_FF, "attention.sliding_window": 8},
        _gpt_oss,
        n_layers=6,
        may_tie=False,
    ),
    "gemma": Recipe("gemma", RMS, plain, always_tied=True),
    "gemma2": Recipe(
        "gemma2",
        {**RMS, "attention.sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        lambda _: norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm") | attention() | dense(),
        n_layers=6,
        always_tied=True,
    ),
    "gemma3": Recipe("gemma3", GEMMA3, _gemma3, n_layers=8),
    "gemma3:pattern": Recipe("gemma3", {**GEMMA3, "attention.sliding_window_pattern": 3}, _gemma3),
    "gemma3:27b": Recipe(
        "gemma3", {**GEMMA3, "attention.key_length": HEAD // 2, "attention.value_length": HEAD // 2}, _gemma3_narrow,
        n_layers=62,
    ),
    "gemma3:plain": Recipe("gemma3", {**RMS, "final_logit_softcapping": 30.0}, _gemma3),
    "cohere2": Recipe(
        "cohere2",
        {**NORM, "logit_scale": 0.5, "attention.sliding_window": 8},
        lambda _: norms("attn_norm") | attention() | dense(),
        n_layers=8,
        always_tied=True,
    ),
    "olmo2": Recipe("olmo2", RMS, _olmo2, may_tie=False),
    "olmo2:windows": Recipe(
        "olmo2", {**RMS, **YARN, "attention.sliding_window": 8}, _olmo2, n_layers=8, may_tie=False
    ),
    "exaone4": Recipe(
        "exaone4",
        RMS,
        lambda _: norms("post_attention_norm", "post_ffw_norm") | attention() | head_norms() | dense(),
        norms("output_norm") | {"rope_freqs.weight": (HEAD // 2,)},
    ),
    "exaone-moe": Recipe(
        "exaone-moe",
        {**RMS, **MOE, **SIGMOID, "attention.sliding_window": 8},
        lambda layer: norms("attn_norm", "ffn_norm") | attention() | head_norms() | after_dense(layer),
        n_layers=8,
        may_tie=False,
    ),
    "ernie4_5-moe": Recipe(
        "ernie4_5-moe",
        {**RMS, **MOE, "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 32,
         "interleave_moe_layer_step": 1, "leading_dense_block_count": 1},
        lambda layer: norms("attn_norm", "ffn_norm") | attention() | after_dense(layer),
    ),
    "bailingmoe2": Recipe(
        "bailingmoe2",
        {**RMS, **MOE, **SIGMOID},
        lambda layer: norms("attn_norm", "ffn_norm") | fused() | head_norms() | after_dense(layer),
        may_tie=False,
    ),
    "hunyuan-dense": Recipe(
        "hunyuan-dense", {**RMS, "rope.scaling.alpha": 50.0}, lambda layer: {**plain(layer), **head_norms()}
    ),
    "apertus": Recipe(
        "apertus",
        {**RMS, "xielu.alpha_n": [0.2, 0.4, 0.6, 0.8, 1.0], "xielu.alpha_p": [1.0, 0.9, 0.8, 0.7, 0.6],
         "xielu.beta": [0.5, 0.4, 0.3, 0.2, 0.1], "xielu.eps": [-1e-6] * 5},
        lambda _: norms("attn_norm", "ffn_norm") | attention() | head_norms() | dense(gate=False),
        norms("output_norm") | {"rope_freqs.weight": (HEAD // 2,)},
        may_tie=False,
    ),
    "mimo2": Recipe(
        "mimo2",
        {**RMS, **MOE, "attention.sliding_window": 8, "attention.sliding_window_pattern": MIMO2_WINDOWS,
         "attention.head_count_kv": MIMO2_KV_HEADS, "attention.key_length": HEAD, "attention.value_length": HEAD // 2,
         "attention.value_scale": 0.7, "rope.dimension_count": HEAD // 2, "rope.freq_base": 5e6,
         "expert_feed_forward_length": 32},
        _mimo2,
        n_layers=6,
        may_tie=False,
    ),
    "step35": Recipe(
        "step35",
        {**RMS, **MOE, "attention.sliding_window": 8, "attention.sliding_window_pattern": STEP35_WINDOWS,
         "attention.head_count": STEP35_HEADS, "attention.key_length": HEAD, "attention.value_length": HEAD,
         "rope.dimension_count": HEAD, "rope.freq_base": 5e6, "expert_feed_forward_length": 32,
         "expert_shared_feed_forward_length": 32, "expert_weights_norm": True, "expert_weights_scale": 1.5,
         "swiglu_clamp_exp": [0.0, 0.1, 0.0, 0.2, 0.0, 0.3], "swiglu_clamp_shexp": [0.0, 0.0, 0.1, 0.0, 0.2, 0.0]},
        _step35,
        norms("output_norm") | {"rope_freqs.weight": (HEAD // 2,)},
        n_layers=6,
        may_tie=False,
    ),
    "llama4": Recipe(
        "llama4",
        {**RMS, **MOE, "expert_feed_forward_length": 32, "interleave_moe_layer_step": 2},
        lambda layer: norms("attn_norm", "ffn_norm") | attention()
        | (experts(32, shared=32) if layer % 2 else dense()),
        norms("output_norm") | {"rope_freqs.weight": (HEAD // 2,)},
        n_layers=12,
    ),
    "grok": Recipe(
        "grok",
        {**RMS, **MOE, "expert_feed_forward_length": 32},
        lambda _: norms("attn_norm", "attn_output_norm", "ffn_norm", "layer_output_norm") | attention() | dense()
        | experts(32),
    ),
    "mistral4": Recipe(
        "mistral4",
        {**RMS, **MOE, **LATENT, **YARN, "attention.q_lora_rank": Q_RANK, "attention.temperature_scale": 0.3,
         "attention.temperature_length": 8},
        _latent,
    ),
}  # fmt: skip

RECIPES |= LATER | HYBRIDS | WIDE
