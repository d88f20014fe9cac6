"""Pools the hidden rows of one prompt into one embedding: their mean, the first one or the last one. Pure.

A chunk of rows that arrives twice counts once. Any other chunk that does not continue the earlier ones is a gap.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from relayline.wire.common.errors import NumericError, PositionGapError
from relayline.wire.common.sampler_fields import POOLINGS

MEAN, CLS, LAST = POOLINGS["mean"], POOLINGS["cls"], POOLINGS["last"]


class Pool:
    """The pooled rows of one session so far."""

    def __init__(
        self, kind: int, n_embd: int, head: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]] | None = None
    ) -> None:
        """`kind` is a number of `POOLINGS`. `head` makes scores of the pooled row, where these are asked for."""
        self._head = head
        self._kind = kind
        self._sum = np.zeros(n_embd, np.float64)
        self._next = 0  # position behind the rows that are in the sum
        self._before: tuple[int, npt.NDArray[np.float64]] = (0, self._sum)  # the same without the last chunk

    def add(self, position: int, rows: npt.NDArray[np.float32]) -> None:
        """Take rows (f32 [n, n_embd]) from `position` on. Raises PositionGapError."""
        if self._kind == LAST:
            self._sum = rows[-1].astype(np.float64)
        elif self._kind == CLS:
            if position == 0:
                self._sum = rows[0].astype(np.float64)
        else:
            self._add_all(position, rows)

    def _add_all(self, position: int, rows: npt.NDArray[np.float32]) -> None:
        if position == self._before[0] and position != self._next:
            self._next, self._sum = self._before
        if position != self._next:
            raise PositionGapError(f"rows from position {position} came for pooling instead of those from {self._next}")
        self._before = (position, self._sum)
        self._sum = self._sum + rows.sum(axis=0, dtype=np.float64)
        self._next = position + len(rows)

    def take(self) -> npt.NDArray[np.float32]:
        """Return the embedding, f32 [n_embd], not normalised, or the head's scores. Raises NumericError where it is not
        finite.
        """
        pooled = self._sum / max(1, self._next) if self._kind == MEAN else self._sum
        found = pooled.astype(np.float32)
        if not np.isfinite(found).all():
            raise NumericError("the hidden rows of this prompt are not finite")
        return found if self._head is None else self._head(found)
