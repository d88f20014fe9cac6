"""What a stage knows of its own speed: what a step costs by its decode rows, its prompt rows and their context. Pure.

A step takes

    all rows through the layers + the head for rows of running streams + context_ns * context

where *context* is the sum, over all rows, of the tokens that stand in a row's lane before its frame: with flash
attention a row reads its own lane's keys and values and nobody else's. What rows of one frame read of each other is
part of the prefill curve. On CPUs a row of a context of 2,000 tokens costs twice a short one's (benches/RESULTS.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from stage.queue_types import QueuedFrame
from wire.curve import OUTLIER, SMOOTHING_SHARED, CostCurve, mixed_cost_ns
from wire.pb.relayline.v1 import relayline_pb2 as pb

CONTEXT_DOUBT = 4  # so many times less certain than the curves, which many more steps have refined, is its price
CONTEXT_SMOOTHING = 0.1  # weight of a new observation for the price of context
CONTEXT_CHANGE_MAX = 0.05  # of the price, by one observation
CONTEXT_PART_MIN = 0.1  # of what the rows cost: steps of less context say nothing of its price


@dataclasses.dataclass(frozen=True, slots=True)
class StepShape:
    """What the cost of a step depends on."""

    decode_rows: int
    prefill_rows: int
    context: int = 0
    """Sum over all rows of the tokens in a row's lane before its frame."""
    scratch_rows: int = 0
    """Rows of no session; they have no context."""

    @property
    def n_rows(self) -> int:
        """Rows of the native step."""
        return self.decode_rows + self.prefill_rows + self.scratch_rows


def shape_of(frames: Iterable[QueuedFrame], scratch_rows: int = 0) -> StepShape:
    """Return the shape of a step of these frames."""
    decode = prefill = context = 0
    for frame in frames:
        context += frame.n_rows * frame.position
        if frame.is_prefill:
            prefill += frame.n_rows
        else:
            decode += frame.n_rows
    return StepShape(decode, prefill, context, scratch_rows)


@dataclasses.dataclass(slots=True)
class Curves:
    """What one stage knows of its own speed."""

    decode: CostCurve = dataclasses.field(default_factory=CostCurve)
    prefill: CostCurve = dataclasses.field(default_factory=CostCurve)
    context_ns: float = 0.0
    """What a row costs for every token in its lane before it; 0.0 where that was not measured. Then it is not learned
    either, but taken for what rows cost."""

    @classmethod
    def of_stage(
        cls,
        *,
        has_head: bool,
        decode: Iterable[tuple[int, float]] = (),
        prefill: Iterable[tuple[int, float]] = (),
        context_ns: float = 0.0,
    ) -> Curves:
        """Return the curves of a stage from (rows, ns) points.

        Without a head a row of a prompt costs what a decode row does: both are one curve then. So steps of prompts also
        teach what numbers of decode rows cost that no plan has tried.
        """
        if has_head:
            return cls(CostCurve(decode), CostCurve(prefill), context_ns)
        rows = CostCurve((*decode, *prefill))
        return cls(rows, rows, context_ns)

    def predict_ns(self, shape: StepShape) -> float:
        """Predict a native step; 0.0 while nothing is known of such steps."""
        rows_ns = self._rows_ns(shape)
        return rows_ns + self.context_ns * shape.context if rows_ns else 0.0

    def tell(self, message: pb.DescribeResponse | pb.StatusResponse) -> None:
        """Write all of it into a message."""
        for points, curve in ((message.decode_curve, self.decode), (message.prefill_curve, self.prefill)):
            points.extend(pb.CostPoint(n_rows=n_rows, cost_ns=cost_ns) for n_rows, cost_ns in curve.points())
        message.context_ns = self.context_ns

    def observe(self, shape: StepShape, ns: int) -> None:
        """Refine from a real step.

        A wrong prediction is blamed on the price of context and on the curve, each as far as it is uncertain and part
        of the cost. Of steps of both kinds nobody can say which rows were dearer, so these refine the price of context
        alone: where they took the blame to the speed of the machine, and steps of one kind took it back again for their
        own number of rows, all numbers of rows that were not tried meanwhile seemed dearer and dearer.
        """
        rows_ns, context_ns = self._rows_ns(shape), self.context_ns * shape.context
        ratio = ns / (rows_ns + context_ns) if rows_ns else 1.0
        share = 0.0
        if context_ns > CONTEXT_PART_MIN * rows_ns and rows_ns and ratio <= OUTLIER:
            doubtful_ns = CONTEXT_DOUBT * context_ns
            share = doubtful_ns**2 / (doubtful_ns**2 + rows_ns**2)
            change = CONTEXT_SMOOTHING * share * (ns - rows_ns - context_ns) / context_ns
            self.context_ns *= 1 + max(-CONTEXT_CHANGE_MAX, min(change, CONTEXT_CHANGE_MAX))
        if shape.prefill_rows and shape.decode_rows:
            return
        speed = 1 + (1 - share) * (ratio - 1)
        curve = self.prefill if shape.prefill_rows else self.decode
        curve.observe(shape.n_rows, round(speed * rows_ns) or ns)
        if rows_ns and ratio <= OUTLIER:
            self.context_ns *= max(1 / OUTLIER, speed) ** SMOOTHING_SHARED  # a slower machine is slower at everything

    def _rows_ns(self, shape: StepShape) -> float:
        """Predict a step without its context."""
        if shape.prefill_rows == 0:
            return self.decode.cost_ns(shape.n_rows)
        if shape.decode_rows == 0:
            return self.prefill.cost_ns(shape.n_rows)
        return mixed_cost_ns(self.decode, self.prefill, shape.decode_rows, shape.n_rows - shape.decode_rows)
