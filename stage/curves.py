"""What a stage knows of its own speed: one cost curve for decode rows, one for prefill rows. Pure."""

from __future__ import annotations

import dataclasses

from wire.curve import CostCurve


@dataclasses.dataclass(slots=True)
class Curves:
    """What one stage knows of its own speed.

    A step of decode rows is told by the one curve, a step of prompt rows by the other; in a mixed step the decode rows
    cost beside that what they cost more than as many rows of a prompt, which on the last stage is the head.
    """

    decode: CostCurve = dataclasses.field(default_factory=CostCurve)
    prefill: CostCurve = dataclasses.field(default_factory=CostCurve)

    def predicted_ns(self, n_rows: int, n_decode: int, *, has_prefill: bool) -> int:
        """Predict a step of n_rows rows, padding included, n_decode of them decode rows; 0 while nothing is known."""
        if has_prefill and self.prefill.is_known:
            return round(self.prefill.cost_ns(n_rows) + self._beside_ns(n_decode))
        return round(self.decode.cost_ns(n_rows))

    def observe(self, n_rows: int, n_decode: int, cost_ns: int, *, has_prefill: bool) -> None:
        """Refine from a real step; arguments as for `predicted_ns`.

        Rows of a long context are dearer, and a long prompt beside running streams is computed in mixed steps alone:
        what those take must be learned, or prompts would delay the streams more than the plan allows.
        """
        if has_prefill:
            self.prefill.observe(n_rows, round(cost_ns - self._beside_ns(n_decode)))
        else:
            self.decode.observe(n_rows, cost_ns)

    def _beside_ns(self, n_decode: int) -> float:
        if not n_decode or not self.prefill.is_known:
            return 0.0
        return max(0.0, self.decode.cost_ns(n_decode) - self.prefill.cost_ns(n_decode))
