"""The parts of a row in models where the inputs of blocks enter all later layers (kimi-k3), and the node for each.

After the hidden row's columns come the inputs of all blocks that begin before the stage, oldest first. llama.cpp gets
the first of these as an embedding. The others are written over the outputs of placeholders, and so is the hidden row:
see coordinator/model/placeholders.py. The placeholders themselves are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from relayline.stage.engine.artifact import StageArtifact
from relayline.stage.engine.inner_rows import InnerRowParts
from relayline.stage.engine.micro_batches import Cut
from relayline.stage.engine.row_parts import Entry, Nodes, RowParts, Tap

_OUTPUT = "l_out-{layer}"  # llama_model_kimi_k3::graph
_INPUT = "attn_norm-{layer}"  # of a layer, whose first node it is with a name

Rows = npt.NDArray[np.float32]


class BlockRows:
    """The parts of the rows of one stage, in arrays that llama.cpp or the callback read. As RowParts."""

    are_written = False

    def __init__(self, artifact: StageArtifact, rows: Rows, output_rows: Rows) -> None:
        """Lay the arrays out, once. rows: f32 [max_rows, width_in]; output_rows: f32 [max_rows, width_out]."""
        self._n_embd, self._is_first = artifact.n_embd, artifact.is_first
        start, end, block = artifact.layer_start, artifact.layer_end, artifact.block_layers
        self._begins_block = start % block == 0  # its first layer's input is the hidden row, which all later ones read
        self.are_apart = not self._is_first
        self.embeddings = self._array(len(rows)) if self.are_apart else rows
        self.hidden = output_rows if artifact.is_last else self._array(len(rows))
        entries, taps = [], []
        if not self._is_first:
            outputs = [*range(block - 1, start - 1, block), start - 1]
            entries = [Entry(_OUTPUT.format(layer=layer), self._array(len(rows))) for layer in outputs]
        if not artifact.is_last:
            inside = range(start - start % block + block, end, block)
            taps = [Tap(_OUTPUT.format(layer=layer - 1), self._array(len(rows))) for layer in inside]
        last = start - 1  # of the placeholders
        skipped = (_INPUT.format(layer=0), _INPUT.format(layer=last), _OUTPUT.format(layer=last))
        self.nodes = Nodes(tuple(entries), tuple(taps), () if self._is_first else skipped)

    def _array(self, max_rows: int) -> Rows:
        return np.zeros((max_rows, self._n_embd), np.float32)

    def fill(self, rows: Rows, cut: Cut | None) -> None:
        """Take the rows of a step apart: f32 [n, width_in]. cut: how llama.cpp cuts the step, if it does."""
        n_rows = len(rows)
        first = rows[:, self._n_embd : 2 * self._n_embd]
        np.copyto(self.embeddings[:n_rows], first if cut is None else first[cut.given])
        if cut is not None:
            rows = rows[cut.computed]
        *inputs, hidden = self.nodes.entries
        np.copyto(hidden.source[:n_rows], rows[:, : self._n_embd])
        for block, entry in enumerate(inputs, 1):
            column = (1 + block) * self._n_embd
            np.copyto(entry.source[:n_rows], rows[:, column : column + self._n_embd])

    def pass_on(self, rows: Rows, out: Rows) -> None:
        """Write the rows that leave the stage, f32 [n, width_out]. rows: those that entered."""
        if not out.size:  # the last stage gives logits
            return
        n_rows, n_embd = len(out), self._n_embd
        entered = [rows[:, n_embd:], *([rows[:, :n_embd]] if self._begins_block else [])]
        parts = [self.hidden[:n_rows], *entered, *(tap.rows[:n_rows] for tap in self.nodes.taps)]
        column = 0
        for part in parts:
            out[:, column : column + part.shape[1]] = part
            column += part.shape[1]


Parts = RowParts | BlockRows | InnerRowParts


def parts_of(artifact: StageArtifact, rows: Rows, output_rows: Rows, entry: str, names: Sequence[str]) -> Parts:
    """Return the parts of a stage's rows, whichever they are. entry: see RowParts; names: see InnerRowParts."""
    if artifact.inner_layers:
        return InnerRowParts(artifact, rows, output_rows, names)
    if artifact.block_layers:
        return BlockRows(artifact, rows, output_rows)
    return RowParts(artifact, rows, output_rows, entry)
