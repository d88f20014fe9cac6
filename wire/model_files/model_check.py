"""Checks whether llama.cpp can compute with a GGUF header: the one check of `inspect`, `split`, fetch and load.
llama.cpp ends its process if one of its assertions fails, and follows a null pointer if no product supports a tensor's
type.

Every such fault that shows in the header is reported here, in one line. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from relayline.wire.common.errors import ModelFileError
from relayline.wire.model_files.gguf_header import SCALARS, TOKENS_KEY, GgufFile, KeyValue, Tensor, Value

# Types that ggml has a product of rows by. A test holds this to the installed ggml.
PRODUCT_TYPES = frozenset({
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S",
    "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
    "Q1_0", "Q2_0",
})  # fmt: skip
# llama.cpp's own limits (LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS), which it asserts.
LAYERS_MAX, EXPERTS_MAX = 512, 1_024
# Above these no model of the next years is; each bounds what llama.cpp would allocate or loop over.
CTX_MAX = 1 << 28
VOCAB_MAX = 1 << 22
WIDTH_MAX = 1 << 20  # of a row, of a head, of a feed-forward layer
HEADS_MAX = 1 << 14
INTEGER_MAX = 1 << 31  # any other whole number
FLOAT_MAX = 1e15
EPSILON_MAX = 1.0

_WIDTHS = (
    "embedding_length", "embedding_length_out", "feed_forward_length", "expert_feed_forward_length",
    "expert_shared_feed_forward_length", "attention.key_length", "attention.value_length", "attention.key_length_mla",
    "attention.value_length_mla", "attention.key_length_swa", "attention.value_length_swa", "attention.q_lora_rank",
    "attention.kv_lora_rank", "attention.indexer.key_length", "rope.dimension_count", "rope.dimension_count_swa",
)  # fmt: skip
# Key in the family's namespace -> least and greatest value.
_RANGES: dict[str, tuple[int, int]] = {
    **dict.fromkeys(_WIDTHS, (0, WIDTH_MAX)),
    "block_count": (1, LAYERS_MAX),
    "nextn_predict_layers": (0, LAYERS_MAX),
    "leading_dense_block_count": (0, LAYERS_MAX),
    "context_length": (1, CTX_MAX),
    "vocab_size": (1, VOCAB_MAX),
    "attention.head_count": (0, HEADS_MAX),
    "attention.head_count_kv": (0, HEADS_MAX),
    "attention.indexer.head_count": (0, HEADS_MAX),
    "attention.sliding_window": (0, CTX_MAX),
    "attention.indexer.block_size": (1, CTX_MAX),
    "attention.temperature_length": (1, INTEGER_MAX - 1),
    "rope.scaling.original_context_length": (1, CTX_MAX),
    "expert_count": (0, EXPERTS_MAX),
    "expert_used_count": (0, EXPERTS_MAX),
    "expert_group_count": (0, EXPERTS_MAX),
    "expert_group_used_count": (0, EXPERTS_MAX),
    "expert_gating_func": (0, 16),
    "experts_per_group": (1, EXPERTS_MAX),
    "num_loops": (1, LAYERS_MAX),
}
_MAY_BE_NEGATIVE = ("deepstack_mapping", "pooling_type", "rope.dimension_sections")
_POSITIVE = ("rope.freq_base", "rope.freq_base_swa")
_NOT_NEGATIVE = ("rope.scaling.factor", "rope.scale_linear", "rope.scaling.yarn_ext_factor")
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_FLOAT_TYPES = (6, 12)
# Of _DECODERS: byte-level, by pieces with tokens for bytes, and none at all.
_TOKENIZERS = ("gpt2", "llama", "gemma4", "none", "no_vocab")
_BY_PIECES = "llama"
# Architectures whose graph takes keys to be as wide as values, and those that rotate whole heads (the graph() of
# each in llama.cpp's src/models). Elsewhere the shapes of tensors tell all.
_EQUAL_WIDTHS = frozenset({
    "afmoe", "apertus", "arcee", "arctic", "bailingmoe2", "bitnet", "chatglm", "codeshell", "cohere2",
    "cohere2moe", "command-r", "dbrx", "deci", "deepseek", "dots1", "ernie4_5", "ernie4_5-moe", "exaone",
    "exaone-moe", "exaone4", "falcon", "gemma", "gemma2", "gemma3", "glm4", "glm4moe", "gpt-oss", "gpt2",
    "gptneox", "granite", "granite_swa", "granitemoe", "grok", "grovemoe", "hunyuan-dense", "hunyuan-moe",
    "hunyuan_vl", "hy_v3", "internlm2", "jais", "jais2", "laguna", "llama", "llama4", "maincoder", "maple",
    "mellum", "minicpm", "minimax-m2", "minimax-m3", "mistral3", "mpt", "nanbeige", "nemotron", "olmo", "olmo2",
    "olmoe", "openelm", "orion", "paddleocr", "pangu-embedded", "phi2", "phi3", "phimoe", "plamo", "qwen",
    "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "refact", "seed_oss",
    "smallthinker", "smollm3", "spark2_5", "stablelm", "starcoder", "starcoder2", "step35", "xverse",
})  # fmt: skip
_WHOLE_ROTATION = _EQUAL_WIDTHS - frozenset({
    "afmoe", "bailingmoe2", "bitnet", "chatglm", "cohere2", "command-r", "gemma", "gemma2", "gemma3", "glm4",
    "glm4moe", "gpt-oss", "gpt2", "gptneox", "hunyuan-dense", "jais", "laguna", "maple", "minimax-m2",
    "minimax-m3", "mpt", "nanbeige", "nemotron", "openelm", "phi2", "phi3", "phimoe", "qwen", "refact",
    "spark2_5", "stablelm", "starcoder", "step35",
})  # fmt: skip
_DECODERS = _EQUAL_WIDTHS | {
    "bailingmoe", "deepseek2", "deepseek2-ocr", "deepseek32", "gemma4", "glm-dsa", "mimo2", "mistral4",
}  # fmt: skip


def check_header(file: GgufFile) -> None:
    """Raise ModelFileError for a file that llama.cpp cannot load or compute with."""
    check_model(file.path, file.entries, file.tensors)


def check_model(path: Path, entries: Mapping[str, KeyValue], tensors: Iterable[Tensor]) -> None:
    """Raise ModelFileError for the metadata of a model and the tensors of all its files."""
    problem = next(itertools.chain(tensor_problems(tensors), value_problems(entries)), None)
    if problem is not None:
        raise ModelFileError(f"{path}: {problem}; the file is damaged, or llama.cpp cannot compute this model")


def tensor_problems(tensors: Iterable[Tensor]) -> Iterator[str]:
    """Yield the tensors that no product, sum or norm of llama.cpp takes."""
    for tensor in tensors:
        kind = tensor.type_name
        if "tid2eid" in tensor.name:  # numbers of experts by token, which are looked up
            continue
        if is_elementwise(tensor):
            if kind != "F32":
                yield f"tensor {tensor.name} is {kind}, but norms, biases and other vectors must be F32"
        elif kind not in PRODUCT_TYPES:
            yield f"tensor {tensor.name} is {kind}, a type that llama.cpp cannot multiply"


def is_elementwise(tensor: Tensor) -> bool:
    """Return whether a tensor is added or multiplied value by value, not as a matrix."""
    name = tensor.name
    if "gate_inp" in name and name.endswith(".weight"):  # a product with one row where there is one shared expert
        return False
    if "conv1d" in name or name.endswith("conv.weight"):  # ggml_ssm_conv asserts it
        return True
    return math.prod(tensor.dims[1:]) == 1 or "norm" in name or not name.endswith(".weight")


def value_problems(entries: Mapping[str, KeyValue]) -> Iterator[str]:
    """Yield which hyperparameters are not finite, not of their range, or contradict one another."""
    found = entries.get("general.architecture")
    prefix = f"{found.value}." if found is not None and isinstance(found.value, str) else "\0"
    values = {key.removeprefix(prefix): entry.value for key, entry in entries.items() if key.startswith(prefix)}
    for key, entry in entries.items():
        if key.startswith((prefix, "xielu.")):
            yield from _entry_problems(key, key.removeprefix(prefix), entry)
    yield from _expert_problems(prefix, values)
    yield from _head_problems(prefix, values)
    yield from _width_problems(prefix, values)
    yield from _rope_problems(prefix, values)
    if prefix.removesuffix(".") in _DECODERS:
        yield from _tokenizer_problems(entries)
    if (tokens := entries.get(TOKENS_KEY)) is not None and tokens.repeats:
        yield f"{TOKENS_KEY} holds the same text twice"


def _entry_problems(full_key: str, key: str, entry: KeyValue) -> Iterator[str]:
    if key in _RANGES and (entry.item_type in _FLOAT_TYPES or entry.item_type not in SCALARS):
        yield f"{full_key} is not a whole number"
        return
    items = entry.value if isinstance(entry.value, tuple) else (entry.value,)
    for value in items:
        if isinstance(value, bool) or value is None or isinstance(value, str):
            continue
        low, high = _bounds_of(key, is_float=isinstance(value, float))
        if not low <= value <= high:  # NaN is in no range
            yield f"{full_key} is {value}; it must be {low:g} to {high:g}"
            return


def _bounds_of(key: str, *, is_float: bool) -> tuple[float, float]:
    if key in _RANGES:
        return _RANGES[key]
    if not is_float:
        return (-INTEGER_MAX if key in _MAY_BE_NEGATIVE else 0, INTEGER_MAX - 1)
    if key.endswith("epsilon"):
        return 0.0, EPSILON_MAX
    if key in _POSITIVE:
        return 1e-6, FLOAT_MAX
    return (0.0 if key in _NOT_NEGATIVE else -FLOAT_MAX), FLOAT_MAX


def _largest(value: Value | None) -> int:
    items = value if isinstance(value, tuple) else (value,)
    return max((int(item) for item in items if isinstance(item, int)), default=0)


def _expert_problems(prefix: str, values: Mapping[str, Value | None]) -> Iterator[str]:
    n_experts, n_used = _largest(values.get("expert_count")), _largest(values.get("expert_used_count"))
    n_groups, n_groups_used = (
        _largest(values.get("expert_group_count")),
        _largest(values.get("expert_group_used_count")),
    )
    if n_used > n_experts or (n_experts and not n_used):
        yield f"{prefix}expert_used_count is {n_used} of {n_experts} experts"
    if n_groups and n_groups >= n_experts:
        yield f"{prefix}expert_group_count is {n_groups} of {n_experts} experts"
    if n_groups > 1 and (n_experts % n_groups or not 0 < n_groups_used < n_groups):
        yield f"{prefix}expert_group_count is {n_groups}, {n_groups_used} of them used, of {n_experts} experts"


def _per_layer(value: Value | None, n_layers: int) -> tuple[int, ...]:
    items = value if isinstance(value, tuple) else (value,) * n_layers
    return tuple(int(item) for item in items if isinstance(item, int))


def _head_problems(prefix: str, values: Mapping[str, Value | None]) -> Iterator[str]:
    n_layers = min(_largest(values.get("block_count")), LAYERS_MAX)
    heads = _per_layer(values.get("attention.head_count"), n_layers)
    shared = _per_layer(values.get("attention.head_count_kv"), n_layers)
    for n_heads, n_kv in zip(heads, shared or heads, strict=False):
        if n_kv > n_heads or (n_kv and n_heads % n_kv):
            yield f"{prefix}attention.head_count is {n_heads}, not a multiple of its {n_kv} key and value heads"
            return


def _width_problems(prefix: str, values: Mapping[str, Value | None]) -> Iterator[str]:
    architecture = prefix.removesuffix(".")
    heads = _per_layer(values.get("attention.head_count"), 1)[:1]
    by_default = _largest(values.get("embedding_length")) // heads[0] if heads and heads[0] else 0
    keys, its_values, rotated = (
        by_default if values.get(key) is None else _largest(values.get(key))
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")
    )
    if architecture in _EQUAL_WIDTHS and keys != its_values:
        yield f"{prefix}attention.key_length is {keys} and value_length {its_values}; both must be equal in this family"
    if values.get("rope.dimension_count") is not None and architecture in _WHOLE_ROTATION and rotated != keys:
        yield f"{prefix}rope.dimension_count is {rotated}; it must be {keys}, all values of a head"


def _rope_problems(prefix: str, values: Mapping[str, Value | None]) -> Iterator[str]:
    scaling = values.get("rope.scaling.type")
    if isinstance(scaling, str) and scaling not in _ROPE_SCALINGS:
        yield f"{prefix}rope.scaling.type is {scaling[:40]!r}; it must be one of {', '.join(_ROPE_SCALINGS)}"
    heads = [n_heads for n_heads in _per_layer(values.get("attention.head_count"), 1) if n_heads > 0]
    by_default = _largest(values.get("embedding_length")) // min(heads) if heads else None  # as llama.cpp has it
    for suffix in ("", "_swa"):
        n_rotated = values.get(f"rope.dimension_count{suffix}")
        width = values.get(f"attention.key_length{suffix}") or values.get("attention.key_length") or by_default
        if isinstance(n_rotated, int) and n_rotated % 2:
            yield f"{prefix}rope.dimension_count{suffix} is {n_rotated}; it must be even"
        latent = values.get("attention.key_length_mla")  # only a part of it is cached and rotated
        if isinstance(n_rotated, int) and isinstance(width, int) and n_rotated > width and not latent:
            yield f"{prefix}rope.dimension_count{suffix} is {n_rotated}, but a head has only {width} values"


def _tokenizer_problems(entries: Mapping[str, KeyValue]) -> Iterator[str]:
    tokens, kind = entries.get(TOKENS_KEY), entries.get("tokenizer.ggml.model")
    if kind is not None and kind.value not in _TOKENIZERS:
        yield f"tokenizer.ggml.model is {str(kind.value)[:40]!r}; it must be one of {', '.join(_TOKENIZERS)}"
    if tokens is not None and kind is not None and kind.value == _BY_PIECES and tokens.n_byte_tokens < 256:
        yield f"{TOKENS_KEY} has tokens for only {tokens.n_byte_tokens} of 256 bytes; llama.cpp needs all"
