"""Recipes of families that were added after the first fifty: see tiny_families."""

from __future__ import annotations

from tests.support.tiny_shapes import (
    BIASED_NORM,
    CTX,
    HEAD,
    MOE,
    N_EMBD,
    N_EXPERTS,
    N_FF,
    N_HEADS,
    N_KV_HEADS,
    NORM,
    RANK_TOPS,
    RANKING,
    RMS,
    SIGMOID,
    VOCABULARY,
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

AXES: dict[str, Value] = {"rope.dimension_sections": [3, 3, 2, 0]}
SMALL_EXPERTS: dict[str, Value] = {**MOE, "expert_feed_forward_length": 32}

# gemma4: five layers with a window, then one without. The latter's heads are fewer and wider and have no separate
# values.
GEMMA4_WINDOWS = [layer % 6 < 5 for layer in range(12)]
GEMMA4: dict[str, Value] = {
    **RMS,
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": GEMMA4_WINDOWS,
    "attention.head_count_kv": [2 if is_windowed else 1 for is_windowed in GEMMA4_WINDOWS],
    "attention.key_length": 2 * HEAD,
    "attention.value_length": 2 * HEAD,
    "attention.key_length_swa": HEAD,
    "attention.value_length_swa": HEAD,
    "attention.shared_kv_layers": 0,
    "rope.dimension_count": 2 * HEAD,
    "rope.dimension_count_swa": HEAD,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "embedding_length_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
GEMMA4_TOPS = norms("output_norm") | {"rope_freqs.weight": (HEAD,)}


def _gemma4(layer: int) -> dict[str, Shape]:
    is_windowed = GEMMA4_WINDOWS[layer]
    head, n_kv = (HEAD, 2) if is_windowed else (2 * HEAD, 1)
    shapes = norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm") | dense()
    shapes |= {"attn_q.weight": (N_HEADS * head, N_EMBD), "attn_k.weight": (n_kv * head, N_EMBD)}
    shapes |= {"attn_v.weight": (n_kv * head, N_EMBD)} if is_windowed else {}
    shapes |= {"attn_output.weight": (N_EMBD, N_HEADS * head), "layer_output_scale.weight": (1,)}
    return shapes | {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}


def _gemma4_moe(layer: int) -> Shapes:
    shapes = _gemma4(layer) | norms("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
    shapes |= {"ffn_gate_inp.weight": (N_EXPERTS, N_EMBD), "ffn_gate_inp.scale": (N_EMBD,)}
    shapes |= {"ffn_gate_up_exps.weight": (N_EXPERTS, 64, N_EMBD), "ffn_down_exps.weight": (N_EXPERTS, N_EMBD, 32)}
    return shapes | {"ffn_down_exps.scale": (N_EXPERTS,)}


# And E2B: each layer has its own inputs, and the last four have no cells.
INPUT_WIDTH, GEMMA4_E_LAYERS, N_SHARING = 32, 12, 4
GEMMA4_E_WINDOWS = [layer % 4 < 3 for layer in range(GEMMA4_E_LAYERS)]
GEMMA4_E: dict[str, Value] = {
    **GEMMA4,
    "attention.sliding_window_pattern": GEMMA4_E_WINDOWS,
    "attention.head_count_kv": 1,
    "attention.shared_kv_layers": N_SHARING,
    "embedding_length_per_layer_input": INPUT_WIDTH,
    "feed_forward_length": [N_FF if layer < GEMMA4_E_LAYERS - N_SHARING else 2 * N_FF for layer in range(12)],
}
GEMMA4_E_TOPS: Shapes = {
    **GEMMA4_TOPS,
    "per_layer_token_embd.weight": (VOCABULARY, INPUT_WIDTH * GEMMA4_E_LAYERS),
    "per_layer_model_proj.weight": (INPUT_WIDTH * GEMMA4_E_LAYERS, N_EMBD),
    "per_layer_proj_norm.weight": (INPUT_WIDTH,),
}


def _gemma4_e(layer: int) -> Shapes:
    head = HEAD if GEMMA4_E_WINDOWS[layer] else 2 * HEAD
    is_sharing = layer >= GEMMA4_E_LAYERS - N_SHARING
    n_ff = 2 * N_FF if is_sharing else N_FF
    shapes: dict[str, Shape] = norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm")
    shapes |= {"attn_q.weight": (N_HEADS * head, N_EMBD), "attn_q_norm.weight": (head,)}
    if not is_sharing:
        shapes |= {f"attn_{name}.weight": (head, N_EMBD) for name in "kv"} | {"attn_k_norm.weight": (head,)}
    shapes |= {"attn_output.weight": (N_EMBD, N_HEADS * head), "layer_output_scale.weight": (1,)}
    shapes |= {f"ffn_{name}.weight": (n_ff, N_EMBD) for name in ("gate", "up")} | {"ffn_down.weight": (N_EMBD, n_ff)}
    return shapes | {"inp_gate.weight": (INPUT_WIDTH, N_EMBD), "proj.weight": (N_EMBD, INPUT_WIDTH)}


def _glm4(_: int, bias: bool = False) -> dict[str, Shape]:
    normed = norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    return normed | attention(bias=bias) | _double_up()


def _double_up() -> dict[str, Shape]:
    """A gate and its gated part, in one matrix."""
    return {"ffn_up.weight": (2 * N_FF, N_EMBD), "ffn_down.weight": (N_EMBD, N_FF)}


def _hy_v3(layer: int) -> Shapes:
    shapes = norms("attn_norm", "ffn_norm") | attention() | head_norms()
    shapes |= dense() if layer < 1 else experts(32, shared=32) | {"exp_probs_b": (N_EXPERTS,)}
    return {**shapes, **(prediction() if layer == 5 else {})}


LAGUNA_HEADS = [4, 6, 6, 6, 4, 6, 6, 6]


def _laguna(layer: int) -> Shapes:
    n_heads = LAGUNA_HEADS[layer]
    shapes = norms("attn_norm", "ffn_norm") | attention() | head_norms() | after_dense(layer)
    shapes |= {"attn_q.weight": (n_heads * HEAD, N_EMBD), "attn_output.weight": (N_EMBD, n_heads * HEAD)}
    return shapes | {"attn_gate.weight": (n_heads, N_EMBD)}


def _afmoe(layer: int) -> Shapes:
    shapes = norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm") | attention() | head_norms()
    return shapes | after_dense(layer) | {"attn_gate.weight": (N_HEADS * HEAD, N_EMBD)}


def _minimax_m3(layer: int) -> Shapes:
    shapes = norms("attn_norm", "ffn_norm") | attention() | head_norms()
    if layer < 2:
        return shapes | dense()
    shapes |= experts(32, shared=32) | {"exp_probs_b.bias": (N_EXPERTS,)}
    shapes |= {"indexer.q_proj.weight": (N_KV_HEADS * HEAD, N_EMBD), "indexer.k_proj.weight": (HEAD, N_EMBD)}
    return shapes | {"indexer.q_norm.weight": (HEAD,), "indexer.k_norm.weight": (HEAD,)}


# As in pruned models of Llama: layers without attention, with a product in its place, and without a feed-forward part.
DECI_HEADS, DECI_KV_HEADS = [4, 4, 0, 4, 4, 0, 4, 4], [2, 2, 0, 2, 0, 0, 2, 2]
DECI_WIDTHS = [96, 96, 96, 64, 96, 0, 96, 96]


def _deci(layer: int) -> Shapes:
    shapes: dict[str, Shape] = {}
    if DECI_KV_HEADS[layer]:
        shapes |= norms("attn_norm") | attention()
    elif DECI_HEADS[layer]:
        shapes |= norms("attn_norm") | {"attn_output.weight": (N_EMBD, N_EMBD)}
    width = DECI_WIDTHS[layer]
    if width:
        shapes |= norms("ffn_norm") | {"ffn_down.weight": (N_EMBD, width)}
        shapes |= {f"ffn_{name}.weight": (width, N_EMBD) for name in ("gate", "up")}
    return shapes


def _grovemoe(_: int) -> Shapes:
    shapes = norms("attn_norm", "ffn_norm") | attention() | head_norms() | experts(32)
    shapes |= {f"ffn_{name}_chexps.weight": (N_EXPERTS // 2, 16, N_EMBD) for name in ("gate", "up")}
    return shapes | {"ffn_down_chexps.weight": (N_EXPERTS // 2, N_EMBD, 16)}


OPENELM_HEADS, OPENELM_KV_HEADS, OPENELM_WIDTHS = [2, 4, 4, 6], [1, 2, 2, 3], [32, 64, 96, 128]


def _openelm(layer: int) -> Shapes:
    n_heads, n_kv, width = OPENELM_HEADS[layer], OPENELM_KV_HEADS[layer], OPENELM_WIDTHS[layer]
    shapes = norms("attn_norm", "ffn_norm") | head_norms()
    shapes |= {"attn_qkv.weight": ((n_heads + 2 * n_kv) * HEAD, N_EMBD)}
    shapes |= {"attn_output.weight": (N_EMBD, n_heads * HEAD), "ffn_down.weight": (N_EMBD, width)}
    return shapes | {f"ffn_{name}.weight": (width, N_EMBD) for name in ("gate", "up")}


def _plamo3(_: int) -> Shapes:
    plain_names: Shapes = {"post_attention_norm": (N_EMBD,), "post_ffw_norm": (N_EMBD,)}
    return norms("attn_norm", "ffn_norm") | fused() | head_norms() | _double_up() | plain_names


def _qwen(_: int) -> Shapes:
    width = 3 * N_EMBD
    return norms("attn_norm", "ffn_norm") | dense() | {
        "attn_qkv.weight": (width, N_EMBD), "attn_qkv.bias": (width,), "attn_output.weight": (N_EMBD, N_EMBD),
    }  # fmt: skip


def _bitnet(_: int) -> Shapes:
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    scales: Shapes = {f"{name}.scale": (1,) for name in matrices}
    normed = norms("attn_norm", "attn_sub_norm", "ffn_norm") | {"ffn_sub_norm.weight": (N_FF,)}
    return normed | attention() | dense() | scales


def _learned(_: int) -> Shapes:
    """As in GPT-2: positions are a table, all matrices have biases."""
    return norms("attn_norm", "ffn_norm", bias=True) | fused(bias=True) | dense(gate=False, bias=True)


POSITIONS: Shapes = {"position_embd.weight": (CTX, N_EMBD)}

LATER: dict[str, Recipe] = {
    "gemma4": Recipe("gemma4", GEMMA4, _gemma4, GEMMA4_TOPS, n_layers=12, always_tied=True),
    "gemma4:e2b": Recipe("gemma4", GEMMA4_E, _gemma4_e, GEMMA4_E_TOPS, n_layers=GEMMA4_E_LAYERS, always_tied=True),
    "gemma4:moe": Recipe(
        "gemma4", {**GEMMA4, **SMALL_EXPERTS}, _gemma4_moe, GEMMA4_TOPS, n_layers=12, always_tied=True
    ),
    "qwen3vl": Recipe(
        "qwen3vl", {**RMS, **AXES, "n_deepstack_layers": 2}, lambda layer: {**plain(layer), **head_norms()}
    ),
    "qwen3vl:reranker": Recipe(
        "qwen3vl",
        {**RMS, **AXES, **RANKING, "n_deepstack_layers": 2},
        lambda layer: {**plain(layer), **head_norms()},
        RANK_TOPS,
    ),
    "qwen3vlmoe": Recipe(
        "qwen3vlmoe",
        {**RMS, **AXES, **MOE, "expert_feed_forward_length": N_FF, "n_deepstack_layers": 3},
        lambda layer: {**plain_moe(layer), **head_norms()},
    ),
    "qwen2vl": Recipe(
        "qwen2vl", {**RMS, **AXES}, lambda _: norms("attn_norm", "ffn_norm") | attention(bias=True) | dense()
    ),
    "hunyuan_vl": Recipe(
        "hunyuan_vl",
        {**RMS, "rope.dimension_sections": [2, 2, 2, 2], "rope.scaling.alpha": 50.0},
        lambda layer: {**plain(layer), **head_norms()},
    ),
    "paddleocr": Recipe("paddleocr", {**RMS, **AXES}, plain),
    "glm4": Recipe("glm4", {**RMS, "rope.dimension_count": HEAD // 2}, _glm4),
    "glm4:bias": Recipe("glm4", {**RMS, "rope.dimension_count": HEAD // 2}, lambda layer: _glm4(layer, bias=True)),
    "glm4:axes": Recipe(
        "glm4",
        {**RMS, **AXES, "nextn_predict_layers": 1},
        lambda layer: _glm4(layer) | (prediction() if layer == 5 else {}),
        n_layers=6,
    ),
    "hy_v3": Recipe(
        "hy_v3",
        {**RMS, **SMALL_EXPERTS, "expert_shared_feed_forward_length": 32, "expert_weights_norm": True,
         "expert_weights_scale": 1.5, "nextn_predict_layers": 1},
        _hy_v3,
        n_layers=6,
    ),
    "laguna": Recipe(
        "laguna",
        {**RMS, **SMALL_EXPERTS, **YARN, "attention.head_count": LAGUNA_HEADS, "attention.key_length": HEAD,
         "attention.value_length": HEAD, "attention.sliding_window": 8, "rope.dimension_count": HEAD // 2,
         "rope.dimension_count_swa": HEAD, "rope.freq_base": 5e5, "rope.freq_base_swa": 1e4,
         "leading_dense_block_count": 1, "expert_shared_feed_forward_length": 32, "expert_weights_norm": True,
         "expert_weights_scale": 1.5},
        _laguna,
        n_layers=8,
    ),
    "cohere2moe": Recipe(
        "cohere2moe",
        {**NORM, **SMALL_EXPERTS, "logit_scale": 0.5, "attention.sliding_window": 8, "leading_dense_block_count": 1,
         "expert_shared_count": 1, "expert_weights_norm": True},
        lambda layer: norms("attn_norm") | attention() | (dense() if layer < 1 else experts(32, shared=32)),
        n_layers=9,
        always_tied=True,
    ),
    # As converters write it with a block for prediction: arrays have an item for that, too.
    "cohere2moe:prediction": Recipe(
        "cohere2moe",
        {**NORM, **SMALL_EXPERTS, "logit_scale": 0.5, "attention.sliding_window": 8, "leading_dense_block_count": 1,
         "expert_shared_count": 1, "nextn_predict_layers": 1,
         "attention.sliding_window_pattern": [layer % 4 != 0 for layer in range(8)] + [False],
         "attention.head_count_kv": [N_KV_HEADS] * 9},
        lambda layer: norms("attn_norm") | attention() | (dense() if layer < 1 else experts(32, shared=32))
        | (prediction() if layer == 8 else {}),
        n_layers=9,
        always_tied=True,
    ),
    "afmoe": Recipe("afmoe", {**RMS, **MOE, **SIGMOID, "attention.sliding_window": 8}, _afmoe, n_layers=10),
    "minimax-m3": Recipe(
        "minimax-m3",
        {**RMS, **MOE, **SIGMOID, "leading_dense_block_count": 2, "rope.dimension_count": HEAD // 2,
         "attention.indexer.head_count": N_KV_HEADS, "attention.indexer.key_length": HEAD,
         "attention.indexer.top_k": 2, "attention.indexer.block_size": 4, "attention.indexer.local_blocks": 1},
        _minimax_m3,
        n_layers=7,
        may_tie=False,
    ),
    "minicpm": Recipe("minicpm", RMS, plain),
    "minicpm:stated": Recipe(
        "minicpm",
        {**RMS, **MOE, "embedding_scale": 3.0, "residual_scale": 0.6, "logit_scale": 0.7},
        plain_moe,
    ),
    "chatglm": Recipe(
        "chatglm",
        {**RMS, "rope.dimension_count": HEAD // 2},
        lambda _: norms("attn_norm", "ffn_norm") | fused() | _double_up()
        | {"attn_qkv.bias": ((N_HEADS + 2 * N_KV_HEADS) * HEAD,)},
    ),
    "bailingmoe": Recipe(
        "bailingmoe",
        {**RMS, **SMALL_EXPERTS, "rope.dimension_count": HEAD, "expert_shared_count": 1, "expert_weights_norm": True,
         "leading_dense_block_count": 0, "expert_weights_scale": 1.0},
        lambda _: norms("attn_norm", "ffn_norm") | attention() | experts(32, shared=32),
        may_tie=False,
    ),
    "dbrx": Recipe(
        "dbrx",
        {**NORM, **MOE, "attention.clamp_kqv": 2.0},
        lambda _: norms("attn_norm", "attn_output_norm") | fused() | experts(),
        may_tie=False,
    ),
    "arctic": Recipe(
        "arctic",
        {**RMS, **MOE},
        lambda _: norms("attn_norm", "ffn_norm", "ffn_norm_exps") | attention() | experts()
        | {f"ffn_{name}.weight": (N_EMBD, N_EMBD) for name in ("gate", "up", "down")},
    ),
    "deci": Recipe(
        "deci",
        {**RMS, "attention.head_count": DECI_HEADS, "attention.head_count_kv": DECI_KV_HEADS,
         "feed_forward_length": DECI_WIDTHS},
        _deci,
        norms("output_norm") | {"rope_freqs.weight": (HEAD // 2,)},
        n_layers=8,
    ),
    "grovemoe": Recipe(
        "grovemoe",
        {**RMS, **SMALL_EXPERTS, "expert_chunk_feed_forward_length": 16, "expert_group_scale": 0.5,
         "experts_per_group": 2},
        _grovemoe,
    ),
    "jais": Recipe(
        "jais",
        {**NORM, "attention.max_alibi_bias": 8.0},
        lambda _: norms("attn_norm", "ffn_norm", bias=True) | fused(bias=True) | dense(bias=True)
        | {"ffn_gate.bias": (N_FF,)},
        BIASED_NORM,
        may_tie=False,
    ),
    "jais2": Recipe(
        "jais2",
        NORM,
        lambda _: norms("attn_norm", "ffn_norm", bias=True) | attention(bias=True, out_bias=True)
        | dense(gate=False, bias=True),
        BIASED_NORM,
    ),
    "openelm": Recipe(
        "openelm",
        {**RMS, "attention.head_count": OPENELM_HEADS, "attention.head_count_kv": OPENELM_KV_HEADS,
         "feed_forward_length": OPENELM_WIDTHS, "attention.key_length": HEAD, "attention.value_length": HEAD,
         "rope.dimension_count": HEAD},
        _openelm,
        n_layers=4,
        always_tied=True,
    ),
    "phi2": Recipe(
        "phi2",
        {**NORM, "rope.dimension_count": HEAD // 2},
        lambda _: norms("attn_norm", bias=True) | attention(bias=True, out_bias=True) | dense(gate=False, bias=True),
        BIASED_NORM | {"output.bias": (0,)},
        may_tie=False,
    ),
    "plamo": Recipe("plamo", RMS, lambda _: norms("attn_norm") | attention() | dense(), may_tie=False),
    "plamo3": Recipe(
        "plamo3", {**RMS, "attention.sliding_window": 8, "rope.freq_base_swa": 1e3}, _plamo3, n_layers=10
    ),
    "refact": Recipe("refact", {**RMS, "attention.head_count_kv": 1},
                     lambda _: norms("attn_norm", "ffn_norm") | attention(n_kv=1) | dense()),
    "smallthinker": Recipe(
        "smallthinker",
        {**RMS, **SMALL_EXPERTS, "attention.sliding_window": 4096, "expert_gating_func": 2},
        lambda _: norms("attn_norm", "ffn_norm") | attention() | experts(32),
        n_layers=20,
    ),
    "granite_swa": Recipe(
        "granite_swa",
        {**RMS, "embedding_scale": 3.0, "residual_scale": 0.6, "logit_scale": 2.0, "attention.scale": 0.2,
         "attention.sliding_window": 8, "attention.sliding_window_pattern": [True, True, True, False] * 2,
         "attention.rope_pattern": [True, True, False, True] * 2},
        lambda layer: {**plain(layer), "attn_sinks.weight": (N_HEADS,)},
        n_layers=8,
    ),
    "maple": Recipe(
        "maple",
        {**RMS, **SMALL_EXPERTS, "attention.sliding_window": 8, "swiglu_clamp_exp": 0.5, "rope.freq_base_swa": 1e3,
         "attention.sliding_window_pattern": [True, True, True, False] * 2},
        lambda _: norms("attn_norm", "ffn_norm") | attention() | head_norms() | experts(32),
        n_layers=8,
        may_tie=False,
    ),
    "mellum": Recipe(
        "mellum",
        {**RMS, **SMALL_EXPERTS, **YARN, "attention.sliding_window": 8, "rope.freq_base_swa": 1e3},
        lambda _: norms("attn_norm", "ffn_norm") | attention() | head_norms() | experts(32),
        n_layers=8,
        may_tie=False,
    ),
    "spark2_5": Recipe(
        "spark2_5",
        {**RMS, "attention.sliding_window": 8, "attention.sliding_window_pattern": [True, True, True, False] * 2,
         "rope.dimension_count": HEAD // 2, "rope.dimension_count_swa": HEAD, "rope.freq_base_swa": 1e3},
        lambda layer: {**plain(layer), "attn_gate.weight": (N_HEADS, N_EMBD)},
        n_layers=8,
    ),
    "codeshell": Recipe("codeshell", NORM, _learned, BIASED_NORM, may_tie=False),
    "maincoder": Recipe("maincoder", RMS, lambda layer: {**plain(layer), **head_norms()}),
    "nanbeige": Recipe("nanbeige", RMS, plain),
    "pangu-embedded": Recipe(
        "pangu-embedded", RMS,
        lambda _: norms("attn_norm", "ffn_norm") | attention(bias=True, out_bias=True) | dense(),
    ),
    "qwen": Recipe(
        "qwen", {**RMS, "feed_forward_length": 2 * N_FF, "attention.head_count_kv": N_HEADS}, _qwen, may_tie=False
    ),
    "bitnet": Recipe("bitnet", RMS, _bitnet, always_tied=True),
    "deepseek2-ocr": Recipe(
        "deepseek2-ocr",
        {**RMS, **SMALL_EXPERTS, "attention.head_count_kv": N_HEADS, "expert_shared_count": 1,
         "leading_dense_block_count": 1, "expert_weights_scale": 1.0},
        lambda layer: norms("attn_norm", "ffn_norm") | attention(n_kv=N_HEADS)
        | (dense() if layer < 1 else experts(32, shared=32)),
    ),
    "gpt2": Recipe(
        "gpt2",
        {**NORM, "attention.head_count_kv": N_HEADS},
        lambda _: norms("attn_norm", "ffn_norm", bias=True) | dense(gate=False, bias=True)
        | {"attn_qkv.weight": (3 * N_EMBD, N_EMBD), "attn_qkv.bias": (3 * N_EMBD,),
           "attn_output.weight": (N_EMBD, N_EMBD), "attn_output.bias": (N_EMBD,)},
        BIASED_NORM | POSITIONS,
    ),
    "starcoder": Recipe("starcoder", NORM, _learned, BIASED_NORM | POSITIONS),
    "mpt": Recipe(
        "mpt",
        {**NORM, "attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 2.0},
        lambda _: norms("attn_norm", "ffn_norm") | fused() | dense(gate=False),
    ),
    "mpt:positions": Recipe("mpt", NORM, _learned, BIASED_NORM | POSITIONS),
}  # fmt: skip
