"""Placeholders: layers of zeros at the beginning of a slice, one for each earlier layer of the model. Pure.

In some models (kimi-k3) the inputs of some layers enter all later ones, too. llama.cpp counts layers from the first in
a file. So a slice begins with placeholders: its layers keep their numbers, and its graph has a place for each of those
inputs. Stages write the inputs there, and do not compute the placeholders (stage/engine/block_rows.py).

A placeholder has a state, which takes less memory than the cells of long streams. If no layer of the slice attends, the
last placeholder does: llama.cpp aborts on a file whose layers are all of one kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from relayline.coordinator.model.family import ATTENDS, RECURRENT, Kinds
from relayline.wire.model_files.gguf_header import TENSOR_TYPES, Tensor
from relayline.wire.model_files.gguf_write import TensorSlot

# Types for a matrix that must be there but is never read, smallest first.
PLACEHOLDER_TYPES = (41, 2, 1)  # Q1_0, Q4_0, F16
NARROW = 32  # width of the feed-forward part
_NORMS = ("ffn_norm.weight", "ffn_res_score.weight")
_ENDINGS = (".weight", ".bias", "ssm_a")  # others are scales of quantised matrices, which may be absent
_OPTIONAL = ("attn_gate.weight",)


@dataclasses.dataclass(frozen=True, slots=True)
class Placeholders:
    """What the placeholders of one model's slices are made like."""

    kinds: Kinds  # of the model's layers
    n_embd: int
    n_ff: int  # width of the dense feed-forward parts
    n_dense: int  # layers at the beginning that have one; others have experts
    models: Mapping[str, Sequence[tuple[str, Tensor]]]  # kind -> a layer's tensors, by name without "blk.N."

    def before(self, start: int, end: int) -> Kinds:
        """Return the kinds of a slice's placeholders."""
        lacks_attention = start > 0 and ATTENDS not in self.kinds[start:end]
        return RECURRENT * (start - lacks_attention) + ATTENDS * lacks_attention

    def width(self, start: int) -> int:
        """Return the width of their feed-forward parts: they share it with the slice's own dense layers."""
        return self.n_ff if start < self.n_dense else min(NARROW, self.n_ff)

    def tensors(self, start: int, end: int) -> list[TensorSlot]:
        """Return all of their tensors."""
        kinds, width = self.before(start, end), self.width(start)
        return [slot for layer, kind in enumerate(kinds) for slot in self._layer(layer, kind, width)]

    def size_bytes(self, start: int, end: int) -> int:
        """Return the bytes of their tensors."""
        kinds, width = self.before(start, end), self.width(start)
        sizes = {kind: sum(slot.size_bytes for slot in self._layer(0, kind, width)) for kind in set(kinds)}
        return sum(sizes[kind] for kind in kinds)

    def _layer(self, layer: int, kind: str, width: int) -> Iterator[TensorSlot]:
        for rest, tensor in self.models[kind]:
            is_small = len(tensor.dims) == 1 or "conv1d" in rest
            types = (tensor.type_id,) if is_small else PLACEHOLDER_TYPES
            yield zeros_slot(f"blk.{layer}.{rest}", tensor.dims, types)
        for part in ("gate", "up", "down"):
            dims = (width, self.n_embd) if part == "down" else (self.n_embd, width)
            yield zeros_slot(f"blk.{layer}.ffn_{part}.weight", dims, PLACEHOLDER_TYPES)


def placeholders_of(tensors: Mapping[str, Tensor], kinds: Kinds, n_embd: int, n_ff: int, n_dense: int) -> Placeholders:
    """Return what a model's placeholders are made like."""
    models = {}
    for kind in set(kinds):
        prefix = f"blk.{kinds.index(kind)}."
        layer = [(name.removeprefix(prefix), tensor) for name, tensor in tensors.items() if name.startswith(prefix)]
        models[kind] = tuple((rest, tensor) for rest, tensor in layer if _is_needed(rest))
    return Placeholders(kinds, n_embd, n_ff, n_dense, models)


def _is_needed(rest: str) -> bool:
    if rest.startswith(("ffn_", "exp_")):  # experts: placeholders have none
        return rest in _NORMS
    return rest.endswith(_ENDINGS) and rest not in _OPTIONAL


def zeros_slot(name: str, dims: tuple[int, ...], type_ids: Sequence[int]) -> TensorSlot:
    """Return a tensor of the first of these types whose blocks make up its rows."""
    type_id = next(kind for kind in type_ids if dims[0] % TENSOR_TYPES[kind][1] == 0)
    _, block, block_bytes = TENSOR_TYPES[type_id]
    n_values = 1
    for dim in dims:
        n_values *= dim
    return TensorSlot(name, dims, type_id, n_values // block * block_bytes)
