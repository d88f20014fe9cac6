"""The parts of a stage's row that is more than a hidden row, and the node of the graph for each.

After the hidden row's columns come, in this order: the sidebands of the stage's own layers, those of later stages, and
on stage 0 the experts that its first layers use for the token. llama.cpp gets the hidden row as an embedding. The other
parts are written over nodes that it computes from zeros.

Of models with deepstack layers, stage 0 gives llama.cpp rows with the features of these layers behind their own values,
as one embedding: see coordinator/model/sidebands.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from relayline.stage.engine.artifact import StageArtifact
from relayline.stage.engine.micro_batches import Cut

_LAYER_INPUTS = "inp_per_layer"  # llama_model_gemma4::graph; [width, layers of the slice, rows]
_EXPERTS = (
    "ffn_moe_argsort-{layer}"  # llm_graph_context::build_moe_ffn; i32 [experts, rows], of which it takes the first
)


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A node to write over. source: f32 or i32 [max_rows, values], C-contiguous, filled before each decode."""

    name: str
    source: npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Tap:
    """A node to copy, besides the last layer's output. rows: f32 [max_rows, n_embd], C-contiguous."""

    name: str
    rows: npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a stage's graph that are written over, copied, or not computed at all."""

    entries: tuple[Entry, ...] = ()
    taps: tuple[Tap, ...] = ()
    skipped: tuple[str, ...] = ()
    """Of those that are not computed: the first one, the first of the last layer among them, and the last one."""


NO_NODES = Nodes()


class RowParts:
    """The parts of the rows of one stage, in arrays that llama.cpp or the callback read. Of most, a row is one part."""

    def __init__(
        self, artifact: StageArtifact, rows: npt.NDArray[np.float32], output_rows: npt.NDArray[np.float32], entry: str
    ) -> None:
        """Lay the arrays out, once.

        rows: f32 [max_rows, width_in], a step's as llama.cpp gets them; output_rows: f32 [max_rows, width_out], what
        leaves. entry: the node that hidden rows are written over; empty where they are given as embeddings.
        """
        max_rows, self._n_embd = len(rows), artifact.n_embd
        self.are_written, self.are_apart = bool(entry), artifact.has_sidebands
        self.embeddings = rows  # what llama.cpp is given as such: zeros, never read, where rows are written
        if self.are_written or self.are_apart:
            self.embeddings = np.zeros((max_rows, artifact.n_embd), np.float32)
        self.hidden = output_rows  # the last layer's output
        width, n_left = 0, artifact.source_layers - artifact.layer_start
        if artifact.layer_inputs is not None:
            width = artifact.layer_inputs.width
            if not artifact.is_last:
                self.hidden = np.zeros((max_rows, artifact.n_embd), np.float32)
        n_own = width * (artifact.layer_end - artifact.layer_start)
        self._own = slice(artifact.n_embd, artifact.n_embd + n_own)
        self._passed = slice(self._own.stop, artifact.n_embd + width * n_left)
        self._inputs = [Entry(_LAYER_INPUTS, np.zeros((max_rows, n_own), np.float32))] if width else []
        hashed = artifact.hashed
        self._n_used, self._n_experts = (hashed.n_used, hashed.n_experts) if hashed is not None else (0, 0)
        self._experts = [
            Entry(_EXPERTS.format(layer=layer), np.zeros((max_rows, self._n_experts), np.int32))
            for layer in range(len(hashed.layers) if hashed is not None else 0)
        ]
        self.nodes = Nodes((*([Entry(entry, rows)] if entry else []), *self._inputs, *self._experts))

    def fill(self, rows: npt.NDArray[np.float32], cut: Cut | None) -> None:
        """Take the rows of a step apart: f32 [n, width_in]. cut: how llama.cpp cuts the step, if it does."""
        n_rows = len(rows)
        hidden = rows[:, : self._n_embd]
        np.copyto(self.embeddings[:n_rows], hidden if cut is None else hidden[cut.given])
        if cut is not None:
            rows = rows[cut.computed]
        for entry in self._inputs:
            np.copyto(entry.source[:n_rows], rows[:, self._own])
        column = self._passed.stop
        for entry in self._experts:
            chosen = rows[:, column : column + self._n_used]
            # A value that is not an expert comes from a test or a measurement; llama.cpp would abort.
            entry.source[:n_rows, : self._n_used] = np.clip(np.nan_to_num(chosen), 0, self._n_experts - 1)
            column += self._n_used

    def pass_on(self, rows: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
        """Write the rows that leave the stage, f32 [n, width_out], where they are more than the last layer's output.
        rows: those that entered.
        """
        if self.hidden.shape[1] == out.shape[1]:
            return
        out[:, : self._n_embd] = self.hidden[: len(out)]
        out[:, self._n_embd :] = rows[:, self._passed]
