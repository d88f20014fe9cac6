"""Random weights as ready-made blocks of a ggml type, as `quantize` would write them. Pure. Every generator gives
values of zero mean. This matters: nibbles drawn evenly from 0..15 around 8 have mean -0.5, which adds the same vector
to every row. Then the model repeats one token, and every parity check passes without proving anything.

Speed comes from drawing bytes and mapping them through tables; a matrix is filled at some hundred MB a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
# (generator, standard deviation of each block's values: f32 (n_blocks,)) -> u8 (n_blocks, bytes of a block)
Fill = Callable[[np.random.Generator, Floats], Bytes]

_E2M1_RMS: Final = 5.8523  # of 0 1 2 3 4 6 8 12 and their negatives, the doubled values that ggml computes with
_IQ2_XXS_RMS: Final = 53.24  # of grid value x (0.5 + scale) / 4 over random bits; the test measures it
_UE4M3_LARGEST: Final = 0x7E


def _normal_quantiles(n: int) -> Floats:
    """Return n values that represent a standard normal, symmetric around zero."""
    # Inverse of a fine cumulative sum: the standard library's inverse is exact but takes one value at a time.
    x = np.linspace(-6.0, 6.0, 200_001)
    density = np.exp(-0.5 * x * x)
    cumulative = np.cumsum(density)
    cumulative = (cumulative - 0.5 * density) / cumulative[-1]
    quantiles = np.interp((np.arange(n) + 0.5) / n, cumulative, x)
    return ((quantiles - quantiles[::-1]) / 2).astype(np.float32)


_NORMAL_65536 = _normal_quantiles(1 << 16)
_INT8_STEP: Final = 40.0  # int8 steps to one standard deviation: 127 is 3.2 deviations, as in real Q8_0 blocks
_INT8 = np.clip(np.rint(_normal_quantiles(256) * _INT8_STEP), -127, 127).astype(np.int8).view(np.uint8)
_INT8_RMS: Final = float(np.sqrt(np.mean(_INT8.view(np.int8).astype(np.float64) ** 2)))


def _balanced_nibbles() -> Bytes:
    """Return a table over bytes that turns nibble 0 into 8: even over 0..15 becomes zero mean around 8."""
    nibbles = np.where(np.arange(16) == 0, 8, np.arange(16)).astype(np.uint8)
    byte = np.arange(256)
    table: Bytes = (nibbles[byte & 15] | (nibbles[byte >> 4] << 4)).astype(np.uint8)
    return table


_BALANCED = _balanced_nibbles()
_BALANCED_RMS: Final = float(np.sqrt(280 / 16))  # of 0, 0 and +-1..7


def _random(rng: np.random.Generator, n_blocks: int, n_bytes: int) -> Bytes:
    return np.frombuffer(rng.bytes(n_blocks * n_bytes), np.uint8).reshape(n_blocks, n_bytes)


def _halves(values: Floats) -> Bytes:
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _f32(rng: np.random.Generator, std: Floats) -> Bytes:
    return (rng.standard_normal(std.shape, np.float32) * std).view(np.uint8).reshape(-1, 4)


def _f16(rng: np.random.Generator, std: Floats) -> Bytes:
    drawn = np.frombuffer(rng.bytes(2 * std.size), np.uint16)
    if std.size and (std == std[0]).all():  # one table look-up for each value instead of three passes
        halves: Bytes = (_NORMAL_65536 * std[0]).astype("<f2").view(np.uint16).take(drawn).view(np.uint8)
        return halves.reshape(-1, 2)
    return _halves(_NORMAL_65536[drawn] * std)


def _q4_0(rng: np.random.Generator, std: Floats) -> Bytes:
    return np.hstack((_halves(std / np.float32(_BALANCED_RMS)), _BALANCED[_random(rng, std.size, 16)]))


def _q8_0(rng: np.random.Generator, std: Floats) -> Bytes:
    return np.hstack((_halves(std / np.float32(_INT8_RMS)), _INT8[_random(rng, std.size, 32)]))


def _q4_k(rng: np.random.Generator, std: Floats) -> Bytes:
    # Eight sub-blocks with scale and minimum 32 each; the minimum's factor of 7.5 puts the middle of 0..15 at zero.
    step = std / np.float32(32 * np.sqrt(255 / 12))
    scales = np.tile(np.array([160] * 8 + [0] * 4, np.uint8), (std.size, 1))
    return np.hstack((_halves(step), _halves(step * np.float32(7.5)), scales, _random(rng, std.size, 128)))


def _q6_k(rng: np.random.Generator, std: Floats) -> Bytes:
    # 0..63 around 32 leans by half a step, so the sixteen sub-blocks have scales of random sign.
    signs = np.where(_random(rng, std.size, 16) & 1, 32, -32).astype(np.int8).view(np.uint8)
    step = std / np.float32(32 * np.sqrt(4095 / 12 + 0.25))
    return np.hstack((_random(rng, std.size, 192), signs, _halves(step)))


def _iq2_xxs(rng: np.random.Generator, std: Floats) -> Bytes:
    return np.hstack((_halves(std / np.float32(_IQ2_XXS_RMS)), _random(rng, std.size, 64)))


def _mxfp4(rng: np.random.Generator, std: Floats) -> Bytes:
    # The scale is a power of two: within a factor 1.42 of the requested one.
    exponent = np.clip(np.rint(np.log2(std / np.float32(_E2M1_RMS))) + 128, 2, 250).astype(np.uint8)
    return np.hstack((exponent[:, None], _random(rng, std.size, 16)))


def _ue4m3() -> Floats:
    """Return the value of every unsigned 4-bit exponent, 3-bit mantissa byte that ggml reads."""
    byte = np.arange(_UE4M3_LARGEST + 1)
    exponent, mantissa = byte >> 3, byte & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return value.astype(np.float32)


_UE4M3 = _ue4m3()
_UE4M3_MIDDLES = (_UE4M3[:-1] + _UE4M3[1:]) / 2


def _nvfp4(rng: np.random.Generator, std: Floats) -> Bytes:
    wanted = std * np.float32(2 / _E2M1_RMS)
    scale = np.maximum(1, np.searchsorted(_UE4M3_MIDDLES, wanted)).astype(np.uint8)  # the nearest, never zero
    return np.hstack((np.repeat(scale[:, None], 4, axis=1), _random(rng, std.size, 32)))


FILLS: Final[dict[GGMLQuantizationType, Fill]] = {
    GGMLQuantizationType.F32: _f32,
    GGMLQuantizationType.F16: _f16,
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q6_K: _q6_k,
    GGMLQuantizationType.IQ2_XXS: _iq2_xxs,
    GGMLQuantizationType.MXFP4: _mxfp4,
    GGMLQuantizationType.NVFP4: _nvfp4,
}


def random_rows(rng: np.random.Generator, kind: GGMLQuantizationType, row_std: Floats, n_in: int) -> Bytes:
    """Return rows of `n_in` random values in the layout of `kind`: u8 (n_rows, bytes of a row).

    `row_std`, f32 (n_rows,), is the standard deviation of each row's values; the mean is zero. `n_in` must be whole
    blocks of the type.
    """
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    if n_in % block_values:
        raise ValueError(f"rows of {n_in} values are no whole blocks of {kind.name}, which has {block_values}")
    n_blocks = n_in // block_values
    blocks = FILLS[kind](rng, np.repeat(row_std.astype(np.float32), n_blocks))
    return np.ascontiguousarray(blocks).reshape(row_std.size, n_blocks * block_bytes)
