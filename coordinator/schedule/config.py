"""The settings of the schedule that an operator may change."""

from __future__ import annotations

import dataclasses

from relayline.coordinator.schedule.groups import ITL_STRETCH
from relayline.wire.settings.table import DRAFT_AUTO


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """How frames are grouped."""

    mode: str = "auto"
    """auto: groups from the curves; drain: send at once; fixed: n_groups x group_rows by hand."""
    n_groups: int = 0
    """Decode flights under way, in mode fixed; 0: as many as `group_rows` takes."""
    group_rows: int = 0
    """Rows of one decode flight, in mode fixed; 0: the running streams shared among the flights."""
    chunk_rows: int = 0
    """Largest prefill chunk; 0 leaves it to the plan."""
    draft: int = DRAFT_AUTO
    """Tokens that may be drafted behind a stream's next row: DRAFT_AUTO leaves it to the curves and to how often drafts
    have been right, 0 is none, and more are always so many, where there are drafts. With mode drain there are none."""
    grant_steps: int = 0
    """Steps that stages may continue streams by themselves, see `coordinator.schedule.grants`; 0: none."""
    itl_stretch: float = ITL_STRETCH
    """How many times longer running streams' inter-token latency may become while prompts are read. BURST_PRESSURE
    times that while a burst of short ones is read, at most for BURST_CYCLES tokens; REPLAY_PRESSURE times that until
    all streams go on after a loss."""
    draft_model_tokens: int = 0
    """How many a model holds that guesses tokens, for which rows may wait; 0: there is none."""
