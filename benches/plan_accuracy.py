"""The error of `relayline plan`: predicted against measured rates, `python -m benches.plan_accuracy [--quick]`.

It runs 1, 2, 3 and 4 stages on this machine. For each it measures the model's slices (as `plan --measure` does), plans,
starts the planned pipeline, and loads it with 1, 8 and 32 streams in a closed loop. It compares decode tokens per
second (after each answer's first token) and time to first token with the prediction. Goal: tokens per second within
25 %.

The exit code is 1 where a request was not answered in full, or, in a full run, where the goal is missed. A quick run
only checks that everything works: its toy model's steps are shorter than the noise of a machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benches import interrupt, machine
from benches.arguments import number, numbers
from benches.models import MIXES, SHAPES, model
from benches.reference import prompts_for
from benches.servers import Setup, relayline
from relayline.coordinator.planner.predict import PROMPT_TOKENS, STREAMS_SHOWN
from relayline.deploy.cli import load
from relayline.deploy.cli.load import Target, client
from relayline.deploy.cli.plan import make_plan
from relayline.deploy.manifest import parse_manifest
from relayline.deploy.planning.report import Plan

GOAL = 0.25  # largest part by which tokens per second may miss the prediction
N_PROMPT = 16
CTX_TOKENS = 512
MANIFEST = """
apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {{name: accuracy}}
spec:
  model: {{path: {path}}}
  context: {{tokens: {ctx}, lanes: {lanes}}}
  stages: {n_stages}
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One number of stages and streams."""

    n_stages: int
    n_streams: int
    cuts: tuple[int, ...]
    limit: str
    predicted: float  # tokens per second
    measured: float
    ttft_predicted_ms: float  # of the long prompt in an idle pipeline; the same for every number of streams
    ttft_measured_ms: float
    n_failed: int

    @property
    def miss(self) -> float:
        """The error of the prediction, as a part of it."""
        return self.measured / self.predicted - 1


def planned(path: Path, n_stages: int, n_lanes: int) -> Plan:
    """Plan with measured speeds. Slices are measured again for every number of threads and of concurrent stages."""
    text = MANIFEST.format(path=path, ctx=CTX_TOKENS, lanes=n_lanes, n_stages=n_stages)
    return make_plan(parse_manifest(text.encode(), "manifest"), measure=True)


async def measure(path: Path, plan: Plan, n_tokens: int, streams: Sequence[int], logs: Path) -> list[Point]:
    """Run the planned pipeline and load it."""
    n_stages, n_vocab = len(plan.best.edges), plan.instance.model.n_vocab
    cuts = tuple(start for start, _ in plan.best.edges[1:])
    setup = Setup(path, n_stages, max(streams), CTX_TOKENS, tuple(sorted(os.sched_getaffinity(0))), logs)
    threads = plan.prediction.stages[0].threads
    command = ["up", str(path), "--state-dir", str(logs / f"state-{n_stages}"), "--http", "127.0.0.1:0",
               "--lanes", str(max(streams)), "--ctx", str(CTX_TOKENS), "--threads", str(threads),
               "--no-share"]  # fmt: skip
    command += ["--cuts", ",".join(map(str, cuts))] if cuts else ["--stages", "1"]
    short, long = prompts_for(max(streams), N_PROMPT, n_vocab), prompts_for(1, PROMPT_TOKENS, n_vocab)
    points = []
    async with relayline(f"stages-{n_stages}", command, setup) as ready, client() as session:
        target = Target(ready["url"], "openai", ready["model"])
        await load.closed_loop(session, target, short, n_streams=min(4, max(streams)), n_tokens=8)
        first = load.summarise(await load.closed_loop(session, target, long, n_streams=1, n_tokens=2))
        for n_streams in streams:
            requests = await load.closed_loop(session, target, short, n_streams=n_streams, n_tokens=n_tokens)
            summary, rate = load.summarise(requests), plan.prediction.rate(n_streams)
            assert rate is not None
            points.append(
                Point(
                    n_stages, n_streams, cuts, rate.limit, rate.tokens_per_s, steady_rate(requests),
                    plan.prediction.ttft_ns / 1e6, first.ttft_ms["p50"], summary.n_requests - summary.n_complete,
                )
            )  # fmt: skip
    return points


def steady_rate(requests: Sequence[load.Request]) -> float:
    """Return tokens per second while every stream decodes: from the last first token to the first last one."""
    answered = [request.token_ns for request in requests if len(request.token_ns) > 1]
    if len(answered) < len(requests) or not answered:
        return 0.0
    begin_ns, end_ns = max(times[0] for times in answered), min(times[-1] for times in answered)
    if end_ns <= begin_ns:
        return load.summarise(requests).decode_tok_s  # too short for all to have run side by side
    n_tokens = sum(begin_ns < at_ns <= end_ns for times in answered for at_ns in times)
    return n_tokens / (end_ns - begin_ns) * 1e9


def table_of(points: Sequence[Point]) -> Table:
    """Return the points as a table."""
    table = Table("stages", "cuts", "streams", "predicted tok/s", "measured", "miss", "limited by", "TTFT predicted ms",
                  "measured", title=f"plan against measurement (goal: within {GOAL:.0%})")  # fmt: skip
    for point in points:
        table.add_row(
            str(point.n_stages), ",".join(map(str, point.cuts)) or "-", str(point.n_streams), f"{point.predicted:.1f}",
            f"{point.measured:.1f}", f"{point.miss:+.0%}", point.limit, f"{point.ttft_predicted_ms:.0f}",
            f"{point.ttft_measured_ms:.0f}",
        )  # fmt: skip
    return table


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benches.plan_accuracy", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a toy model, 1 and 2 stages, few tokens")
    parser.add_argument("--shape", choices=list(SHAPES), default=None)
    parser.add_argument("--type", choices=list(MIXES), default="q4_0")
    parser.add_argument("--stages", type=numbers, default=(), help="such as 1,2,3,4")
    parser.add_argument(
        "--streams", type=numbers, default=(), help="those that plans predict: 1, 8, 32 or some of them"
    )
    parser.add_argument("--tokens", type=number, default=0, help="of every answer")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(argv)
    if unknown := sorted(set(options.streams) - set(STREAMS_SHOWN)):
        parser.error(f"--streams {unknown[0]}: plans predict {', '.join(map(str, STREAMS_SHOWN))}")
    return options


async def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    options = parse(argv)
    quick = options.quick
    path = model(SHAPES[options.shape or ("toy" if quick else "llama-1b")], options.type)
    stages = options.stages or ((1, 2) if quick else (1, 2, 3, 4))
    streams = options.streams or ((1, 8) if quick else STREAMS_SHOWN)
    facts: dict[str, Any] = machine.facts()
    points: list[Point] = []
    with tempfile.TemporaryDirectory(prefix="relayline-bench-") as logs:
        for n_stages in stages:
            plan = planned(path, n_stages, max(streams))
            points += await measure(path, plan, options.tokens or (16 if quick else 48), streams, Path(logs))
            Console(width=140).print(table_of(points[-len(streams) :]))
    results = [dataclasses.asdict(point) | {"miss": point.miss} for point in points]
    machine.write_json(options.out / "plan_accuracy.json", {"machine": facts, "goal": GOAL, "points": results})
    Console(width=140).print(table_of(points))
    worst = max(points, key=lambda point: abs(point.miss))
    print(f"worst miss {worst.miss:+.0%} ({worst.n_stages} stages, {worst.n_streams} streams), goal {GOAL:.0%}")
    if any(point.n_failed for point in points):
        print("not every request was answered in full", file=sys.stderr)
        return 1
    return int(not quick and abs(worst.miss) > GOAL)


if __name__ == "__main__":
    sys.exit(interrupt.run(main()))
