"""The layers at the end of a model that predict further tokens (MTP, "nextn"): what the last stage's slice has of them.

A stage drafts with them where llama.cpp can and the user asks for it, see stage.engine.prediction. Others do not load
them.
"""

from __future__ import annotations

import dataclasses

from relayline.coordinator.model.gguf_file import GgufModel

_OWN_TABLE, _PROJECTION = "nextn.embed_tokens.weight", "nextn.eh_proj.weight"


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction layers that the last stage's slice has."""

    n_layers: int
    needs_embeddings: bool
    """They look tokens up in the model's embedding table, which the slice then has beside the head."""
    size_bytes: int
    """Of all that stages without drafts have not: the layers, and the table unless the head is the same."""


def prediction_of(
    model: GgufModel, first: int, n_blocks: int, *, predicts: bool, embedding: str, head: str
) -> Prediction | None:
    """Return the prediction layers `first` to `n_blocks` of a model; None where it has none that can draft.

    `predicts`: whether llama.cpp drafts with those of its family. `embedding`, `head`: names of its two matrices.
    """
    blocks = range(first, n_blocks)
    if not predicts or not blocks or not all(f"blk.{layer}.{_PROJECTION}" in model.tensors for layer in blocks):
        return None
    names = tuple(f"blk.{layer}." for layer in blocks)
    size_bytes = sum(tensor.size_bytes for tensor in model.tensors.values() if tensor.name.startswith(names))
    needs_embeddings = any(f"blk.{layer}.{_OWN_TABLE}" not in model.tensors for layer in blocks)
    if needs_embeddings and head in model.tensors:
        size_bytes += model.tensors[embedding].size_bytes
    return Prediction(len(blocks), needs_embeddings, size_bytes)
