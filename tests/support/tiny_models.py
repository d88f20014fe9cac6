"""Tiny random models of every supported family, as llama.cpp loads them: a few hundred KiB each, always the same.

A recipe says which hyperparameters and which tensors a family needs. Weights are scaled so that the hidden state
keeps its size through the layers and the largest logit stands out.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

from tests.support.tiny_families import RECIPES
from tests.support.tiny_gemma_media import WIDE_E2B
from tests.support.tiny_media_models import MEDIA_MODELS
from tests.support.tiny_predictions import PREDICTING
from tests.support.tiny_shapes import CTX, N_EMBD, N_EXPERTS, N_FF, N_HEADS, N_KV_HEADS, VOCABULARY, Shape, Value

# Its layers add next to nothing to a row, so what follows a token depends on that token.
FAINT = dataclasses.replace(RECIPES["llama"], gain=0.01)


def make_tiny(
    family: str,
    path: Path,
    *,
    n_layers: int | None = None,
    quant: str = "f32",
    tied: bool = False,
    vocab: int = 128,
    tokenizer: bool = False,
    more_tokens: tuple[str, ...] = (),
    seed: int = 1,
    extra_values: Mapping[str, Value] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a model of a recipe and return its path.

    `quant` is the type of every matrix (f32, f16, q8_0, q4_0, mxfp4); vectors stay f32. With `tokenizer` the vocabulary
    is a byte-level one with text (`vocab` is then ignored: see TOKENS), and `more_tokens` are further
    control tokens of it; without, it is nameless.
    """
    recipe = RECIPES.get(family) or PREDICTING.get(family) or MEDIA_MODELS.get(family)
    recipe = recipe or {"gemma4:wide": WIDE_E2B, "llama:faint": FAINT}[family]
    n_layers = n_layers or recipe.n_layers
    vocab = len(TOKENS) + len(more_tokens) if tokenizer else vocab
    writer = gguf.GGUFWriter(None, recipe.architecture)
    common: dict[str, Value] = {
        "block_count": n_layers,
        "context_length": CTX,
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEADS,
        "attention.head_count_kv": N_KV_HEADS,
        "vocab_size": vocab,
    }
    writer.add_name(f"tiny {family}")
    for key, value in {**common, **recipe.values, **(extra_values or {})}.items():
        if not (key.endswith("_mla") and value == 0):
            name = key if key.startswith(("xielu.", "tokenizer.", "general.")) else f"{recipe.architecture}.{key}"
            add_value(writer, name, [value] * n_layers if key in recipe.per_layer else value)
    add_tokenizer(writer, more_tokens) if tokenizer else writer.add_tokenizer_model("none")
    shapes: dict[str, Shape] = {"token_embd.weight": (vocab, N_EMBD), **recipe.tops}
    if not (recipe.always_tied or (tied and recipe.may_tie)):
        shapes["output.weight"] = (vocab, N_EMBD)
    for layer in range(n_layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in recipe.block(layer).items()}
    for name, shape in shapes.items():
        sized = (vocab,) if name == "output.bias" else tuple(vocab if size == VOCABULARY else size for size in shape)
        _add_tensor(writer, name, _weights(name, sized, seed, recipe.gain), quant)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Value | list[Value]) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


_STATE_PARTS = ("ssm_a", "ssm_d", "ssm_norm.weight", "conv.weight", "conv1d.weight")


def _add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, quant: str) -> None:
    # In real files these stay f32 too.
    if array.dtype == np.int32:
        writer.add_tensor(name, array)
        return
    plain = array.ndim == 1 or "gate_inp" in name or "conv1d_" in name or name.endswith((".bias", *_STATE_PARTS))
    kind = gguf.GGMLQuantizationType.F32 if plain else gguf.GGMLQuantizationType[quant.upper()]
    if kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, array)
    else:
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)


def _weights(name: str, shape: Shape, seed: int, block_gain: float) -> np.ndarray:
    random = np.random.default_rng((seed, zlib.crc32(name.encode())))
    values = random.standard_normal(shape, np.float32)
    if "tid2eid" in name:  # other experts for each token
        return random.permuted(np.tile(np.arange(N_EXPERTS, dtype=np.int32), (shape[0], 1)), axis=1)[
            :, : shape[1]
        ].copy()
    if name.endswith("ssm_a"):
        return -np.exp(0.5 * values)  # how quickly a state fades
    if name.startswith("rope_"):
        return 1.0 + np.abs(values)
    if ("norm" in name and not name.endswith("bias")) or "scale" in name:
        return 1.0 + 0.2 * values
    if len(shape) == 1:
        return 0.2 * values
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return values
    gain = 4.0 if name == "output.weight" else 1.5 * block_gain
    return values * np.float32(gain / np.sqrt(shape[-1]))


def _byte_characters() -> list[str]:
    """Return the printable stand-ins that byte-level vocabularies use for the 256 bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]


END_TOKEN = "<|end|>"
CONTROLS = (END_TOKEN, "<|user|>", "<|assistant|>")
_WORDS = ("th", "the", "in", "er", "an", "Ġt", "Ġthe")
_MERGES = ("t h", "th e", "i n", "e r", "a n", "Ġ t", "Ġt he")
TOKENS: tuple[str, ...] = (*_byte_characters(), *_WORDS, *CONTROLS)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def add_tokenizer(writer: gguf.GGUFWriter, more_tokens: tuple[str, ...]) -> None:
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*TOKENS, *more_tokens])
    types = [control if token in CONTROLS else normal for token in TOKENS]
    writer.add_token_types(types + [control] * len(more_tokens))
    writer.add_token_merges(list(_MERGES))
    writer.add_eos_token_id(TOKENS.index(END_TOKEN))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
