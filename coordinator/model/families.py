"""The one table of what is special to a model family when its layers are cut apart.

Everything that can be derived from a file is derived from it (layer count, tied embeddings, leading dense blocks,
per-layer arrays, prediction layers) and has no place here. A row is added only together with the tiny random model
in the tests that proves it: every legal cut of it equals the unsplit model.

The facts are about the llama.cpp that pyproject.toml pins; the function that shows each is named beside it, or at its
rule in `family_rules.py`.
"""

from __future__ import annotations

import math

from relayline.coordinator.model import family_rules as rules
from relayline.coordinator.model.family import Family, Metadata, Overrides, stated_windows, windows_of
from relayline.coordinator.model.gguf_file import GgufModel
from relayline.coordinator.model.gguf_write import F32

POSITIONS = frozenset({"position_embd.weight"})

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family("llama"),
        Family("mistral3"),
        Family("qwen2"),
        Family("qwen2moe", head_required=True),
        Family("qwen3"),
        Family("qwen3moe"),
        Family("phi3"),
        Family("phimoe", head_required=True),
        # build_inp_embd multiplies rows that come in as embeddings too, so only the lookup may scale.
        Family("granite", embedding_scale=0.0, refusal=rules.granite_refusal),
        Family("granitemoe", embedding_scale=0.0),
        Family("deepseek2", overrides=rules.deepseek2_overrides, forbidden_lengths=rules.deepseek2_lengths),
        Family("deepseek32", indexers=rules.all_indexers),
        Family("glm-dsa", indexers=rules.glm_dsa_indexers),
        Family("glm4moe", overrides=rules.multi_axis_overrides, refusal=rules.multi_axis_refusal),
        Family("olmo"),
        Family("olmoe", head_required=True),
        Family("falcon"),
        Family("stablelm", head_required=True),
        Family("starcoder2"),
        # Rotary positions are left out at every fourth layer, counted from the first one in the file.
        Family("smollm3", cut_period=4),
        Family("command-r", refusal=rules.command_r_refusal),
        Family("internlm2", head_required=True),
        Family("gptneox", head_required=True),
        Family("arcee"),
        Family("deepseek"),
        Family("dots1", head_required=True),
        Family("ernie4_5"),
        Family("exaone"),
        Family("hunyuan-moe"),
        Family("minimax-m2", head_required=True),
        Family("nemotron", head_required=True),
        Family("orion", head_required=True),
        Family("seed_oss"),
        Family("xverse", head_required=True),
        Family("gpt-oss", head_required=True, windows=windows_of(2)),
        # llama_model_gemma3::graph leaves rows that come in as embeddings as they are.
        Family(
            "gemma3",
            scales_tokens=True,
            forbidden_lengths=rules.gemma3_lengths,
            windows=windows_of(6, is_optional=True),
            factors=rules.gemma3_factors,
        ),
        # llama_model_gemma::graph and llama_model_gemma2::graph scale rows that come in as embeddings too.
        Family("gemma", scales_rows=True),
        Family(
            "gemma2",
            scales_rows=True,
            refusal=rules.gemma2_refusal,
            forbidden_lengths=rules.gemma2_lengths,
            windows=windows_of(2),
        ),
        Family("llama4", cut_period=rules.LLAMA4_ROPE_STEP, refusal=rules.llama4_refusal, windows=windows_of(4)),
        # Rotary positions are left out where there is no window.
        Family("cohere2", windows=windows_of(4)),
        Family("olmo2", head_required=True, windows=windows_of(4, is_optional=True)),
        Family("exaone4", refusal=rules.exaone4_refusal, forbidden_lengths=rules.exaone4_lengths),
        Family("exaone-moe", head_required=True, windows=windows_of(4)),
        Family("ernie4_5-moe", refusal=rules.ernie_moe_refusal),
        Family("bailingmoe2", head_required=True),
        Family("hunyuan-dense"),
        Family("apertus", head_required=True),
        # Which layers have windows stands in the file, layer by layer.
        Family("mimo2", head_required=True, windows=windows_of(0)),
        Family("step35", head_required=True, windows=windows_of(0), rotates_by_layer=True),
        # build_inp_embd as for granite; llama_model_grok::load_arch_hparams has the default of old files.
        Family("grok", embedding_scale=78.38367176906169),
        # The loader of deepseek2.
        Family("mistral4", overrides=rules.deepseek2_overrides, forbidden_lengths=rules.deepseek2_lengths),
        # A BOOL for each layer says where windows are; their heads have other widths, and their rope another base.
        Family(
            "gemma4",
            scales_tokens=True,
            refusal=rules.gemma4_refusal,
            forbidden_lengths=rules.gemma4_lengths,
            windows=windows_of(0),
            unread=rules.gemma4_unread,
            rotates_by_layer=True,
            widths_by_layer=True,
        ),
        Family("qwen3vl", overrides=rules.no_deepstack),
        Family("qwen3vlmoe", overrides=rules.no_deepstack),
        Family("qwen2vl"),
        Family("hunyuan_vl"),
        Family("paddleocr"),
        Family(
            "glm4",
            overrides=rules.multi_axis_overrides,
            refusal=rules.glm4_refusal,
            row_orders=rules.glm4_row_orders,
        ),
        Family("hy_v3"),
        Family(
            "laguna",
            blocked=rules.laguna_blocked,
            windows=windows_of(4, is_optional=True, full_first=True),
            rotates_by_layer=True,
        ),
        # Rotary positions are left out where there is no window, but for the leading dense layers.
        Family("cohere2moe", windows=windows_of(4, full_first=True)),
        # llama_model_afmoe::graph scales rows that come in, and leaves rotary positions out at every fourth layer.
        Family("afmoe", cut_period=4, scales_rows=True, windows=windows_of(4, is_optional=True)),
        Family("minimax-m3", head_required=True, blocked=rules.minimax_m3_blocked),
        Family("minicpm", embedding_scale=12.0, overrides=rules.minicpm_overrides),
        Family("chatglm"),
        Family("bailingmoe", head_required=True),
        Family("dbrx", head_required=True),
        Family("arctic"),
        Family("deci", blocked=rules.deci_blocked),
        Family("grovemoe"),
        Family("jais", head_required=True),
        Family("jais2"),
        Family("openelm"),
        Family("phi2", head_required=True),
        Family("plamo", head_required=True),
        Family("plamo3", windows=windows_of(8, is_optional=True)),
        Family("refact"),
        Family(
            "smallthinker",
            cut_period=rules.SMALLTHINKER_ROPE_STEP,
            forbidden_lengths=rules.smallthinker_lengths,
            windows=windows_of(4, is_optional=True, full_first=True),
        ),
        Family("granite_swa", embedding_scale=0.0, refusal=rules.granite_refusal, windows=windows_of(0)),
        Family("maple", head_required=True, windows=windows_of(0), rotates_by_layer=True),
        Family("mellum", head_required=True, windows=windows_of(4, is_optional=True)),
        Family("spark2_5", windows=windows_of(0), rotates_by_layer=True),
        Family("codeshell", head_required=True),
        Family("maincoder"),
        Family("nanbeige", refusal=rules.nanbeige_refusal),
        Family("pangu-embedded"),
        Family("qwen", head_required=True),
        Family("bitnet"),
        Family("deepseek2-ocr"),
        Family("gpt2", entry_tables=POSITIONS),
        Family("starcoder", entry_tables=POSITIONS),
        Family("mpt", entry_tables=POSITIONS),
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
    """Collect what the rules look at."""
    architecture = model.text("general.architecture")
    prefix = architecture + "."
    values = {key.removeprefix(prefix): entry.value for key, entry in model.entries.items() if entry.value is not None}
    return Metadata(architecture, values, model.tensors.keys(), n_layers, n_vocab)


def scale_of(family: Family, facts: Metadata) -> float:
    """Return the factor for looked-up embedding rows; 1.0 when the family has none (llama.cpp reads 0 as none)."""
    if family.scales_tokens:
        return math.sqrt(facts.integer("embedding_length") or 1)
    if family.embedding_scale is None:
        return 1.0
    found = facts.values.get("embedding_scale")
    return (float(found) if isinstance(found, int | float) else family.embedding_scale) or 1.0


def output_scale_of(family: Family, facts: Metadata) -> float:
    """Return the factor for rows that leave a stage: what the next stage's graph will multiply them by, taken back."""
    return 1.0 / math.sqrt(facts.integer("embedding_length") or 1) if family.scales_rows else 1.0


def slice_overrides(family: Family, facts: Metadata) -> Overrides:
    """Return the keys that every slice of the model carries in place of the source's."""
    stated = dict(family.overrides(facts))
    if family.embedding_scale is not None and scale_of(family, facts) != 1.0:
        stated["embedding_scale"] = (F32, 0.0)
    return stated
