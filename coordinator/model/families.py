"""The one table of the peculiarities of model families that matter when layers are cut apart.

Facts that can be derived from a file (layer count, tied embeddings, leading dense blocks, per-layer arrays, prediction
layers) have no place here. A row is added only together with the tiny random model in the tests that proves it: every
legal cut of it equals the unsplit model.

The facts are about the llama.cpp that pyproject.toml pins; a comment, here or at the rule in `family_rules.py`, names
the function that shows each.
"""

from __future__ import annotations

import math

from relayline.coordinator.model import family_rules as rules
from relayline.coordinator.model.family import Family, Metadata, Overrides, stated_windows, windows_of
from relayline.coordinator.model.gguf_file import GgufModel
from relayline.wire.model_files.gguf_write import F32

POSITIONS = frozenset({"position_embd.weight"})

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family("llama", "Llama 1 to 3, Mistral 7B, Mixtral, Yi, SmolLM, Vicuna"),
        Family("mistral3", "Ministral 3, Mistral Large 3 (dense)"),
        Family("qwen2", "Qwen1.5, Qwen2, Qwen2.5, DeepSeek R1 distills"),
        Family("qwen2moe", "Qwen1.5-MoE, Qwen2-57B-A14B", head_required=True),
        Family("qwen3", "Qwen3 0.6B to 32B, Qwen3-Reranker", ranks=True),
        Family("qwen3moe", "Qwen3-30B-A3B, 235B-A22B, Qwen3-Coder"),
        Family("phi3", "Phi-3, Phi-4"),
        Family("phimoe", "Phi-3.5-MoE", head_required=True),
        # build_inp_embd multiplies rows that come in as embeddings too, so only the lookup may scale.
        Family("granite", "Granite 3", embedding_scale=0.0, refusal=rules.granite_refusal),
        Family("granitemoe", "Granite 3 MoE", embedding_scale=0.0),
        Family(
            "deepseek2",
            "DeepSeek V2, V3, R1, Kimi K2, GLM-4.7-Flash",
            overrides=rules.deepseek2_overrides,
            forbidden_lengths=rules.deepseek2_lengths,
            predicts=True,
        ),
        Family("deepseek32", "DeepSeek V3.2", indexers=rules.all_indexers, predicts=True),
        Family("glm-dsa", "GLM-5, GLM-5.2", indexers=rules.glm_dsa_indexers, predicts=True),
        Family(
            "glm4moe",
            "GLM-4.5, 4.5V, 4.6, 4.6V, 4.7",
            overrides=rules.multi_axis_overrides,
            refusal=rules.multi_axis_refusal,
        ),
        Family("olmo", "OLMo"),
        Family("olmoe", "OLMoE", head_required=True),
        Family("falcon", "Falcon 7B to 180B"),
        Family("stablelm", "StableLM 2", head_required=True),
        Family("starcoder2", "StarCoder2"),
        # Rotary positions are left out at every fourth layer, counted from the first one in the file.
        Family("smollm3", "SmolLM3", cut_period=4),
        Family("command-r", "Command R", refusal=rules.command_r_refusal),
        Family("internlm2", "InternLM2, 3", head_required=True),
        Family("gptneox", "Pythia, GPT-NeoX, Dolly", head_required=True),
        Family("arcee", "AFM-4.5B"),
        Family("deepseek", "DeepSeek MoE 16B"),
        Family("dots1", "dots.llm1", head_required=True),
        Family("ernie4_5", "ERNIE 4.5 0.3B"),
        Family("exaone", "EXAONE 3, 3.5"),
        Family("hunyuan-moe", "Hunyuan A13B"),
        Family("minimax-m2", "MiniMax M2", head_required=True),
        Family("nemotron", "Nemotron 4, Minitron", head_required=True),
        Family("orion", "Orion 14B", head_required=True),
        Family("seed_oss", "Seed-OSS 36B"),
        Family("xverse", "XVERSE", head_required=True),
        Family("gpt-oss", "gpt-oss 20B and 120B", head_required=True, windows=windows_of(2)),
        # llama_model_gemma3::graph leaves rows that enter as embeddings unchanged.
        Family(
            "gemma3",
            "Gemma 3",
            scales_tokens=True,
            forbidden_lengths=rules.gemma3_lengths,
            windows=windows_of(6, is_optional=True),
            factors=rules.gemma3_factors,
        ),
        # llama_model_gemma::graph and llama_model_gemma2::graph scale rows that come in as embeddings too.
        Family("gemma", "Gemma", scales_rows=True),
        Family(
            "gemma2",
            "Gemma 2",
            scales_rows=True,
            refusal=rules.gemma2_refusal,
            forbidden_lengths=rules.gemma2_lengths,
            windows=windows_of(2),
            window_tokens=4_096,
        ),
        Family(
            "llama4",
            "Llama 4 Scout, Maverick",
            cut_period=rules.LLAMA4_ROPE_STEP,
            refusal=rules.llama4_refusal,
            windows=windows_of(4),
        ),
        # Rotary positions are left out where there is no window.
        Family("cohere2", "Command A, Command R7B", windows=windows_of(4)),
        Family("olmo2", "OLMo 2, OLMo 3", head_required=True, windows=windows_of(4, is_optional=True)),
        Family("exaone4", "EXAONE 4 1.2B", refusal=rules.exaone4_refusal, forbidden_lengths=rules.exaone4_lengths),
        Family("exaone-moe", "K-EXAONE", head_required=True, windows=windows_of(4)),
        Family("ernie4_5-moe", "ERNIE 4.5 21B-A3B, 300B-A47B", refusal=rules.ernie_moe_refusal),
        Family("bailingmoe2", "Ling 2, Ring 2", head_required=True),
        Family("hunyuan-dense", "Hunyuan 0.5B to 7B"),
        Family("apertus", "Apertus 8B, 70B", head_required=True),
        # The file states for each layer whether it has a window.
        Family("mimo2", "MiMo-V2-Flash, MiMo-V2.5", head_required=True, windows=windows_of(0)),
        Family(
            "step35", "Step 3.5 Flash", head_required=True, windows=windows_of(0), rotates_by_layer=True, predicts=True
        ),
        # build_inp_embd as for granite; llama_model_grok::load_arch_hparams has the default of old files.
        Family("grok", "Grok-1, Grok-2", embedding_scale=78.38367176906169),
        # The loader of deepseek2.
        Family("mistral4", "Mistral 4", overrides=rules.deepseek2_overrides, forbidden_lengths=rules.deepseek2_lengths),
        # A BOOL for each layer says where windows are; their heads have other widths, and their rope another base.
        Family(
            "gemma4",
            "Gemma 4 E2B, E4B, 26B-A4B, 31B",
            scales_tokens=True,
            layer_inputs=rules.layer_inputs,
            sharing_layers=rules.sharing_layers,
            blocked=rules.gemma4_blocked,
            forbidden_lengths=rules.gemma4_lengths,
            windows=windows_of(0),
            unread=rules.gemma4_unread,
            rotates_by_layer=True,
            widths_by_layer=True,
        ),
        Family(
            "qwen3vl",
            "Qwen3-VL 2B to 32B, Qwen3-VL-Reranker",
            refusal=rules.deepstack_refusal,
            deepstack_layers=rules.deepstack_layers,
            blocked=rules.deepstack_blocked,
            ranks=True,
        ),
        Family(
            "qwen3vlmoe",
            "Qwen3-VL-30B-A3B, 235B-A22B",
            refusal=rules.deepstack_refusal,
            deepstack_layers=rules.deepstack_layers,
            blocked=rules.deepstack_blocked,
        ),
        Family("qwen2vl", "Qwen2-VL, Qwen2.5-VL"),
        Family("hunyuan_vl", "HunyuanOCR", left_out="images"),
        Family("paddleocr", "PaddleOCR-VL"),
        Family(
            "glm4",
            "GLM-4-9B, 32B (0414), GLM-Z1, GLM-4.1V, GLM-OCR",
            overrides=rules.multi_axis_overrides,
            refusal=rules.glm4_refusal,
            row_orders=rules.glm4_row_orders,
        ),
        Family("hy_v3", "Hunyuan 3", predicts=True),
        Family(
            "laguna",
            "Laguna XS, S, M",
            blocked=rules.laguna_blocked,
            windows=windows_of(4, is_optional=True, full_first=True),
            rotates_by_layer=True,
        ),
        # Rotary positions are left out where there is no window, but for the leading dense layers.
        Family("cohere2moe", "Command A MoE", windows=windows_of(4, full_first=True), predicts=True),
        # llama_model_afmoe::graph scales rows that come in, and leaves rotary positions out at every fourth layer.
        Family("afmoe", "Trinity Nano, Mini", cut_period=4, scales_rows=True, windows=windows_of(4, is_optional=True)),
        Family("minimax-m3", "MiniMax M3", head_required=True, blocked=rules.minimax_m3_blocked),
        Family("minicpm", "MiniCPM 1B, 2B", embedding_scale=12.0, overrides=rules.minicpm_overrides),
        Family("chatglm", "ChatGLM3, GLM-4-9B-Chat, GLM-Edge"),
        Family("bailingmoe", "Ling Lite, Ling Plus", head_required=True),
        Family("dbrx", "DBRX", head_required=True),
        Family("arctic", "Snowflake Arctic"),
        Family("deci", "Llama-Nemotron 51B, Super 49B, Ultra 253B", blocked=rules.deci_blocked),
        Family("grovemoe", "GroveMoE"),
        Family("jais", "Jais", head_required=True),
        Family("jais2", "Jais 2"),
        Family("openelm", "OpenELM"),
        Family("phi2", "Phi-1.5, Phi-2", head_required=True),
        Family("plamo", "PLaMo 13B", head_required=True),
        Family("plamo3", "PLaMo 3", windows=windows_of(8, is_optional=True)),
        Family("refact", "Refact 1.6B"),
        Family(
            "smallthinker",
            "SmallThinker 4B, 21B",
            cut_period=rules.SMALLTHINKER_ROPE_STEP,
            forbidden_lengths=rules.smallthinker_lengths,
            windows=windows_of(4, is_optional=True, full_first=True),
        ),
        Family(
            "granite_swa",
            "Granite with windows",
            embedding_scale=0.0,
            refusal=rules.granite_refusal,
            windows=windows_of(0),
        ),
        Family("maple", "Maple 20B", head_required=True, windows=windows_of(0), rotates_by_layer=True),
        Family("mellum", "Mellum 2", head_required=True, windows=windows_of(4, is_optional=True)),
        Family("spark2_5", "Spark 2.5", windows=windows_of(0), rotates_by_layer=True),
        Family("codeshell", "CodeShell 7B", head_required=True),
        Family("maincoder", "Maincoder 1B"),
        Family("nanbeige", "Nanbeige 4", refusal=rules.nanbeige_refusal),
        Family("pangu-embedded", "openPangu Embedded 1B, 7B"),
        Family("qwen", "Qwen (the first)", head_required=True),
        Family("bitnet", "BitNet b1.58"),
        Family("deepseek2-ocr", "DeepSeek-OCR", left_out="images"),
        Family("gpt2", "GPT-2", entry_tables=POSITIONS),
        Family("starcoder", "StarCoder, SantaCoder", entry_tables=POSITIONS),
        Family("mpt", "MPT 7B, 30B", entry_tables=POSITIONS),
        # Layers with a recurrent state; most of these families have attention layers too.
        Family("qwen35", "Qwen3.5, Qwen3.6 0.8B to 27B", kinds=rules.delta_net_kinds, states_kinds=True, predicts=True),
        Family(
            "qwen35moe",
            "Qwen3.5, Qwen3.6 35B-A3B to 397B",
            kinds=rules.delta_net_kinds,
            states_kinds=True,
            predicts=True,
        ),
        Family(
            "qwen3next",
            "Qwen3-Next-80B, Qwen3-Coder-Next",
            kinds=rules.delta_net_kinds,
            states_kinds=True,
        ),
        Family("nemotron_h", "Nemotron-H, Nemotron Nano 2", kinds=rules.nemotron_kinds),
        Family("nemotron_h_moe", "Nemotron 3 Nano, Super", kinds=rules.nemotron_kinds),
        Family("granitehybrid", "Granite 4 H", embedding_scale=0.0, kinds=rules.headless_kinds),
        Family("lfm2", "LFM2, LFM2.5", kinds=rules.headless_kinds, refusal=rules.lfm2_refusal),
        Family("lfm2moe", "LFM2-8B-A1B, 24B-A2B", kinds=rules.headless_kinds),
        Family("jamba", "Jamba 1.5, Jamba 2", kinds=rules.headless_kinds),
        Family("falcon-h1", "Falcon H1", kinds=rules.both_kinds),
        Family("mamba", "Mamba, Falcon Mamba", kinds=rules.recurrent_kinds),
        Family("mamba2", "Mamba 2, Mamba Codestral", kinds=rules.recurrent_kinds),
        Family("bailingmoe3", "Ling 3, Ring 3", kinds=rules.headless_kinds),
        # Hyper-connections: layers hand on several streams of a row, which enter a graph behind its embedding.
        Family(
            "deepseek4",
            "DeepSeek V4 Flash, Pro",
            head_required=True,
            streams=rules.hyper_connections,
            enters_inside=True,
            hash_layers=rules.hash_layers,
            blocked=rules.deepseek4_blocked,
            needed=rules.deepseek4_needed,
            cache_values=rules.deepseek4_kv_values,
            state_values=rules.deepseek4_states,
            dropped=frozenset({"exp_probs_b_vl.bias"}),
        ),
        Family(
            "hy_v4",
            "Hunyuan 4",
            head_required=True,
            streams=rules.hyper_connections,
            enters_inside=True,
            indexers=rules.hy_v4_indexers,
        ),
        Family(
            "glm5-next",
            "GLM-5.3 Flash",
            head_required=True,
            streams=rules.hyper_connections,
            enters_inside=True,
            kinds=rules.headless_kinds,
            indexers=rules.glm5_next_indexers,
        ),
        # Embeddings are normed before the first layer, and rows of an earlier stage are not to be.
        Family("bloom", "BLOOM, BLOOMZ", enters_inside=True),
        Family("muse-glimmer", "Muse Glimmer 30B", head_required=True, windows=windows_of(4), enters_inside=True),
        Family("kimi-linear", "Kimi Linear 48B-A3B", head_required=True, kinds=rules.headless_kinds),
        # Every twelfth layer's input goes into all later layers, and travels with the row.
        Family(
            "kimi-k3",
            "Kimi K3",
            left_out="images",
            head_required=True,
            kinds=rules.headless_kinds,
            block_layers=rules.block_layers,
        ),
    )
}


def supported_architectures() -> tuple[str, ...]:
    """Return the certified architectures, sorted."""
    return tuple(sorted(FAMILIES))


def family_of(architecture: str) -> Family:
    """Return the family's row, or the generic rule for one outside the table, which is not certified."""
    # The generic row always ships output.weight, since nothing says that the family could do without it.
    return FAMILIES.get(architecture) or Family(
        architecture, head_required=True, windows=stated_windows, certified=False
    )


def metadata_of(model: GgufModel, n_layers: int, n_vocab: int) -> Metadata:
    """Collect the inputs of the rules."""
    architecture = model.text("general.architecture")
    prefix = architecture + "."
    values = {key.removeprefix(prefix): entry.value for key, entry in model.entries.items() if entry.value is not None}
    return Metadata(values, model.tensors.keys(), n_layers, n_vocab)


def scale_of(family: Family, facts: Metadata) -> float:
    """Return the factor for looked-up embedding rows; 1.0 when the family has none (llama.cpp reads 0 as none)."""
    if family.scales_tokens:
        return math.sqrt(facts.integer("embedding_length") or 1)
    if family.embedding_scale is None:
        return 1.0
    found = facts.values.get("embedding_scale")
    return (float(found) if isinstance(found, int | float) else family.embedding_scale) or 1.0


def output_scale_of(family: Family, facts: Metadata) -> float:
    """Return the factor for rows that leave a stage. It undoes the multiplication at the start of the next stage's
    graph.
    """
    return 1.0 / math.sqrt(facts.integer("embedding_length") or 1) if family.scales_rows else 1.0


def slice_overrides(family: Family, facts: Metadata) -> Overrides:
    """Return the keys that every slice of the model carries in place of the source's."""
    stated = dict(family.overrides(facts))
    if family.embedding_scale is not None and scale_of(family, facts) != 1.0:
        stated["embedding_scale"] = (F32, 0.0)
    return stated
