"""Compares prediction and measurement: GET /v1/pipeline of a running coordinator against a plan.

Every stage's step counters give the real average time of steps by rows (`busy_ns` over all of them), and bytes per
token follow from the payloads. Tokens per second come from the tokens generated between two readings some seconds
apart, with equally many streams at both. They may also come from a file with the output of `relayline bench --json`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from rich.markup import escape

from relayline.coordinator.planner.costs import Costs
from relayline.coordinator.schedule.overhead import HOST_STEP_NS
from relayline.deploy.planning.report import Plan
from relayline.deploy.tables import console_of_stdout, fitted
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.common.texts import counted, layer_ranges, plural

WHAT_CELLS = 12  # of a figure's name at least; longer ones take more lines
FINE_SHARE, WORRY_SHARE = 0.15, 0.5  # off the plan: as good as right, and no longer explained by a busy machine


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """One figure, predicted and measured."""

    what: str
    unit: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured against predicted."""
        return self.measured / self.predicted if self.predicted else float("nan")


def compare(
    plan: Plan, before: dict[str, Any], after: dict[str, Any], wall_s: float, bench: list[dict[str, Any]]
) -> list[Comparison]:
    """Hold what happened between two looks at GET /v1/pipeline, or since the start, against the plan.

    Raises StartError when the running pipeline is cut otherwise than the plan, or has not decoded anything yet.
    """
    found = after.get("stages", [])
    cut = tuple(tuple(stage["layers"]) for stage in found)
    if cut != plan.best.edges:
        raise StartError(
            f"the running pipeline has layers {layer_ranges(cut) or 'none'}, this plan {layer_ranges(plan.best.edges)}"
            "; to compare them, write the running ones as `layers` into the manifest"
        )
    if not all(stage.get("steps") for stage in found):
        raise StartError("the running pipeline has not decoded anything yet; send it some requests first")
    figures = [figure for index, stage in enumerate(found) for figure in _of_stage(plan, index, stage)]
    known = plan.prediction.rate(after["running"])
    if known is not None and not why_no_rate(plan, before, after, wall_s):
        measured = _generated(before, after) / wall_s
        figures.append(Comparison(counted(known.n_streams, "stream"), "tok/s", known.tokens_per_s, measured))
    return [*figures, *_of_bench(plan, bench)]


def why_no_rate(plan: Plan, before: dict[str, Any], after: dict[str, Any], wall_s: float) -> str:
    """Return in one line why two looks at GET /v1/pipeline give no tokens per second; "" where they do."""
    if wall_s <= 0 or not before:
        return "there was only one reading"
    first, last = before["running"], after["running"]
    if first != last:
        return f"the streams changed: {first} ran at the first reading, {last} at the last"
    n_tokens = _generated(before, after)
    if n_tokens < 0:
        return "the coordinator was restarted between the two readings"
    if not last or not n_tokens:
        return f"no stream decoded during the {wall_s:.1f} s from start to end"
    if plan.prediction.rate(last) is None:
        return f"this plan predicts nothing for {last} streams (--streams {last} does)"
    return ""


def _generated(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Tokens of answers between two looks. Rows of a stage would count prompts as well."""
    return int(after["generated_tokens"]) - int(before["generated_tokens"])


def _of_stage(plan: Plan, index: int, stage: dict[str, Any]) -> list[Comparison]:
    """Compare the mean native step over all row counts that occurred, weighted as they occurred."""
    costs, edge, name = Costs(plan.instance), plan.best.edges[index], plan.prediction.stages[index].name
    counts = {int(rows): int(n) for rows, n in stage["steps_by_rows"].items()}
    n_steps = sum(counts.values())
    # Prompt rows of a last stage need no head. Stages do not count which steps were prompts, so large ones are taken as
    # such.
    predicted_ns = sum(n * _native_ns(costs, index, edge, rows) for rows, n in counts.items()) / n_steps
    mean_rows = sum(rows * n for rows, n in counts.items()) / n_steps
    what = f"{name}: mean step of {n_steps} ({mean_rows:.1f} rows)"
    return [Comparison(what, "ms", predicted_ns / 1e6, stage["busy_ns"] / n_steps / 1e6)]


def _native_ns(costs: Costs, index: int, edge: tuple[int, int], rows: int) -> int:
    n_lanes = costs.instance.load.n_lanes
    head_rows = rows if rows <= n_lanes else 1
    return costs.raw_ns(index, *edge, rows, head_rows) - HOST_STEP_NS


def _of_bench(plan: Plan, lines: list[dict[str, Any]]) -> list[Comparison]:
    found = []
    for line in lines:
        known = plan.prediction.rate(int(line["load"])) if str(line["load"]).isdigit() else None
        if known is not None:
            measured = float(line["decode_tok_s"])
            found.append(
                Comparison(f"{line['load']} {plural(known.n_streams, 'stream')}", "tok/s", known.tokens_per_s, measured)
            )
    return found


def read_bench(path: Path) -> list[dict[str, Any]]:
    """Read the output of `relayline bench --json`. Raises UsageError."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        if not all("load" in line and "decode_tok_s" in line for line in lines):
            raise ValueError
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path}: not the output of `relayline bench URL --json`") from error
    return lines


def as_json(figures: list[Comparison]) -> list[dict[str, Any]]:
    """Return the comparison as JSON values: what, unit, predicted, measured, ratio (measured / predicted)."""
    return [dataclasses.asdict(figure) | {"ratio": round(figure.ratio, 4)} for figure in figures]


def verdict(figures: list[Comparison]) -> str:
    """Return a sentence that says whether the plan holds. Pure."""
    worst = max(figures, key=lambda figure: abs(math.log(max(figure.ratio, 1e-9))), default=None)
    if worst is None:
        return "there was nothing to compare."
    is_slow = worst.ratio < 1 if worst.unit == "tok/s" else worst.ratio > 1
    off = f"{worst.what} is {worst.ratio:.2f} times the plan's"
    if abs(worst.ratio - 1) <= FINE_SHARE:
        return f"nothing to worry about: everything is within {FINE_SHARE:.0%} of the plan."
    if not is_slow:
        return f"nothing to worry about, but the plan is too careful: {off}; `plan --measure` makes it exact."
    if abs(worst.ratio - 1) <= WORRY_SHARE:
        return f"no need to worry yet: {off}, which a busy machine explains; `plan --measure` makes the plan exact."
    return f"worry: {off}. Look for other programs there or for too many threads, or measure with `plan --measure`."


def show(figures: list[Comparison]) -> None:
    """Print the comparison as a table."""
    rows = [
        [
            escape(figure.what),
            f"{figure.predicted:.2f} {figure.unit}",
            f"{figure.measured:.2f} {figure.unit}",
            f"{figure.ratio:.2f}",
        ]
        for figure in figures
    ]
    columns = ("", "predicted", "measured", "measured/predicted")
    left_out = ("measured/predicted",)
    console = console_of_stdout()
    console.print(fitted(console.width, columns, rows, left_out=left_out, folds={"": WHAT_CELLS}, left=("",)))
    console.print(verdict(figures), soft_wrap=True, highlight=False)
