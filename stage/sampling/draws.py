"""Which of some tokens is drawn: the one with the largest sum of logit / temperature and Gumbel noise. Pure.

The noise of a token is a hash of (seed, position, token). So a draw has the distribution of the softmax (the Gumbel-max
trick; Maddison, Tarlow and Minka, 2014), and a token's noise does not depend on which other tokens are left, on their
order, or on who else is in the batch. Logits of one row differ a little from one batch to another. A draw along the
cumulative sum turns that into another token often, this one about as rarely as two distributions allow.

It is computed as a race, which is the same: a token arrives after E / exp(logit / temperature), where E is -log(1 - v)
and v is uniform in (0, 1); the first one wins. A first look at all tokens, in f32, bounds the logarithm of each arrival
from below: v <= E, and the bits of an f32, read as an integer, are at most its logarithm. It leaves a few tokens that
may win; these are timed in f64 with 64 bits of v.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_U64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SPREAD = np.uint32(0x9E3779B1)  # odd: tokens stay distinct, and so does the noise of any two
_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_LOG2 = 1 << 23  # an f32 that doubles: its bits, read as an integer, grow by so much
_BITS_OF_1 = 159 * _LOG2  # of the f32 2**32, which stands for v = 1
_SLACK = _LOG2 // 1024  # more than the f32 arithmetic of the first look is off by
_BITS_PER_NAT = math.log2(math.e)
_BELOW_1 = 1.0 - 2.0**-53
_COLDEST, _HOTTEST = 1e-20, 1e20  # temperatures beyond change nothing, and would overflow f32


def noise_keys(seed: int, position: int) -> tuple[int, int]:
    """Return the two 64-bit keys of the noise at a position, for the upper and the lower half of v."""
    key = _mix(_mix(seed + _GOLDEN) + position + _GOLDEN)
    return key, _mix(key + _GOLDEN)


def _mix(value: int) -> int:
    """Return splitmix64's finaliser of a number."""
    value &= _U64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _U64
    return value ^ (value >> 31)


class Draws:
    """Draws from one vocabulary, with arrays over it that every draw reuses. Not thread-safe."""

    def __init__(self, n_vocab: int) -> None:
        self._spread = np.arange(n_vocab, dtype=np.uint32) * _SPREAD
        self._hash, self._shifted = np.empty(n_vocab, np.uint32), np.empty(n_vocab, np.uint32)
        self._scores, self._bits = np.empty(n_vocab, np.float32), np.empty(n_vocab, np.float32)

    def draw(
        self,
        logits: npt.NDArray[np.float32],
        largest: float,
        temperature: float,
        keys: tuple[int, int],
        tokens: npt.NDArray[np.int32] | None = None,
    ) -> int:
        """Return the token drawn from softmax(logits / temperature).

        `tokens` are those that the logits (f32 [n]) are of; None: all of the vocabulary, in order. `largest` is the
        largest logit, a finite number. Logits may be -inf: such a token is never drawn.
        """
        temperature = min(max(temperature, _COLDEST), _HOTTEST)
        with np.errstate(over="ignore"):
            left = self._may_win(logits, largest, temperature, keys[0], tokens)
            if left.size == 1:  # nearly always
                return int(left[0] if tokens is None else tokens[left[0]])
            those = left if tokens is None else tokens[left]
            arrivals = _arrivals(logits[left], largest, temperature, self.noise(those, keys))
            return int(those[arrivals == arrivals.min()].min())

    def _may_win(
        self,
        logits: npt.NDArray[np.float32],
        largest: float,
        temperature: float,
        key: int,
        tokens: npt.NDArray[np.int32] | None,
    ) -> npt.NDArray[np.intp]:
        """Return the indices of the tokens that may come first, by bounds of their arrivals."""
        n_tokens = logits.size
        spread = self._spread if tokens is None else self._spread[tokens]
        hashed = _hashed(spread, key, self._hash[:n_tokens], self._shifted[:n_tokens])
        scores, bits = self._scores[:n_tokens], self._bits[:n_tokens]
        np.copyto(bits, hashed, casting="unsafe")
        np.copyto(bits, bits.view(np.int32), casting="unsafe")
        np.subtract(logits, np.float32(largest), out=scores)
        np.multiply(scores, np.float32(_LOG2 * _BITS_PER_NAT / temperature), out=scores)
        np.subtract(scores, bits, out=scores)
        best = int(scores.argmax())
        # No later than this does the token arrive whose bound is the first.
        latest = math.log(-math.log1p(-min((int(hashed[best]) + 1) * 2.0**-32, _BELOW_1)))
        latest -= (float(logits[best]) - largest) / temperature
        return np.flatnonzero(scores >= np.float32(-latest * _BITS_PER_NAT * _LOG2 - _BITS_OF_1 - _SLACK))

    def noise(self, tokens: npt.NDArray[np.integer], keys: tuple[int, int]) -> npt.NDArray[np.float64]:
        """Return v of each token."""
        spread = self._spread[tokens]
        upper, lower = (_hashed(spread, key, np.empty_like(spread), np.empty_like(spread)) for key in keys)
        return upper * 2.0**-32 + (lower + 0.5) * 2.0**-64


def _hashed(
    spread: npt.NDArray[np.uint32], key: int, out: npt.NDArray[np.uint32], shifted: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint32]:
    """Fill `out` with a hash of each token: a bijection of 32 bits that takes in the halves of the key one by one.

    `shifted` is scratch. The constants are those of Ellis's lowbias32.
    """
    np.bitwise_xor(spread, np.uint32(key & 0xFFFFFFFF), out=out)
    np.right_shift(out, 16, out=shifted)
    np.bitwise_xor(out, shifted, out=out)
    np.multiply(out, _FIRST, out=out)
    np.right_shift(out, 15, out=shifted)
    np.bitwise_xor(out, shifted, out=out)
    np.add(out, np.uint32(key >> 32), out=out)
    np.multiply(out, _SECOND, out=out)
    np.right_shift(out, 16, out=shifted)
    np.bitwise_xor(out, shifted, out=out)
    return out


def _arrivals(
    logits: npt.NDArray[np.float32], largest: float, temperature: float, noise: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return the natural logarithm of each token's arrival: minus logit / temperature, minus its Gumbel noise."""
    arrivals: npt.NDArray[np.float64] = np.log(-np.log1p(-np.minimum(noise, _BELOW_1)))
    arrivals -= (logits.astype(np.float64) - largest) / temperature
    return arrivals
