"""Predicted rates of a running pipeline and of other plans for it, from its stages' measured cost curves. Pure.

The rates are those of `rates`, as in a plan that is made before the start. This works without the model's file: a
stage's step is scaled with its layers, including the head of the last stage and the tables of the first. Memory and
legal cuts are not checked; `relayline plan` does both.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from relayline.coordinator.planner.costs import Edges
from relayline.coordinator.planner.rates import Measured, Rates
from relayline.coordinator.schedule.overhead import RoundTrip
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.wire.common.curve import CostCurve

STREAMS_SHOWN = (1, 8, 32)
ROWS_SHOWN = (1, 8, 32)
LANES_MORE = 2  # times the lanes of the plan with more of them
ROWS_COMPARED = 8  # of the step by which layers are divided
STEP_SHARE_MIN = 0.02  # of layers that must move before another cut is reported


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One plan and its prediction."""

    name: str
    layers: list[tuple[int, int]]
    """Of each stage, from and up to, the end not included."""
    tokens_per_s: list[float]
    """With each number of streams; 0.0 where nothing is known."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunningPlan:
    """The plan that runs, first, and others."""

    is_known: bool
    """Whether every stage has measured its steps."""
    streams: list[int]
    stages: list[dict[str, dict[str, float]]]
    """Of each stage, `step_ms` by rows."""
    plans: list[Variant]


def running_plan(
    costs: Sequence[StageCost],
    edges: Edges,
    names: Sequence[str],
    *,
    round_trips: Sequence[RoundTrip],
    n_lanes: int,
    ctx_tokens: int = 0,
    faster: Edges = (),
) -> RunningPlan:
    """Return the predicted rates of a pipeline of these stages: as it runs, and with other settings.

    `round_trips`: the overhead with some numbers of streams. `n_lanes`: streams that run at once; further ones wait.
    `ctx_tokens`: tokens that one lane may hold; 0 if unknown. `faster`: the cut that a reported imbalance names; ()
    without one.
    """
    n_lanes = max(1, n_lanes)
    counts = _counts(n_lanes)
    is_known = _is_known(costs)
    within = [min(n, n_lanes) for n in counts]
    plans = [_variant("as it runs", costs, edges, round_trips, within)]
    if is_known:
        plans.append(_variant(f"{LANES_MORE * n_lanes} lanes", costs, edges, round_trips, counts))
        if ctx_tokens:
            full = [dataclasses.replace(cost, decode_tokens=ctx_tokens) for cost in costs]
            plans.append(_variant(f"every lane full: {ctx_tokens:,} tokens", full, edges, round_trips, within))
        steps_ns = [cost.decode_ns(ROWS_COMPARED) for cost in costs]
        speeds = [step_ns / (end - start) for step_ns, (start, end) in zip(steps_ns, edges, strict=True)]
        n_layers = edges[-1][1]
        even = faster or cut_by_speed(steps_ns, edges)
        moved = sum(abs(new[1] - old[1]) for new, old in zip(even[:-1], edges[:-1], strict=True))
        if moved > STEP_SHARE_MIN * n_layers:
            plans.append(_variant("layers by measured speed", _moved(costs, edges, even), even, round_trips, within))
        slowest = max(range(len(costs)), key=steps_ns.__getitem__)
        if n_layers > len(costs):
            copy = dataclasses.replace(costs[slowest], shares_host=False, device=-1)
            more = [*costs[: slowest + 1], copy, *costs[slowest + 1 :]]
            old = [*edges[: slowest + 1], edges[slowest], *edges[slowest + 1 :]]
            new = _edges(_shares([*speeds[: slowest + 1], speeds[slowest], *speeds[slowest + 1 :]], n_layers))
            longer = [each.scaled((len(costs) + 2) / (len(costs) + 1)) for each in round_trips]
            name = f"one more machine like {names[slowest]}'s"
            plans.append(_variant(name, _moved(more, old, new), new, longer, within))
    steps = [{"step_ms": _steps_ms(cost)} for cost in costs]
    return RunningPlan(is_known, counts, steps, plans)


def other_layers(
    costs: Sequence[StageCost], edges: Edges, asked: Edges, *, round_trips: Sequence[RoundTrip], n_lanes: int
) -> Variant | None:
    """Return the plan in which the same stages hold other layers, as `running_plan` predicts; None if nothing is
    known."""
    if not _is_known(costs):
        return None
    within = [min(n, max(1, n_lanes)) for n in _counts(max(1, n_lanes))]
    return _variant("these layers", _moved(costs, edges, asked), asked, round_trips, within)


def _counts(n_lanes: int) -> list[int]:
    return sorted({n for n in STREAMS_SHOWN if n < n_lanes} | {n_lanes, LANES_MORE * n_lanes})


def _is_known(costs: Sequence[StageCost]) -> bool:
    return bool(costs) and all(cost.decode.is_known and cost.prefill.is_known for cost in costs)


def cut_by_speed(steps_ns: Sequence[float], edges: Edges) -> Edges:
    """Return the cut with which all stages take about as long, if these steps were measured with `edges`."""
    layer_ns = [step_ns / (end - start) for step_ns, (start, end) in zip(steps_ns, edges, strict=True)]
    return _edges(_shares(layer_ns, edges[-1][1]))


def gain_of(
    costs: Sequence[StageCost], edges: Edges, other: Edges, n_streams: int, round_trips: Sequence[RoundTrip]
) -> float:
    """Return how many more tokens per second the same stages make with other layers, as a share; 0.0 if unknown."""
    if not _is_known(costs):
        return 0.0
    surroundings = Measured(round_trips)
    now = Rates(costs, surroundings).rate(n_streams)
    return Rates(_moved(costs, edges, other), surroundings).rate(n_streams) / now - 1


def _variant(
    name: str, costs: Sequence[StageCost], edges: Edges, round_trips: Sequence[RoundTrip], counts: Sequence[int]
) -> Variant:
    rates = Rates(costs, Measured(round_trips))
    return Variant(name, list(edges), [round(rates.rate(n) * 1e9, 2) for n in counts])


def _steps_ms(cost: StageCost) -> dict[str, float]:
    if not cost.decode.is_known:
        return {}
    return {str(rows): round(cost.decode_ns(rows) * 1e-6, 3) for rows in ROWS_SHOWN if rows <= cost.rows_max}


def _shares(layer_ns: Sequence[float], n_layers: int) -> list[int]:
    """Divide layers so that all stages take about as long, with at least one each. The quickest get the remainder."""
    pace = 1.0 / sum(1.0 / ns for ns in layer_ns)
    wanted = [n_layers * pace / ns for ns in layer_ns]
    found = [max(1, int(layers)) for layers in wanted]
    while sum(found) != n_layers:
        step = 1 if sum(found) < n_layers else -1
        can = [at for at, layers in enumerate(found) if step > 0 or layers > 1]
        # Prefer the stage that ends nearest to its wish.
        at = min(can, key=lambda at: (found[at] + step) * layer_ns[at] * step)
        found[at] += step
    return found


def _edges(shares: Sequence[int]) -> Edges:
    starts = [sum(shares[:at]) for at in range(len(shares) + 1)]
    return tuple(itertools.pairwise(starts))


def _moved(costs: Sequence[StageCost], old: Sequence[tuple[int, int]], new: Edges) -> list[StageCost]:
    """Return the costs of stages that hold other numbers of layers."""
    return [
        _scaled(cost, (after[1] - after[0]) / (before[1] - before[0]))
        for cost, before, after in zip(costs, old, new, strict=True)
    ]


def _scaled(cost: StageCost, by: float) -> StageCost:
    def scaled(curve: CostCurve) -> CostCurve:
        return CostCurve((rows, ns * by) for rows, ns in curve.points())

    return dataclasses.replace(
        cost,
        decode=scaled(cost.decode),
        prefill=scaled(cost.prefill),
        context_ns=cost.context_ns * by,
        context_tiled_ns=cost.context_tiled_ns * by,
    )
