"""One frame as it leaves for stage 0: a value, which nothing that happens to its session afterwards changes. Pure."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from relayline.coordinator.sessions.generation import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class Opening:
    """What stages are told of a session that is opened."""

    sampling: SamplingParams
    wants_logits: bool = False
    is_kept: bool = False
    said: tuple[int, ...] = ()
    """The latest tokens of its answer so far, where a pick depends on what was picked before."""


class Frame(NamedTuple):
    """One frame for stage 0. A tuple, because one is made for every row that leaves."""

    session_id: int
    position: int
    tokens: tuple[int, ...]  # empty for controls
    flags: int
    argument: int = 0  # of an open: the lane that it is best given, plus one
    n_drafted: int = 0  # how many of its tokens were guesses when it left
    opening: Opening | None = None  # of an open
