"""Draws from rows of logits that stay on a device: it tells the largest of each block, and logits of single tokens.

The draws are those of `stage.sampling.together`, with the same tokens. First the device tells the largest logit of each
block. With the noise, few blocks are left in which the winner may be, and only the logits of their tokens are fetched.
Then, for top-p, those of the blocks that reach the winner. Each of these is one question about all rows of the step.

A row is fetched whole where this would fetch too much, or bounds do not tell that top-p keeps the winner.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from relayline.stage.sampling.draws import FEW, MANY, Draws, Logits, Places, by, least_logits
from relayline.stage.sampling.filters import FilteredDraws
from relayline.stage.sampling.noise import ROWS, Noise
from relayline.stage.sampling.together import DrawsTogether, Row

DEVICE_ROWS = 64  # drawn with the same questions to the device

Gather = Callable[[Places, Places], Logits]  # rows, by their places among those asked for, and tokens: logits, all [n]


class Device(Protocol):
    """Questions to a device about rows of logits that stay there; see stage.engine.device_greedy.DeviceGreedy."""

    gives_parts: bool

    def token(self, row: int) -> int | None: ...  # noqa: D102
    def maxima(self, rows: Sequence[int]) -> Logits: ...  # noqa: D102
    def gathered(  # noqa: D102
        self, rows: Sequence[int], at: Places, tokens: Places
    ) -> Logits: ...


@dataclasses.dataclass(slots=True)
class _Blocks:
    """The blocks of one row that its winner may be in."""

    at: int  # the row's place
    blocks: Places
    log_least: Logits
    bounds: Logits  # no token of a block comes before
    firsts: Places  # the token with the least noise of each
    latest: float  # when some token has come

    def come_by(self, latest: float) -> None:
        """Leave out the blocks that come too late, if a token has come by a time."""
        if latest < self.latest:
            may = self.bounds <= np.float32(latest)
            self.blocks, self.log_least, self.latest = self.blocks[may], self.log_least[may], latest


class DeviceDraws(DrawsTogether):
    """Draws from rows of one vocabulary of whole blocks. Not thread-safe."""

    def __init__(self, draws: Draws, filtered: FilteredDraws, noise: Noise) -> None:
        super().__init__(draws, filtered, noise, DEVICE_ROWS)
        self._gather: Gather = _nothing

    def draw_on_device(
        self, rows: Sequence[Row], best: Sequence[int], maxima: Logits, gather: Gather
    ) -> list[int | None]:
        """Return the token of each row, None for one that must be fetched whole.

        At most DEVICE_ROWS. Their own logits are not looked at; `best` are the tokens of their largest ones, `maxima`
        those of their blocks (f32 [n_rows, n_blocks]).
        """
        self._rows, self._gather, self._left = list(rows), gather, []
        self._maxima[: len(rows)] = maxima
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            found = self._blocks_of(best)
            self._bring_nearer([each for each in found if each.blocks.size > FEW])
            self._fetch([each for each in found if each.blocks.size <= MANY])
            winners = self._first() if self._left else {}
            asked = [at for at in winners if rows[at].top_p < 1.0]
            surely = self._surely_kept(winners, asked) if asked else set()
        return [
            winners[at][0] if at in winners and (at in surely or row.top_p == 1.0) else None
            for at, row in enumerate(rows)
        ]

    def _blocks_of(self, best: Sequence[int]) -> list[_Blocks]:
        """Return the blocks that may come before the largest logit of each row."""
        found: list[_Blocks] = []
        for begin in range(0, len(self._rows), ROWS):
            rows = self._rows[begin : begin + ROWS]
            log_least, firsts = self._noise.of([row.keys[0] for row in rows])
            bounds = self._maxima[begin : begin + len(rows)] - np.array([[row.largest] for row in rows], np.float32)
            bounds *= np.array([[1.0 / row.temperature] for row in rows], np.float32)
            np.subtract(log_least[: len(rows)], bounds, out=bounds)
            for number, row in enumerate(rows):
                at = begin + number
                if row.floor > -math.inf:
                    bounds[number][self._maxima[at] < np.float32(row.floor)] = np.inf
                latest = by(self._draws.arrival(best[at], row.largest, row.largest, row.temperature, row.keys))
                blocks = (bounds[number] <= np.float32(latest)).nonzero()[0]
                least, mine = log_least[number][blocks], bounds[number][blocks]
                found.append(_Blocks(at, blocks, least, mine, firsts[number][blocks], latest))
        return found

    def _bring_nearer(self, found: Sequence[_Blocks]) -> None:
        """Find an earlier token in rows with many blocks, among those that come first in a block by noise alone."""
        if not found:
            return
        sizes = [each.firsts.size for each in found]
        at = np.repeat([each.at for each in found], sizes)
        logits = np.split(self._gather(at, np.concatenate([each.firsts for each in found])), np.cumsum(sizes)[:-1])
        for each, theirs in zip(found, logits, strict=True):
            row = self._rows[each.at]
            late = each.log_least - (theirs - np.float32(row.largest)) * np.float32(1.0 / row.temperature)
            if row.floor > -math.inf:
                late[theirs < np.float32(row.floor)] = np.inf
            leader = int(late.argmin())
            if late[leader] < np.inf:
                token, logit = int(each.firsts[leader]), float(theirs[leader])
                each.come_by(by(self._draws.arrival(token, logit, row.largest, row.temperature, row.keys)))

    def _fetch(self, found: Sequence[_Blocks]) -> None:
        """Fetch the logits of these blocks, and leave the tokens that may win."""
        found = [each for each in found if each.blocks.size <= MANY]
        if not found:
            return
        sizes = [each.blocks.size for each in found]
        rows = [self._rows[each.at] for each in found]
        least = least_logits(
            np.concatenate([each.log_least for each in found]),
            np.repeat([each.latest for each in found], sizes),
            np.repeat([row.temperature for row in rows], sizes),
            np.repeat([row.largest for row in rows], sizes),
            np.repeat([row.floor for row in rows], sizes),
        )
        at = np.repeat([each.at for each in found], sizes)
        tokens, logits = self._of_blocks(at, np.concatenate([each.blocks for each in found]))
        keep = logits >= least[:, None]
        begin = 0
        for each, size in zip(found, sizes, strict=True):
            part = slice(begin, begin + size)
            mine = keep[part]
            self._left.append((each.at, tokens[part][mine], logits[part][mine]))
            begin += size

    def _gathered(self, at: Places, tokens: Places) -> Logits:
        n_places = tokens.shape[1]
        return self._gather(at.repeat(n_places), tokens.ravel()).reshape(tokens.shape)


def _nothing(_: Places, __: Places) -> Logits:
    return np.zeros(0, np.float32)
