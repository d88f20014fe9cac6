"""Turns runs into figures: medians and spreads over repeats, ratios compared with the goals, tables on the terminal.
Pure but for printing.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from benches.compared import Plan, Run

# (what, system, rival, figure, {streams: goal}); a ratio of at least the goal meets it
RATIO_GOALS: tuple[tuple[str, str, str, str, dict[int, float]], ...] = (
    ("against llama.cpp RPC, decode", "auto", "rpc", "decode_tok_s", {1: 1.05, 2: 2.2, 4: 2.2, 8: 2.8, 16: 3, 32: 3.6}),
    ("against llama.cpp RPC, with prompts", "auto", "rpc", "tok_s", {}),
    ("batching on against off", "auto", "single", "tok_s", {1: 0.98, 2: 0.98, 4: 1.0, 8: 1.5, 16: 1.9, 32: 2.3}),
    ("against plain drain", "auto", "drain", "tok_s", {}),
    ("against unsplit llama-server", "auto", "unsplit", "tok_s", {8: 0.85, 16: 0.85, 32: 1.0}),
    ("against RPC + our kernels, decode", "auto", "rpc+kernels", "decode_tok_s", {}),
    ("against unsplit + our kernels", "auto", "unsplit+kernels", "tok_s", {}),
)
# the same, but a ratio of at most the goal meets it
TTFT_GOALS: tuple[tuple[str, str, str, str, dict[int, float]], ...] = (
    ("TTFT p50 against llama.cpp RPC", "auto", "rpc", "ttft_p50_ms", {1: 1.15, 8: 0.5, 32: 0.5}),
)
OVERLAP = "overlap while all streams decode"
OVERLAP_GOAL = 0.85  # from OVERLAP_STREAMS on, while all of them decode on equal stages
OVERLAP_STREAMS = 8
PROFILE = (  # of that time, see benches.stages: evenness, work, idle
    ("overlap at most, as equal as stages were", "step_evenness"),
    ("decode then, of what its curves allow", "decode_reached"),
    ("time in steps then, of the least by its curves", "step_work"),
    ("a stage's idle time then: steps elsewhere", "idle_elsewhere"),
    ("a stage's idle time then: all else", "idle_way"),
)
SWEEP_GOAL = 0.95
PREFILL_GOAL = 2.0  # ITL p99 during a long prompt / quiet


def progress(run: Run) -> None:
    """Print one line per measured point, to show progress."""
    summary = run.summary
    text = f"{run.part} {run.system} {run.n_streams or ''} #{run.repeat}: {summary.tok_s:.1f} tok/s"
    extra = f", TTFT p50 {summary.ttft_ms['p50']:.0f} ms" + (f"; {summary.error}" if summary.error else "")
    print(text + extra, file=sys.stderr, flush=True)


def figures_of(run: Run) -> dict[str, float]:
    """Return the numbers of one run by name; without those that it does not have."""
    summary, pipeline = run.summary, run.pipeline
    found = {
        "tok_s": summary.tok_s,
        "decode_tok_s": summary.decode_tok_s,
        "ttft_p50_ms": summary.ttft_ms["p50"],
        "ttft_p95_ms": summary.ttft_ms["p95"],
        "itl_p50_ms": summary.itl_ms["p50"],
        "itl_p95_ms": summary.itl_ms["p95"],
        "itl_p99_ms": summary.itl_ms["p99"],
    }
    if pipeline:
        for name in ("batch_mean", "rows_mean"):
            found[name] = statistics.fmean(stage[name] for stage in pipeline["stages"])
        found |= {name: pipeline[name] for name in ("computing_mean", "overlap") if name in pipeline}
    return found | {name: value for name, value in run.extra.items() if isinstance(value, int | float)}


def points_of(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Group runs into points: per figure the median and the spread over the repeats that count."""
    groups: dict[tuple[str, str, int, float], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.part, run.system, run.n_streams, run.extra.get("delay_ms", 0.0)), []).append(run)
    points: list[dict[str, Any]] = []
    for (part, system, n_streams, _), members in groups.items():
        counted = [figures_of(run) for run in members if not run.fault]
        names = dict.fromkeys(name for figures in counted for name in figures)
        values = {name: [figures[name] for figures in counted if name in figures] for name in names}
        points.append(
            {
                "part": part,
                "system": system,
                "streams": n_streams,
                "n_runs": len(members),
                "n_counted": len(counted),
                "faults": [run.fault for run in members if run.fault],
                "answers_exact": sum(run.n_exact for run in members),
                "answers": sum(len(run.requests) for run in members),
                "worst_gap": max(run.worst_gap for run in members),
                "median": {name: statistics.median(found) for name, found in values.items()},
                "spread": {name: [min(found), max(found)] for name, found in values.items()},
            }
        )
    return points


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """One ratio or share, and what it is held against."""

    what: str
    streams: int
    value: float
    goal: float | None = None
    at_most: bool = False  # whether the goal is the largest value that meets it, not the smallest
    allowed: float | None = None

    def judged(self, *, has_goals: bool) -> dict[str, Any]:
        """Return it as it is stored and shown."""
        goal, met = self.goal if has_goals else None, None
        if goal is not None:
            met = self.value <= goal if self.at_most else self.value >= goal
        found = dataclasses.asdict(self)
        allowed = found.pop("allowed")
        return found | {"goal": goal, "met": met, "allowed": allowed}


def goals_of(
    points: Sequence[dict[str, Any]], streams: Sequence[int], *, has_goals: bool = True
) -> list[dict[str, Any]]:
    """Return every comparison with its goal: {what, streams, value, goal, at_most, met, allowed}.

    `met` is None without a goal; `allowed` is the largest ratio that the stages' curves allow, given the rival's
    figure; None if it is unknown. The goals are for models of real size; with `has_goals` off the comparisons have no
    goals.
    """
    found = [*_against_rivals(points, streams)]
    for n_streams in streams:
        found += _of_auto(points, n_streams)
    found += _beside_prompts(points)
    return [each.judged(has_goals=has_goals) for each in found]


def _figure(points: Sequence[dict[str, Any]], system: str, n_streams: int, name: str) -> float | None:
    """Return a median of a system with so many streams, None where it was not measured."""
    for point in points:
        if (point["part"], point["system"], point["streams"]) == ("streams", system, n_streams):
            value: float | None = point["median"].get(name)
            return value
    return None


def _against_rivals(points: Sequence[dict[str, Any]], streams: Sequence[int]) -> Iterator[Comparison]:
    for goals, at_most in ((RATIO_GOALS, False), (TTFT_GOALS, True)):
        for what, system, rival, name, wanted in goals:
            for n_streams in streams:
                ours = _figure(points, system, n_streams, name)
                theirs = _figure(points, rival, n_streams, name)
                if not ours or not theirs:
                    continue
                most = _figure(points, system, n_streams, f"allowed_{name}")
                allowed = most / theirs if most else None
                yield Comparison(what, n_streams, ours / theirs, wanted.get(n_streams), at_most, allowed)


def _of_auto(points: Sequence[dict[str, Any]], n_streams: int) -> Iterator[Comparison]:
    """Yield the figures of the automatic schedule that no rival has."""
    ours, most = (_figure(points, "auto", n_streams, name) for name in ("tok_s", "allowed_tok_s"))
    if ours and most:
        yield Comparison("of what its curves allow at most", n_streams, ours / most)
    overlap = _figure(points, "auto", n_streams, "overlap")
    if overlap is not None:
        yield Comparison("overlap, whole run", n_streams, overlap)
    overlap = _figure(points, "auto", n_streams, "overlap_decode")
    if overlap is not None:
        yield Comparison(OVERLAP, n_streams, overlap, OVERLAP_GOAL if n_streams >= OVERLAP_STREAMS else None)
    for what, name in PROFILE:
        share = _figure(points, "auto", n_streams, name)
        if share is not None:
            yield Comparison(what, n_streams, share)
    by_hand = [  # each is compared with the automatic run next to it, since the machine drifts during a sweep
        point["median"]["against_auto"]
        for point in points
        if point["part"] == "sweep" and point["system"] != "auto" and point["streams"] == n_streams
        if point["median"]
    ]
    if by_hand:
        yield Comparison("automatic against best by hand", n_streams, 1 / max(by_hand), SWEEP_GOAL)


def _beside_prompts(points: Sequence[dict[str, Any]]) -> Iterator[Comparison]:
    for point in points:
        if point["part"] != "prefill" or not point["median"]:
            continue
        goal = PREFILL_GOAL if point["system"] == "auto" else None
        for part, most in (("p99", goal), ("p50", None)):
            what = f"ITL {part} beside a long prompt, {point['system']}"
            yield Comparison(what, point["streams"], point["median"][f"itl_{part}_ratio"], most, at_most=True)


def results(plan: Plan, runs: Sequence[Run], facts: dict[str, Any], notes: Sequence[str]) -> dict[str, Any]:
    """Return everything, JSON-ready: the plan, the machine, every run, the points, the goals."""
    points = points_of(runs)
    return {
        "machine": facts,
        "plan": dataclasses.asdict(plan),
        "notes": list(notes),
        "points": points,
        "goals": goals_of(points, plan.streams, has_goals=plan.shape.name != "toy"),
        "runs": [
            {
                "part": run.part,
                "system": run.system,
                "streams": run.n_streams,
                "repeat": run.repeat,
                "fault": run.fault,
                "summary": dataclasses.asdict(run.summary),
                "pipeline": run.pipeline,
                "extra": run.extra,
                "exact": run.n_exact,
                "worst_gap": run.worst_gap,
            }
            for run in runs
        ],
    }


# --- tables -----------------------------------------------------------------------------------------------------------

COLUMNS = (
    ("tok_s", "tok/s", 1),
    ("allowed_tok_s", "curves allow", 1),
    ("decode_tok_s", "decode tok/s", 1),
    ("ttft_p50_ms", "TTFT p50 ms", 0),
    ("ttft_p95_ms", "p95", 0),
    ("itl_p50_ms", "ITL p50 ms", 1),
    ("itl_p95_ms", "p95", 1),
    ("itl_p99_ms", "p99", 1),
    ("batch_mean", "batch", 1),
    ("overlap", "overlap", 2),
    ("overlap_decode", "in decode", 2),
    ("computing_mean", "computing", 2),
)

SPREAD_SHOWN = ("tok_s", "ttft_p50_ms", "itl_p99_ms")  # the JSON has it for the others

PREFILL_COLUMNS = (
    ("quiet_itl_p50_ms", "quiet ITL p50 ms", 1),
    ("quiet_itl_p99_ms", "p99", 1),
    ("beside_itl_p50_ms", "beside ITL p50 ms", 1),
    ("beside_itl_p99_ms", "p99", 1),
    ("itl_p50_ratio", "beside / quiet p50", 2),
    ("itl_p99_ratio", "p99", 2),
    ("ttft_ms", "TTFT of the prompt ms", 1),
)


def _cell(point: dict[str, Any], name: str, digits: int) -> str:
    value = point["median"].get(name)
    if value is None:
        return "-"
    low, high = point["spread"][name]
    is_spread = name in SPREAD_SHOWN and value and point["n_counted"] > 1
    wide = f" ±{100 * (high - low) / 2 / value:.0f}%" if is_spread else ""
    return f"{value:.{digits}f}{wide}"


def _points_table(title: str, points: Sequence[dict[str, Any]], labels: dict[str, str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("streams", justify="right")
    table.add_column("system")
    for _, heading, _ in COLUMNS:
        table.add_column(heading, justify="right")
    table.add_column("exact", justify="right")
    table.add_column("gap", justify="right")
    for point in points:
        delay = point["median"].get("delay_ms")
        name = labels.get(point["system"], point["system"])
        if delay is not None:
            name += f", {delay:g} ms ({point['median']['delay_measured_ms']:.2f})"
        n_runs, n_counted = point["n_runs"], point["n_counted"]
        counted = f" ({n_counted}/{n_runs} count)" if n_counted < n_runs else f" ({n_runs})" if n_runs > 1 else ""
        cells = [_cell(point, figure, digits) for figure, _, digits in COLUMNS]
        exact = f"{point['answers_exact']}/{point['answers']}"
        table.add_row(str(point["streams"] or "open"), name + counted, *cells, exact, f"{point['worst_gap']:.2f}")
    return table


def _prefill_table(points: Sequence[dict[str, Any]], labels: dict[str, str]) -> Table:
    table = Table(title="running streams while a long prompt is read", title_justify="left")
    table.add_column("system")
    for _, heading, _ in PREFILL_COLUMNS:
        table.add_column(heading, justify="right")
    for point in points:
        cells = [_cell(point, name, digits) for name, heading, digits in PREFILL_COLUMNS]
        table.add_row(labels.get(point["system"], point["system"]), *cells)
    return table


def _goals_table(goals: Sequence[dict[str, Any]], streams: Sequence[int]) -> Table:
    table = Table(title="ratios of medians, with their goals", title_justify="left")
    table.add_column("")
    columns = sorted({*streams, *(goal["streams"] for goal in goals)})
    for n_streams in columns:
        table.add_column(str(n_streams), justify="right")
    for what in dict.fromkeys(goal["what"] for goal in goals):
        cells = {goal["streams"]: goal for goal in goals if goal["what"] == what}
        table.add_row(what, *(_goal_cell(cells[n]) if n in cells else "" for n in columns))
    return table


def _goal_cell(goal: dict[str, Any]) -> str:
    if goal["met"] is None:
        return f"{goal['value']:.2f}"
    sign, colour = "≤" if goal["at_most"] else "≥", "green" if goal["met"] else "red"
    # No schedule can reach a goal beyond what the curves allow, and the reader should see that at once.
    beyond = goal["allowed"] is not None and not goal["met"] and goal["allowed"] < goal["goal"]
    most = f"; curves allow {goal['allowed']:.2f}" if beyond else ""
    return f"[{colour}]{goal['value']:.2f}[/] ({sign} {goal['goal']:g}{most})"


def show(found: dict[str, Any], labels: dict[str, str], console: Console | None = None) -> None:
    """Print the tables."""
    console = console or Console(width=None if sys.stdout.isatty() else 200)
    plan, facts = found["plan"], found["machine"]
    repeats = f"{'up to ' if plan['repeat_minutes'] else ''}{plan['repeats']} repeats"
    console.print(
        "\nexact: answers equal to the unsplit model's, token for token; gap: how far a token of the others lay below "
        "the best, in deviations of the logits, at most"
    )
    console.print(
        f"{plan['shape']['name']} {plan['mix']}, {plan['n_tokens']} tokens after {plan['n_prompt']}, "
        f"{repeats}, cores {','.join(map(str, plan['cores']))} of {facts['cpu']}; "
        f"load average at the start {facts['load_average'][0]:.2f}"
    )
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    console.print(f"commit {facts.get('commit') or 'unknown'}; {versions}")
    titles = {
        "streams": "streams at once (closed loop)",
        "open": "Poisson arrivals (open loop)",
        "delay": "4 stages x 1 thread, link delay each way",
        "sweep": "groups x rows by hand",
    }
    for part, title in titles.items():
        points = sorted((p for p in found["points"] if p["part"] == part), key=lambda p: p["streams"])
        if points:
            console.print(_points_table(title, points, labels))
    prefill = [point for point in found["points"] if point["part"] == "prefill"]
    if prefill:
        console.print(_prefill_table(prefill, labels))
    if found["goals"]:
        console.print(_goals_table(found["goals"], plan["streams"]))
    for point in found["points"]:
        for fault in point["faults"]:
            console.print(f"[red]does not count:[/] {point['part']} {point['system']} {point['streams']}: {fault}")
    for note in found["notes"]:
        console.print(f"note: {note}")
