"""Draws one of some tokens: the one with the largest sum of logit / temperature and Gumbel noise. Pure.

The noise of a token is a function of (seed, position, token). So a draw has the distribution of the softmax (the
Gumbel-max trick; Maddison, Tarlow and Minka, 2014), and a token's noise does not depend on which other tokens are left,
on their order, or on who else is in the batch. Logits of one row differ a little from one batch to another. A draw
along the cumulative sum then often gives another token. This draw does so about as rarely as two distributions allow.

It is computed as a race, which is the same: a token arrives after E / exp(logit / temperature), where E is exponential
with mean 1, and the first one wins. The E of a large vocabulary are made from the top down, so that most of them are
never computed. Its tokens are in blocks of 64 places. The least E of a block is exponential with mean 1/64 and belongs
to each place with the same chance; the others exceed it by exponentials with mean 1. That is the distribution of 64
independent E. A block cannot win before its least E at its largest logit, and that bound leaves a few tokens of a few
blocks. These are timed in f64.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]

BLOCK = 64  # places of a block
BLOCKS_FROM = 8_192  # tokens of a vocabulary; in a smaller one each token is a block: calls cost more than numbers
_U64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of splitmix64's finaliser
_BITS = 52  # of a hash make the uniform number: as many, and a half, are exact in f64
_PLACE_BITS = 6  # of a hash say which place of a block has its least E; apart from those above
_ULP = 2.0**-_BITS
_SHIFT = 64 - _BITS
# Arrays without dimensions: numpy takes a microsecond to make one of a number.
_ROUNDS = tuple((np.array(shift, np.uint64), np.array(by, np.uint64)) for shift, by in ((30, _FIRST), (27, _SECOND)))
_LAST_SHIFT, _TO_UNIFORM = np.array(31, np.uint64), np.array(_SHIFT, np.uint64)
_TO_PLACE = np.array(_SHIFT - _PLACE_BITS, np.uint64)
_HALF = np.array(0.5)
_SLACK = 1e-3  # nats; exceeds the f32 error of the bounds, together with a share of the logits
_SLACK_SHARE = 1e-6
_COLDEST, _HOTTEST = 1e-20, 1e20  # temperatures beyond change nothing, and would overflow f32
_SCATTERED = 4_096  # as many tokens out of a vocabulary are put in their places, so that blocks are skipped


def noise_keys(seed: int, position: int) -> tuple[int, int]:
    """Return the two 64-bit keys of the noise at a position, of blocks and of tokens."""
    key = _mix(_mix(seed + _GOLDEN) + position + _GOLDEN)
    return key, _mix(key + _GOLDEN)


def _mix(value: int) -> int:
    """Return splitmix64's finaliser of a number."""
    value &= _U64
    value = ((value ^ (value >> 30)) * _FIRST) & _U64
    value = ((value ^ (value >> 27)) * _SECOND) & _U64
    return value ^ (value >> 31)


class Draws:
    """Draws from one vocabulary, with arrays over its blocks that every draw reuses. Not thread-safe."""

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        self.block = block = BLOCK if n_vocab >= BLOCKS_FROM else 1
        self.n_blocks = -(-n_vocab // block)  # block of a token: token % n_blocks; place: token // n_blocks
        n_blocks = self.n_blocks
        self._spread = np.arange(n_vocab, dtype=np.uint64) * np.uint64(_GOLDEN)
        self._hash, self._shifted = np.empty(n_blocks, np.uint64), np.empty(n_blocks, np.uint64)
        self._log_unit, self._place = np.array(math.log(_ULP / block), np.float32), np.array(block - 1, np.uint64)
        self._blocks = np.arange(n_blocks, dtype=np.int64)
        self._places = np.arange(0, n_blocks * block, n_blocks)[:, None]
        self._is_ragged = n_blocks * block > n_vocab  # the last places of some blocks are for no token
        self._first, self._theirs = np.empty(n_blocks, np.int64), np.empty(n_blocks, np.float32)
        self._uniform, self._log_least = np.empty(n_blocks, np.float64), np.empty(n_blocks, np.float32)
        self._maxima, self._bounds = np.empty(n_blocks, np.float32), np.empty(n_blocks, np.float32)
        self._row: Logits | None = None  # for tokens that are scattered; made when first needed

    def maxima(self, logits: Logits) -> Logits:
        """Return the largest logit of each block of a whole row (f32 [n_vocab]); NaN where a block has one.

        The array is this object's own, and valid until the next call, or the row itself.
        """
        n_blocks, maxima = self.n_blocks, self._maxima
        if self.block == 1:
            return logits
        n_full, n_more = divmod(self.n_vocab, n_blocks)
        np.maximum.reduce(logits[: n_full * n_blocks].reshape(n_full, n_blocks), axis=0, out=maxima)
        if n_more:
            np.maximum(maxima[:n_more], logits[n_full * n_blocks :], out=maxima[:n_more])
        return maxima

    def draw(
        self,
        logits: Logits,
        largest: float,
        temperature: float,
        keys: tuple[int, int],
        tokens: Tokens | None = None,
        *,
        floor: float = -math.inf,
        maxima: Logits | None = None,
    ) -> int:
        """Return the token drawn from softmax(logits / temperature).

        `tokens` are those that the logits (f32 [n]) are of; None: all of the vocabulary, in order. `largest` is the
        largest logit, a finite number. Logits may be -inf: such a token is never drawn, nor is one below `floor`, which
        is at most `largest`. `maxima` are the whole row's, where they are known.
        """
        temperature = min(max(temperature, _COLDEST), _HOTTEST)
        if tokens is not None and tokens.size > _SCATTERED:
            if self._row is None:
                self._row = np.empty(self.n_vocab, np.float32)
            self._row.fill(-np.inf)
            self._row[tokens] = logits
            logits, tokens, maxima = self._row, None, None
        left: npt.NDArray[np.integer]
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            if tokens is None:
                if maxima is None and self.block > 1:
                    maxima = self.maxima(logits)
                left = self._may_win(logits, largest, temperature, keys, floor, maxima)
                logits = logits[left]
            elif floor > -math.inf:
                above = logits >= np.float32(floor)
                left, logits = tokens[above], logits[above]
            else:
                left = tokens
            if left.size == 1:
                return int(left[0])
            arrivals = np.log(self.noise(left, keys))
            arrivals -= (logits.astype(np.float64) - largest) / temperature
            return int(left[arrivals == arrivals.min()].min())

    def _may_win(
        self,
        logits: Logits,
        largest: float,
        temperature: float,
        keys: tuple[int, int],
        floor: float,
        maxima: Logits | None,
    ) -> npt.NDArray[np.int64]:
        """Return the tokens that may come first, at least one; in f32, and in nats of the time of arrival."""
        n_blocks, bounds = self.n_blocks, self._bounds
        if maxima is None or self.block == 1:
            return self._alone(logits, largest, temperature, keys, floor)
        scale, top = np.float32(1.0 / temperature), np.float32(largest)
        log_least = self._block_noise(keys[0])
        # How late some of those come that arrive first in their block, and the one with the largest logit.
        first = self._first
        theirs = logits.take(first, out=self._theirs, mode="clip")
        np.subtract(theirs, top, out=bounds)
        np.multiply(bounds, scale, out=bounds)
        np.subtract(log_least, bounds, out=bounds)
        if self._is_ragged:
            bounds[first >= self.n_vocab] = np.inf
        if floor > -math.inf:
            bounds[theirs < np.float32(floor)] = np.inf
        leader, block = int(bounds.argmin()), int(maxima.argmax())
        known = block + n_blocks * int(logits[block::n_blocks].argmax())
        latest = self._arrival(known, largest, largest, temperature, keys)
        if bounds[leader] < np.inf:
            token = int(first[leader])
            latest = min(latest, self._arrival(token, float(logits[token]), largest, temperature, keys))
        latest += _SLACK + _SLACK_SHARE * abs(latest)
        # The blocks that may be as early, and of these the tokens.
        np.subtract(maxima, top, out=bounds)
        np.multiply(bounds, scale, out=bounds)
        np.subtract(log_least, bounds, out=bounds)
        blocks = (bounds <= np.float32(latest)).nonzero()[0]
        # A logit of a block may be so far below the largest that its least E would come too late with it.
        within = log_least[blocks].astype(np.float64)
        within -= latest
        within *= temperature
        within += largest - _SLACK_SHARE * abs(largest)
        within -= _SLACK_SHARE * np.abs(within)
        np.maximum(within, floor, out=within)
        tokens = self._places + blocks
        keep = logits.take(tokens, mode="clip") >= within.astype(np.float32)
        if self._is_ragged:
            keep &= tokens < self.n_vocab
        return tokens[keep]

    def _alone(
        self, logits: Logits, largest: float, temperature: float, keys: tuple[int, int], floor: float
    ) -> npt.NDArray[np.int64]:
        """Return the tokens that may come first where each is a block for itself."""
        bounds = self._bounds
        np.subtract(logits, np.float32(largest), out=bounds)
        np.multiply(bounds, np.float32(1.0 / temperature), out=bounds)
        np.subtract(self._block_noise(keys[0]), bounds, out=bounds)
        if floor > -math.inf:
            bounds[logits < np.float32(floor)] = np.inf
        leader = int(bounds.argmin())
        latest = self._arrival(leader, float(logits[leader]), largest, temperature, keys)
        tokens: npt.NDArray[np.int64] = (bounds <= latest + _SLACK + _SLACK_SHARE * abs(latest)).nonzero()[0]
        return tokens

    def _block_noise(self, key: int) -> Logits:
        """Return a lower bound of the logarithm of each block's least E, and note the token whose it is."""
        hashed, shifted = _hashed(self._spread[: self.n_blocks], key, self._hash, self._shifted), self._shifted
        np.right_shift(hashed, _TO_UNIFORM, out=shifted)
        np.add(shifted, _HALF, out=self._uniform, casting="unsafe", dtype=np.float64)
        log_least = np.log(self._uniform, out=self._log_least, casting="same_kind", dtype=np.float32)
        np.add(log_least, self._log_unit, out=log_least)  # v <= E, for E = -log(1 - v)
        if self.block == 1:
            return log_least
        np.right_shift(hashed, _TO_PLACE, out=shifted)
        np.bitwise_and(shifted, self._place, out=shifted)
        np.multiply(shifted.view(np.int64), self.n_blocks, out=self._first)
        np.add(self._first, self._blocks, out=self._first)
        return log_least

    def _arrival(self, token: int, logit: float, largest: float, temperature: float, keys: tuple[int, int]) -> float:
        """Return when a token arrives, but for the last bits of what numpy would say."""
        place, block = divmod(token, self.n_blocks)
        hashed = _mix(block * _GOLDEN + keys[0])
        least = -math.log1p(-((hashed >> _SHIFT) + 0.5) * _ULP) / self.block
        if (hashed >> (_SHIFT - _PLACE_BITS)) % self.block != place:
            least -= math.log1p(-((_mix(token * _GOLDEN + keys[1]) >> _SHIFT) + 0.5) * _ULP)
        return math.log(least) - (logit - largest) / temperature

    def noise(self, tokens: npt.NDArray[np.integer], keys: tuple[int, int]) -> npt.NDArray[np.float64]:
        """Return the E of each token."""
        n_tokens = tokens.size
        places, blocks = np.divmod(tokens, self.n_blocks)
        spread = self._spread.take(np.concatenate([blocks, tokens]))
        spread[:n_tokens] += np.uint64(keys[0])
        spread[n_tokens:] += np.uint64(keys[1])
        hashed = _hashed(spread, 0, spread, np.empty_like(spread))
        noise: npt.NDArray[np.float64] = np.add(hashed >> _TO_UNIFORM, _HALF, dtype=np.float64)
        noise *= -_ULP
        np.log1p(noise, out=noise)
        np.negative(noise, out=noise)
        first = (hashed[:n_tokens] >> _TO_PLACE) & self._place
        least, more = noise[:n_tokens], noise[n_tokens:]
        least /= self.block
        more[places == first.view(np.int64)] = 0.0
        least += more
        return least


def _hashed(
    spread: npt.NDArray[np.uint64], key: int, out: npt.NDArray[np.uint64], shifted: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Fill `out` with splitmix64 of each number and the key. `shifted` is scratch."""
    np.add(spread, np.uint64(key), out=out)
    for shift, factor in _ROUNDS:
        np.right_shift(out, shift, out=shifted)
        np.bitwise_xor(out, shifted, out=out)
        np.multiply(out, factor, out=out)
    np.right_shift(out, _LAST_SHIFT, out=shifted)
    np.bitwise_xor(out, shifted, out=out)
    return out
