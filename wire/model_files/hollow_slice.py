"""Writes a slice of a model without its weights: as long to compute as the real one, for measuring.

Zeros in place of weights take as long as weights, but for a few tensors. Zeros as divisors of angles would leave no
value finite. Routers of zeros would send all rows to the same experts, which is too quick: routers have pseudo-random
values, and what scales rows before them has ones, so that rows that differ choose differently, as with trained weights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from relayline.wire.common.errors import ModelFileError
from relayline.wire.model_files.gguf_header import Tensor, read_header

DIVISORS = "rope_"  # tensors by which angles are divided
ROUTER = ".ffn_gate_inp.weight"
SHARED_GATE = ".ffn_gate_inp_shexp.weight"  # of a shared expert; some graphs divide by its value
BY_TOKEN = ".ffn_gate_tid2eid.weight"  # tables in which layers look up a token's experts: no zeros will do
_SCALES = re.compile(r"norm\w*\.weight$|scale")  # vectors that rows are multiplied with
F32, F16, BF16 = 0, 1, 30
SEED = 20_261_130  # the same values on every machine


def write_hollow(path: Path, header: bytes, size_bytes: int) -> None:
    """Write a file of this header and size, with zeros in place of nearly all weights.

    Raises OSError.
    """
    path.write_bytes(header)
    os.truncate(path, size_bytes)  # unwritten parts read as zeros
    try:
        tensors = read_header(path).tensors
    except ModelFileError:  # the engine says what is wrong with it
        return
    has_experts = any(map(_is_router, tensors))
    with path.open("r+b") as file:
        for tensor in tensors:
            if (values := _values(tensor, has_experts=has_experts)) is not None:
                file.seek(tensor.offset)
                file.write(_encoded(values, tensor.type_id))


def spreads_rows(tensors: Iterable[Tensor]) -> bool:
    """Tell whether rows choose different experts in these layers without the model's weights, or there are none.

    Routers are to have plain numbers. Where a row is several streams (deepseek4, hy_v4), zeros mix these equally: rows
    that differ still do before a router.
    """
    found = list(tensors)
    routers = [tensor for tensor in found if _is_router(tensor)]
    is_plain = all(tensor.type_id in (F32, F16, BF16) for tensor in routers)
    return is_plain and not any(tensor.name.endswith(BY_TOKEN) for tensor in found)


def _is_router(tensor: Tensor) -> bool:
    return tensor.name.endswith(ROUTER)


def _values(tensor: Tensor, *, has_experts: bool) -> npt.NDArray[np.float32] | None:
    """Return the values of a tensor that is not all zeros; None for the others."""
    n_values = int(np.prod(tensor.dims))
    if tensor.name.endswith((ROUTER, SHARED_GATE)) and tensor.type_id in (F32, F16, BF16):
        return np.random.default_rng(SEED).standard_normal(n_values, np.float32)
    if tensor.type_id != F32:
        return None
    scales = has_experts and len(tensor.dims) == 1 and _SCALES.search(tensor.name) is not None
    return np.ones(n_values, np.float32) if scales or tensor.name.startswith(DIVISORS) else None


def _encoded(values: npt.NDArray[np.float32], type_id: int) -> bytes:
    if type_id == BF16:
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(np.float16 if type_id == F16 else np.float32).tobytes()
