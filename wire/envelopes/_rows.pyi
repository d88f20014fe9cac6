"""Typed view of _rows.c. Arrays are C-contiguous; a wrong shape or dtype is a ValueError."""

import numpy as np
import numpy.typing as npt

SCALED: int  # bit of encode_f16's result: some row has an exponent
NOT_FINITE: int  # bit of encode_f16's result: some row holds NaN or infinity
EXPONENT_MAX: int  # largest exponent of a row that is read or written; the smallest is 0

def largest(rows: npt.NDArray[np.float32], out: npt.NDArray[np.float32], /) -> None:
    """Write the largest magnitude of each row (n_rows, width) into out (n_rows,); NaN wins, then infinity."""

def encode_f16(rows: npt.NDArray[np.float32], out: npt.NDArray[np.float16], exponents: npt.NDArray[np.int8], /) -> int:
    """Convert rows into out, both (n_rows, width), and fill exponents (n_rows,). Returns SCALED | NOT_FINITE."""

def decode_f16(
    rows: npt.NDArray[np.float16], exponents: npt.NDArray[np.int8] | None, out: npt.NDArray[np.float32], /
) -> bool:
    """Convert rows into out, both (n_rows, width); returns whether every value of out is finite."""

def implementations() -> tuple[str, ...]:
    """Return the implementations this machine can run, the quickest first; that one is used from the start."""

def use(name: str, /) -> str:
    """Switch the implementation of the whole process (for tests) and return the one used before."""
