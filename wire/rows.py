"""Hidden-state rows on the wire: range-safe f16, or exact f32.

f16 ends at 65,504 while residual streams of real models go beyond it. A row whose largest magnitude does not fit is
scaled down by a power of two, which costs no precision, and the exponent travels beside it. Rows that fit (nearly
all) are converted as they are, so the common case is one conversion pass and one maximum per row.

NaN and infinity never travel: `RowEncoder.measure` says which rows are not finite and the caller ends those sessions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F16_MAX = 65_504.0
# Scaled rows aim a factor two below the limit, so that rounding to 11 bits can never carry past it.
_TARGET = F16_MAX / 2

Rows32 = npt.NDArray[np.float32]
Rows16 = npt.NDArray[np.float16]


class RowEncoder:
    """Converts rows of one width; owns the scratch, so that steady use allocates nothing of payload size."""

    def __init__(self, max_rows: int, width: int) -> None:
        self._magnitude = np.empty((max_rows, width), dtype=np.float32)
        self._largest = np.empty(max_rows, dtype=np.float32)
        self._exponents = np.zeros(max_rows, dtype=np.int8)

    def measure(self, rows: Rows32) -> Rows32:
        """Return the largest magnitude of each row, f32 (n_rows,); NaN or inf marks a row that must not travel.

        The result is a view that the next call overwrites.
        """
        n_rows = rows.shape[0]
        magnitude, largest = self._magnitude[:n_rows], self._largest[:n_rows]
        np.abs(rows, out=magnitude)
        np.max(magnitude, axis=1, out=largest)
        return largest

    def encode_f16(self, rows: Rows32, largest: Rows32, out: Rows16) -> npt.NDArray[np.int8] | None:
        """Write rows, f32 (n_rows, width), into out, f16 of the same shape. `largest` is measure's result, all finite.

        Returns None when every exponent is zero, else the exponents, i8 (n_rows,): row = f16 * 2^exponent. The
        result is a view that the next call overwrites.
        """
        if rows.shape[0] == 0 or float(largest.max()) <= F16_MAX:
            np.copyto(out, rows, casting="same_kind")
            return None
        exponents = self._exponents[: rows.shape[0]]
        exponents.fill(0)
        for row in np.flatnonzero(largest > F16_MAX):
            exponent = int(np.ceil(np.log2(float(largest[row]) / _TARGET)))
            exponents[row] = exponent
            np.ldexp(rows[row], -exponent, out=self._magnitude[row])
        fits = exponents == 0
        np.copyto(out, rows, where=fits[:, None], casting="same_kind")
        np.copyto(out, self._magnitude[: rows.shape[0]], where=~fits[:, None], casting="same_kind")
        return exponents


def decode_f16(rows: Rows16, exponents: npt.NDArray[np.int8] | None, out: Rows32) -> None:
    """Write rows, f16 (n_rows, width), into out, f32 of the same shape, applying the exponents where given."""
    np.copyto(out, rows)
    if exponents is not None:
        for row in np.flatnonzero(exponents):
            np.ldexp(out[row], int(exponents[row]), out=out[row])
