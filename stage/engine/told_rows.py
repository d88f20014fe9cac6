"""What prediction layers are given, and what they give; see `stage.engine.prediction`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """Rows of one lane, paired with the tokens behind them."""

    lane: int
    position: int
    """Of the first token: one more than its row's."""
    tokens: Sequence[int]
    rows: Rows
    """f32 [tokens, n_embd], a copy."""
    n_drafts: int = 0
    """Tokens that are to be guessed behind the last one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Guess:
    """A guessed token."""

    token: int
    chance: float
    """The layer's own probability of it, behind the guesses before it."""
