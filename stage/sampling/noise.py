"""The noise of blocks for rows of a step, which needs no logits: it may be computed while these are. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relayline.stage.sampling.draws import BlockScratch, Draws, Logits, Places

ROWS = 16  # that are drawn together
_AT_ONCE = 8  # rows whose noise is computed together: what it takes stays in a core's cache
PREPARED_MAX = 256  # rows whose noise is kept: 12 bytes for each block of each


class Noise:
    """The noise of one vocabulary's blocks, see `Draws.block_noise`. Not thread-safe."""

    def __init__(self, draws: Draws) -> None:
        self._draws, self._scratch = draws, BlockScratch((_AT_ONCE, draws.n_blocks))
        self._own = self._made(ROWS)
        self._kept = self._made(0)
        self._places = dict[int, int]()  # of keys whose noise is kept

    def _made(self, n_rows: int) -> tuple[Logits, Places]:
        shape = n_rows, self._draws.n_blocks
        return np.empty(shape, np.float32), np.empty(shape, np.int64)

    def prepare(self, keys: Sequence[int]) -> None:
        """Keep the noise of these keys, of PREPARED_MAX at most, and forget all other keys."""
        keys = keys[:PREPARED_MAX]
        if len(keys) > len(self._kept[0]):
            self._kept = self._made(min(PREPARED_MAX, 2 * len(keys)))
        self._places = {key: place for place, key in enumerate(keys)}
        self._fill(keys, *self._kept)

    def of(self, keys: Sequence[int]) -> tuple[Logits, Places]:
        """Return what `Draws.block_noise` gives for at most ROWS keys: arrays [n_keys, n_blocks], not to be changed.

        They are valid until the next call.
        """
        places = [self._places.get(key, -1) for key in keys]
        if -1 in places:
            self._fill(keys, *self._own)
            return self._own
        begin, end = places[0], places[0] + len(places)
        if places == list(range(begin, end)):
            return self._kept[0][begin:end], self._kept[1][begin:end]
        self._own[0][: len(places)] = self._kept[0][places]
        self._own[1][: len(places)] = self._kept[1][places]
        return self._own

    def _fill(self, keys: Sequence[int], log_least: Logits, firsts: Places) -> None:
        for begin in range(0, len(keys), _AT_ONCE):
            column = np.array(keys[begin : begin + _AT_ONCE], np.uint64)[:, None]
            part = slice(begin, begin + len(column))
            self._draws.block_noise(column, log_least[part], firsts[part], self._scratch.of(len(column)))
