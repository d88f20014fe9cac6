"""A stage's knowledge of its own speed: the cost of a step by its decode rows, its prompt rows and their context. Pure.

A step takes

    all rows through the layers + the head for rows of running streams + attention to what stands before their frames

With flash attention a row reads only its own lane's keys and values, which takes context_ns for each of these tokens.
With our attention the further rows of a frame take half of that (wire.common.curve.FURTHER_ROW_PART), since a cache of
the processor still holds what the first one has read.

On CPUs, steps of at least ATTENTION_TILE_ROWS rows differ where the build or the model lets llama.cpp go by tiles
(stage.engine.kv_cache.goes_by_tiles). A tile's lanes are read once for all of its rows, and every row pays for all of
them, even the missing rows of a tile that is not full (ggml_compute_forward_flash_attn_ext_tiled in ggml-cpu/ops.cpp).
So a token of context costs a row of a long prompt a quarter. Rows of many lanes in one tile cost many times as much as
one by one. Where the build takes lanes apart (deploy/kernels/attend_own_cells.cpp), only steps that are mostly prompt
rows go by tiles. Attention within one frame is part of the prefill curve.

Where lanes have KV cells of their own a frame reads its lane once, and each of its rows multiplies with that. There too
the only row of a frame pays context_ns, and every further one context_tiled_ns. Rows that are computed together all go
through as many cells as the longest of their lanes has (llama_kv_cache::get_n_kv). This applies to decode frames, which
travel with their neighbours; each prompt is computed apart. All that is so without flash attention; with it
context_tiled_ns is 0.0, and a row pays for its own lane alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from relayline.stage.queue_types import QueuedFrame
from relayline.wire.common.curve import (
    ATTENTION_TILE_ROWS,
    OUTLIER,
    SMOOTHING_SHARED,
    CostCurve,
    further_ns,
    goes_by_tiles,
    mixed_cost_ns,
    price_per_lane,
)
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

CONTEXT_DOUBT = 4  # so many times less certain than the curves, which many more steps have refined, is its price
CONTEXT_SMOOTHING = 0.1  # weight of a new observation for the price of context
CONTEXT_CHANGE_MAX = 0.05  # of the price, by one observation
CONTEXT_PART_MIN = 0.1  # of the rows' cost: steps with less context do not show its price


@dataclasses.dataclass(frozen=True, slots=True)
class StepShape:
    """The inputs of a step's cost."""

    decode_rows: int
    prefill_rows: int
    context: int = 0
    """Sum over all rows of the tokens in a row's lane before its frame."""
    tile_tokens: int = 0
    """Sum over tiles of attention of the tokens that the lanes of a tile hold before their frames; what counts in steps
    of enough rows for tiles. Scratch rows add none: they come last, and their lane is empty."""
    lane_context: int = 0
    """As `context`, where lanes have their own cells: decode rows count as if all were in the longest lane."""
    lane_tokens: int = 0
    """And the sum over frames instead of rows."""
    scratch_rows: int = 0
    """Rows of no session; they have no context."""
    frame_context: int = 0
    """Sum over all frames of the tokens in their lanes before them: what the first rows of all frames see."""
    micro_batches: tuple[int, ...] = ()
    """Rows of each part in which llama.cpp ran the step, see stage.engine.micro_batches; empty: all rows at once."""

    @property
    def n_rows(self) -> int:
        """Rows of the native step."""
        return self.decode_rows + self.prefill_rows + self.scratch_rows

    def padded(self, scratch_rows: int) -> StepShape:
        """Return the shape of the same step with this many padding rows added."""
        return dataclasses.replace(self, scratch_rows=scratch_rows)


def shape_of(frames: Iterable[QueuedFrame]) -> StepShape:
    """Return the shape of a step of these frames, one of a session, in the order of their rows."""
    n_rows = prefill = context = frame_context = tile_tokens = longest = 0
    prompt_context = prompt_tokens = n_decode = 0
    for frame in frames:
        first_tile = n_rows // ATTENTION_TILE_ROWS
        n_rows += frame.n_rows
        context += frame.n_rows * frame.position
        frame_context += frame.position
        tile_tokens += frame.position * (-(-n_rows // ATTENTION_TILE_ROWS) - first_tile)
        if frame.is_prefill:
            prefill += frame.n_rows
            prompt_context += frame.n_rows * frame.position
            prompt_tokens += frame.position
        else:
            longest = max(longest, frame.position)
            n_decode += 1
    decode = n_rows - prefill  # one row a frame, and drafted ones
    lane_context, lane_tokens = decode * longest + prompt_context, n_decode * longest + prompt_tokens
    return StepShape(decode, prefill, context, tile_tokens, lane_context, lane_tokens, frame_context=frame_context)


@dataclasses.dataclass(slots=True)
class Curves:
    """A stage's knowledge of its own speed."""

    decode: CostCurve = dataclasses.field(default_factory=CostCurve)
    prefill: CostCurve = dataclasses.field(default_factory=CostCurve)
    context_ns: float = 0.0
    """The cost of the first row of a frame for every token in its lane before it; further rows cost as much or, where
    `takes_lanes_apart`, a part of it. 0.0 where that was not measured. Then it is not learned either, and
    counts as part of the rows' cost.
    """
    context_tiled_ns: float = 0.0
    """The cost of a row of a tile for every token that the tile's lanes hold before their frames. 0.0 where that was
    not measured, or there are no such tiles. Then steps of many rows cost the same per row as those of few, and teach
    that price.
    """
    is_per_lane: bool = False
    """Lanes have KV cells of their own. Then context_tiled_ns is what each row of a frame after its first costs for
    every token before it, however many they are; 0.0 where attention goes row by row."""
    takes_lanes_apart: bool = False
    """Rows of a step most of which are decode rows pay for their own lanes, however many they are."""
    has_tiles: bool = False
    """Where lanes share cells: steps of many rows may go by tiles, and then have other bits. That is known without a
    measurement, unlike the price of tiles."""

    @property
    def doubt(self) -> str:
        """The least plausible fact of these curves, in one line; empty for none."""
        for kind, curve in (("decode", self.decode), ("prefill", self.prefill)):
            if curve.is_flat:
                (few, few_ns), (many, many_ns) = curve.points()[0], curve.points()[-1]
                return (
                    f"{many} {kind} rows seem to take {many_ns / 1e6:.2f} ms and {few} {few_ns / 1e6:.2f} ms: "
                    "other programs disturbed the short steps, or the model is tiny for this device. Plans may be off "
                    "until real steps correct that; if it was busy, measure again when it is idle"
                )
        return ""

    @classmethod
    def of_stage(
        cls,
        *,
        has_head: bool,
        decode: Iterable[tuple[int, float]] = (),
        prefill: Iterable[tuple[int, float]] = (),
        context_ns: float = 0.0,
        context_tiled_ns: float = 0.0,
        is_per_lane: bool = False,
        takes_lanes_apart: bool = False,
        has_tiles: bool = False,
    ) -> Curves:
        """Return the curves of a stage from (rows, ns) points.

        Without a head a row of a prompt costs the same as a decode row, and both are one curve. So steps of prompts
        also teach the cost of numbers of decode rows that no plan has tried.
        """
        rows = (CostCurve(decode), CostCurve(prefill)) if has_head else (CostCurve((*decode, *prefill)),) * 2
        return cls(*rows, context_ns, context_tiled_ns, is_per_lane, takes_lanes_apart, has_tiles)

    def copy(self, *, has_head: bool) -> Curves:
        """Return curves that know the same, and learn on their own."""
        decode, prefill = self.decode.points(), self.prefill.points() if has_head else ()
        return Curves.of_stage(
            has_head=has_head,
            decode=decode,
            prefill=prefill,
            context_ns=self.context_ns,
            context_tiled_ns=self.context_tiled_ns,
            is_per_lane=self.is_per_lane,
            takes_lanes_apart=self.takes_lanes_apart,
            has_tiles=self.has_tiles,
        )

    def scale(self, factor: float) -> None:
        """Multiply every cost by this factor: the curves of a stage with as many times the layers."""
        self.decode.scale(factor)
        if self.prefill is not self.decode:
            self.prefill.scale(factor)
        self.context_ns *= factor
        self.context_tiled_ns *= factor

    def predict_ns(self, shape: StepShape) -> float:
        """Predict a native step; 0.0 while nothing is known of such steps."""
        rows_ns = self._rows_ns(shape)
        return rows_ns + self._context_ns(shape) if rows_ns else 0.0

    def padded_rows(self, shape: StepShape, rows_max: int) -> int:
        """Return the number of rows that is predicted to be cheapest, from a step's own rows up to `rows_max`.

        None of the candidates makes a step tiled where there are tiles: all its rows would have other bits
        (coordinator.schedule.tiles). Prompt rows and decode rows differ in cost, so with prompt rows scratch rows must
        pay by the cost of such a step.
        """
        if (self.has_tiles or self.context_tiled_ns) and shape.n_rows < ATTENTION_TILE_ROWS:
            rows_max = min(rows_max, ATTENTION_TILE_ROWS - 1)
        most = self.decode.padded_rows(shape.n_rows, rows_max)
        may_be = [most]
        if shape.prefill_rows and most > shape.n_rows and self.prefill.is_known:
            may_be.insert(0, shape.n_rows)
        if len(may_be) == 1:
            return most
        return min(may_be, key=lambda rows: self.predict_ns(shape.padded(rows - shape.n_rows)))

    def tell(self, message: pb.DescribeResponse | pb.StatusResponse) -> None:
        """Write all of it into a message."""
        for points, curve in ((message.decode_curve, self.decode), (message.prefill_curve, self.prefill)):
            points.extend(pb.CostPoint(n_rows=n_rows, cost_ns=cost_ns) for n_rows, cost_ns in curve.points())
        message.context_ns, message.context_tiled_ns = self.context_ns, self.context_tiled_ns
        message.takes_lanes_apart, message.has_tiles = self.takes_lanes_apart, self.has_tiles

    def observe(self, shape: StepShape, ns: int) -> None:
        """Refine from a real step.

        The error of a prediction is divided between the price of context and the curve, in proportion to their
        uncertainty and their part of the cost. If most of the context's price is that of many rows, that one takes the
        blame. A mixed step does not show which of its rows were dearer, so it refines only the price of context. Once
        mixed steps moved the scale of the whole curve instead. Steps of one kind then moved it back for their own row
        count only, and all other row counts seemed dearer and dearer.
        """
        rows_ns, context_ns = self._rows_ns(shape), self._context_ns(shape)
        ratio = ns / (rows_ns + context_ns) if rows_ns else 1.0
        share = 0.0
        if context_ns > CONTEXT_PART_MIN * rows_ns and rows_ns and ratio <= OUTLIER:
            doubtful_ns = CONTEXT_DOUBT * context_ns
            share = doubtful_ns**2 / (doubtful_ns**2 + rows_ns**2)
            change = CONTEXT_SMOOTHING * share * (ns - rows_ns - context_ns) / context_ns
            change = max(-CONTEXT_CHANGE_MAX, min(change, CONTEXT_CHANGE_MAX))
            if self._teaches_tiled(shape):
                self.context_tiled_ns *= 1 + change
            else:
                self.context_ns *= 1 + change
        if shape.prefill_rows and shape.decode_rows:
            return
        n_rows = max(shape.micro_batches, default=shape.n_rows)
        if n_rows < shape.n_rows:  # it is unknown which of several parts was slower: the largest represents all
            if not rows_ns:
                return
            rows_ns = (self.prefill if shape.prefill_rows else self.decode).cost_ns(n_rows)
        speed = 1 + (1 - share) * (ratio - 1)
        curve = self.prefill if shape.prefill_rows else self.decode
        curve.observe(n_rows, round(speed * rows_ns) or ns)
        if rows_ns and ratio <= OUTLIER:
            slower = max(1 / OUTLIER, speed) ** SMOOTHING_SHARED  # a slower machine is slower at everything
            self.context_ns *= slower
            self.context_tiled_ns *= slower

    def _teaches_tiled(self, shape: StepShape) -> bool:
        if self.is_per_lane:
            further_ns = self.context_tiled_ns * (shape.lane_context - shape.lane_tokens)
            return further_ns > self.context_ns * shape.lane_tokens
        return self._is_tiled(shape)

    def _is_tiled(self, shape: StepShape) -> bool:
        other_rows = shape.n_rows - shape.decode_rows
        may_be = goes_by_tiles(shape.decode_rows, other_rows, takes_lanes_apart=self.takes_lanes_apart)
        return self.context_tiled_ns > 0 and may_be

    def _context_ns(self, shape: StepShape) -> float:
        """Predict the cost of a step's context on top of its rows."""
        if self.is_per_lane and self.context_tiled_ns:
            return price_per_lane(self.context_ns, self.context_tiled_ns, shape.lane_context, shape.lane_tokens)
        if self._is_tiled(shape):
            return self.context_tiled_ns * ATTENTION_TILE_ROWS * shape.tile_tokens
        more_ns = further_ns(self.context_ns, takes_lanes_apart=self.takes_lanes_apart)
        return price_per_lane(self.context_ns, more_ns, shape.context, shape.frame_context)

    def _rows_ns(self, shape: StepShape) -> float:
        """Predict a step without its context."""
        if len(shape.micro_batches) > 1 and self.prefill.is_known:
            head_ns = self.decode.cost_ns(shape.decode_rows) - self.prefill.cost_ns(shape.decode_rows)
            return sum(map(self.prefill.cost_ns, shape.micro_batches)) + max(0.0, head_ns)
        if shape.prefill_rows == 0:
            return self.decode.cost_ns(shape.n_rows)
        if shape.decode_rows == 0:
            return self.prefill.cost_ns(shape.n_rows)
        return mixed_cost_ns(self.decode, self.prefill, shape.decode_rows, shape.n_rows - shape.decode_rows)
