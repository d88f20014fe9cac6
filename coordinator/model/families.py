"""The one table of what is special to a model family when its layers are cut apart.

Everything that can be derived from a file is derived from it (layer count, tied embeddings, leading dense blocks,
per-layer arrays, prediction layers) and has no place here. A row is added only together with the tiny random model
in the tests that proves it: every legal cut of it equals the unsplit model.

The facts are about the llama.cpp that pyproject.toml pins; the function that shows each is named beside it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping

from relayline.coordinator.model.gguf_file import GgufModel
from relayline.coordinator.model.gguf_write import F32, I32, U32
from relayline.wire.model_files.gguf_header import Value


@dataclasses.dataclass(frozen=True, slots=True)
class Metadata:
    """What a rule may look at."""

    architecture: str
    values: Mapping[str, Value]  # decoded entries; keys of the family's own namespace without the prefix
    tensor_names: Collection[str]
    n_layers: int  # decoded layers; prediction layers at the end are not counted
    n_vocab: int

    def integer(self, key: str) -> int | None:
        """Return an integer value, or None when it is absent."""
        found = self.values.get(key)
        return found if isinstance(found, int) and not isinstance(found, bool) else None


# Key (without the family's prefix) -> (GGUF type, value) that every slice carries in place of the source's. For a
# tuple, which becomes an array, the type is that of its items.
Overrides = Mapping[str, tuple[int, Value]]


def _no_overrides(_: Metadata) -> Overrides:
    return {}


def _no_refusal(_: Metadata) -> str | None:
    return None


def _no_lengths(_: Metadata) -> frozenset[int]:
    return frozenset()


# Which layers have a sliding window, one flag per layer; empty where llama.cpp keeps all layers alike. Every slice is
# told its own flags outright, because a pattern counts from the first layer in the file.
Windows = tuple[bool, ...]
WINDOW_PATTERN = "attention.sliding_window_pattern"


def _no_windows(_: Metadata) -> Windows:
    return ()


# Which layers choose by themselves which tokens they attend to, one flag per layer; others attend to what the last one
# before them has chosen, so that no slice starts with them. Empty where none chooses.
Indexers = tuple[bool, ...]
INDEXER_TYPES = "attention.indexer.types"


def _no_indexers(_: Metadata) -> Indexers:
    return ()


def _all_indexers(facts: Metadata) -> Indexers:
    return (True,) * facts.n_layers


# F32 vectors of each block, by name without "blk.N.", and what a slice carries them multiplied with.
Factors = Mapping[str, float]


def _no_factors(_: Metadata) -> Factors:
    return {}


def _windows(period: int, *, is_optional: bool = False) -> Callable[[Metadata], Windows]:
    """Return what llama_model_base::load_swa_pattern makes of a file where the last layer of each period has no window.

    Optional: without a window in the file, no layer has one.
    """

    def found(facts: Metadata) -> Windows:
        if is_optional and not facts.integer("attention.sliding_window"):
            return ()
        stated = facts.values.get(WINDOW_PATTERN)
        if isinstance(stated, tuple):
            flags = tuple(bool(flag) for flag in stated[: facts.n_layers])
            return flags + (False,) * (facts.n_layers - len(flags))
        every = stated if isinstance(stated, int) else period
        return tuple(every == 0 or layer % every < every - 1 for layer in range(facts.n_layers))

    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """How one architecture is cut."""

    architecture: str  # general.architecture
    head_required: bool = False  # llama.cpp demands output.weight; otherwise it falls back to token_embd.weight
    cut_period: int = 1  # a slice must start at a multiple of this, because a layer's kind follows from its index
    embedding_scale: float | None = None  # llama.cpp's default for <arch>.embedding_scale; None: no such key is read
    scales_tokens: bool = False  # looked-up rows are scaled by the root of their width, rows that come in are not
    scales_rows: bool = False  # both are, so that every stage but the last has to undo it for the next
    overrides: Callable[[Metadata], Overrides] = _no_overrides  # keys that every slice must carry changed
    refusal: Callable[[Metadata], str | None] = _no_refusal  # why a certain model of the family cannot be cut
    forbidden_lengths: Callable[[Metadata], frozenset[int]] = _no_lengths  # layer counts that load as another model
    windows: Callable[[Metadata], Windows] = _no_windows  # where layers with and without sliding windows alternate
    indexers: Callable[[Metadata], Indexers] = _no_indexers  # which layers choose what is attended to
    factors: Callable[[Metadata], Factors] = _no_factors  # what llama.cpp would multiply by in the whole file alone
    rotates_by_layer: bool = False  # llama.cpp asks each layer how many values of its heads are rotated
    certified: bool = True  # False only for the generic rule of --experimental


def _granite_refusal(facts: Metadata) -> str | None:
    # llama_model_granite::load_arch_hparams: such a model takes wider rows, with image features per layer.
    mapping = facts.values.get("deepstack_mapping")
    if isinstance(mapping, tuple) and any(isinstance(index, int) and index >= 0 for index in mapping):
        return "its deepstack layers take image features beside the hidden state, which stages do not forward"
    return None


def _command_r_refusal(facts: Metadata) -> str | None:
    # llama_model_command_r::load_arch_tensors reads the query and key norms only if n_layer >= 64.
    if "blk.0.attn_q_norm.weight" in facts.tensor_names:
        return "its query and key norms are loaded by llama.cpp only from files of 64 or more layers"
    return None


DEEPSEEK2_LITE_LAYERS = frozenset({26, 27})
GATING_SOFTMAX, GATING_SIGMOID = 1, 2


def _deepseek2_is_lite(facts: Metadata) -> bool:
    return facts.n_layers in DEEPSEEK2_LITE_LAYERS or (facts.n_layers == 48 and facts.n_vocab == 128_256)


def _deepseek2_overrides(facts: Metadata) -> Overrides:
    # llama_model_deepseek2::load_arch_hparams guesses two things from the layer count: whether queries are low-rank
    # (the Lite models are not) and, in old files, the gating function. A slice has to say both outright.
    stated: dict[str, tuple[int, Value]] = {}
    if _deepseek2_is_lite(facts):
        stated["attention.q_lora_rank"] = (U32, 0)
    if not facts.integer("expert_gating_func"):
        flash = facts.n_layers in (47, 48) and facts.n_vocab == 154_880
        stated["expert_gating_func"] = (U32, GATING_SIGMOID if flash else GATING_SOFTMAX)
    return stated


def _deepseek2_lengths(facts: Metadata) -> frozenset[int]:
    if _deepseek2_is_lite(facts):
        return frozenset()
    return DEEPSEEK2_LITE_LAYERS | ({48} if facts.n_vocab == 128_256 else frozenset())


def _n_rotated(facts: Metadata) -> int:
    """Return how many values of a head are rotated, by llama.cpp's rules for the absent keys."""
    n_embd, n_heads = facts.integer("embedding_length") or 0, facts.integer("attention.head_count") or 0
    head_width = facts.integer("attention.key_length") or (n_embd // n_heads if n_heads else 0)
    return facts.integer("rope.dimension_count") or head_width


def _glm4moe_overrides(facts: Metadata) -> Overrides:
    # llama_model_glm4_moe::graph aborts the process on rows that come in as embeddings unless the file has multi-axis
    # rope. With all axes at one position, as text has them, multi-axis rope is the very rotation of the plain one.
    sections = facts.values.get("rope.dimension_sections")
    if isinstance(sections, tuple) and len(sections) > 1 and sections[0] and sections[1]:
        return {}
    n_pairs = _n_rotated(facts) // 2
    third = -(-n_pairs // 3)
    return {"rope.dimension_sections": (I32, (third, third, n_pairs - 2 * third, 0))}


def _glm4moe_refusal(facts: Metadata) -> str | None:
    if _glm4moe_overrides(facts) and _n_rotated(facts) < 4:
        return "its rope is too narrow to be written with several axes, which stages need for this architecture"
    return None


GLM_5_2_TOKENS = 1_048_576  # of context, by which llama.cpp knows files whose layers share indexers without saying so


def _glm_dsa_indexers(facts: Metadata) -> Indexers:
    # llama_model_glm_dsa::load_arch_hparams, which asserts that the first layer is one of these.
    stated = facts.values.get(INDEXER_TYPES)
    if isinstance(stated, tuple):
        flags = tuple(bool(flag) for flag in stated[: facts.n_layers])
    elif stated is None and (facts.integer("context_length") or 0) >= GLM_5_2_TOKENS:
        flags = tuple(layer < 2 or layer % 4 == 2 for layer in range(facts.n_layers))
    else:
        flags = _all_indexers(facts)
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


def _gemma3_factors(facts: Metadata) -> Factors:
    # llama_model_gemma3::load_arch_hparams takes 62 layers for the 27B model, whose scores are divided by the root of
    # another width than the heads'. The graph multiplies queries by their norm just before, and both factors meet.
    found = _other_width(facts)
    if facts.n_layers != GEMMA3_27B_LAYERS or found is None:
        return {}
    width, head_width = found
    return {"attn_q_norm.weight": math.sqrt(head_width / width)}


def _gemma3_lengths(facts: Metadata) -> frozenset[int]:
    return frozenset({GEMMA3_27B_LAYERS}) - {facts.n_layers}


def _gemma2_refusal(facts: Metadata) -> str | None:
    # llama_model_gemma2::load_arch_hparams does the same with 46 layers, but its queries have no norm that could tell.
    if facts.n_layers == GEMMA2_27B_LAYERS and _other_width(facts):
        return "llama.cpp knows how to scale its attention by its number of layers alone, which no slice has"
    return None


def _gemma2_lengths(facts: Metadata) -> frozenset[int]:
    return frozenset({GEMMA2_27B_LAYERS}) - {facts.n_layers}


def _exaone4_refusal(facts: Metadata) -> str | None:
    # llama_model_exaone4::load_arch_hparams reads windows only from files of 64 layers.
    if facts.n_layers == EXAONE4_32B_LAYERS:
        return "llama.cpp gives its layers sliding windows only in a file of 64 layers"
    return None


def _exaone4_lengths(_: Metadata) -> frozenset[int]:
    return frozenset({EXAONE4_32B_LAYERS})


LLAMA4_ROPE_STEP = 4


def _llama4_refusal(facts: Metadata) -> str | None:
    # llama_model_llama4::graph counts layers with experts and such without rotary positions from the first in the file,
    # and where the file says that none has a window, its last layer has no rotary positions.
    if facts.integer("attention.sliding_window") == 0:
        return "without windows its last layer differs from others, whichever it is"
    if LLAMA4_ROPE_STEP % (facts.integer("interleave_moe_layer_step") or 1):
        return "its layers with experts do not repeat with those without rotary positions"
    return None


def _ernie_moe_refusal(facts: Metadata) -> str | None:
    # llama_model_ernie4_5_moe::graph counts from the first layer in the file.
    if facts.integer("interleave_moe_layer_step") != 1:
        return "its layers with experts alternate with others, counted from its first layer"
    return None


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
        Family("granite", embedding_scale=0.0, refusal=_granite_refusal),
        Family("granitemoe", embedding_scale=0.0),
        Family("deepseek2", overrides=_deepseek2_overrides, forbidden_lengths=_deepseek2_lengths),
        Family("deepseek32", indexers=_all_indexers),
        Family("glm-dsa", indexers=_glm_dsa_indexers),
        Family("glm4moe", overrides=_glm4moe_overrides, refusal=_glm4moe_refusal),
        Family("olmo"),
        Family("olmoe", head_required=True),
        Family("falcon"),
        Family("stablelm", head_required=True),
        Family("starcoder2"),
        # Rotary positions are left out at every fourth layer, counted from the first one in the file.
        Family("smollm3", cut_period=4),
        Family("command-r", refusal=_command_r_refusal),
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
        Family("gpt-oss", head_required=True, windows=_windows(2)),
        # llama_model_gemma3::graph leaves rows that come in as embeddings as they are.
        Family(
            "gemma3",
            scales_tokens=True,
            forbidden_lengths=_gemma3_lengths,
            windows=_windows(6, is_optional=True),
            factors=_gemma3_factors,
        ),
        # llama_model_gemma::graph and llama_model_gemma2::graph scale rows that come in as embeddings too.
        Family("gemma", scales_rows=True),
        Family(
            "gemma2",
            scales_rows=True,
            refusal=_gemma2_refusal,
            forbidden_lengths=_gemma2_lengths,
            windows=_windows(2),
        ),
        Family("llama4", cut_period=LLAMA4_ROPE_STEP, refusal=_llama4_refusal, windows=_windows(4)),
        # Rotary positions are left out where there is no window.
        Family("cohere2", windows=_windows(4)),
        Family("olmo2", head_required=True, windows=_windows(4, is_optional=True)),
        Family("exaone4", refusal=_exaone4_refusal, forbidden_lengths=_exaone4_lengths),
        Family("exaone-moe", head_required=True, windows=_windows(4)),
        Family("ernie4_5-moe", refusal=_ernie_moe_refusal),
        Family("bailingmoe2", head_required=True),
        Family("hunyuan-dense"),
        Family("apertus", head_required=True),
        # Which layers have windows stands in the file, layer by layer.
        Family("mimo2", head_required=True, windows=_windows(0)),
        Family("step35", head_required=True, windows=_windows(0), rotates_by_layer=True),
        # build_inp_embd as for granite; llama_model_grok::load_arch_hparams has the default of old files.
        Family("grok", embedding_scale=78.38367176906169),
        # The loader of deepseek2.
        Family("mistral4", overrides=_deepseek2_overrides, forbidden_lengths=_deepseek2_lengths),
    )
}


def supported_architectures() -> tuple[str, ...]:
    """Return the certified architectures, sorted."""
    return tuple(sorted(FAMILIES))


def family_of(architecture: str) -> Family:
    """Return the family's row, or the generic rule for one outside the table, which is not certified."""
    # The generic row always ships output.weight, since nothing says that the family could do without it.
    return FAMILIES.get(architecture) or Family(architecture, head_required=True, certified=False)


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
