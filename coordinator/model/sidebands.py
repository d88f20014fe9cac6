"""Sidebands: values that stage 0 looks up or computes from token ids besides embeddings, and their metadata in an
artifact. Pure.

Two families use token ids after the embedding. Layers of gemma4's E2B and E4B take separate inputs: stage 0 makes them
for all layers, and they travel with the row; each stage takes its part. Those of a row of an image or of audio are made
of it and the padding token. The first layers of deepseek4 look their experts up by token id: these layers are on
stage 0, and nothing travels.

The first layers of qwen3vl and qwen3vlmoe add features of an image to their rows (deepstack). The encoder makes them
with the image's rows, and they are zeros for a token. These layers and one more are on stage 0, and nothing travels.

The tables are behind stage 0's embedding table, where llama.cpp does not look. Slices have zeros in their places, and
the products of these zeros are overwritten in the running graph (stage/engine/row_parts.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from relayline.wire.common.errors import ModelFileError
from relayline.wire.model_files.gguf_header import Tensor
from relayline.wire.model_files.gguf_write import ALIGNMENT, F32, U32, U64, encode_entry

LAYER_TOKENS = "per_layer_token_embd.weight"
LAYER_PRODUCT = "per_layer_model_proj.weight"
LAYER_NORM = "per_layer_proj_norm.weight"
EXPERTS_BY_TOKEN = "ffn_gate_tid2eid.weight"  # of a block
EPSILON = "attention.layer_norm_rms_epsilon"
_LAYER_TABLES = {"tokens": LAYER_TOKENS, "product": LAYER_PRODUCT, "norm": LAYER_NORM}
_EPSILON_USUAL = 1e-6
_F32_ID, _I32_ID = 0, 26


@dataclasses.dataclass(frozen=True, slots=True)
class Sidebands:
    """The sidebands of one model's rows: none, for most models."""

    n_layers: int
    n_vocab: int
    layer_inputs: int = 0  # values that each layer takes for each token
    hash_layers: int = 0  # layers at the beginning that look experts up by token id
    deepstack_layers: int = 0  # layers at the beginning that add features of an image to what leaves them
    n_experts: int = 0
    n_experts_used: int = 0
    epsilon: float = _EPSILON_USUAL  # of the norm that layer inputs go through
    block_layers: int = 0  # of each block whose input all later layers read
    n_embd: int = 0  # values of such an input

    @property
    def exist(self) -> bool:
        """Whether stages have to know of any; of deepstack layers, stage 0 alone has."""
        return bool(self.layer_inputs or self.hash_layers or self.block_layers)

    def values_into(self, layer: int) -> int:
        """Return the number of sideband values of a row that enters a layer; for stage 0, of the values looked up."""
        looked_up = self.hash_layers * self.n_experts_used if layer == 0 else 0
        rows_more = self.blocks_before(layer) + self.deepstack_at(layer)
        return self.layer_inputs * (self.n_layers - layer) + looked_up + self.n_embd * rows_more

    def deepstack_at(self, start: int) -> int:
        """Return for how many layers the rows that enter a stage have features of an image."""
        return self.deepstack_layers if start == 0 else 0

    def blocks_before(self, layer: int) -> int:
        """Return how many blocks begin before a layer: their inputs travel with the row that enters it."""
        return -(-layer // self.block_layers) if self.block_layers else 0

    def tables(self) -> dict[str, str]:
        """Return the tables appended to stage 0: name in its metadata -> name of the tensor."""
        hashed = {f"hash.{layer}": f"blk.{layer}.{EXPERTS_BY_TOKEN}" for layer in range(self.hash_layers)}
        inputs = {f"layer_inputs.{name}": tensor for name, tensor in _LAYER_TABLES.items()} if self.layer_inputs else {}
        return {**inputs, **hashed}

    def size_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """Return the bytes of the tables outside the blocks, besides the embedding table."""
        return sum(tensors[name].size_bytes for name in _LAYER_TABLES.values()) if self.layer_inputs else 0

    def check(self, tensors: Mapping[str, Tensor], n_embd: int) -> None:
        """Raise ModelFileError for a table that is missing or of another shape than llama.cpp takes."""
        widths = self.layer_inputs * self.n_layers
        wanted = {
            LAYER_TOKENS: (widths, self.n_vocab),
            LAYER_PRODUCT: (n_embd, widths),
            LAYER_NORM: (self.layer_inputs,),
        }
        for name in self.tables().values():
            found, dims = tensors.get(name), wanted.get(name, (self.n_experts_used, self.n_vocab))
            if found is None or found.dims != dims:
                problem = "is missing" if found is None else f"has shape {list(found.dims)}, not {list(dims)}"
                raise ModelFileError(f"tensor {name} {problem}")
        for name, type_id in ((LAYER_NORM, _F32_ID), *((t, _I32_ID) for t in self.tables().values() if "tid2eid" in t)):
            if name in self.tables().values() and tensors[name].type_id != type_id:
                raise ModelFileError(f"tensor {name} is {tensors[name].type_name}")

    def entries(self, is_first: bool) -> list[bytes]:
        """Return a stage's metadata, without the places of the tables."""
        found = []
        if self.block_layers:
            found.append(encode_entry("relayline.blocks.layers", U32, self.block_layers))
        if self.layer_inputs:
            found.append(encode_entry("relayline.layer_inputs.width", U32, self.layer_inputs))
        if self.layer_inputs and is_first:
            found.append(encode_entry("relayline.layer_inputs.epsilon", F32, self.epsilon))
        if self.hash_layers and is_first:
            found += [
                encode_entry("relayline.hash.layers", U32, self.hash_layers),
                encode_entry("relayline.hash.experts", U32, self.n_experts),
                encode_entry("relayline.hash.experts_used", U32, self.n_experts_used),
            ]
        return found


def table_entries(tables: Mapping[str, Tensor], offsets: Sequence[int]) -> list[bytes]:
    """Return where the tables are in stage 0's file, in bytes from its start."""
    found = []
    for (name, tensor), offset in zip(tables.items(), offsets, strict=True):
        found.append(encode_entry(f"relayline.{name}.offset_bytes", U64, offset))
        found.append(encode_entry(f"relayline.{name}.type", U32, tensor.type_id))
    return found


def offsets_behind(start: int, tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return where each of these begins when they follow one another from `start` on, and where the last one ends."""
    offsets, end = [], start
    for tensor in tensors:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(begin)
        end = begin + tensor.size_bytes
    return offsets, end
