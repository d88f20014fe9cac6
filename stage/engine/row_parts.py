"""What a row of a stage is made of where it is more than a hidden row: which columns go into which node of the graph.

Behind the hidden row's columns follow, in this order: what the stage's own layers take beside it, what is for later
stages, and on stage 0 the experts that its first layers use for the token. llama.cpp is given the hidden row as an
embedding; the others are written over nodes that it computes from zeros.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from relayline.stage.engine.artifact import StageArtifact

_LAYER_INPUTS = "inp_per_layer"  # llama_model_gemma4::graph; [width, layers of the slice, rows]
_EXPERTS = (
    "ffn_moe_argsort-{layer}"  # llm_graph_context::build_moe_ffn; i32 [experts, rows], of which it takes the first
)


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A node to write over. source: f32 or i32 [max_rows, values], C-contiguous, filled before each decode."""

    name: str
    source: npt.NDArray[Any]


class RowParts:
    """The parts of the rows of one stage, in arrays that llama.cpp or the callback read."""

    def __init__(self, artifact: StageArtifact, max_rows: int) -> None:
        self._n_embd = artifact.n_embd
        self.embeddings = np.zeros((max_rows, artifact.n_embd), np.float32)  # what llama.cpp is given as such
        width = artifact.layer_inputs.width if artifact.layer_inputs is not None else 0
        n_own = width * (artifact.layer_end - artifact.layer_start)
        self._own = slice(artifact.n_embd, artifact.n_embd + n_own)
        self._passed = slice(self._own.stop, artifact.n_embd + width * (artifact.source_layers - artifact.layer_start))
        self._inputs = [Entry(_LAYER_INPUTS, np.zeros((max_rows, n_own), np.float32))] if width else []
        hashed = artifact.hashed
        self._n_used, self._n_experts = (hashed.n_used, hashed.n_experts) if hashed is not None else (0, 0)
        self._experts = [
            Entry(_EXPERTS.format(layer=layer), np.zeros((max_rows, self._n_experts), np.int32))
            for layer in range(len(hashed.layers) if hashed is not None else 0)
        ]
        self.entries = (*self._inputs, *self._experts)

    def fill(
        self,
        rows: npt.NDArray[np.float32],
        given: npt.NDArray[np.intp] | None,
        computed: npt.NDArray[np.intp] | None,
    ) -> None:
        """Take the rows of a step apart: f32 [n, width_in].

        given, computed: in which order llama.cpp gets rows and computes them; None: as they are.
        """
        n_rows = len(rows)
        np.copyto(self.embeddings[:n_rows], rows[:, : self._n_embd] if given is None else rows[given, : self._n_embd])
        if computed is not None:
            rows = rows[computed]
        for entry in self._inputs:
            np.copyto(entry.source[:n_rows], rows[:, self._own])
        column = self._passed.stop
        for entry in self._experts:
            chosen = rows[:, column : column + self._n_used]
            # What is no expert is a row of a test or a measurement; llama.cpp would abort.
            entry.source[:n_rows, : self._n_used] = np.clip(np.nan_to_num(chosen), 0, self._n_experts - 1)
            column += self._n_used

    def pass_on(
        self, rows: npt.NDArray[np.float32], hidden: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
    ) -> None:
        """Write what leaves the stage: f32 [n, width_out]. rows: what entered; hidden: what the last layer gave."""
        n_hidden = hidden.shape[1]
        out[:, :n_hidden] = hidden
        out[:, n_hidden:] = rows[:, self._passed]
