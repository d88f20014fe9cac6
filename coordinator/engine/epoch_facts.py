"""The facts that the stages of a new epoch report, merged. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.tier import NO_TIER, TierFacts
from relayline.wire.common.bounds import ROWS_PER_FRAME_MAX
from relayline.wire.common.sampler_fields import OPTIONS


@dataclasses.dataclass(frozen=True, slots=True)
class EpochFacts:
    """The facts that the stages of a new epoch reported."""

    n_lanes: int
    """Sessions that every stage can hold."""
    ctx_tokens: int
    """Tokens of one session that every stage can hold."""
    held: Mapping[int, int]
    """Of each session of the epoch before that any stage knows, how many tokens all of them hold."""
    instances: tuple[str, ...]
    """The stages' incarnation names: a restarted stage has a new one."""
    costs: Sequence[StageCost]
    rewinds: bool = True
    """Whether every stage can drop rejected draft tokens."""
    keeps_state: bool = False
    """Whether some stage can take a session back to checkpoints alone."""
    rewind_rows: int = 0
    """How many rejected draft tokens of a step every stage can drop, where `rewinds` is false."""
    predictions: int = 0
    """Tokens that the last stage's prediction layers guess behind a sample."""
    tier: TierFacts = NO_TIER
    """What their tiers hold."""
    options: Set[str] = OPTIONS
    """The options that the last stage's sampler knows."""
    mutual_rows_max: int = ROWS_PER_FRAME_MAX
    """The most rows that may attend to each other, in one step of every stage; 0: some stage knows no such rows."""
    takes_grids: bool = True
    """Whether every stage takes rows with places on several axes."""
