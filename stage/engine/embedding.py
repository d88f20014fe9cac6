"""Token embedding lookup of stage 0: rows of the quantised table, converted by ggml's own routine.

llama.cpp's token path looks rows up with the same routine, so the result is equal to its result bit for bit. The
table is memory-mapped: a token's row is paged in when it is first asked for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from relayline.stage.engine import ggml
from relayline.stage.engine.artifact import StageArtifact
from relayline.wire.common.errors import ArtifactError, InternalError, ProtocolError


class EmbeddingTable:
    """The table of one stage-0 artifact. Read-only after construction, so any thread may look up."""

    def __init__(self, artifact: StageArtifact) -> None:
        """Map the table. Raises ArtifactError if the artifact has none or it does not fit into the file."""
        section = artifact.embedding
        if section is None:
            raise ArtifactError(f"{artifact.path}: stage {artifact.stage_index} holds no embedding table")
        traits = ggml.type_traits(section.type_id)
        if traits is None:
            raise ArtifactError(f"{artifact.path}: embedding table of unknown ggml type {section.type_id}")
        if traits.to_float is None and traits.name != "f32":
            raise ArtifactError(f"{artifact.path}: embedding table of type {traits.name} cannot be read as numbers")
        if artifact.n_embd % traits.block_elements:
            raise ArtifactError(f"{artifact.path}: {traits.name} rows of {artifact.n_embd} values are not whole blocks")
        row_bytes = artifact.n_embd // traits.block_elements * traits.block_bytes
        end_bytes = section.offset_bytes + section.rows * row_bytes
        if not section.rows or artifact.path.stat().st_size < end_bytes:
            raise ArtifactError(f"{artifact.path}: ends before its embedding table does; copy it again")
        self.n_rows = section.rows
        self.n_embd = artifact.n_embd
        self._scale = np.float32(section.scale)
        self._to_float = traits.to_float
        self._row_bytes = row_bytes
        shape = (section.rows, row_bytes)
        self._rows = np.memmap(artifact.path, np.uint8, mode="r", offset=section.offset_bytes, shape=shape)
        self._address = self._rows.ctypes.data

    def lookup(self, tokens: npt.NDArray[np.int32], out: npt.NDArray[np.float32]) -> None:
        """Write the rows of `tokens` (i32 [n]) into `out` (f32 [n, n_embd], C-contiguous).

        Raises ProtocolError, with `out` untouched, if a token is outside the vocabulary.
        """
        outside = [token for token in tokens.tolist() if not 0 <= token < self.n_rows]
        if outside:
            raise ProtocolError(f"token {outside[0]} is outside the vocabulary of {self.n_rows}")
        if out.shape != (tokens.size, self.n_embd) or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise InternalError(f"out must be contiguous f32 [{tokens.size}, {self.n_embd}]")
        if self._to_float is None:
            out.view(np.uint8)[:] = self._rows[tokens]
        else:
            to_float, table, row_bytes = self._to_float, self._address, self._row_bytes
            destination, stride = out.ctypes.data, out.strides[0]
            for index, token in enumerate(tokens.tolist()):
                to_float(table + token * row_bytes, destination + index * stride, self.n_embd)
        if self._scale != 1.0:
            out *= self._scale
