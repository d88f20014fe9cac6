"""One frame as it leaves for stage 0: an immutable value, independent of later changes to its session. Pure."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from relayline.coordinator.sessions.generation import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class Opening:
    """The settings of a session that its open carries to the stages."""

    sampling: SamplingParams
    wants_logits: bool = False
    is_kept: bool = False
    kept_key: int = 0
    """If it is kept: see SessionOptions.kept_key."""
    said: tuple[int, ...] = ()
    """The latest tokens of its answer so far, if sampling depends on earlier tokens."""
    read: tuple[int, ...] = ()
    """The latest tokens of its prompt, if sampling depends on them."""
    told: tuple[int, ...] = ()
    """The latest tokens of its history, if the last stage's prediction layers are to know them."""
    told_from: int = 0
    """Position of the first of them."""


class Frame(NamedTuple):
    """One frame for stage 0. A tuple, because one is made for every row that leaves."""

    session_id: int
    position: int
    tokens: tuple[int, ...]  # empty for controls
    flags: int
    argument: int = 0  # of an open: the lane that it is best given, plus one
    n_drafted: int = 0  # how many of its tokens were guesses when it left
    opening: Opening | None = None  # of an open
    followers: tuple[int, ...] = ()  # of a scored prompt: the token behind each row, 0 behind the last of all
    rows: npt.NDArray[np.float32] | None = None  # of an image, in place of its tokens: f32 [n, n_embd]
