"""What a stage knows of its own speed: what a step costs by its decode rows, its prompt rows and their context. Pure.

A step takes

    decode(rows of running streams) + what prompt rows beside them add + context_ns * context

where *context* is the sum, over all rows, of the tokens that stand in a row's lane before its frame: with flash
attention a row reads its own lane's keys and values and nobody else's. What rows of one frame read of each other is
part of the prefill curve. On CPUs a row of a context of 2,000 tokens costs twice a short one's (benches/RESULTS.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from stage.queue_types import QueuedFrame
from wire.curve import OUTLIER, SMOOTHING_SHARED, CostCurve
from wire.pb.relayline.v1 import relayline_pb2 as pb

MEANS_SMOOTHING = 0.05  # weight of a new observation for the means that others are judged by
CONTEXT_SMOOTHING = 0.02  # and for the price of context
CONTEXT_DOUBT_TOKENS = 100  # contexts that differ less than this say little of its price
CONTEXT_MISS_MAX = 0.25  # of a step's cost; who misses by more than others do has another reason


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
    """What a row costs for every token in its lane before it."""

    _mean_tokens: float = 0.0  # of recent steps: context of an average row,
    _variance: float = 0.0  # how much that differs from step to step,
    _mean_ratio: float = 1.0  # and what a step took of what was predicted

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

        The first reason for a wrong prediction is the machine's speed, which changes what everything costs alike. Steps
        of one kind also refine their own point; of both kinds nobody can say which rows were dearer.
        """
        rows_ns = self._rows_ns(shape)
        ratio = ns / (rows_ns + self.context_ns * shape.context) if rows_ns else 1.0
        if shape.prefill_rows == 0:
            self.decode.observe(shape.n_rows, round(ratio * rows_ns) or ns)
        elif shape.decode_rows == 0:
            self.prefill.observe(shape.n_rows, round(ratio * rows_ns) or ns)
        else:
            self.decode.observe_speed(ratio)
            self.prefill.observe_speed(ratio)
        if rows_ns and ratio <= OUTLIER:
            self.context_ns *= 1 + SMOOTHING_SHARED * (ratio - 1)
            self._observe_context(shape.context / shape.n_rows, ratio, rows_ns / shape.n_rows)

    def _observe_context(self, tokens: float, ratio: float, row_ns: float) -> None:
        """Move the price of context by least mean squares: steps of longer context than others that took longer than
        others, each against what was predicted, say that it is too low. So a machine that slows down says nothing."""
        above, missed = tokens - self._mean_tokens, ratio - self._mean_ratio
        self._mean_tokens += MEANS_SMOOTHING * above
        self._mean_ratio += MEANS_SMOOTHING * missed
        self._variance += MEANS_SMOOTHING * (above**2 - self._variance)
        if abs(missed) <= CONTEXT_MISS_MAX:
            slope = missed * above / (self._variance + CONTEXT_DOUBT_TOKENS**2)
            self.context_ns = max(0.0, self.context_ns + CONTEXT_SMOOTHING * slope * row_ns)

    def _rows_ns(self, shape: StepShape) -> float:
        """Predict a step without its context."""
        if shape.prefill_rows == 0:
            return self.decode.cost_ns(shape.n_rows)
        if shape.decode_rows == 0:
            return self.prefill.cost_ns(shape.n_rows)
        if not (self.decode.is_known and self.prefill.is_known):
            return 0.0
        alone_ns = self.decode.cost_ns(shape.decode_rows)
        added_ns = self.prefill.cost_ns(shape.n_rows) - self.prefill.cost_ns(shape.decode_rows)
        return alone_ns + max(0.0, added_ns)
