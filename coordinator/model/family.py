"""A row of the table of model families, and the inputs of its rules. The rows are in `families.py`, their rules in
`family_rules.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

from relayline.wire.model_files.gguf_header import Value


@dataclasses.dataclass(frozen=True, slots=True)
class Metadata:
    """The inputs of a rule."""

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


# One flag per layer: whether it has a sliding window. Empty where llama.cpp treats all layers alike. Every slice gets
# its own flags, because a pattern counts from the first layer in the file.
Windows = tuple[bool, ...]
WINDOW_PATTERN = "attention.sliding_window_pattern"


def _no_windows(_: Metadata) -> Windows:
    return ()


# One flag per layer: whether it chooses the tokens it attends to (sparse attention). The other layers attend to the
# choice of the last choosing layer before them, so no slice starts with them. Empty where no layer chooses.
Indexers = tuple[bool, ...]
INDEXER_TYPES = "attention.indexer.types"


def _no_indexers(_: Metadata) -> Indexers:
    return ()


# What each layer keeps of the past, one letter per layer: see the constants. Empty where all layers attend.
Kinds = str
ATTENDS, RECURRENT, BOTH, NEITHER = "a", "r", "b", "f"
RECURRENT_LAYERS = "attention.recurrent_layers"


def _no_kinds(_: Metadata) -> Kinds:
    return ""


# F32 vectors of each block, by name without "blk.N.", and the factor that a slice multiplies them with.
Factors = Mapping[str, float]


def _no_factors(_: Metadata) -> Factors:
    return {}


def windows_of(period: int, *, is_optional: bool = False, full_first: bool = False) -> Callable[[Metadata], Windows]:
    """Return llama_model_base::load_swa_pattern's result for a file where one layer of each period has no window.

    It is the last of its period, or the first (`full_first`). Optional: without a window in the file, no layer has one.
    """

    def found(facts: Metadata) -> Windows:
        if is_optional and not facts.integer("attention.sliding_window"):
            return ()
        stated = facts.values.get(WINDOW_PATTERN)
        if isinstance(stated, tuple):
            flags = tuple(bool(flag) for flag in stated[: facts.n_layers])
            return flags + (False,) * (facts.n_layers - len(flags))
        every = facts.integer(WINDOW_PATTERN)
        every = period if every is None else every
        full = 0 if full_first else every - 1
        return tuple(every == 0 or layer % every != full for layer in range(facts.n_layers))

    return found


def stated_windows(facts: Metadata) -> Windows:
    """Return the windows that a file of an unknown family states layer by layer, if it does."""
    if not facts.integer("attention.sliding_window") or not isinstance(facts.values.get(WINDOW_PATTERN), tuple):
        return ()
    return windows_of(0)(facts)


# Layers with which no slice may start -> why.
Blocked = Mapping[int, str]


def _no_blocked(_: Metadata) -> Blocked:
    return {}


# Tensors of each block, by name without "blk.N.", and the order in which a slice carries the rows of every head.
RowOrders = Mapping[str, tuple[int, ...]]


def no_orders(_: Metadata) -> RowOrders:
    """Return nothing: slices hold the rows of their matrices as the model has them."""
    return {}


def _one_row(_: Metadata) -> int:
    return 1


# Which layers count for the rule that every slice must have one of them: one flag per layer; empty without such a rule.
Needed = tuple[bool, ...]


def _none_needed(_: Metadata) -> Needed:
    return ()


# Further inputs that each layer takes for each token, besides the row: stage 0 computes those of all layers and sends
# them on.
LAYER_INPUT_WIDTH = "embedding_length_per_layer_input"
# Layers at the beginning that add features of an image to their rows.
DEEPSTACK_LAYERS = "n_deepstack_layers"
# Layers at the beginning that look their experts up by token id.
HASH_LAYERS = "hash_layer_count"
# Layers of a block. What enters a block's first layer enters every later layer, too.
BLOCK_LAYERS = "attn_res.block_size"
# Layers at the end that attend to the cells of earlier ones.
SHARING_LAYERS = "attention.shared_kv_layers"


def _none_of_them(_: Metadata) -> int:
    return 0


def _all_read(_: Windows) -> frozenset[str]:
    return frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """How one architecture is cut."""

    architecture: str  # general.architecture
    models: str = ""  # by the names that people know them by
    head_required: bool = False  # llama.cpp demands output.weight; otherwise it falls back to token_embd.weight
    cut_period: int = 1  # a slice must start at a multiple of this, because a layer's kind follows from its index
    embedding_scale: float | None = None  # llama.cpp's default for <arch>.embedding_scale; None: no such key is read
    scales_tokens: bool = False  # looked-up rows are scaled by the root of their width, rows that come in are not
    scales_rows: bool = False  # both are, so that every stage but the last has to undo it for the next
    overrides: Callable[[Metadata], Overrides] = _no_overrides  # keys that every slice must carry changed
    refusal: Callable[[Metadata], str | None] = _no_refusal  # why a certain model of the family cannot be cut
    forbidden_lengths: Callable[[Metadata], frozenset[int]] = _no_lengths  # layer counts that load as another model
    blocked: Callable[[Metadata], Blocked] = _no_blocked  # layers with which no slice may start
    windows: Callable[[Metadata], Windows] = _no_windows  # where layers with and without sliding windows alternate
    window_tokens: int = 0  # that llama.cpp takes for a window where the file states none
    indexers: Callable[[Metadata], Indexers] = _no_indexers  # whether each layer chooses the tokens it attends to
    kinds: Callable[[Metadata], Kinds] = _no_kinds  # what each layer keeps of the past, where some have a state
    states_kinds: bool = False  # slices carry RECURRENT_LAYERS: else the pattern counts from the first layer in a file
    streams: Callable[[Metadata], int] = _one_row  # rows of the model's width that layers hand on for each token
    cache_values: Callable[[Metadata], tuple[int, ...]] | None = None  # per layer and token; None: by heads
    state_values: Callable[[Metadata], tuple[int, ...]] | None = None  # per layer and lane, on top of those of `kinds`
    needed: Callable[[Metadata], Needed] = _none_needed  # layers without which llama.cpp runs no slice
    factors: Callable[[Metadata], Factors] = _no_factors  # what llama.cpp would multiply by in the whole file alone
    row_orders: Callable[[Metadata], RowOrders] = no_orders  # where slices are computed with another form of rope
    unread: Callable[[Windows], frozenset[str]] = _all_read  # windows of a slice -> tensors its loader would refuse
    dropped: frozenset[str] = frozenset()  # tensors of each block that would be read for rows of images
    enters_inside: bool = False  # stages write rows into the graph, after its treatment of embeddings
    layer_inputs: Callable[[Metadata], int] = _none_of_them  # inputs of each layer besides the row
    hash_layers: Callable[[Metadata], int] = _none_of_them  # layers at the beginning that go by token ids
    deepstack_layers: Callable[[Metadata], int] = _none_of_them  # and those that add an image's features
    sharing_layers: Callable[[Metadata], int] = _none_of_them  # layers at the end without separate cells
    block_layers: Callable[[Metadata], int] = _none_of_them  # of each block whose input all later layers read
    entry_tables: frozenset[str] = frozenset()  # added to rows where they enter a graph: zeros behind stage 0
    rotates_by_layer: bool = False  # llama.cpp asks each layer how many values of its heads are rotated
    widths_by_layer: bool = False  # and how wide its heads are
    predicts: bool = False  # llama.cpp drafts with the prediction layers of the last stage's slice, which has them then
    ranks: bool = False  # llama.cpp reads a head that ranks from its files, and makes chances of its products
    left_out: str = ""  # tensors of the family's files that stages do not use, besides prediction layers
    certified: bool = True  # False only for the generic rule of --experimental
