"""The cost of one stage's steps for planning: its curves, the price of context, padding. Pure.

The stage decides the same for its real steps (`stage.speed.curves`, `stage.steps.padding`); a plan predicts that
decision.
"""

from __future__ import annotations

import dataclasses

from relayline.wire.common.curve import (
    ATTENTION_TILE_ROWS,
    CostCurve,
    further_ns,
    goes_by_tiles,
    mixed_cost_ns,
    price_per_lane,
)


@dataclasses.dataclass(frozen=True, slots=True)
class StageCost:
    """One stage as the planner sees it."""

    decode: CostCurve  # every row needs the stage's decode arithmetic
    prefill: CostCurve  # rows of a prompt: the last stage computes no head for them
    rows_max: int  # rows of one native step
    context_ns: float = 0.0  # price of the first row of a frame per token before it in its lane, see further_ns
    context_tiled_ns: float = 0.0  # and in steps of tiles, for every token of its tile's lanes; 0: not known. Per lane:
    # the cost that every earlier token adds to each further row of a prompt's chunk
    decode_tokens: int = 0  # context of an average decode row, or of the longest where all of a flight pay for that
    prompt_tokens: int = 0  # and of a prompt row
    is_per_lane: bool = False  # per-lane KV cells: decode rows and prompt rows are computed separately
    takes_lanes_apart: bool = False  # decode rows cost context_ns however many they are; see also goes_by_tiles
    has_tiles: bool = False  # where lanes share cells, steps of many rows go by tiles, whatever these cost
    device: int = -1  # stages of the same number, from 0 on, take turns: they compute on one device
    shares_host: bool = False  # another stage of the pipeline computes on the same host, and reads the same memory
    runs_ahead: bool = False  # it computes the next rows of its streams before they are asked for

    @property
    def shares_longest(self) -> bool:
        """Whether decode rows computed together all pay for the longest of their lanes, see stage.speed.curves."""
        return self.is_per_lane and self.context_tiled_ns > 0

    @property
    def may_tile(self) -> bool:
        """Whether steps of many rows may round differently. Older stages state the price of tiles alone."""
        return self.has_tiles or self.context_tiled_ns > 0

    def decode_ns(self, rows: int) -> float:
        """Predict a step of decode rows, padding included."""
        return self._padded_ns(self._padded_rows(rows, 0), rows, 0)

    def prefill_ns(self, rows: int) -> float:
        """Predict a step of prompt rows."""
        return self.prefill.cost_ns(rows) + self._context_ns(rows, 0, rows)

    def mixed_ns(self, rows: int, prompt_rows: int) -> float:
        """Predict a step of both, padding included; prompt rows take the place of scratch rows."""
        if not prompt_rows:
            return self.decode_ns(rows)
        if self.is_per_lane:
            return self.decode_ns(rows) + self.prefill_ns(prompt_rows)
        return self._padded_ns(self._padded_rows(rows, prompt_rows), rows, prompt_rows)

    def _padded_ns(self, padded_rows: int, rows: int, prompt_rows: int) -> float:
        """Predict a step of `rows` rows that is padded to `padded_rows`."""
        if not prompt_rows:
            return self.decode.cost_ns(padded_rows) + self._context_ns(padded_rows, rows, 0)
        # As many padding rows use the head as fill its tile, see stage.steps.padding.
        heads = self.decode.padded_rows(rows, padded_rows - prompt_rows)
        rows_ns = mixed_cost_ns(self.decode, self.prefill, heads, padded_rows - heads)
        return rows_ns + self._context_ns(padded_rows, rows, prompt_rows)

    def _padded_rows(self, rows: int, prompt_rows: int) -> int:
        """Return the rows that such a step is padded to, see stage.speed.curves."""
        n_rows = rows + prompt_rows
        if self.is_per_lane:
            return n_rows
        rows_max = self.rows_max
        if self.may_tile and n_rows < ATTENTION_TILE_ROWS:  # see stage.speed.curves
            rows_max = min(rows_max, ATTENTION_TILE_ROWS - 1)
        most = self.decode.padded_rows(n_rows, rows_max)
        may_be = [most]
        if prompt_rows and most > n_rows and self.prefill.is_known:
            may_be.insert(0, n_rows)
        if len(may_be) == 1:
            return most
        return min(may_be, key=lambda padded_rows: self._padded_ns(padded_rows, rows, prompt_rows))

    def _context_ns(self, padded_rows: int, rows: int, prompt_rows: int) -> float:
        """Predict what context adds to a step of so many rows, of which these are decode rows and rows of one prompt.

        Of tiles every one pays for whose rows are in it: a prompt in each of its tiles, a decode row in one.
        """
        if self.shares_longest:
            decode_tokens = rows * self.decode_tokens
            row_tokens = decode_tokens + prompt_rows * self.prompt_tokens
            lane_tokens = decode_tokens + (self.prompt_tokens if prompt_rows else 0)
            return price_per_lane(self.context_ns, self.context_tiled_ns, row_tokens, lane_tokens)
        is_tiled = goes_by_tiles(rows, padded_rows - rows, takes_lanes_apart=self.takes_lanes_apart)
        if not (self.context_tiled_ns and is_tiled):
            first_tokens = rows * self.decode_tokens + (self.prompt_tokens if prompt_rows else 0)
            all_tokens = rows * self.decode_tokens + prompt_rows * self.prompt_tokens
            more_ns = further_ns(self.context_ns, takes_lanes_apart=self.takes_lanes_apart)
            return price_per_lane(self.context_ns, more_ns, all_tokens, first_tokens)
        n_tiles = -(-(rows + prompt_rows) // ATTENTION_TILE_ROWS) - rows // ATTENTION_TILE_ROWS if prompt_rows else 0
        tile_tokens = rows * self.decode_tokens + n_tiles * self.prompt_tokens
        return self.context_tiled_ns * ATTENTION_TILE_ROWS * tile_tokens
