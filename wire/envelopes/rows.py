"""Hidden-state rows on the wire: range-safe f16, or exact f32.

f16 ends at 65,504, but residual streams of real models go beyond it. A row whose largest magnitude does not fit is
scaled down by the smallest power of two that makes it fit. That costs no precision, and the exponent travels with the
row. Rows that fit (nearly all) travel as they are.

NaN and infinity never travel. The sender finds them in the same pass that converts and ends those sessions; the
receiver refuses rows that hold them all the same, before they reach a native cache.

The loops are native (`_rows.c`). This saves 120 of 124 us for 8 rows of 4,096 values (`python -m benches.tricks`),
since numpy converts f16 element by element on most machines. numpy also releases the GIL around every call, which can
cost a switch interval (5 ms).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from relayline.wire.common.errors import ProtocolError
from relayline.wire.envelopes import _rows

EXPONENT_MAX = _rows.EXPONENT_MAX  # exponents of rows that travel are 0..EXPONENT_MAX

_FULL = np.dtype(np.float32)
Rows32 = npt.NDArray[np.float32]
Rows16 = npt.NDArray[np.float16]
Exponents = npt.NDArray[np.int8]


class Encoded(NamedTuple):
    """The facts that `RowEncoder.encode` finds on its way."""

    exponents: Exponents | None  # i8 (n_rows,): row = f16 * 2^exponent; None when all are zero
    all_finite: bool  # False: some row holds NaN or infinity, the output must not travel; `measure` says which


class RowEncoder:
    """Converts rows of one width for one sender. Owns its small results, so that steady use allocates no arrays.

    Results are views that the next call overwrites. Arrays must be C-contiguous and agree in shape and dtype, or
    ValueError is raised.
    """

    def __init__(self, max_rows: int, width: int) -> None:
        self._width = width
        self._largest = np.empty(max_rows, dtype=np.float32)
        self._exponents = np.zeros(max_rows, dtype=np.int8)

    def encode(self, rows: Rows32, out: npt.NDArray[Any]) -> Encoded:
        """Write rows, f32 (n_rows, width), into out, f16 or f32 of the same shape, in one pass over them."""
        if out.dtype == _FULL:
            np.copyto(out, rows, casting="no")
            return Encoded(None, bool(np.isfinite(self.measure(rows)).all()))
        exponents = self._exponents[: rows.shape[0]]
        found = _rows.encode_f16(rows, out, exponents)
        return Encoded(exponents if found & _rows.SCALED else None, not found & _rows.NOT_FINITE)

    def measure(self, rows: Rows32) -> Rows32:
        """Return the largest magnitude of each row of f32 (n_rows, width), as f32 (n_rows,).

        NaN or inf marks a row that must not travel. Raises ValueError for rows of another width.
        """
        if rows.shape[1] != self._width:
            raise ValueError(f"rows are {rows.shape[1]} wide, this encoder was made for {self._width}")
        largest = self._largest[: rows.shape[0]]
        _rows.largest(rows, largest)
        return largest


def decode_f16(rows: Rows16, exponents: Exponents | None, out: Rows32) -> None:
    """Write rows, f16 (n_rows, width), into out, f32 of the same shape, applying the exponents where given.

    Raises ProtocolError when a value is NaN or infinite; out then holds unusable rows.
    """
    if not _rows.decode_f16(rows, exponents, out):
        raise ProtocolError("a frame's rows hold NaN or infinity, which must not travel")
