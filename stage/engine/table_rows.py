"""Reads rows, by token and as numbers, of a table that follows the tensors in an artifact.

Mapped: a row is read when it is first asked for.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from relayline.stage.engine import ggml
from relayline.wire.common.errors import ArtifactError

I32_ID = 26


class TableRows:
    """One table of `n_rows` x `n_columns` values of a ggml type. Read-only, so any thread may look up."""

    def __init__(
        self,
        path: Path,
        what: str,
        *,
        offset_bytes: int,
        type_id: int,
        n_rows: int,
        n_columns: int,
        are_integers: bool = False,
    ) -> None:
        """Map it. Raises ArtifactError where its rows cannot be read as such numbers or the file ends before it does.

        what: the table's name in messages.
        """
        traits = ggml.type_traits(type_id)
        if traits is None:
            raise ArtifactError(f"{path}: {what} of unknown ggml type {type_id}")
        is_readable = type_id == I32_ID if are_integers else traits.to_float is not None or traits.name == "f32"
        if not is_readable:
            raise ArtifactError(f"{path}: {what} of type {traits.name} cannot be read as numbers")
        if n_columns % traits.block_elements:
            raise ArtifactError(f"{path}: {traits.name} rows of {n_columns} values are not whole blocks")
        row_bytes = n_columns // traits.block_elements * traits.block_bytes
        if not n_rows or path.stat().st_size < offset_bytes + n_rows * row_bytes:
            raise ArtifactError(f"{path}: ends before its {what} does; copy it again")
        self.n_columns = n_columns
        self._to_float, self._row_bytes = traits.to_float, row_bytes
        self._rows = np.memmap(path, np.uint8, mode="r", offset=offset_bytes, shape=(n_rows, row_bytes))
        self._plain = self._rows.view(np.int32 if are_integers else np.float32) if self._to_float is None else None
        self._address = self._rows.ctypes.data

    def read(self, tokens: list[int], out: npt.NDArray[np.float32]) -> None:
        """Write the rows of tokens, each below `n_rows`, into f32 [n, n_columns], whose rows may lie apart."""
        if self._plain is not None:
            out[:] = self._plain[tokens]
            return
        to_float, table, row_bytes, n_columns = self._to_float, self._address, self._row_bytes, self.n_columns
        assert to_float is not None
        destination, stride = out.ctypes.data, out.strides[0]
        for index, token in enumerate(tokens):
            to_float(table + token * row_bytes, destination + index * stride, n_columns)
