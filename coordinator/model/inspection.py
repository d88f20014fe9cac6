"""Derives from a model's header what planning, splitting and a curious user need to know. Reads no tensor data."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import re
from collections.abc import Set
from pathlib import Path

from relayline.coordinator.model import families
from relayline.coordinator.model.cuts import legal_cuts
from relayline.coordinator.model.family import (
    ATTENDS,
    BOTH,
    RECURRENT,
    Blocked,
    Family,
    Indexers,
    Kinds,
    Metadata,
    Needed,
    Windows,
)
from relayline.coordinator.model.family_rules import state_values
from relayline.coordinator.model.first_layer import first_layer_refusal
from relayline.coordinator.model.gguf_file import GgufModel, open_model
from relayline.coordinator.model.placeholders import Placeholders, placeholders_of
from relayline.coordinator.model.prediction import Prediction, prediction_of
from relayline.coordinator.model.rank_head import labels_of, rank_refusal, scoring_labels
from relayline.coordinator.model.refused_families import REFUSED
from relayline.coordinator.model.sidebands import EPSILON, LAYER_NORM, LAYER_PRODUCT, LAYER_TOKENS, Sidebands
from relayline.wire.common.bounds import N_EMBD_MAX
from relayline.wire.common.checkpoints import REWINDING_ARCHITECTURES
from relayline.wire.common.errors import ModelFileError, UnsupportedArchitectureError
from relayline.wire.common.kv_layout import CHUNKED_ARCHITECTURES
from relayline.wire.common.rope_factors import CONTEXT, LONG_FACTORS, ORIGINAL_CONTEXT, LongRope
from relayline.wire.model_files.gguf_header import Tensor, Value
from relayline.wire.model_files.model_check import LAYERS_MAX, check_model
from relayline.wire.model_files.rank_head import RANK_HEAD

BLOCK_NAME = re.compile(r"^blk\.(?P<layer>\d+)\.(?P<rest>.+)$")
EMBEDDING = "token_embd.weight"
STAGE_INDEX = "relayline.stage_index"  # a key of artifacts alone
HEAD = "output.weight"
# Tensors outside the blocks that are known to be used before the first or after the last block, or by every block.
GLOBAL_TENSORS = frozenset({
    EMBEDDING, HEAD, "output.bias", "output.scale", "output.input_scale", "output_norm.weight", "output_norm.bias",
    "rope_freqs.weight", LONG_FACTORS, "rope_factors_short.weight", "position_embd.weight",
    "token_embd_norm.weight", "token_embd_norm.bias", "output_hc_fn.weight", "output_hc_base.weight",
    "output_hc_scale.weight", "output_res_score.weight", LAYER_TOKENS, LAYER_PRODUCT, LAYER_NORM,
})  # fmt: skip
# general.type of files that are none of a language model by themselves.
PARTS = {
    "adapter": "an adapter (LoRA), a part of a model; give the model itself, and this file with --lora",
    "imatrix": "an importance matrix, which only helps to quantise a model; give the model itself",
    "mmproj": "a projector for images or sound, a part of a model; give the model itself, which serves text without it",
}
KV_VALUE_BYTES = 2  # f16, the default cache type
STATE_VALUE_BYTES = 4  # f32, for every cache type
INDEXER_KEYS = "attention.indexer.key_length"


@dataclasses.dataclass(frozen=True, slots=True)
class QuantShare:
    """How much of a model is stored in one tensor type."""

    type_name: str
    n_tensors: int
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of a model's header. Per-layer tuples have n_layers items, one per decoded layer."""

    path: Path
    n_files: int
    file_bytes: int
    architecture: str
    model_name: str
    n_layers: int
    n_prediction_layers: int  # multi-token prediction blocks at the end
    prediction: Prediction | None  # the last stage's slice has them, and can draft; None: no slice has them
    n_embd: int
    row_widths: tuple[int, ...]  # per layer: values of each row that enters it, sidebands included
    sidebands: Sidebands  # what that is
    placeholders: Placeholders | None  # what slices have in place of earlier layers; None: nothing
    sharing_layers: int  # at the end, which attend to the cells of earlier ones
    n_heads: tuple[int, ...]
    n_kv_heads: tuple[int, ...]
    n_vocab: int
    n_experts: int
    ctx_train: int
    quantization: tuple[QuantShare, ...]  # largest share first
    layer_bytes: tuple[int, ...]
    embedding_bytes: int  # the token embedding table, needed by stage 0, and what else that looks up by token
    head_bytes: int  # the matrix the last stage multiplies with; when tied, the token embedding table
    tied_embeddings: bool
    n_labels: int  # of a reranker's head, on the last stage; 0: it is none, or has one label, and no slice has the head
    kv_bytes_per_token: tuple[int, ...]  # per layer, with an f16 cache; 0 where a layer does not attend
    state_bytes_per_lane: tuple[int, ...]  # per layer: its recurrent state, kept for each lane; 0 where it has none
    rewinds_states: bool  # llama.cpp can keep earlier ones of each lane as well, so that guessed rows can be taken back
    needed: Needed  # layers that count for the rule that every slice must have one; empty without such a rule
    kinds: Kinds  # what each layer keeps of the past; empty where all attend
    supported: bool  # certified and nothing in this very model forbids it
    refusal: str | None  # why not, when it is not
    may_be_tried: bool  # whether that is only because it was never certified; otherwise it is known to come out wrong
    cut_period: int
    forbidden_lengths: frozenset[int]  # numbers of layers that no slice may have
    blocked: Blocked  # layers with which no slice may start, and why
    reorders_rows: bool  # slices add the same products up in another order, which moves their last bits
    indexers: Indexers  # whether each layer chooses the tokens it attends to; empty where none does
    long_rope: LongRope | None  # if it has two sets of rope factors
    windows: Windows  # which layers have a sliding window; empty unless some have and some have not
    window_tokens: int  # that a row of these layers reads, its own included; 0: they keep all, or none has a window

    @property
    def fills_kinds(self) -> bool:
        """Whether slices behind the first have placeholders, of the kind of layers that they lack."""
        return self.placeholders is not None

    @property
    def legal_cuts(self) -> tuple[int, ...]:
        """Return every layer at which a later stage may begin."""
        return legal_cuts(self)


def inspect_model(path: Path) -> ModelFacts:
    """Read a model's header and return its facts.

    Raises ModelFileError for anything but a complete GGUF language model.
    """
    return facts_of(open_model(path))


@dataclasses.dataclass(frozen=True, slots=True)
class _Header:
    """The checked sources of a model's facts."""

    model: GgufModel
    architecture: str
    n_blocks: int  # decoded layers, and then those of multi-token prediction
    n_layers: int  # decoded layers
    n_embd: int
    embedding: Tensor
    n_heads: tuple[int, ...]  # per decoded layer; empty where the model does not say
    n_kv_heads: tuple[int, ...]
    family: Family
    metadata: Metadata
    n_labels: int  # of a head that ranks; 0: there is none

    @property
    def n_vocab(self) -> int:
        """The number of tokens."""
        return self.embedding.dims[1]


def facts_of(model: GgufModel) -> ModelFacts:
    """Return the facts of an opened model. Raises ModelFileError when it is not a complete language model."""
    header = _read_header(model)
    family, metadata = header.family, header.metadata
    refusal, may_be_tried = _refusal(header)
    sidebands = _sidebands(header)
    head = model.tensors.get(HEAD, header.embedding)
    return ModelFacts(
        path=model.path,
        n_files=len(model.files),
        file_bytes=sum(file.size_bytes for file in model.files),
        architecture=header.architecture,
        model_name=model.name,
        n_layers=header.n_layers,
        n_prediction_layers=header.n_blocks - header.n_layers,
        prediction=prediction_of(
            model, header.n_layers, header.n_blocks, predicts=family.predicts, embedding=EMBEDDING, head=HEAD
        ),
        n_embd=header.n_embd,
        row_widths=_row_widths(header, sidebands),
        sidebands=sidebands,
        placeholders=_placeholders(header),
        sharing_layers=family.sharing_layers(metadata),
        n_heads=header.n_heads,
        n_kv_heads=header.n_kv_heads,
        n_vocab=header.n_vocab,
        n_experts=model.integer(f"{header.architecture}.expert_count", 0),
        ctx_train=model.integer(f"{header.architecture}.context_length", 0),
        quantization=_quantization(model),
        layer_bytes=_layer_bytes(header),
        embedding_bytes=header.embedding.size_bytes + sidebands.size_bytes(model.tensors),
        head_bytes=head.size_bytes,
        tied_embeddings=head is header.embedding,
        n_labels=scoring_labels(header.n_labels),
        kv_bytes_per_token=_kv_bytes(header),
        state_bytes_per_lane=_state_bytes(header),
        rewinds_states=header.architecture in REWINDING_ARCHITECTURES,
        needed=family.needed(metadata),
        kinds=family.kinds(metadata),
        supported=refusal is None,
        refusal=refusal,
        may_be_tried=may_be_tried,
        cut_period=family.cut_period,
        forbidden_lengths=family.forbidden_lengths(metadata),
        blocked=family.blocked(metadata),
        reorders_rows=bool(family.row_orders(metadata)),
        windows=family.windows(metadata),
        window_tokens=_window_tokens(header),
        indexers=family.indexers(metadata),
        long_rope=_long_rope(model, header.architecture),
    )


def inspect_whole(path: Path) -> ModelFacts:
    """Do the same for a model that is to be split or planned. Raises ModelFileError also for one stage of a split."""
    model = open_model(path)
    check_whole(model)
    return facts_of(model)


def check_whole(model: GgufModel) -> None:
    """Raise ModelFileError for one stage of a split."""
    if STAGE_INDEX in model.entries:
        raise ModelFileError(f"{model.path}: is already one stage of a split; give the whole model")


def check_has_weights(model: GgufModel) -> None:
    """Raise ModelFileError for a vocabulary alone."""
    _tensor(model, EMBEDDING)


def _read_header(model: GgufModel) -> _Header:
    """Return what facts are derived from. Raises ModelFileError for anything but a complete language model."""
    architecture = _architecture(model)
    check_model(model.path, model.entries, model.tensors.values())
    n_blocks = model.integer(f"{architecture}.block_count")
    n_prediction = model.integer(f"{architecture}.nextn_predict_layers", 0)
    n_layers = n_blocks - n_prediction
    if not (0 < n_layers <= n_blocks <= LAYERS_MAX):
        raise ModelFileError(
            f"{model.path}: {n_blocks} layers, {n_prediction} of them for multi-token prediction, are not a model"
        )
    embedding = _tensor(model, EMBEDDING)
    n_embd = model.integer(f"{architecture}.embedding_length")
    if len(embedding.dims) != 2 or embedding.dims[0] != n_embd or not 0 < n_embd <= N_EMBD_MAX:
        raise ModelFileError(f"{model.path}: {EMBEDDING} has shape {list(embedding.dims)}, but the width is {n_embd}")
    n_heads = _per_layer(model, "attention.head_count", n_layers, 0)
    family = families.family_of(architecture)
    return _Header(
        model=model,
        architecture=architecture,
        n_blocks=n_blocks,
        n_layers=n_layers,
        n_embd=n_embd,
        embedding=embedding,
        n_heads=n_heads,
        n_kv_heads=_per_layer(model, "attention.head_count_kv", n_layers, None) or n_heads,
        family=family,
        metadata=families.metadata_of(model, n_layers, embedding.dims[1]),
        n_labels=labels_of(model, family, n_embd),
    )


def _architecture(model: GgufModel) -> str:
    """Return the architecture of a file that may be a language model; refuse other kinds of file by name."""
    kind = model.text("general.type", "model")
    if kind in PARTS:
        raise ModelFileError(f"{model.path}: is {PARTS[kind]}")
    architecture = model.text("general.architecture")
    if not architecture:
        raise ModelFileError(f"{model.path}: has no general.architecture; it is not a language model")
    if architecture in REFUSED and (
        EMBEDDING not in model.tensors or f"{architecture}.block_count" not in model.entries
    ):
        raise _unsupported(model.path, architecture, REFUSED[architecture])
    return architecture


def _unsupported(path: Path, architecture: str, reason: str) -> UnsupportedArchitectureError:
    return UnsupportedArchitectureError(f"{path}: this {architecture} model cannot be split: {reason}")


def _long_rope(model: GgufModel, architecture: str) -> LongRope | None:
    if LONG_FACTORS not in model.tensors:
        return None
    known = f"{architecture}.{ORIGINAL_CONTEXT}" in model.entries
    return LongRope(architecture, model.integer(f"{architecture}.{ORIGINAL_CONTEXT if known else CONTEXT}", 0))


def _tensor(model: GgufModel, name: str) -> Tensor:
    if name not in model.tensors:
        raise ModelFileError(f"{model.path}: tensor {name} is missing; the file is not a complete language model")
    return model.tensors[name]


def check_support(facts: ModelFacts, *, experimental: bool) -> None:
    """Raise UnsupportedArchitectureError for a model that cannot be split; `experimental` admits unproven ones."""
    if facts.refusal is None or (experimental and facts.may_be_tried):
        return
    advice = "; `relayline split --experimental` tries it anyway" if facts.may_be_tried else ""
    raise _unsupported(facts.path, facts.architecture, facts.refusal + advice)


def _refusal(header: _Header) -> tuple[str | None, bool]:
    """Return why the model cannot be split, None if it can, and whether it may be tried all the same."""
    family, metadata = header.family, header.metadata
    known = (
        REFUSED.get(header.architecture)
        or family.refusal(metadata)
        or first_layer_refusal(
            metadata,
            family.windows(metadata),
            rotates_by_layer=family.rotates_by_layer,
            widths_by_layer=family.widths_by_layer,
        )
        or rank_refusal(header.model, family, header.n_labels)
    )
    if known is not None:
        return known, False
    if family.certified:
        doubt = _odd_tensors(header.model, {RANK_HEAD} if header.n_labels else set())
    else:
        known_ones = families.supported_architectures()
        near = difflib.get_close_matches(header.architecture, known_ones, n=3)
        alike = f", {' and '.join(near)} among them" if near else ""
        where = "docs/reference/families.md lists them"
        doubt = f"its architecture has not been certified; {len(known_ones)} are{alike}; {where}"
    return doubt, doubt is not None


def _odd_tensors(model: GgufModel, known: Set[str]) -> str | None:
    known = known | GLOBAL_TENSORS
    odd = [name for name in model.tensors if name not in known and not BLOCK_NAME.match(name)]
    return f"it has the tensor {odd[0]}, which belongs to no stage" if odd else None


def _per_layer(model: GgufModel, key: str, n_layers: int, default: int | None) -> tuple[int, ...]:
    """Read a value that is one number for all layers or an array with one per block."""
    full_key = f"{model.text('general.architecture')}.{key}"
    found: Value | None = model.value(full_key)
    if isinstance(found, int):
        return (int(found),) * n_layers
    if isinstance(found, tuple) and len(found) >= n_layers and all(isinstance(item, int) for item in found):
        return tuple(int(item) for item in found[:n_layers])
    if full_key in model.entries:
        raise ModelFileError(f"{model.path}: metadata key {full_key} is neither a number nor one per layer")
    return () if default is None else (default,) * n_layers


def _quantization(model: GgufModel) -> tuple[QuantShare, ...]:
    counts: collections.Counter[str] = collections.Counter()
    sizes: collections.Counter[str] = collections.Counter()
    for tensor in model.tensors.values():
        counts[tensor.type_name] += 1
        sizes[tensor.type_name] += tensor.size_bytes
    return tuple(QuantShare(name, counts[name], size) for name, size in sizes.most_common())


def _row_widths(header: _Header, sidebands: Sidebands) -> tuple[int, ...]:
    """Return how many values enter each layer for each token. The first one is given looked-up embeddings."""
    width = header.n_embd * header.family.streams(header.metadata)
    widths = tuple(
        (width if layer else header.n_embd) + sidebands.values_into(layer) for layer in range(header.n_layers)
    )
    if max(widths) > N_EMBD_MAX:
        text = f"its layers pass on rows of {max(widths)} values; the limit is {N_EMBD_MAX}"
        raise ModelFileError(f"{header.model.path}: {text}")
    return widths


def _sidebands(header: _Header) -> Sidebands:
    """Return the sidebands of rows. Raises ModelFileError for tables that llama.cpp would not take."""
    family, metadata = header.family, header.metadata
    epsilon = metadata.values.get(EPSILON)
    found = Sidebands(
        n_layers=header.n_layers,
        n_vocab=header.n_vocab,
        layer_inputs=family.layer_inputs(metadata),
        hash_layers=family.hash_layers(metadata),
        deepstack_layers=family.deepstack_layers(metadata),
        n_experts=metadata.integer("expert_count") or 0,
        n_experts_used=metadata.integer("expert_used_count") or 0,
        block_layers=family.block_layers(metadata),
        n_embd=header.n_embd,
        **({"epsilon": epsilon} if isinstance(epsilon, float) else {}),
    )
    try:
        found.check(header.model.tensors, header.n_embd)
    except ModelFileError as error:
        raise ModelFileError(f"{header.model.path}: {error.message}; the file is damaged") from None
    return found


def _placeholders(header: _Header) -> Placeholders | None:
    family, metadata = header.family, header.metadata
    if not family.block_layers(metadata):
        return None
    return placeholders_of(
        header.model.tensors,
        family.kinds(metadata),
        header.n_embd,
        max(_per_layer(header.model, "feed_forward_length", header.n_layers, 0), default=0),
        metadata.integer("leading_dense_block_count") or 0,
    )


def _layer_bytes(header: _Header) -> tuple[int, ...]:
    """Return the bytes of each decoded layer's tensors. Raises ModelFileError where a layer has none."""
    model, n_blocks, n_layers = header.model, header.n_blocks, header.n_layers
    sizes = [0] * n_blocks
    for tensor in model.tensors.values():
        block = BLOCK_NAME.match(tensor.name)
        if block is None:
            continue
        if int(block["layer"]) >= n_blocks:
            raise ModelFileError(f"{model.path}: holds {tensor.name}, but only {n_blocks} layers")
        sizes[int(block["layer"])] += tensor.size_bytes
    missing = [layer for layer in range(n_layers) if sizes[layer] == 0]
    if missing:
        widths = _per_layer(model, "feed_forward_length", n_layers, None) or (1,) * n_layers
        missing = [
            layer for layer in missing if header.n_heads[layer] or widths[layer]
        ]  # pruned ones have empty layers
    if missing:
        raise ModelFileError(f"{model.path}: layer {missing[0]} has no tensors; the file is not complete")
    return tuple(sizes[:n_layers])


def _kv_bytes(header: _Header) -> tuple[int, ...]:
    """Return the bytes of a token's cell in each layer, with an f16 cache."""
    family, metadata = header.family, header.metadata
    if family.cache_values is not None:
        return tuple(n_values * KV_VALUE_BYTES for n_values in family.cache_values(metadata))
    usual, windowed = _head_widths(header)
    index_width = header.model.integer(f"{header.architecture}.{INDEXER_KEYS}", 0)  # of one key more for an indexer
    n_kv_heads = header.n_kv_heads
    none = (False,) * len(n_kv_heads)
    indexers, windows = family.indexers(metadata) or none, family.windows(metadata) or none
    kinds = family.kinds(metadata) or ATTENDS * len(n_kv_heads)
    n_own = len(n_kv_heads) - family.sharing_layers(metadata)
    return tuple(
        (n_kv * (windowed if is_windowed else usual) + index_width * has_indexer) * KV_VALUE_BYTES
        if kind in (ATTENDS, BOTH) and layer < n_own
        else 0
        for layer, (n_kv, has_indexer, is_windowed, kind) in enumerate(
            zip(n_kv_heads, indexers, windows, kinds, strict=True)
        )
    )


def _window_tokens(header: _Header) -> int:
    if header.architecture in CHUNKED_ARCHITECTURES or not any(header.family.windows(header.metadata)):
        return 0
    return header.metadata.integer("attention.sliding_window") or header.family.window_tokens


def _head_widths(header: _Header) -> tuple[int, int]:
    """Return the values that a head keeps of a token, keys and values together: usually, and in windowed layers."""
    n_heads = header.n_heads[0] if header.n_heads else 0
    default = header.n_embd // n_heads if n_heads else 0

    def width(key: str, default: int) -> int:
        return header.model.integer(f"{header.architecture}.attention.{key}", default)

    key_width, value_width = width("key_length", default), width("value_length", default)
    if width("key_length_mla", 0):
        value_width = 0  # with latent attention the values are a view of the cached keys
    usual = key_width + value_width
    if not header.family.widths_by_layer:
        return usual, usual
    return usual, width("key_length_swa", key_width) + width("value_length_swa", value_width)


def _state_bytes(header: _Header) -> tuple[int, ...]:
    """Return the bytes of each layer's recurrent state for a lane."""
    family, metadata = header.family, header.metadata
    kinds = family.kinds(metadata)
    if family.state_values is not None:
        return tuple(n_values * STATE_VALUE_BYTES for n_values in family.state_values(metadata))
    if not kinds:
        return (0,) * header.n_layers
    size_bytes = state_values(metadata) * STATE_VALUE_BYTES
    return tuple(size_bytes if kind in (RECURRENT, BOTH) else 0 for kind in kinds)
