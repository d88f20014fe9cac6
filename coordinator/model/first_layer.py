"""Facts that llama.cpp reads from the first layer of a file for all layers. A slice's first layer may differ. Pure.

llm_graph_context reads n_expert_used, n_rot and the widths of heads for layer 0 (llama-graph.cpp), and
llama_model_base::load_hparams divides rows by the heads of layer 0. Where layers differ in these, a slice gets the
values of the whole file's first layer, or the model is refused.
"""

from __future__ import annotations

from relayline.coordinator.model.family import Metadata, Overrides, Windows
from relayline.wire.model_files.gguf_write import U32

HEADS, KEYS, VALUES = "attention.head_count", "attention.key_length", "attention.value_length"
ROTATED = "rope.dimension_count"
WINDOWED = "_swa"  # ends the key of what layers with a sliding window have


def head_width(facts: Metadata) -> int:
    """Return the width of a head where the file does not state it: the first layer's part of a row."""
    n_heads = facts.values.get(HEADS)
    first = n_heads[0] if isinstance(n_heads, tuple) and n_heads else n_heads
    return (facts.integer("embedding_length") or 0) // first if isinstance(first, int) and first else 0


def stated_widths(facts: Metadata) -> Overrides:
    """Return the head widths that slices must state, because layers have different numbers of heads."""
    n_heads = facts.values.get(HEADS)
    if not isinstance(n_heads, tuple) or len(set(n_heads)) < 2:
        return {}
    return {key: (U32, head_width(facts)) for key in (KEYS, VALUES) if facts.integer(key) is None}


def first_layer_refusal(
    facts: Metadata, windows: Windows, *, rotates_by_layer: bool, widths_by_layer: bool
) -> str | None:
    """Return why no slice can compute the same as the whole file, or None. rotates_by_layer: whether llama.cpp asks
    each layer of the family for the number of rotated values of a head. widths_by_layer: whether it asks each layer for
    the width of its heads.
    """
    n_used = facts.values.get("expert_used_count")
    if isinstance(n_used, tuple) and len(set(n_used[: facts.n_layers])) > 1:
        return "its layers use different numbers of experts, and llama.cpp takes the first one's for all"
    if len(set(windows)) < 2:
        return None
    keys, width = facts.integer(KEYS), head_width(facts)
    rotated = facts.integer(ROTATED)
    full = {KEYS: keys or width, VALUES: facts.integer(VALUES) or width, ROTATED: rotated or keys or width}
    asked = {KEYS: widths_by_layer, VALUES: widths_by_layer, ROTATED: rotates_by_layer}
    for key, usual in full.items():
        windowed = facts.integer(key + WINDOWED)
        if windowed not in (None, usual) and not asked[key]:
            text = f"its layers with a sliding window have another {key} than others ({windowed}, {usual})"
            return f"{text}, and llama.cpp takes the first layer's for all"
    return None
