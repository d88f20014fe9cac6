"""Draws one of some tokens: the one with the largest sum of logit / temperature and Gumbel noise. Pure.

The noise of a token is a function of (seed, position, token). So a draw has the distribution of the softmax (the
Gumbel-max trick; Maddison, Tarlow and Minka, 2014). A token's noise does not depend on which other tokens are left, on
their order, or on who else is in the batch. Logits of one row differ a little from one batch to another. A draw along
the cumulative sum then often gives another token. This draw does so about as rarely as two distributions allow.

It is computed as a race, which is the same: a token arrives after E / exp(logit / temperature), where E is exponential
with mean 1, and the first one wins. The E of a large vocabulary are made from the top down, so that most of them are
never computed. Its tokens are in blocks of 64 places. The least E of a block is exponential with mean 1/64 and belongs
to each place with the same chance; the others exceed it by exponentials with mean 1. That is the distribution of 64
independent E. A block cannot win before its least E at its largest logit, and that bound leaves a few tokens of a few
blocks. These are timed in f64.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Hashes = npt.NDArray[np.uint64]

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
_HALF, _NO_KEY = np.array(0.5), np.array(0, np.uint64)
_SLACK = 1e-3  # nats; exceeds the f32 error of the bounds, together with a share of the logits
_SLACK_SHARE = 1e-6
_COLDEST, _HOTTEST = 1e-20, 1e20  # temperatures beyond change nothing, and would overflow f32
MANY = 256  # blocks of a row that are looked at instead of the row
FEW = 64  # blocks that the first token may be in; with more, a nearer bound pays
SCATTERED = 4_096  # as many tokens out of a vocabulary are put in their places, so that blocks are skipped


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


def clipped(temperature: float) -> float:
    """Return a temperature that f32 can work with, and that draws the same tokens."""
    return min(max(temperature, _COLDEST), _HOTTEST)


def least_logits(
    log_least: Logits,
    latest: float | Floats,
    temperature: float | Floats,
    largest: float | Floats,
    floor: float | Floats,
) -> Logits:
    """Return how large a logit of a block must be not to come too late, or fall below the floor, with its least E."""
    within = log_least.astype(np.float64)
    within -= latest
    within *= temperature
    within += largest - _SLACK_SHARE * np.abs(largest)
    within -= _SLACK_SHARE * np.abs(within)
    return np.maximum(within, floor).astype(np.float32)


def by(time: float) -> float:
    """Return a time by which a token has come for sure that arrives at a time."""
    return time + _SLACK + _SLACK_SHARE * abs(time)


class BlockScratch:
    """Memory for `Draws.block_noise`."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.hashed, self.shifted = np.empty(shape, np.uint64), np.empty(shape, np.uint64)
        self.uniform = np.empty(shape, np.float64)

    def of(self, n_rows: int) -> BlockScratch:
        """Return the memory of the first rows."""
        part = copy.copy(self)
        part.hashed, part.shifted, part.uniform = self.hashed[:n_rows], self.shifted[:n_rows], self.uniform[:n_rows]
        return part


class Draws:
    """Draws from one vocabulary, with arrays over its blocks that every draw reuses. Not thread-safe."""

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        self.block = block = BLOCK if n_vocab >= BLOCKS_FROM else 1
        self.n_blocks = -(-n_vocab // block)  # block of a token: token % n_blocks; place: token // n_blocks
        n_blocks = self.n_blocks
        self._spread = np.arange(n_vocab, dtype=np.uint64) * np.uint64(_GOLDEN)
        self._scratch = BlockScratch((n_blocks,))
        self._log_unit, self._place = np.array(math.log(_ULP / block), np.float32), np.array(block - 1, np.uint64)
        self._blocks = np.arange(n_blocks, dtype=np.int64)
        self._places = np.arange(0, n_blocks * block, n_blocks)[:, None]
        self._is_ragged = n_blocks * block > n_vocab  # the last places of some blocks are for no token
        self._first, self._theirs = np.empty(n_blocks, np.int64), np.empty(n_blocks, np.float32)
        self._log_least = np.empty(n_blocks, np.float32)
        self._maxima, self._bounds = np.empty(n_blocks, np.float32), np.empty(n_blocks, np.float32)
        self._late = np.empty(n_blocks, np.float32)
        self._row: Logits | None = None  # for tokens that are scattered; made when first needed

    def maxima(self, logits: Logits, out: Logits | None = None) -> Logits:
        """Return the largest logit of each block of a whole row (f32 [n_vocab]); NaN where a block has one.

        Without `out` the array is this object's own, and valid until the next call, or the row itself.
        """
        n_blocks, maxima = self.n_blocks, self._maxima if out is None else out
        if self.block == 1:
            if out is not None:
                np.copyto(out, logits)
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
        temperature = clipped(temperature)
        if tokens is not None and tokens.size > SCATTERED:
            if self._row is None:
                self._row = np.empty(self.n_vocab, np.float32)
            self._row.fill(-np.inf)
            self._row[tokens] = logits
            logits, tokens, maxima = self._row, None, None
        left: npt.NDArray[np.integer]
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            if tokens is None:
                if maxima is None:
                    maxima = self.maxima(logits)
                left, logits = self.may_win(logits, largest, temperature, keys, floor, maxima, self._noise(keys[0]))
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

    def may_win(
        self,
        logits: Logits,
        largest: float,
        temperature: float,
        keys: tuple[int, int],
        floor: float,
        maxima: Logits,
        noise: tuple[Logits, Places],
    ) -> tuple[Places, Logits]:
        """Return the tokens of a whole row that may come first, at least one, and their logits.

        In f32, and in nats of the time of arrival. `temperature` is `clipped`, and `noise` is that of `block_noise`.
        """
        n_blocks, bounds, log_least = self.n_blocks, self._bounds, noise[0]
        scale, top = np.float32(1.0 / temperature), np.float32(largest)
        # No token of a block comes before this. The one with the largest logit comes in time.
        np.subtract(maxima, top, out=bounds)
        np.multiply(bounds, scale, out=bounds)
        np.subtract(log_least, bounds, out=bounds)
        if floor > -math.inf:
            bounds[maxima < np.float32(floor)] = np.inf
        block = int(maxima.argmax())
        known = block + n_blocks * int(logits[block::n_blocks].argmax())
        latest = by(self.arrival(known, largest, largest, temperature, keys))
        may = bounds <= np.float32(latest)
        if np.count_nonzero(may) > FEW:
            latest = min(latest, self._first_come(logits, largest, temperature, keys, floor, noise))
            may = bounds <= np.float32(latest)
        blocks = may.nonzero()[0]
        tokens = self._places + blocks
        theirs = logits.take(tokens, mode="clip")
        keep = theirs >= least_logits(log_least[blocks], latest, temperature, largest, floor)
        if self._is_ragged:
            keep &= tokens < self.n_vocab
        kept = keep.ravel().nonzero()[0]
        return tokens.take(kept), theirs.take(kept)

    def reaching(self, logits: Logits, bound: float, maxima: Logits) -> Places | None:
        """Return the tokens of a whole row whose logits are `bound` or more, ascending; None where they may be many.

        `maxima` are the row's.
        """
        blocks = (maxima >= np.float32(bound)).nonzero()[0]
        if self.block == 1 or blocks.size > MANY:
            return None
        tokens = self._places + blocks  # in the order of tokens
        keep = logits.take(tokens, mode="clip") >= np.float32(bound)
        if self._is_ragged:
            keep &= tokens < self.n_vocab
        return tokens.take(keep.ravel().nonzero()[0])

    def _first_come(
        self,
        logits: Logits,
        largest: float,
        temperature: float,
        keys: tuple[int, int],
        floor: float,
        noise: tuple[Logits, Places],
    ) -> float:
        """Return by when the first of those tokens has come that come first in their block if all logits are equal."""
        (log_least, first), late = noise, self._late
        theirs = logits.take(first, out=self._theirs, mode="clip")
        np.subtract(theirs, np.float32(largest), out=late)
        np.multiply(late, np.float32(1.0 / temperature), out=late)
        np.subtract(log_least, late, out=late)
        if self._is_ragged:
            late[first >= self.n_vocab] = np.inf
        if floor > -math.inf:
            late[theirs < np.float32(floor)] = np.inf
        leader = int(late.argmin())
        if late[leader] == np.inf:
            return math.inf
        return by(self.arrival(int(first[leader]), float(theirs[leader]), largest, temperature, keys))

    def _noise(self, key: int) -> tuple[Logits, Places]:
        self.block_noise(np.array(key, np.uint64), self._log_least, self._first, self._scratch)
        return self._log_least, self._first

    def block_noise(self, keys: Hashes, log_least: Logits, first: Places, scratch: BlockScratch) -> None:
        """Fill in a lower bound of the logarithm of each block's least E, and the token whose it is.

        All of shape [..., n_blocks]; `keys` may be broadcast to it.
        """
        hashed = _hashed(self._spread[: self.n_blocks], keys, scratch.hashed, scratch.shifted)
        shifted, uniform = scratch.shifted, scratch.uniform
        np.right_shift(hashed, _TO_UNIFORM, out=shifted)
        np.add(shifted, _HALF, out=uniform, casting="unsafe", dtype=np.float64)
        np.log(uniform, out=log_least, casting="same_kind", dtype=np.float32)
        np.add(log_least, self._log_unit, out=log_least)  # v <= E, for E = -log(1 - v)
        if self.block == 1:
            np.copyto(first, self._blocks)
            return
        np.right_shift(hashed, _TO_PLACE, out=shifted)
        np.bitwise_and(shifted, self._place, out=shifted)
        np.multiply(shifted.view(np.int64), self.n_blocks, out=first)
        np.add(first, self._blocks, out=first)

    def arrival(self, token: int, logit: float, largest: float, temperature: float, keys: tuple[int, int]) -> float:
        """Return when a token arrives, but for the last bits of what numpy would say."""
        place, block = divmod(token, self.n_blocks)
        hashed = _mix(block * _GOLDEN + keys[0])
        least = -math.log1p(-((hashed >> _SHIFT) + 0.5) * _ULP) / self.block
        if (hashed >> (_SHIFT - _PLACE_BITS)) % self.block != place:
            least -= math.log1p(-((_mix(token * _GOLDEN + keys[1]) >> _SHIFT) + 0.5) * _ULP)
        return math.log(least) - (logit - largest) / temperature

    def noise(
        self, tokens: npt.NDArray[np.integer], keys: tuple[int, int] | tuple[Hashes, Hashes]
    ) -> npt.NDArray[np.float64]:
        """Return the E of each token. Keys are those of all tokens, or of each (u64 [n])."""
        n_tokens = tokens.size
        places, blocks = np.divmod(tokens, self.n_blocks)
        spread = self._spread.take(np.concatenate([blocks, tokens]))
        spread[:n_tokens] += np.asarray(keys[0], np.uint64)
        spread[n_tokens:] += np.asarray(keys[1], np.uint64)
        hashed = _hashed(spread, _NO_KEY, spread, np.empty_like(spread))
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


def _hashed(spread: Hashes, keys: Hashes, out: Hashes, shifted: Hashes) -> Hashes:
    """Fill `out` with splitmix64 of each number and its key. `shifted` is scratch."""
    np.add(spread, keys, out=out)
    for shift, factor in _ROUNDS:
        np.right_shift(out, shift, out=shifted)
        np.bitwise_xor(out, shifted, out=out)
        np.multiply(out, factor, out=out)
    np.right_shift(out, _LAST_SHIFT, out=shifted)
    np.bitwise_xor(out, shifted, out=out)
    return out
