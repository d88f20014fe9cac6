"""The rules of single families: facts that llama.cpp derives from a whole file, and the keys that give a slice the same
facts.

The facts are about the llama.cpp that pyproject.toml pins; a comment names the function that shows each.
"""

from __future__ import annotations

import math
import struct

from relayline.coordinator.model.family import (
    ATTENDS,
    BLOCK_LAYERS,
    BOTH,
    DEEPSTACK_LAYERS,
    HASH_LAYERS,
    INDEXER_TYPES,
    LAYER_INPUT_WIDTH,
    NEITHER,
    RECURRENT,
    RECURRENT_LAYERS,
    SHARING_LAYERS,
    Blocked,
    Factors,
    Indexers,
    Kinds,
    Metadata,
    Needed,
    Overrides,
    RowOrders,
    Windows,
    windows_of,
)
from relayline.wire.model_files.gguf_header import Value
from relayline.wire.model_files.gguf_write import F32, I32, U32


def all_indexers(facts: Metadata) -> Indexers:
    """Every layer makes its own choice."""
    return (True,) * facts.n_layers


def granite_refusal(facts: Metadata) -> str | None:
    """Models whose layers take image features in addition to the row (deepstack)."""
    # llama_model_granite::load_arch_hparams: such a model takes wider rows, with image features per layer.
    mapping = facts.values.get("deepstack_mapping")
    if isinstance(mapping, tuple) and any(isinstance(index, int) and index >= 0 for index in mapping):
        return (
            "its deepstack layers need image features in addition to the hidden state, and stages do not forward them"
        )
    return None


def command_r_refusal(facts: Metadata) -> str | None:
    """Command R+ of 64 layers, whose query and key norms llama.cpp knows by that number."""
    # llama_model_command_r::load_arch_tensors reads the query and key norms only if n_layer >= 64.
    if "blk.0.attn_q_norm.weight" in facts.tensor_names:
        return "its query and key norms are loaded by llama.cpp only from files of 64 or more layers"
    return None


DEEPSEEK2_LITE_LAYERS = frozenset({26, 27})
GATING_SOFTMAX, GATING_SIGMOID = 1, 2


def _deepseek2_is_lite(facts: Metadata) -> bool:
    return facts.n_layers in DEEPSEEK2_LITE_LAYERS or (facts.n_layers == 48 and facts.n_vocab == 128_256)


def deepseek2_overrides(facts: Metadata) -> Overrides:
    """State the values that llama.cpp guesses from the number of layers."""
    # llama_model_deepseek2::load_arch_hparams guesses two things from the layer count: whether queries are low-rank
    # (the Lite models are not) and, in old files, the gating function. A slice has to say both outright.
    stated: dict[str, tuple[int, Value]] = {}
    if _deepseek2_is_lite(facts):
        stated["attention.q_lora_rank"] = (U32, 0)
    if not facts.integer("expert_gating_func"):
        flash = facts.n_layers in (47, 48) and facts.n_vocab == 154_880
        stated["expert_gating_func"] = (U32, GATING_SIGMOID if flash else GATING_SOFTMAX)
    return stated


def deepseek2_lengths(facts: Metadata) -> frozenset[int]:
    """No stage has 26, 27 or, with some vocabularies, 48 layers."""
    if _deepseek2_is_lite(facts):
        return frozenset()
    return DEEPSEEK2_LITE_LAYERS | ({48} if facts.n_vocab == 128_256 else frozenset())


def _head_width(facts: Metadata) -> int:
    n_embd, n_heads = facts.integer("embedding_length") or 0, facts.integer("attention.head_count") or 0
    return facts.integer("attention.key_length") or (n_embd // n_heads if n_heads else 0)


def _n_rotated(facts: Metadata) -> int:
    """Return how many values of a head are rotated, by llama.cpp's rules for the absent keys."""
    return facts.integer("rope.dimension_count") or _head_width(facts)


ROPE_SECTIONS = "rope.dimension_sections"


def is_multi_axis(sections: Value | None) -> bool:
    """Whether a rope with these sections has several axes, as llama_hparams::use_mrope has it."""
    return isinstance(sections, tuple) and len(sections) > 1 and bool(sections[0] and sections[1])


def _is_multi_axis(facts: Metadata) -> bool:
    return is_multi_axis(facts.values.get(ROPE_SECTIONS))


def multi_axis_overrides(facts: Metadata) -> Overrides:
    """Let a file with plain rope of GLM-4 be one with several axes."""
    # llama_model_glm4::graph and llama_model_glm4_moe::graph abort the process on rows that come in as embeddings
    # unless the file has multi-axis rope. With all axes at one position, as text has them, that is the rotation of the
    # plain rope by halves of a head.
    if _is_multi_axis(facts):
        return {}
    n_pairs = _n_rotated(facts) // 2
    third = -(-n_pairs // 3)
    return {ROPE_SECTIONS: (I32, (third, third, n_pairs - 2 * third, 0))}


def multi_axis_refusal(facts: Metadata) -> str | None:
    """Models that rotate fewer than four values of a head."""
    if multi_axis_overrides(facts) and _n_rotated(facts) < 4:
        return "its rope is too narrow to be written with several axes, which stages need for this architecture"
    return None


def glm4_refusal(facts: Metadata) -> str | None:
    """Files whose queries, keys and values are one matrix, unless their rope has several axes."""
    if "blk.0.attn_qkv.weight" in facts.tensor_names and not _is_multi_axis(facts):
        return "its queries, keys and values are one matrix, and stages need the first two with rows in another order"
    return multi_axis_refusal(facts)


def glm4_row_orders(facts: Metadata) -> RowOrders:
    """Put the first values of all rotated pairs of a head before the second ones.

    Products of queries and keys are then added up in another order, so that slices equal the whole up to float noise.
    """
    # llama_model_rope_type: plain rope of glm4 rotates neighbours (NORM), multi-axis rope rotates halves.
    if _is_multi_axis(facts):
        return {}
    n_rotated, width = _n_rotated(facts), _head_width(facts)
    order = (*range(0, n_rotated, 2), *range(1, n_rotated, 2), *range(n_rotated, width))
    return {f"attn_{name}.{kind}": order for name in "qk" for kind in ("weight", "bias")}


GLM_5_2_TOKENS = 1_048_576  # of context, by which llama.cpp knows files whose layers share indexers without saying so


def glm_dsa_indexers(facts: Metadata) -> Indexers:
    """Tell which layers choose by themselves."""
    # llama_model_glm_dsa::load_arch_hparams, which asserts that the first layer is one of these.
    stated = facts.values.get(INDEXER_TYPES)
    if isinstance(stated, tuple):
        flags = tuple(bool(flag) for flag in stated[: facts.n_layers])
    elif stated is None and (facts.integer("context_length") or 0) >= GLM_5_2_TOKENS:
        flags = tuple(layer < 2 or layer % 4 == 2 for layer in range(facts.n_layers))
    else:
        flags = all_indexers(facts)
    return flags


GEMMA2_27B_LAYERS = 46
GEMMA3_27B_LAYERS = 62
EXAONE4_32B_LAYERS = 64


def _other_width(facts: Metadata) -> tuple[int, int] | None:
    """Return a head's part of a row and the width of a head, if they differ."""
    n_embd, n_heads = facts.integer("embedding_length") or 0, facts.integer("attention.head_count") or 1
    width = n_embd // n_heads
    head_width = facts.integer("attention.key_length") or width
    return (width, head_width) if width not in (0, head_width) else None


def gemma3_factors(facts: Metadata) -> Factors:
    """Scale queries of the 27B model as the whole file does."""
    # llama_model_gemma3::load_arch_hparams takes 62 layers for the 27B model, whose scores are divided by the root of
    # another width than the heads'. The graph multiplies queries by their norm just before, and both factors meet.
    found = _other_width(facts)
    if facts.n_layers != GEMMA3_27B_LAYERS or found is None:
        return {}
    width, head_width = found
    return {"attn_q_norm.weight": math.sqrt(head_width / width)}


def gemma3_lengths(facts: Metadata) -> frozenset[int]:
    """No stage has as many layers as the 27B model."""
    return frozenset({GEMMA3_27B_LAYERS}) - {facts.n_layers}


def gemma2_refusal(facts: Metadata) -> str | None:
    """27B, whose attention llama.cpp scales by its number of layers."""
    # llama_model_gemma2::load_arch_hparams does the same with 46 layers, but its queries have no norm that could tell.
    if facts.n_layers == GEMMA2_27B_LAYERS and _other_width(facts):
        return "llama.cpp knows how to scale its attention by its number of layers alone, which no slice has"
    return None


def gemma2_lengths(facts: Metadata) -> frozenset[int]:
    """No stage has as many layers as the 27B model."""
    return frozenset({GEMMA2_27B_LAYERS}) - {facts.n_layers}


def exaone4_refusal(facts: Metadata) -> str | None:
    """32B, whose windows llama.cpp knows by its number of layers."""
    # llama_model_exaone4::load_arch_hparams reads windows only from files of 64 layers.
    if facts.n_layers == EXAONE4_32B_LAYERS:
        return "llama.cpp gives its layers sliding windows only in a file of 64 layers"
    return None


def exaone4_lengths(_: Metadata) -> frozenset[int]:
    """No stage has as many layers as the 32B model."""
    return frozenset({EXAONE4_32B_LAYERS})


LLAMA4_ROPE_STEP = 4


def llama4_refusal(facts: Metadata) -> str | None:
    """Files whose layers do not repeat every four."""
    # llama_model_llama4::graph counts two kinds of layers from the first in the file: those with experts, and those
    # without rotary positions. Where the file states that no layer has a window, its last layer has no rotary
    # positions.
    if facts.integer("attention.sliding_window") == 0:
        return "without windows its last layer differs from others, whichever it is"
    if LLAMA4_ROPE_STEP % (facts.integer("interleave_moe_layer_step") or 1):
        return "its layers with experts do not repeat with those without rotary positions"
    return None


def ernie_moe_refusal(facts: Metadata) -> str | None:
    """Models whose layers with experts alternate with others."""
    # llama_model_ernie4_5_moe::graph counts from the first layer in the file.
    if facts.integer("interleave_moe_layer_step") != 1:
        return "its layers with experts alternate with others, counted from its first layer"
    return None


def deepstack_layers(facts: Metadata) -> int:
    """Return how many layers, from the first, add features of an image to what leaves them."""
    # llama_model_qwen3vl::graph finds the features behind the row's own values. llm_graph_context::build_inp_embd gives
    # rows of text zeros there.
    return facts.integer(DEEPSTACK_LAYERS) or 0


def deepstack_refusal(facts: Metadata) -> str | None:
    """Files without a layer behind those that add features of images."""
    if deepstack_layers(facts) >= facts.n_layers:
        return f"{deepstack_layers(facts)} of its layers add features of images, but it has only {facts.n_layers}"
    return None


def deepstack_blocked(facts: Metadata) -> Blocked:
    """Layers that add features of images are on stage 0, and so is the next one."""
    # The last layer of a graph leaves out the rows that nobody wants, but the features of its layer have all rows: ggml
    # ends the process where llama_model_qwen3vl::graph adds them.
    n_layers = deepstack_layers(facts)
    reason = f"its first {n_layers} layers add features of images, and are on stage 0 with one more layer"
    return dict.fromkeys(range(1, n_layers + 1), reason)


def _as_f32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def minicpm_overrides(facts: Metadata) -> Overrides:
    """State what llama_model_minicpm::load_arch_hparams takes from the number of layers and the width."""
    stated: dict[str, tuple[int, Value]] = {}
    if facts.values.get("residual_scale") is None:
        stated["residual_scale"] = (F32, _as_f32(1.4) / _as_f32(math.sqrt(facts.n_layers)))
    if facts.values.get("logit_scale") is None:
        stated["logit_scale"] = (F32, 256.0 / (facts.integer("embedding_length") or 256))
    return stated


def layer_inputs(facts: Metadata) -> int:
    """Return how many further inputs each layer takes, looked up by token and computed from its embedding."""
    return facts.integer(LAYER_INPUT_WIDTH) or 0


def sharing_layers(facts: Metadata) -> int:
    """Return how many layers at the end have no separate cells."""
    return min(facts.integer(SHARING_LAYERS) or 0, facts.n_layers)


def gemma4_blocked(facts: Metadata) -> Blocked:
    """Layers that share cells stay on one stage, with the two layers whose cells they attend to."""
    # llama_model::create_memory: those with a window attend to the last but one that has cells, others to the last one.
    n_sharing = sharing_layers(facts)
    if not n_sharing:
        return {}
    reason = f"its last {n_sharing} layers attend to the cells of the two before them, so these stay on one stage"
    return dict.fromkeys(range(max(1, facts.n_layers - n_sharing - 1), facts.n_layers), reason)


def gemma4_lengths(_: Metadata) -> frozenset[int]:
    """No stage has a single layer."""
    # llama_model::create_memory asserts that at least two layers have separate cells.
    return frozenset({1})


def gemma4_unread(windows: Windows) -> frozenset[str]:
    """Return what llama_model_gemma4::load_arch_tensors asks for only where some layer has no window."""
    return frozenset({"rope_freqs.weight"}) if all(windows) else frozenset()


def laguna_blocked(facts: Metadata) -> Blocked:
    """A stage starts with a layer without a window if it has one."""
    # llama_model_laguna::graph asks hparams for the rotated width of layers with a window. For the other layers it
    # takes n_rot, the rotated width of the first layer in the file.
    windows = windows_of(4, is_optional=True, full_first=True)(facts)
    rotated, windowed = _n_rotated(facts), facts.integer("rope.dimension_count_swa")
    if windowed in (None, rotated):
        return {}
    reason = "layers without a window would rotate as many values of a head as its first layer, which has one"
    return {layer: reason for layer in range(1, len(windows)) if windows[layer] and not all(windows[layer:])}


SMALLTHINKER_ROPE_STEP = 4


def smallthinker_lengths(facts: Metadata) -> frozenset[int]:
    """No stage has four layers."""
    # llama_model_smallthinker::graph; without a window in the file, all of its layers have them.
    if not facts.integer("attention.sliding_window"):
        return frozenset()
    return frozenset({SMALLTHINKER_ROPE_STEP}) - {facts.n_layers}


def minimax_m3_blocked(facts: Metadata) -> Blocked:
    """Each stage has a layer with an indexer, which the leading dense ones lack."""
    lead = min(facts.integer("leading_dense_block_count") or 0, facts.n_layers - 1)
    return dict.fromkeys(range(1, lead + 1), "llama.cpp runs layers without an indexer only together with one that has")


def nanbeige_refusal(facts: Metadata) -> str | None:
    """Models that run through all layers several times."""
    if (facts.integer("num_loops") or 1) > 1:
        return "it runs through all of its layers several times, and a stage runs its own once"
    return None


def _of_layers(facts: Metadata, key: str) -> tuple[int, ...]:
    found = facts.values.get(key)
    values = found if isinstance(found, tuple) else (found,) * facts.n_layers
    return tuple(value if isinstance(value, int) else 1 for value in values[: facts.n_layers])


def deci_blocked(facts: Metadata) -> Blocked:
    """A stage starts with a layer that has attention, behind one that has a feed-forward part."""
    # llama_model_base::load_hparams reads the widths of heads only if the first layer has any. llama_model_deci::graph
    # names no output of a layer without a feed-forward part.
    attends = _of_layers(facts, "attention.head_count_kv") if "attention.head_count_kv" in facts.values else ()
    heads, widths = _of_layers(facts, "attention.head_count"), _of_layers(facts, "feed_forward_length")
    blocked: dict[int, str] = {}
    for layer in range(1, min(facts.n_layers, len(heads), len(widths))):
        if heads[layer] == 0 or (attends and attends[layer] == 0):
            blocked[layer] = "its first layer would have no attention, and llama.cpp reads the width of heads there"
        elif widths[layer - 1] == 0:
            blocked[layer] = "the layer before has no feed-forward part, and llama.cpp does not name what leaves it"
    return blocked


DELTA_NET_INTERVAL = 4


def delta_net_kinds(facts: Metadata) -> Kinds:
    """Stated per layer, or the last layer of each interval attends."""
    # llama_model_qwen35::load_arch_hparams, and the same in qwen35moe and qwen3next.
    stated = facts.values.get(RECURRENT_LAYERS)
    if isinstance(stated, tuple):
        found = "".join(RECURRENT if flag else ATTENDS for flag in stated[: facts.n_layers])
        return found.ljust(facts.n_layers, ATTENDS)
    if stated is not None:
        return (RECURRENT if stated else ATTENDS) * facts.n_layers
    interval = facts.integer("full_attention_interval") or DELTA_NET_INTERVAL
    return "".join(RECURRENT if (layer + 1) % interval else ATTENDS for layer in range(facts.n_layers))


def headless_kinds(facts: Metadata) -> Kinds:
    """A layer without heads of keys and values has a state."""
    # hparams.is_recr_impl in granite-hybrid.cpp, lfm2.cpp, jamba.cpp, kimi-linear.cpp and bailingmoe3.cpp.
    found = "".join(ATTENDS if n_heads else RECURRENT for n_heads in _of_layers(facts, "attention.head_count_kv"))
    return found.ljust(facts.n_layers, ATTENDS)


def nemotron_kinds(facts: Metadata) -> Kinds:
    """Layers with a feed-forward part keep nothing; others without heads of keys and values have a state."""
    # llama_model_nemotron_h::load_arch_hparams and load_arch_tensors.
    heads, widths = _of_layers(facts, "attention.head_count_kv"), _of_layers(facts, "feed_forward_length")
    pairs = zip(heads, widths, strict=False)
    found = "".join(NEITHER if width else ATTENDS if n_heads else RECURRENT for n_heads, width in pairs)
    return found.ljust(facts.n_layers, NEITHER)


def block_layers(facts: Metadata) -> int:
    """Return of how many layers each block is whose input all later layers read."""
    # llama_model_kimi_k3::graph::res_push and res_mix.
    return facts.integer(BLOCK_LAYERS) or 0


def lfm2_refusal(facts: Metadata) -> str | None:
    """Models whose attention has a window."""
    # llama_model_lfm2::load_arch_hparams; their memory is another class of llama.cpp, llama_memory_hybrid_iswa.
    if facts.integer("attention.sliding_window"):
        return "it combines a sliding window with recurrent states, which is not certified"
    return None


def both_kinds(facts: Metadata) -> Kinds:
    """Each layer attends and has a state."""
    return BOTH * facts.n_layers


def recurrent_kinds(facts: Metadata) -> Kinds:
    """Each layer has a state, and none attends."""
    return RECURRENT * facts.n_layers


HYPER_CONNECTIONS = "hyper_connection.count"


def hyper_connections(facts: Metadata) -> int:
    """Return how many streams of a row its layers hand on."""
    return max(1, facts.integer(HYPER_CONNECTIONS) or 1)


DENSE_RATIO, SPARSE_RATIO = 128, 4  # tokens for which one compressed cell is kept


def compress_ratios(facts: Metadata) -> tuple[int, ...]:
    """Return the number of tokens per compressed cell for each layer; 0 where it has none."""
    return _of_layers(facts, "attention.compress_ratios")


def deepseek4_needed(facts: Metadata) -> Needed:
    """Each stage has a layer that compresses four tokens into one cell."""
    # llm_graph_input_dsv4 divides by the cells of these, of which a slice without one has none.
    return tuple(ratio == SPARSE_RATIO for ratio in compress_ratios(facts))


def hash_layers(facts: Metadata) -> int:
    """Return how many layers at the beginning look their experts up by token id."""
    return min(facts.integer(HASH_LAYERS) or 0, facts.n_layers)


def deepseek4_blocked(facts: Metadata) -> Blocked:
    """Layers that look experts up by token id are on stage 0."""
    n_hashed = hash_layers(facts)
    reason = f"its first {n_hashed} layers look their experts up by token id, and token ids end at stage 0"
    return dict.fromkeys(range(1, n_hashed), reason)


def deepseek4_kv_values(facts: Metadata) -> tuple[int, ...]:
    """Return how many values of a cache each token takes in each layer, the compressed cells by their part."""
    # llama_kv_cache_dsv4: keys alone, one for each token; one for each `ratio`, and of an indexer too.
    key, index = facts.integer("attention.key_length") or 0, facts.integer("attention.indexer.key_length") or 0
    kept = {0: key, SPARSE_RATIO: key + (key + index) // SPARSE_RATIO, DENSE_RATIO: key + key // DENSE_RATIO}
    return tuple(kept.get(ratio, key) for ratio in compress_ratios(facts))


def deepseek4_states(facts: Metadata) -> tuple[int, ...]:
    """Return how many f32 values each layer keeps for each lane, of tokens that fill no compressed cell yet."""
    # llama_dsv4_comp_state: a key and a score for each row; cells of four tokens overlap.
    key, index = facts.integer("attention.key_length") or 0, facts.integer("attention.indexer.key_length") or 0
    kept = {SPARSE_RATIO: 2 * 2 * SPARSE_RATIO * 2 * (key + index), DENSE_RATIO: 2 * DENSE_RATIO * key}
    return tuple(kept.get(ratio, 0) for ratio in compress_ratios(facts))


def hy_v4_indexers(facts: Metadata) -> Indexers:
    """Tell which layers choose by themselves, where any does."""
    # llama_model_hy_v4::load_arch_hparams.
    stated = facts.values.get(INDEXER_TYPES)
    if not facts.integer("attention.indexer.top_k") or not isinstance(stated, tuple):
        return ()
    return tuple(bool(flag) for flag in stated[: facts.n_layers])


def glm5_next_indexers(facts: Metadata) -> Indexers:
    """Tell which layers that attend choose by themselves; one with a state has its next one's flag."""
    # llama_model_glm5_next::load_arch_hparams and build_dsa_layer: the first that attends in a file has to.
    stated = facts.values.get(INDEXER_TYPES)
    flags = tuple(bool(flag) for flag in stated[: facts.n_layers]) if isinstance(stated, tuple) else all_indexers(facts)
    found, following = list(flags), True
    for layer, kind in reversed(list(enumerate(headless_kinds(facts)))):
        following = flags[layer] if kind == ATTENDS else following
        found[layer] = following
    return tuple(found)


def state_values(facts: Metadata) -> int:
    """Return how many f32 values a layer with a state keeps for each lane."""
    # llama_hparams::n_embd_r and n_embd_s.
    n_embd, n_heads = facts.integer("embedding_length") or 0, _of_layers(facts, "attention.head_count")
    cached = facts.integer("shortconv.l_cache") or 0
    if cached:
        return n_embd * (cached - 1)
    n_kept = max(0, (facts.integer("ssm.conv_kernel") or 0) - 1)
    kda = facts.integer("kda.head_dim") or 0
    if kda:
        inner = kda * (n_heads[0] if n_heads else 0)
        return 3 * (n_kept or 3) * inner + kda * inner
    state, inner = facts.integer("ssm.state_size") or 0, facts.integer("ssm.inner_size") or 0
    return n_kept * (inner + 2 * (facts.integer("ssm.group_count") or 0) * state) + state * inner
