"""Token embedding lookup of stage 0: rows of the quantised table, converted by ggml's own routine.

llama.cpp's token path looks rows up with the same routine, so the result is equal to its result bit for bit. The table
is memory-mapped: a token's row is paged in when it is first asked for. Sidebands of a row come from further tables
(stage/engine/layer_inputs.py), or are looked up in the same way. Rows of images and audio get theirs here as well.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from relayline.stage.engine.artifact import HashedExperts, StageArtifact
from relayline.stage.engine.layer_inputs import LayerInputTable
from relayline.stage.engine.table_rows import TableRows
from relayline.wire.common.errors import ArtifactError, InternalError, ProtocolError

_PADDING = 0  # the token whose values for each layer rows of images and audio take


class EmbeddingTable:
    """The tables of one stage-0 artifact. Read-only after construction; one thread at a time may look up."""

    def __init__(self, artifact: StageArtifact, n_threads: int = 1) -> None:
        """Map them.

        Raises ArtifactError if the artifact has none or one does not fit into the file. n_threads: for computed
        sidebands; only gemma4 needs it.
        """
        section = artifact.embedding
        if section is None:
            raise ArtifactError(f"{artifact.path}: stage {artifact.stage_index} holds no embedding table")
        self._table = TableRows(
            artifact.path,
            "embedding table",
            offset_bytes=section.offset_bytes,
            type_id=section.type_id,
            n_rows=section.rows,
            n_columns=artifact.n_embd,
        )
        self.n_rows, self.n_embd, self.width = section.rows, artifact.n_embd, artifact.width_in
        self._scale = np.float32(section.scale)
        self._media_scale = self._scale if artifact.scales_media else np.float32(1)
        self._n_features = artifact.media_width - artifact.n_embd
        self._inputs = LayerInputTable(artifact, section.rows, n_threads) if artifact.layer_inputs is not None else None
        self._experts: list[TableRows] = []
        if artifact.hashed is not None:
            self._experts = self._open_experts(artifact, artifact.hashed, section.rows)

    @staticmethod
    def _open_experts(artifact: StageArtifact, hashed: HashedExperts, n_rows: int) -> list[TableRows]:
        return [
            TableRows(
                artifact.path,
                "table of experts by token",
                offset_bytes=layer.offset_bytes,
                type_id=layer.type_id,
                n_rows=n_rows,
                n_columns=hashed.n_used,
                are_integers=True,
            )
            for layer in hashed.layers
        ]

    def lookup(self, tokens: npt.NDArray[np.int32], out: npt.NDArray[np.float32]) -> None:
        """Write the rows of `tokens` (i32 [n]) into `out` (f32 [n, width], C-contiguous).

        Raises ProtocolError, with `out` untouched, if a token is outside the vocabulary.
        """
        given = tokens.tolist()
        outside = [token for token in given if not 0 <= token < self.n_rows]
        if outside:
            raise ProtocolError(f"token {outside[0]} is outside the vocabulary of {self.n_rows}")
        if out.shape != (tokens.size, self.width) or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise InternalError(f"out must be contiguous f32 [{tokens.size}, {self.width}]")
        rows = out if self.width == self.n_embd else out[:, : self.n_embd]
        self._table.read(given, rows)
        if self._scale != 1.0:
            rows *= self._scale
        column = self.n_embd
        if self._n_features:
            rows_more = out[:, column : column + self._n_features]
            rows_more[:] = 0  # a token has no features of an image
            column += self._n_features
        if self._inputs is not None:
            self._inputs.compute(given, rows, out[:, column : column + self._inputs.n_values])
            column += self._inputs.n_values
        for experts in self._experts:
            experts.read(given, out[:, column : column + experts.n_columns])
            column += experts.n_columns

    def take(self, rows: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
        """Write rows of images or audio into `out` (f32 [n, width], C-contiguous), as the first layer gets them, with
        what layers take besides.

        llama_model_gemma4::graph gives such rows the values of the padding token. Raises ProtocolError, with `out`
        untouched, if they have another width, or belong to a model whose layers need the tokens.
        """
        n_rows, n_values = rows.shape
        n_inputs = self._inputs.n_values if self._inputs is not None else 0
        if n_values + n_inputs != self.width:
            raise ProtocolError(f"rows of {n_values} values came, and this stage takes {self.width - n_inputs}")
        if out.shape != (n_rows, self.width):
            raise InternalError(f"out must be f32 [{n_rows}, {self.width}]")
        np.multiply(rows, self._media_scale, out=out[:, :n_values])
        if self._inputs is not None:
            self._inputs.compute([_PADDING] * n_rows, rows, out[:, n_values:])
