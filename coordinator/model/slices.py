"""Plans the content of every artifact of a split: which metadata, which tensors, which source bytes go where.

Pure but for reading the source's metadata bytes. `split.py` turns the plans into files.

Why slices look as they do: every stage is fed hidden rows, so no stage ever looks a token up in its own token_embd.
All but the last stage get a vocabulary of DUMMY_TOKENS, so that head and logits cost them nothing. The last stage
needs the head only: it is stored in the place that the family's loader takes it from. Stage 0's embedding table
follows after the GGUF's own data, where llama.cpp does not look, because it would refuse a tensor it does not know.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from relayline.coordinator.model.content_key import model_key
from relayline.coordinator.model.cuts import ranges
from relayline.coordinator.model.families import family_of, metadata_of, output_scale_of, scale_of, slice_overrides
from relayline.coordinator.model.family import (
    ATTENDS,
    DEEPSTACK_LAYERS,
    HASH_LAYERS,
    INDEXER_TYPES,
    RECURRENT,
    RECURRENT_LAYERS,
    SHARING_LAYERS,
    WINDOW_PATTERN,
    Family,
    Metadata,
    Overrides,
)
from relayline.coordinator.model.first_layer import stated_widths
from relayline.coordinator.model.gguf_file import GgufModel, read_entries
from relayline.coordinator.model.inspection import BLOCK_NAME, EMBEDDING, HEAD, ModelFacts
from relayline.coordinator.model.placeholders import PLACEHOLDER_TYPES, zeros_slot
from relayline.coordinator.model.sidebands import (
    EXPERTS_BY_TOKEN,
    LAYER_PRODUCT,
    LAYER_TOKENS,
    offsets_behind,
    table_entries,
)
from relayline.wire.common.errors import ModelFileError
from relayline.wire.model_files.gguf_header import ARRAY_TYPE, STRING_TYPE, KeyValue, Tensor, Value
from relayline.wire.model_files.gguf_write import (
    BOOL,
    F32,
    U32,
    U64,
    TensorSlot,
    aligned,
    encode_array,
    encode_entry,
    encode_header,
)
from relayline.wire.model_files.rank_head import LABELS_KEY, RANK_HEAD

# The features that a stage must support. Version 2: windows lose cells, and an output may need scaling. Version 3: rows
# may have another width than the model, and are written into the graph. Version 4: more than a row is written there.
# Version 5: a slice begins with layers that are not computed. Builds that do not would compute something else, and say
# instead which versions they read.
ARTIFACT_VERSION, WINDOWED_VERSION, INSIDE_VERSION, SIDEBANDS_VERSION, BLOCKS_VERSION = 1, 2, 3, 4, 5
DEEPSTACK_VERSION = 6
DUMMY_TOKENS = 32
TOKENIZER_NAME = "tokenizer.gguf"
DROPPED_KEYS = ("split.", "general.alignment", "relayline.")
# Arrays in the family's namespace with their own length, which may happen to equal the number of layers.
FIXED_ARRAYS = frozenset({"rope.dimension_sections", "classifier.output_labels"})
BARE_PREFIXES = ("xielu.",)  # of values per layer that llama.cpp reads without the family's namespace (apertus)
F32_ID, F16_ID = 0, 1
# Types for a matrix of zeros whose rows are read, on any device, smallest first.
ZERO_TYPES = (2, F16_ID)


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of an artifact: a source tensor's bytes, or zeros when `source` is None."""

    slot: TensorSlot
    source: Tensor | None
    factor: float = 1.0  # of every value, which are F32 then
    row_order: tuple[int, ...] = ()  # the row of a head for each one; empty for the original order


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedArtifact:
    """One file of the split: its header, its tensors in order and, for stage 0, the tables that follow them."""

    file: str
    header: bytes
    tensors: tuple[PlannedTensor, ...]
    trailers: tuple[Tensor, ...]  # each at a multiple of ALIGNMENT bytes
    size_bytes: int
    layers: tuple[int, int] | None  # first layer, last layer + 1; None for the tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class SplitPlan:
    """All artifacts of one split; the tokenizer comes first."""

    pipeline_id: str
    source_key: str
    cuts: tuple[int, ...]
    artifacts: tuple[PlannedArtifact, ...]


def plan_split(model: GgufModel, facts: ModelFacts, cuts: Sequence[int], *, has_words: bool = True) -> SplitPlan:
    """Plan every artifact. The cuts must have been checked. Reads a few KiB of each tensor, see `model_key`.

    Without `has_words` the last stage has as many tokens as the model, but not their texts: for measuring it. Raises
    ModelFileError for metadata that cannot be sliced.
    """
    source_key = model_key(model)
    identity = f"relayline {ARTIFACT_VERSION} {source_key} {','.join(map(str, cuts))}"
    identity += " prediction" if facts.prediction else ""
    identity += " deepstack" if facts.sidebands.deepstack_layers else ""  # slices for text alone were made before
    pipeline_id = hashlib.sha256(identity.encode()).hexdigest()[:32]
    rules = metadata_of(model, facts.n_layers, facts.n_vocab)
    family = family_of(facts.architecture)
    planner = _Planner(model, facts, family, rules, source_key, pipeline_id, len(cuts) + 1, has_words)
    stages = tuple(planner.stage(index, *edges) for index, edges in enumerate(ranges(facts.n_layers, cuts)))
    return SplitPlan(pipeline_id, source_key, tuple(cuts), (planner.tokenizer(), *stages))


@dataclasses.dataclass(frozen=True, slots=True)
class _Planner:
    model: GgufModel
    facts: ModelFacts
    family: Family
    rules: Metadata
    source_key: str
    pipeline_id: str
    n_stages: int
    has_words: bool = True

    def identity(self, *, is_first: bool = False) -> list[bytes]:
        """Return the entries that every artifact carries; `is_first`: it is that of stage 0."""
        is_plain = not self.facts.windows and not self.family.scales_rows
        version = INSIDE_VERSION if self.family.enters_inside else ARTIFACT_VERSION if is_plain else WINDOWED_VERSION
        version = SIDEBANDS_VERSION if self.facts.sidebands.exist else version
        version = BLOCKS_VERSION if self.facts.sidebands.block_layers else version
        version = DEEPSTACK_VERSION if is_first and self.facts.sidebands.deepstack_layers else version
        return [
            encode_entry("relayline.version", U32, version),
            encode_entry("relayline.source_sha256", STRING_TYPE, self.source_key),
            encode_entry("relayline.pipeline_id", STRING_TYPE, self.pipeline_id),
            encode_entry("relayline.stage_count", U32, self.n_stages),
            encode_entry("relayline.source_layers", U32, self.facts.n_layers),
            encode_entry("relayline.n_embd", U32, self.facts.n_embd),
            encode_entry("relayline.n_vocab", U32, self.facts.n_vocab),
        ]

    def tokenizer(self) -> PlannedArtifact:
        keys = [key for key in self.model.entries if not key.startswith(DROPPED_KEYS)]
        labels = [encode_entry(LABELS_KEY, U32, self.facts.n_labels)] if self.facts.n_labels else []
        header = encode_header([*read_entries(self.model, keys), *self.identity(), *labels], ())
        return PlannedArtifact(TOKENIZER_NAME, header, (), (), len(header), None)

    def stage(self, index: int, start: int, end: int) -> PlannedArtifact:
        is_last = end == self.facts.n_layers
        unread = self.family.unread(self.facts.windows[start:end])
        outside = [planned for planned in self.global_tensors(start, end) if planned.slot.name not in unread]
        tensors = (*outside, *self.blocks(start, end))
        entries = [
            *self.entries(start, end, is_last),
            *self.identity(is_first=index == 0),
            encode_entry("relayline.stage_index", U32, index),
            encode_entry("relayline.layer_start", U32, start),
            encode_entry("relayline.layer_end", U32, end),
        ]
        widths = self.facts.row_widths
        for name, width in (("in", widths[start]), ("out", self.facts.n_embd if is_last else widths[end])):
            if width != self.facts.n_embd:
                entries.append(encode_entry(f"relayline.rows.width_{name}", U32, width))
        entries += self.facts.sidebands.entries(index == 0)
        if not is_last and (scale := output_scale_of(self.family, self.rules)) != 1.0:
            entries.append(encode_entry("relayline.output.scale", F32, scale))
        slots = [planned.slot for planned in tensors]
        data_bytes = sum(aligned(slot.size_bytes) for slot in slots)
        trailers = self.trailers() if index == 0 else ()
        # Their offsets are in the header whose length they depend on; its own length is fixed, so measure first.
        size_bytes = len(encode_header([*entries, *self.trailer_entries(trailers, 0)], slots))
        header = encode_header([*entries, *self.trailer_entries(trailers, size_bytes + data_bytes)], slots)
        _, total_bytes = offsets_behind(len(header) + data_bytes, trailers)
        return PlannedArtifact(f"stage-{index}.gguf", header, tensors, trailers, total_bytes, (start, end))

    def trailers(self) -> tuple[Tensor, ...]:
        """Return the tables that follow stage 0's own data: of embeddings, and what else goes by token ids."""
        return tuple(self.model.tensors[name] for name in (EMBEDDING, *self.facts.sidebands.tables().values()))

    def trailer_entries(self, trailers: Sequence[Tensor], start_bytes: int) -> list[bytes]:
        if not trailers:
            return []
        offsets, _ = offsets_behind(start_bytes, trailers)
        others = dict(zip(self.facts.sidebands.tables(), trailers[1:], strict=True))
        return [*self.embedding_entries(trailers[0], offsets[0]), *table_entries(others, offsets[1:])]

    def embedding_entries(self, table: Tensor, offset_bytes: int) -> list[bytes]:
        entries = [
            encode_entry("relayline.embedding.offset_bytes", U64, offset_bytes),
            encode_entry("relayline.embedding.type", U32, table.type_id),
            encode_entry("relayline.embedding.rows", U64, table.dims[1]),
        ]
        scale = scale_of(self.family, self.rules)
        if scale != 1.0:
            entries.append(encode_entry("relayline.embedding.scale", F32, scale))
        return entries

    def entries(self, start: int, end: int, is_last: bool) -> list[bytes]:
        """Return the source's metadata for a slice, with what depends on the layers adapted."""
        prefix, has_words = self.facts.architecture + ".", is_last and self.has_words
        changed = dict(self.changed(start, end, is_last))
        kept = []
        encoded = {prefix + key: _encoded(prefix + key, type_id, value) for key, (type_id, value) in changed.items()}
        for key, entry in self.model.entries.items():
            if key.startswith(DROPPED_KEYS) or key in encoded or (not has_words and key.startswith("tokenizer.")):
                continue
            if self.is_per_layer(entry):
                first = start - self.n_placeholders(start)
                encoded[key] = self.sliced(entry, first, end, self.n_kept(end))
            else:
                kept.append(key)
        if not has_words:
            encoded["tokenizer.ggml.model"] = encode_entry("tokenizer.ggml.model", STRING_TYPE, "none")
        return [*read_entries(self.model, kept), *encoded.values()]

    def changed(self, start: int, end: int, is_last: bool) -> Overrides:
        """Return the family's keys that differ from the source's in a slice."""
        lead, windows = self.rules.integer("leading_dense_block_count"), self.facts.windows[start:end]
        indexers = tuple(int(flag) for flag in self.facts.indexers[start:end])
        kinds = tuple(kind == RECURRENT for kind in self.facts.kinds[start:end]) if self.family.states_kinds else ()
        n_kept = self.n_kept(end)
        windows = windows and windows + self.prediction_flags(WINDOW_PATTERN, n_kept)
        kinds = kinds and kinds + self.prediction_flags(RECURRENT_LAYERS, n_kept)
        return {
            **stated_widths(self.rules),
            **slice_overrides(self.family, self.rules),
            "block_count": (U32, end - start + n_kept),
            **({} if lead is None else {"leading_dense_block_count": (U32, min(max(0, lead - start), end - start))}),
            **self.counted(start, end),
            **self.with_placeholders(start, end),
            **({WINDOW_PATTERN: (BOOL, windows)} if windows else {}),
            **({RECURRENT_LAYERS: (BOOL, kinds)} if kinds else {}),
            **({} if all(self.facts.indexers) else {INDEXER_TYPES: (U32, indexers)}),
            **({"nextn_predict_layers": (U32, n_kept)} if self.facts.n_prediction_layers else {}),
            **self.vocabulary(is_last),
        }

    def n_kept(self, end: int) -> int:
        """Return how many prediction layers follow the last layer of a slice."""
        return self.facts.prediction.n_layers if self.facts.prediction and end == self.facts.n_layers else 0

    def prediction_flags(self, key: str, n_kept: int) -> tuple[bool, ...]:
        """Return what a file states of its prediction layers where it has one flag for each layer; else False."""
        stated = self.rules.values.get(key)
        tail = tuple(map(bool, stated[self.facts.n_layers :])) if isinstance(stated, tuple) else ()
        return (*tail, *(False,) * n_kept)[:n_kept]

    def counted(self, start: int, end: int) -> Overrides:
        """Return how many layers of a slice are of the kinds that a file counts from its first or its last layer."""
        sidebands, n_sharing = self.facts.sidebands, self.facts.sharing_layers
        n_hashed, n_deepstack = sidebands.hash_layers, sidebands.deepstack_at(start)
        n_own = self.facts.n_layers - n_sharing
        return {
            **({HASH_LAYERS: (U32, min(max(0, n_hashed - start), end - start))} if n_hashed else {}),
            **({DEEPSTACK_LAYERS: (U32, n_deepstack)} if sidebands.deepstack_layers else {}),
            **({SHARING_LAYERS: (U32, max(0, end - max(start, n_own)))} if n_sharing else {}),
        }

    def n_placeholders(self, start: int) -> int:
        """Return how many layers of zeros a slice has before its own."""
        return start if self.facts.placeholders else 0

    def with_placeholders(self, start: int, end: int) -> Overrides:
        """Return what a slice says of its layers if some are placeholders, which are dense."""
        made = self.facts.placeholders
        if made is None or not start:
            return {}
        heads = tuple(int(kind == ATTENDS) for kind in made.before(start, end))
        return {
            "block_count": (U32, end),
            "leading_dense_block_count": (U32, min(max(made.n_dense, start), end)),
            "attention.head_count_kv": (U32, heads + self.facts.n_kv_heads[start:end]),
            "feed_forward_length": (U32, made.width(start)),
        }

    def vocabulary(self, is_last: bool) -> Overrides:
        """Return how many tokens a slice has where no list of them says so."""
        if is_last and self.has_words:
            return {}
        return {"vocab_size": (U32, self.facts.n_vocab if is_last else DUMMY_TOKENS)}

    def is_per_layer(self, entry: KeyValue) -> bool:
        prefix = self.facts.architecture + "."
        if entry.type_id != ARRAY_TYPE or entry.key.removeprefix(prefix) in FIXED_ARRAYS:
            return False
        if not entry.key.startswith((prefix, *BARE_PREFIXES)):
            return False
        return entry.length in (self.facts.n_layers, self.facts.n_layers + self.facts.n_prediction_layers)

    def sliced(self, entry: KeyValue, start: int, end: int, n_kept: int) -> bytes:
        if not isinstance(entry.value, tuple):
            raise ModelFileError(f"{self.model.path}: {entry.key} has text per layer, which cannot be sliced")
        of_prediction = entry.value[self.facts.n_layers :][:n_kept]
        return encode_array(entry.key, entry.item_type, entry.value[start:end] + of_prediction)

    def blocks(self, start: int, end: int) -> list[PlannedTensor]:
        factors = {} if end - start == self.facts.n_layers else self.family.factors(self.rules)
        orders = self.family.row_orders(self.rules)
        n_before, made = self.n_placeholders(start), self.facts.placeholders
        planned = [PlannedTensor(slot, None) for slot in made.tensors(start, end)] if made else []
        for tensor in self.model.tensors.values():
            block = BLOCK_NAME.match(tensor.name)
            if block is not None and block["rest"] in self.family.dropped:
                continue
            if block is not None and start <= int(block["layer"]) < end + self.n_kept(end):
                kept = _kept(tensor, f"blk.{int(block['layer']) - start + n_before}.{block['rest']}")
                if block["rest"] == EXPERTS_BY_TOKEN:  # a trailer has it; llama.cpp wants one here too, and reads none
                    n_tokens = self.facts.n_vocab if end == self.facts.n_layers else DUMMY_TOKENS
                    kept = _zeros(kept.slot.name, tensor.type_id, (tensor.dims[0], n_tokens))
                order = orders.get(block["rest"], ())
                planned.append(dataclasses.replace(kept, factor=factors.get(block["rest"], 1.0), row_order=order))
        for each in planned:
            if each.row_order and each.slot.dims[-1] % len(each.row_order):
                raise ModelFileError(f"{self.model.path}: {each.slot.name} is not made of whole heads")
        if any(tensor.factor != 1.0 and tensor.slot.type_id != F32_ID for tensor in planned):
            raise ModelFileError(f"{self.model.path}: {', '.join(factors)} of its blocks are not F32")
        return planned

    def global_tensors(self, start: int, end: int) -> list[PlannedTensor]:
        """Return the tensors outside the blocks: the source's on the last stage, cheap stand-ins elsewhere.

        A placeholder has the type and shape rules of the source's tensor, so the loader accepts it too.
        """
        tensors = [tensor for tensor in self.model.tensors.values() if not BLOCK_NAME.match(tensor.name)]
        planned = (self._global_tensor(tensor, start, end) for tensor in tensors)
        return [each for each in planned if each is not None]

    def _global_tensor(self, tensor: Tensor, start: int, end: int) -> PlannedTensor | None:
        """Return a tensor outside the blocks as the stage of these layers has it; None where it has none."""
        n_inputs = self.facts.sidebands.layer_inputs * (end - start)
        is_last = end == self.facts.n_layers
        if n_inputs and tensor.name == LAYER_TOKENS:
            return _zeros_of(
                tensor.name, (n_inputs, self.facts.n_vocab if is_last else DUMMY_TOKENS), PLACEHOLDER_TYPES
            )
        if n_inputs and tensor.name == LAYER_PRODUCT:
            return _zeros_of(tensor.name, (self.facts.n_embd, n_inputs), ZERO_TYPES)
        if start > 0 and tensor.name in self.family.entry_tables:
            return _nothing(tensor)
        if tensor.name == RANK_HEAD and self.family.ranks and not (is_last and self.facts.n_labels):
            return None
        return self._tensor_of_last(tensor) if is_last else self._tensor_before_last(tensor)

    def _tensor_before_last(self, tensor: Tensor) -> PlannedTensor:
        """Return a tensor outside the blocks as a stage has it that reads no tokens and makes no logits."""
        if tensor.name in (EMBEDDING, HEAD):
            return _zeros(tensor.name, F16_ID, (self.facts.n_embd, DUMMY_TOKENS))
        if tensor.name == "output.bias":
            return _zeros(tensor.name, F32_ID, (DUMMY_TOKENS,))
        return _kept(tensor, tensor.name)

    @property
    def is_looked_up(self) -> bool:
        """Whether the last stage looks tokens up, to predict further ones."""
        return self.facts.prediction is not None and self.facts.prediction.needs_embeddings

    def _tensor_of_last(self, tensor: Tensor) -> PlannedTensor | None:
        """Return a tensor outside the blocks as the last stage has it.

        It reads no tokens: where the loader makes the head of the embedding's tensor, the head itself stands there.
        Prediction layers do read some, unless they have a table of their own.
        """
        head = self.model.tensors.get(HEAD)
        if head is None or tensor.name not in (EMBEDDING, HEAD) or self.is_looked_up:
            return _kept(tensor, tensor.name)
        is_moved = not self.family.head_required and "output.scale" not in self.model.tensors
        if tensor.name == HEAD:
            return None if is_moved else _kept(tensor, HEAD)
        return _kept(head, EMBEDDING) if is_moved else _placeholder(tensor)


def _encoded(key: str, type_id: int, value: Value) -> bytes:
    return encode_array(key, type_id, value) if isinstance(value, tuple) else encode_entry(key, type_id, value)


def _kept(tensor: Tensor, name: str) -> PlannedTensor:
    return PlannedTensor(TensorSlot(name, tensor.dims, tensor.type_id, tensor.size_bytes), tensor)


def _zeros(name: str, type_id: int, dims: tuple[int, ...]) -> PlannedTensor:
    return _zeros_of(name, dims, (type_id,))


def _placeholder(tensor: Tensor) -> PlannedTensor:
    """Return the smallest matrix of the tensor's shape."""
    return _zeros_of(tensor.name, tensor.dims, PLACEHOLDER_TYPES)


def _nothing(tensor: Tensor) -> PlannedTensor:
    """Return a matrix of the tensor's shape whose rows may be added and change nothing."""
    return _zeros_of(tensor.name, tensor.dims, ZERO_TYPES)


def _zeros_of(name: str, dims: tuple[int, ...], type_ids: Sequence[int]) -> PlannedTensor:
    return PlannedTensor(zeros_slot(name, dims, type_ids), None)
