"""What a stage knows of its own speed: one cost curve for decode rows, one for prefill rows."""

from __future__ import annotations

import dataclasses

from wire.curve import CostCurve


@dataclasses.dataclass(slots=True)
class Curves:
    """What one stage knows of its own speed."""

    decode: CostCurve = dataclasses.field(default_factory=CostCurve)
    prefill: CostCurve = dataclasses.field(default_factory=CostCurve)
