"""The input of a simulation: stages with their true costs, links, requests. Also the bound of any schedule.

Knows neither batcher nor scheduler. Times are integer nanoseconds of virtual time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from relayline.wire.common.curve import LADDER, CostCurve

MS = 1_000_000

# FIELD.md: 8 layers and the head of a 1B-shape llama, Q4_0, one thread. Beyond 32 rows each tile costs what it did.
STAIRCASE_MS = (
    (1, 14.7), (2, 28.3), (3, 43.2), (4, 26.5), (5, 40.7), (6, 54.0), (7, 75.4), (8, 50.7), (12, 77.0), (16, 90.0),
    (24, 141.0), (32, 165.0), (64, 330.0), (128, 660.0), (256, 1320.0), (512, 2640.0),
)  # fmt: skip

# docs/results/curves.md: 10 of 16 layers of a 1B-shape llama, Q4_0, one thread of a processor without AVX-512.
ARITHMETIC_MS = (
    (1, 26.7), (2, 51.0), (3, 78.3), (4, 86.1), (5, 113.2), (8, 162.8), (12, 248.3), (16, 273.3), (24, 435.9),
    (32, 545.8), (64, 1091.0), (128, 2182.0), (256, 4364.0), (512, 8728.0),
)  # fmt: skip

# docs/results/curves.md: the same on a processor with AMX, on which two to eight rows cost about the same.
MATRIX_MS = (
    (1, 23.3), (2, 47.5), (3, 49.6), (4, 50.8), (5, 53.2), (8, 59.9), (12, 91.2), (16, 107.0), (24, 153.5),
    (32, 163.1), (64, 326.2), (128, 652.4), (256, 1304.8), (512, 2609.6),
)  # fmt: skip


# docs/results/gpu.md: a whole llama-8b in Q4_0 on one H200; a row in the best step costs a fourteenth of one alone.
GPU_MS = (
    (1, 3.1), (2, 3.4), (4, 4.3), (8, 6.2), (16, 7.6), (32, 9.9), (64, 14.0), (128, 22.0), (256, 38.0), (512, 70.0),
)  # fmt: skip


def smooth(factor: float = 1.0) -> CostCurve:
    """Return a GPU-like cost: bound by reading the weights up to 64 rows, then by arithmetic, without tiles."""
    ladder = (*LADDER, 256, 512)
    return CostCurve((rows, factor * MS * (8.0 + 0.02 * rows + 0.10 * max(0, rows - 64))) for rows in ladder)


def measured(costs_ms: Sequence[tuple[int, float]], factor: float = 1.0) -> CostCurve:
    """Return a cost curve measured at a CPU stage."""
    return CostCurve((rows, factor * ms * MS) for rows, ms in costs_ms)


staircase = functools.partial(measured, STAIRCASE_MS)  # tiles of four rows, the rest runs row by row
arithmetic = functools.partial(measured, ARITHMETIC_MS)  # bound by arithmetic from the second row on
matrix = functools.partial(measured, MATRIX_MS)  # matrix units serve every step of more than one row
gpu = functools.partial(measured, GPU_MS)  # rows cost little compared with reading the weights

CURVES: dict[str, Callable[..., CostCurve]] = {  # of a factor
    "staircase": staircase,
    "smooth": smooth,
    "arithmetic": arithmetic,
    "matrix": matrix,
}


@dataclasses.dataclass(frozen=True, slots=True)
class StageModel:
    """One stage with its true costs; its own curves are measured from them."""

    decode: CostCurve
    prefill: CostCurve
    rows_max: int = 512
    host_ns: int = 0
    """Work of the stage's process around each native step, during which the stage is busy."""
    context_ns: float = 0.0
    """Cost per row for every earlier token of its lane."""
    context_tiled_ns: float = 0.0
    """In a step of at least ATTENTION_TILE_ROWS rows, the extra cost for every token before the frames of its tile;
    0.0: none, so a row costs the same as in a smaller step, for its own lane alone.
    """
    is_per_lane: bool = False
    """Each lane has its own KV cells: a step runs in the parts of `stage.engine.micro_batches`, without padding. Then
    context_tiled_ns is the cost of each row of a frame after its first, for every token before it.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One client's request."""

    arrives_ns: int
    n_prompt: int
    max_tokens: int
    cancel_ns: int | None = None
    """When the client gives up, if it does."""
    n_before: int = 0
    """Tokens of its answer from before the simulation, as after a loss: they are read again."""
    predicted: float | None = None
    """Share of right tokens in the client's prediction of the answer; None: no prediction and no drafts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Disturbance:
    """From `at_ns` on a stage takes `factor` times as long; with `stall_ns` it does nothing for that time."""

    at_ns: int
    stage: int
    factor: float = 1.0
    stall_ns: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class SlowLinks:
    """From `at_ns` on every link takes this much longer."""

    at_ns: int
    extra_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """Everything a simulation needs besides the policy under test."""

    stages: tuple[StageModel, ...]
    requests: tuple[Request, ...]
    link_ns: int = 0
    """One way, between neighbours and between the coordinator and both ends."""
    links_ns: tuple[int, ...] = ()
    """The same of each link, in the order of travel: coordinator to first stage, ..., last stage to coordinator. Empty:
    all of them take `link_ns`."""
    token_ns: int = 0
    """Work of the coordinator for each token that comes back, before the next row of its stream leaves."""
    jitter: float = 0.0
    """Largest relative deviation of a step from its curve."""
    disturbances: tuple[Disturbance, ...] = ()
    slow_links: tuple[SlowLinks, ...] = ()
    n_lanes: int = 4_096
    waiting_max: int = 100_000
    refresh_ns: int = 0
    """How often the coordinator asks for the curves that stages have learned; 0 never."""
    seed: int = 0
    crowding: float = 1.0
    """Factor by which a step is slower if it begins while another stage computes. Above 1 stages share a host, and the
    coordinator knows.
    """

    @property
    def overhead_ns(self) -> int:
        """A round trip without native steps and without waits."""
        return sum(map(self.way_ns, range(len(self.stages) + 1))) + sum(stage.host_ns for stage in self.stages)

    def way_ns(self, link: int) -> int:
        """Return the time of the link to this stage; the one after the last stage's leads to the coordinator."""
        return self.links_ns[link] if self.links_ns else self.link_ns


def equal_stages(
    n_stages: int,
    curve: str = "staircase",
    *,
    host_ns: int = 0,
    context_ns: float = 0.0,
    context_tiled_ns: float = 0.0,
) -> tuple[StageModel, ...]:
    """Return n_stages stages of one kind."""
    return tuple(
        StageModel(
            CURVES[curve](), CURVES[curve](), host_ns=host_ns, context_ns=context_ns, context_tiled_ns=context_tiled_ns
        )
        for _ in range(n_stages)
    )


def one_slower(n_stages: int, factor: float, curve: str = "staircase") -> tuple[StageModel, ...]:
    """Return stages of which the middle one takes `factor` times as long."""
    stages = list(equal_stages(n_stages, curve))
    stages[n_stages // 2] = StageModel(CURVES[curve](factor), CURVES[curve](factor))
    return tuple(stages)


def streams(
    n_streams: int, max_tokens: int, *, n_prompt: int = 4, predicted: float | None = None
) -> tuple[Request, ...]:
    """Return n_streams equal requests that arrive together."""
    return tuple(Request(0, n_prompt, max_tokens, predicted=predicted) for _ in range(n_streams))


def best_rate(stages: Sequence[StageModel], n_streams: int, overhead_ns: float) -> float:
    """Return tokens a second that no schedule can exceed if batches stay together: the least of `stage_rates` and
    `_crowded_rate`. Drafts may exceed it: with guesses in flight a stream is at several stages at once.
    """
    return min(*stage_rates(stages, n_streams, overhead_ns), _crowded_rate(stages, n_streams))


def stage_rates(stages: Sequence[StageModel], n_streams: int, overhead_ns: float) -> list[float]:
    """Return for each stage the largest tokens per second that it allows with at most n_streams decoding.

    A schedule starts x(r) batches of r rows a second. Stage s is busy sum x(r) c_s(r) <= 1 of the time, and by Little's
    law the streams under way are sum r x(r) way(r) <= n_streams. For one stage at a time, the largest sum r x(r) is a
    linear program with two constraints. Its dual is the least, over the price p of a stream, of

        p n_streams + max over r of r (1 - p way(r)) / c_s(r)

    which is convex in p.
    """
    sizes, costs = _step_costs(stages, n_streams)
    hosts_ns = sum(stage.host_ns for stage in stages)
    ways = [sum(column) - hosts_ns + overhead_ns for column in zip(*costs, strict=True)]

    def dual(price: float, stage_costs: Sequence[float]) -> float:
        scarce = max(rows * (1 - price * way) / cost for rows, way, cost in zip(sizes, ways, stage_costs, strict=True))
        return price * n_streams + max(0.0, float(scarce))

    rates: dict[tuple[float, ...], float] = {}
    for stage_costs in {tuple(each) for each in costs}:
        low, high = 0.0, 1.0 / min(ways)
        for _ in range(80):
            third = (high - low) / 3
            if dual(low + third, stage_costs) < dual(high - third, stage_costs):
                high -= third
            else:
                low += third
        rates[stage_costs] = dual((low + high) / 2, stage_costs) * 1e9
    return [rates[tuple(each)] for each in costs]


def _step_costs(stages: Sequence[StageModel], n_streams: int) -> tuple[list[int], list[list[float]]]:
    """Return numbers of rows that a step may have, and the cost of such steps at each stage."""
    rows_max = min(n_streams, *(stage.rows_max for stage in stages))
    sizes = sorted({*range(1, min(rows_max, 128) + 1), *range(128, rows_max + 1, 8), rows_max} - {0})
    sizes = [rows for rows in sizes if rows <= rows_max]
    return sizes, [[s.decode.padded_cost_ns(rows, s.rows_max) + s.host_ns for rows in sizes] for s in stages]


def _crowded_rate(stages: Sequence[StageModel], n_streams: int) -> float:
    """Return tokens a second at most, given that no stream is at two stages at once.

    While stage s runs a batch of r rows it makes r / c_s(r) of a token's way a nanosecond, and all batches that run at
    one moment hold n_streams rows at most. In the long run all stages make the same number, so the average over time is
    at most the best moment's rate. This is the tighter bound if large batches are cheap per row, and the streams fill
    one of them but not one at each stage.
    """
    sizes, costs = _step_costs(stages, n_streams)
    best = np.zeros(n_streams + 1)  # sum over the stages so far, by the rows that they hold
    for stage_costs in costs:
        with_stage = best.copy()
        for rows, cost in zip(sizes, stage_costs, strict=True):
            np.maximum(with_stage[rows:], best[: best.size - rows] + rows / cost, out=with_stage[rows:])
        best = with_stage
    return float(best[-1]) / len(costs) * 1e9
