"""Recipes of families with recurrent states, deep enough for their periods: see tiny_families.

Their weights are hot (`gain`): with usual ones a wholly wrong state moves the logits by less than a test would see.
"""

from __future__ import annotations

from tests.support.tiny_shapes import (
    HEAD,
    KV_RANK,
    MOE,
    N_EMBD,
    N_EXPERTS,
    N_FF,
    N_HEADS,
    Q_RANK,
    RMS,
    ROPE,
    Recipe,
    Shape,
    Shapes,
    Value,
    attention,
    dense,
    experts,
    head_norms,
    norms,
    prediction,
)

HOT = 2.0  # times the usual size of a layer's matrices
N_LAYERS = 8
STATE, INNER, GROUPS, CONV, SSM_HEADS = 16, 2 * N_EMBD, 2, 4, 8
DELTA_STATE, DELTA_KEYS, DELTA_HEADS = 16, 2, 4  # gated delta net: width of a head, heads of keys, heads of values

# The attention layers of real files: every fourth one, or a few among many.
EVERY_FOURTH = [int(layer % 4 == 3) for layer in range(N_LAYERS)]  # one head of latent keys
SPARSE = [0, 2, 0, 0, 2, 0, 2, 0]

SSM: dict[str, Value] = {
    "ssm.conv_kernel": CONV, "ssm.inner_size": INNER, "ssm.state_size": STATE,
    "ssm.time_step_rank": SSM_HEADS, "ssm.group_count": GROUPS,
}  # fmt: skip
DELTA: dict[str, Value] = {
    **RMS,
    "ssm.conv_kernel": CONV, "ssm.inner_size": DELTA_HEADS * DELTA_STATE, "ssm.state_size": DELTA_STATE,
    "ssm.time_step_rank": DELTA_HEADS, "ssm.group_count": DELTA_KEYS,
    "attention.key_length": HEAD, "attention.value_length": HEAD, "rope.dimension_count": HEAD // 2,
}  # fmt: skip
AXES: dict[str, Value] = {"rope.dimension_sections": [2, 1, 1, 0]}
DELTA_MOE: dict[str, Value] = {**MOE, "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 32}


def _shared_gate() -> dict[str, Shape]:
    return {"ffn_gate_inp_shexp.weight": (N_EMBD,)}


def _gated_attention() -> dict[str, Shape]:
    shapes = attention() | head_norms()
    return shapes | {"attn_q.weight": (2 * N_HEADS * HEAD, N_EMBD)}


def _delta_net(*, has_one_gate: bool = False) -> dict[str, Shape]:
    keys, values = DELTA_KEYS * DELTA_STATE, DELTA_HEADS * DELTA_STATE
    shapes: dict[str, Shape] = {
        "attn_qkv.weight": (2 * keys + values, N_EMBD),
        "attn_gate.weight": (values, N_EMBD),
        "ssm_conv1d.weight": (2 * keys + values, CONV),
        "ssm_dt.bias": (DELTA_HEADS,),
        "ssm_a": (DELTA_HEADS,),
        "ssm_norm.weight": (DELTA_STATE,),
        "ssm_out.weight": (N_EMBD, values),
    }
    if has_one_gate:
        return shapes | {"ssm_ba.weight": (2 * DELTA_HEADS, N_EMBD)}
    return shapes | {f"ssm_{name}.weight": (DELTA_HEADS, N_EMBD) for name in ("alpha", "beta")}


def _qwen35(layer: int) -> Shapes:
    shapes = norms("attn_norm", "post_attention_norm") | dense()
    return shapes | (_gated_attention() if layer % 4 == 3 else _delta_net())


def _qwen35_mtp(layer: int) -> Shapes:
    if layer < N_LAYERS:
        return _qwen35(layer)
    return {**norms("attn_norm", "post_attention_norm"), **dense(), **_gated_attention(), **prediction()}


def _qwen35moe(layer: int) -> Shapes:
    shapes = norms("attn_norm", "post_attention_norm") | experts(32, shared=32) | _shared_gate()
    return shapes | (_gated_attention() if layer % 4 == 3 else _delta_net())


def _qwen3next(layer: int) -> Shapes:
    shapes = norms("attn_norm", "post_attention_norm") | experts(32, shared=32) | _shared_gate()
    return shapes | (_gated_attention() if layer % 4 == 3 else _delta_net(has_one_gate=True))


def _mamba2(*, groups: int = GROUPS) -> dict[str, Shape]:
    width = INNER + 2 * groups * STATE
    return {
        "ssm_in.weight": (INNER + width + SSM_HEADS, N_EMBD),
        "ssm_conv1d.weight": (width, CONV),
        "ssm_conv1d.bias": (width,),
        "ssm_dt.bias": (SSM_HEADS,),
        "ssm_a": (SSM_HEADS, 1),
        "ssm_d": (SSM_HEADS, 1),
        "ssm_norm.weight": (groups, INNER // groups),
        "ssm_out.weight": (N_EMBD, INNER),
    }


DT_RANK = 4


def _mamba(*, is_normed: bool = False) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {
        "ssm_in.weight": (2 * INNER, N_EMBD),
        "ssm_conv1d.weight": (INNER, CONV),
        "ssm_conv1d.bias": (INNER,),
        "ssm_x.weight": (DT_RANK + 2 * STATE, INNER),
        "ssm_dt.weight": (INNER, DT_RANK),
        "ssm_dt.bias": (INNER,),
        "ssm_a": (INNER, STATE),
        "ssm_d": (INNER,),
        "ssm_out.weight": (N_EMBD, INNER),
    }
    if is_normed:
        shapes |= {"ssm_dt_norm.weight": (DT_RANK,), "ssm_b_norm.weight": (STATE,), "ssm_c_norm.weight": (STATE,)}
    return shapes


NO_ATTENTION: dict[str, Value] = {"attention.head_count": 0, "attention.head_count_kv": 0, "feed_forward_length": 0}
MAMBA: dict[str, Value] = {
    **RMS,
    "ssm.conv_kernel": CONV, "ssm.inner_size": INNER, "ssm.state_size": STATE, "ssm.time_step_rank": DT_RANK,
}  # fmt: skip


def _granite(layer: int) -> Shapes:
    shapes = norms("attn_norm", "ffn_norm") | dense()
    return shapes | (attention() if SPARSE[layer] else _mamba2())


def _granite_moe(layer: int) -> Shapes:
    shapes = norms("attn_norm", "ffn_norm") | experts(N_FF, shared=32)
    return shapes | (attention() if SPARSE[layer] else _mamba2())


GRANITE: dict[str, Value] = {
    **RMS, **SSM, "attention.head_count_kv": SPARSE,
    "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 2.0, "attention.scale": 0.2,
    "rope.scaling.finetuned": False,
}  # fmt: skip

# Three kinds of layers, one thing each: M (state), * (attention), - (feed-forward part).
NEMOTRON = "M-M*-M*-M-"
NEMOTRON_HEADS = [2 * (kind == "*") for kind in NEMOTRON]
NEMOTRON_WIDTHS = [N_FF * (kind == "-") for kind in NEMOTRON]


def _nemotron(layer: int, *, has_experts: bool = False) -> Shapes:
    parts = {"M": _mamba2(), "*": attention(), "-": _nemotron_experts() if has_experts else dense(gate=False)}
    return norms("attn_norm") | parts[NEMOTRON[layer]]


def _nemotron_moe(layer: int) -> Shapes:
    return _nemotron(layer, has_experts=True)


def _nemotron_experts() -> dict[str, Shape]:
    return {
        "ffn_gate_inp.weight": (N_EXPERTS, N_EMBD), "exp_probs_b.bias": (N_EXPERTS,),
        "ffn_up_exps.weight": (N_EXPERTS, 32, N_EMBD), "ffn_down_exps.weight": (N_EXPERTS, N_EMBD, 32),
        "ffn_up_shexp.weight": (32, N_EMBD), "ffn_down_shexp.weight": (N_EMBD, 32),
    }  # fmt: skip


NEMOTRON_VALUES: dict[str, Value] = {
    **SSM, **RMS, "attention.layer_norm_epsilon": 1e-5,
    "attention.head_count_kv": NEMOTRON_HEADS, "feed_forward_length": NEMOTRON_WIDTHS,
}  # fmt: skip


def _lfm2(layer: int) -> Shapes:
    return norms("attn_norm", "ffn_norm") | dense() | _short_convolution_or_attention(layer)


def _lfm2moe(layer: int) -> Shapes:
    shapes = norms("attn_norm", "ffn_norm") | _short_convolution_or_attention(layer)
    return shapes | (dense() if layer < 2 else experts(32) | {"exp_probs_b.bias": (N_EXPERTS,)})


def _short_convolution_or_attention(layer: int) -> dict[str, Shape]:
    if SPARSE[layer]:
        return attention() | head_norms()
    return {
        "shortconv.conv.weight": (N_EMBD, 3), "shortconv.in_proj.weight": (3 * N_EMBD, N_EMBD),
        "shortconv.out_proj.weight": (N_EMBD, N_EMBD),
    }  # fmt: skip


LFM2_TOPS = norms("token_embd_norm")


def _jamba(layer: int) -> Shapes:
    shapes = norms("attn_norm", "ffn_norm") | (attention() if SPARSE[layer] else _mamba(is_normed=True))
    return shapes | (experts() if layer % 2 else dense())


def _falcon_h1(_: int) -> Shapes:
    plain_name: Shapes = {"ffn_norm": (N_EMBD,)}
    return {**norms("attn_norm"), **plain_name, **attention(), **dense(), **_mamba2()}


KDA = HEAD
KDA_INNER = N_HEADS * KDA
KDA_VALUES: dict[str, Value] = {
    **RMS, **MOE,
    "attention.key_length": KV_RANK + ROPE, "attention.value_length": KV_RANK,
    "attention.key_length_mla": HEAD + ROPE, "attention.value_length_mla": HEAD, "attention.kv_lora_rank": KV_RANK,
    "rope.dimension_count": ROPE, "ssm.conv_kernel": CONV, "kda.head_dim": KDA,
    "expert_feed_forward_length": 32, "expert_shared_count": 1, "expert_gating_func": 2, "expert_weights_scale": 1.5,
    "leading_dense_block_count": 1, "attention.head_count_kv": EVERY_FOURTH,
}  # fmt: skip


def kda() -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"attn_{name}.weight": (KDA_INNER, N_EMBD) for name in "qkv"}
    shapes |= {f"ssm_conv1d_{name}.weight": (1, KDA_INNER, 1, CONV) for name in "qkv"}
    shapes |= {"ssm_beta.weight": (N_HEADS, N_EMBD), "ssm_a": (N_HEADS, 1), "ssm_dt.bias": (KDA_INNER,)}
    return shapes | {"ssm_norm.weight": (KDA,), "attn_output.weight": (N_EMBD, KDA_INNER)}


def _latent() -> dict[str, Shape]:
    return {
        "attn_q.weight": (N_HEADS * (HEAD + ROPE), N_EMBD), "attn_kv_a_mqa.weight": (KV_RANK + ROPE, N_EMBD),
        "attn_kv_a_norm.weight": (KV_RANK,), "attn_k_b.weight": (N_HEADS, KV_RANK, HEAD),
        "attn_v_b.weight": (N_HEADS, HEAD, KV_RANK), "attn_output.weight": (N_EMBD, N_HEADS * HEAD),
    }  # fmt: skip


def feed_forward(layer: int) -> dict[str, Shape]:
    return dense() if layer < 1 else experts(32, shared=32) | {"exp_probs_b.bias": (N_EXPERTS,)}


def _kimi_linear(layer: int) -> Shapes:
    shapes = norms("attn_norm", "ffn_norm") | feed_forward(layer)
    if EVERY_FOURTH[layer]:
        return shapes | _latent()
    shapes |= {f"ssm_{name}_a.weight": (KDA, N_EMBD) for name in "fg"}
    return shapes | {f"ssm_{name}_b.weight": (KDA_INNER, KDA) for name in "fg"} | kda()


# Kimi K3: every third layer's input goes into all later layers. Its last layer attends, whatever the period.
BLOCK_LAYERS, K3_LAYERS, LATENT_EXPERTS = 3, 10, 32
K3_ATTENDING = [int(layer % 4 == 3 or layer == K3_LAYERS - 1) for layer in range(K3_LAYERS)]
K3_VALUES: dict[str, Value] = {
    **KDA_VALUES, "attention.q_lora_rank": Q_RANK, "attention.head_count_kv": K3_ATTENDING,
    "kda.gate_lower_bound": -5.0, "expert_weights_norm": True, "expert_latent_length": LATENT_EXPERTS,
    "attn_res.block_size": BLOCK_LAYERS, "activation.situ_beta": 4.0, "activation.situ_linear_beta": 25.0,
}  # fmt: skip


def _kimi_k3(layer: int, n_dense: int = 1) -> Shapes:
    shapes = norms("attn_norm", "ffn_norm", "attn_res_score", "ffn_res_score")
    shapes |= dense() if layer < n_dense else _latent_experts()
    if not K3_ATTENDING[layer]:
        shapes |= {"ssm_f_a.weight": (KDA, N_EMBD), "ssm_f_b.weight": (KDA_INNER, KDA)}
        return shapes | kda() | {"ssm_g.weight": (KDA_INNER, N_EMBD), "ssm_a": (N_HEADS,)}
    queries = {"attn_q_a.weight": (Q_RANK, N_EMBD), "attn_q_b.weight": (N_HEADS * (HEAD + ROPE), Q_RANK)}
    shapes |= {"attn_q_a_norm.weight": (Q_RANK,), "attn_gate.weight": (N_HEADS * HEAD, N_EMBD)}
    return shapes | queries | {name: shape for name, shape in _latent().items() if name != "attn_q.weight"}


def _latent_experts() -> dict[str, Shape]:
    return {
        "ffn_gate_inp.weight": (N_EXPERTS, N_EMBD), "exp_probs_b.bias": (N_EXPERTS,),
        "ffn_gate_exps.weight": (N_EXPERTS, 32, LATENT_EXPERTS), "ffn_up_exps.weight": (N_EXPERTS, 32, LATENT_EXPERTS),
        "ffn_down_exps.weight": (N_EXPERTS, LATENT_EXPERTS, 32), "ffn_routed_norm.weight": (LATENT_EXPERTS,),
        "ffn_routed_down.weight": (LATENT_EXPERTS, N_EMBD), "ffn_routed_up.weight": (N_EMBD, LATENT_EXPERTS),
        "ffn_gate_shexp.weight": (32, N_EMBD), "ffn_up_shexp.weight": (32, N_EMBD),
        "ffn_down_shexp.weight": (N_EMBD, 32),
    }  # fmt: skip


def _bailingmoe3(layer: int) -> Shapes:
    shapes = norms("attn_norm", "ffn_norm") | feed_forward(layer)
    if EVERY_FOURTH[layer]:
        return shapes | _latent() | {"attn_gate.weight": (N_HEADS, N_EMBD)}
    return shapes | {f"ssm_{name}_a.weight": (KDA_INNER, N_EMBD) for name in "fg"} | kda()


HYBRIDS: dict[str, Recipe] = {
    # As converters write it: the interval alone, or a flag for each layer, one more for the prediction layer.
    "qwen35": Recipe("qwen35", {**DELTA, **AXES, "full_attention_interval": 4}, _qwen35, n_layers=N_LAYERS, gain=HOT),
    "qwen35:mtp": Recipe(
        "qwen35",
        {
            **DELTA, **AXES, "nextn_predict_layers": 1,
            "attention.recurrent_layers": [layer % 4 < 3 for layer in range(N_LAYERS)] + [False],
        },
        _qwen35_mtp, n_layers=N_LAYERS + 1, gain=HOT,
    ),
    "qwen35moe": Recipe("qwen35moe", {**DELTA, **AXES, **DELTA_MOE}, _qwen35moe, n_layers=N_LAYERS, gain=HOT),
    "qwen3next": Recipe("qwen3next", {**DELTA, **DELTA_MOE}, _qwen3next, n_layers=N_LAYERS, gain=HOT),
    "nemotron_h": Recipe("nemotron_h", NEMOTRON_VALUES, _nemotron, n_layers=len(NEMOTRON), gain=HOT),
    "nemotron_h_moe": Recipe(
        "nemotron_h_moe",
        {
            **NEMOTRON_VALUES, **MOE, "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 32,
            "expert_shared_count": 1, "expert_weights_norm": True, "expert_weights_scale": 1.5,
        },
        _nemotron_moe, n_layers=len(NEMOTRON), gain=HOT,
    ),
    "granitehybrid": Recipe("granitehybrid", GRANITE, _granite, n_layers=N_LAYERS, gain=HOT),
    "granitehybrid:moe": Recipe(
        "granitehybrid", {**GRANITE, **MOE, "expert_shared_feed_forward_length": 32}, _granite_moe,
        n_layers=N_LAYERS, gain=HOT,
    ),
    "lfm2": Recipe(
        "lfm2", {**RMS, "shortconv.l_cache": 3, "attention.head_count_kv": SPARSE}, _lfm2,
        tops=LFM2_TOPS, n_layers=N_LAYERS, gain=HOT,
    ),
    "lfm2moe": Recipe(
        "lfm2moe",
        {
            **RMS, **MOE, "shortconv.l_cache": 3, "attention.head_count_kv": SPARSE,
            "expert_feed_forward_length": 32, "expert_gating_func": 2, "leading_dense_block_count": 2,
        },
        _lfm2moe, tops=LFM2_TOPS, n_layers=N_LAYERS, gain=HOT,
    ),
    "jamba": Recipe(
        "jamba", {**MAMBA, **MOE, "attention.head_count_kv": SPARSE}, _jamba, n_layers=N_LAYERS, gain=HOT
    ),
    "falcon-h1": Recipe("falcon-h1", {**RMS, **SSM}, _falcon_h1, gain=HOT),
    "mamba": Recipe("mamba", {**MAMBA, **NO_ATTENTION}, lambda _: norms("attn_norm") | _mamba(), gain=HOT),
    "mamba2": Recipe("mamba2", {**RMS, **SSM, **NO_ATTENTION}, lambda _: norms("attn_norm") | _mamba2(), gain=HOT),
    "bailingmoe3": Recipe(
        "bailingmoe3", {**KDA_VALUES, "kda.gate_lower_bound": -5.0, "kda.safe_gate": True}, _bailingmoe3,
        n_layers=N_LAYERS, gain=HOT,
    ),
    "kimi-linear": Recipe("kimi-linear", KDA_VALUES, _kimi_linear, n_layers=N_LAYERS, may_tie=False, gain=HOT),
    "kimi-k3": Recipe(
        "kimi-k3", K3_VALUES, _kimi_k3, tops=norms("output_norm", "output_res_score"),
        n_layers=K3_LAYERS, may_tie=False, gain=HOT,
    ),
    "kimi-k3:dense": Recipe(
        "kimi-k3", {**K3_VALUES, "leading_dense_block_count": 6, "attn_res.block_size": 2},
        lambda layer: _kimi_k3(layer, 6), tops=norms("output_norm", "output_res_score"),
        n_layers=K3_LAYERS, may_tie=False, gain=HOT,
    ),
}  # fmt: skip
