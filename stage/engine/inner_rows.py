"""The parts of a row in a pipeline whose last stage drafts with an EAGLE-3 model: a hidden row, and inner rows.

Such a model reads the inputs of some layers (`wire/model_files/eagle3.py`). A stage takes those of its own layers out
of its running graph, and hands them on behind its hidden row, after those of earlier layers, in the order of layers.
The input of a stage's first layer is the row that enters it. So a row grows on its way, and at the last stage all parts
are there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from relayline.stage.engine.artifact import StageArtifact
from relayline.stage.engine.micro_batches import Cut
from relayline.stage.engine.row_parts import Nodes, Tap
from relayline.wire.common.errors import NativeError

Rows = npt.NDArray[np.float32]


class InnerRowParts:
    """The parts of the rows of one stage, in arrays that llama.cpp or the callback read. As RowParts."""

    are_written = False

    def __init__(self, artifact: StageArtifact, rows: Rows, output_rows: Rows, names: Sequence[str]) -> None:
        """Lay the arrays out, once. rows: f32 [max_rows, width_in]; output_rows: f32 [max_rows, width_out].

        names: of the outputs of the stage's layers in llama.cpp's graph.
        """
        self._n_embd, start, end = artifact.n_embd, artifact.layer_start, artifact.layer_end
        self._order = artifact.inner_layers
        ascending = sorted(self._order)
        self._before = [layer for layer in ascending if layer < start]
        self._is_own = start in ascending  # the row that enters is one of them
        self.are_apart = bool(self._before)
        self.embeddings = self._array(rows) if self.are_apart else rows
        self.hidden = output_rows if artifact.width_out == self._n_embd and not artifact.is_last else self._array(rows)
        inside = [layer for layer in ascending if start < layer < end]
        self._taps = {layer: Tap(names[layer - 1 - start], self._array(rows)) for layer in inside}
        self.nodes = Nodes((), tuple(self._taps.values()))
        self._start = start

    def _array(self, rows: Rows) -> Rows:
        return np.zeros((len(rows), self._n_embd), np.float32)

    def fill(self, rows: Rows, cut: Cut | None) -> None:
        """Take the rows of a step apart: f32 [n, width_in]. cut: how llama.cpp cuts the step, if it does."""
        hidden = rows[:, : self._n_embd]
        np.copyto(self.embeddings[: len(rows)], hidden if cut is None else hidden[cut.given])

    def pass_on(self, rows: Rows, out: Rows) -> None:
        """Write the rows that leave the stage, f32 [n, width_out]. rows: those that entered."""
        if self.hidden.shape[1] == out.shape[1]:
            return
        parts = [self.hidden[: len(out)], *self._inner(rows[: len(out)], slice(len(out))).values()]
        np.concatenate(parts, axis=1, out=out)

    def _inner(self, rows: Rows, own: slice | npt.NDArray[np.intp]) -> dict[int, Rows]:
        """Return the inner rows of rows that entered, by layer. own: their places in the arrays of this stage."""
        n_embd = self._n_embd
        found = {layer: rows[:, n_embd * at : n_embd * (at + 1)] for at, layer in enumerate(self._before, 1)}
        if self._is_own:
            found[self._start] = rows[:, :n_embd]
        return found | {layer: tap.rows[own] for layer, tap in self._taps.items()}

    def read(self, entered: Rows, rows: npt.NDArray[np.intp]) -> Rows:
        """Return the parts of rows of the last step as the draft model reads them: f32 [rows, parts x n_embd], a copy.

        entered: the rows that entered the stage in that step. Raises NativeError where some part is missing.
        """
        found = self._inner(entered[rows], rows)
        if missing := [layer for layer in self._order if layer not in found]:
            raise NativeError(f"the input of layer {missing[0]} did not come with its row")
        return np.concatenate([found[layer] for layer in self._order], axis=1)
