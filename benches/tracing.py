"""The cost of tracing: tokens per second at 16 streams with each trace level, `python -m benches.tracing [--quick]`.

One pipeline of the bundled model stays up; its level is changed between runs by PUT /v1/telemetry. Levels take turns,
every turn in another order, and the figure is the ratio of a level's median to the median of `off`. So a drifting
machine affects all levels alike. Spans go over OTLP/gRPC to a sink in another process, which drops every byte. It runs
on the same cores as the pipeline, so the collector's share of the work counts too.

The second figure is the processor time per token of all processes together (their `process_cpu_seconds_total`). On a
machine with busy cores one figure is the inverse of the other, but other programs on the machine disturb only the
first. If equal runs differ by more than a level costs, read the second.

A run counts only if every request was answered in full. Dropped spans are shown: a level that loses spans is cheaper
than it looks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from concurrent import futures
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import aiohttp
import grpc
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from benches import interrupt, machine
from benches.arguments import number, some_of
from benches.models import SHAPES, model
from benches.servers import Setup, relayline
from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.deploy.cli import load
from relayline.deploy.cli.load import Target, client
from relayline.deploy.models.splits import split_for
from relayline.deploy.testing.paths import DEMO_MODEL as DEMO
from relayline.wire.telemetry import names
from relayline.wire.telemetry.config import LEVEL_NAMES

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
SUMMARY_COST_MAX = 0.02  # of the tokens per second at 16 streams: the goal
METRIC_CPU = "process_cpu_seconds"  # user and system time of a process, as Prometheus' clients name it
N_PROMPT = 16
WARM_TOKENS = 8
SETTLE_S = 2.5  # after a run: its last spans take a second to arrive, and must not count for the next


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What one run of the bench measures."""

    n_streams: int
    n_tokens: int
    repeats: int
    n_stages: int
    levels: tuple[str, ...] = tuple(LEVEL_NAMES)
    shape: str = ""  # of a model with random weights; empty takes the demonstration model


@dataclasses.dataclass(slots=True)
class Run:
    """One level, once."""

    level: str
    repeat: int
    summary: load.Summary
    n_exported: int  # spans, coordinator and stages together
    n_dropped: int
    cpu_ms_per_token: float = 0.0  # of coordinator and stages together


@dataclasses.dataclass(frozen=True, slots=True)
class Counters:
    """The sums over all processes of the pipeline since their start."""

    n_exported: int
    n_dropped: int
    cpu_s: float


# --- the sink ---------------------------------------------------------------------------------------------------------


def sink() -> None:
    """Serve an OTLP collector that takes everything and keeps nothing, until stdin closes; prints its address."""
    handler = grpc.unary_unary_rpc_method_handler(lambda _request, _context: b"")  # bytes in, an empty message out

    class Collector(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            return handler if details.method == EXPORT else None

    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=(Collector(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"http://127.0.0.1:{port}", flush=True)
    sys.stdin.read()
    server.stop(None).wait()


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[str]:
    """Run the sink as a process; yields its address."""
    command = [sys.executable, "-m", "benches.tracing", "--sink"]
    child = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield (await child.stdout.readline()).decode().strip()
    finally:
        child.stdin.close()
        await child.wait()


# --- measuring --------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def pipeline(setup: Setup) -> AsyncIterator[tuple[Target, list[str]]]:
    """Run stages and coordinator; yields the server and the URLs of all /metrics."""
    directory = await asyncio.to_thread(split_for, setup.model, setup.n_stages, None, None)
    engine = ["--ctx", str(setup.ctx_tokens), "--lanes", str(setup.n_lanes), "--threads", str(setup.stage_threads)]
    events: list[dict[str, str]] = []
    async with contextlib.AsyncExitStack() as stack:
        for stage in load_pipeline(directory).stages:
            arguments = ["stage", "--artifact", str(directory / stage.file), "--listen", "127.0.0.1:0",
                         "--metrics", "127.0.0.1:0", "--exit-with-stdin", *engine]  # fmt: skip
            events.append(await stack.enter_async_context(relayline(f"stage-{stage.index}", arguments, setup)))
        addresses = ",".join(event["address"] for event in events)
        arguments = ["serve", "--pipeline", str(directory), "--stages", addresses, "--http", "127.0.0.1:0",
                     "--no-share", "--exit-with-stdin"]  # fmt: skip
        ready = await stack.enter_async_context(relayline("serve", arguments, setup))
        metrics = [f"http://{event['metrics']}/metrics" for event in events]
        yield Target(ready["url"], "openai", ready["model"]), [f"{ready['url']}/metrics", *metrics]


async def set_level(session: aiohttp.ClientSession, target: Target, level: str) -> None:
    """Change the level of the coordinator and of every stage."""
    async with session.put(f"{target.url}/v1/telemetry", json={"level": level}) as response:
        if response.status != 200:
            raise RuntimeError(f"PUT /v1/telemetry: HTTP {response.status}: {(await response.text())[:200]}")


async def counters_of(session: aiohttp.ClientSession, urls: Sequence[str]) -> Counters:
    """Return spans and processor time until now, summed over all /metrics."""
    totals = dict.fromkeys((names.METRIC_SPANS_EXPORTED, names.METRIC_SPANS_DROPPED, METRIC_CPU), 0.0)
    for url in urls:
        async with session.get(url) as response:
            text = await response.text()
        for family in text_string_to_metric_families(text):
            if family.name in totals:
                totals[family.name] += sum(s.value for s in family.samples if s.name.endswith("_total"))
    exported, dropped, cpu_s = totals.values()
    return Counters(int(exported), int(dropped), cpu_s)


def order_of(repeat: int, names: Sequence[str] = LEVEL_NAMES) -> list[str]:
    """Return the levels in the order of one turn: in four turns each has every place, in the next four backwards."""
    levels = list(names)
    at = repeat % len(levels)
    turned = levels[at:] + levels[:at]
    return turned[::-1] if repeat // len(levels) % 2 else turned


async def measure(plan: Plan, log_dir: Path) -> list[Run]:
    """Measure every level `repeats` times."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    room = N_PROMPT + max(plan.n_tokens, WARM_TOKENS) + 8
    path = model(SHAPES[plan.shape], "q4_0") if plan.shape else DEMO
    setup = Setup(path, plan.n_stages, plan.n_streams, room, cores, log_dir)
    prompts = [[1 + (stream * 37 + at * 11) % 200 for at in range(N_PROMPT)] for stream in range(plan.n_streams)]
    runs: list[Run] = []
    async with contextlib.AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(collecting())
        stack.enter_context(mock.patch.dict(os.environ, {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}))
        target, urls = await stack.enter_async_context(pipeline(setup))
        session = await stack.enter_async_context(client())

        async def run(level: str, repeat: int, n_tokens: int) -> Run:
            await set_level(session, target, level)
            before = await counters_of(session, urls)
            requests = await load.closed_loop(session, target, prompts, n_streams=plan.n_streams, n_tokens=n_tokens)
            await asyncio.sleep(SETTLE_S)
            after = await counters_of(session, urls)
            return Run(
                level,
                repeat,
                load.summarise(requests),
                after.n_exported - before.n_exported,
                after.n_dropped - before.n_dropped,
                1e3 * (after.cpu_s - before.cpu_s) / (n_tokens * plan.n_streams),
            )

        for level in plan.levels:
            await run(level, -1, WARM_TOKENS)  # loads the level's modules
        for repeat in range(plan.repeats):
            for level in order_of(repeat, plan.levels):
                runs.append(await run(level, repeat, plan.n_tokens))
                found = runs[-1].summary
                print(f"{level:8} {found.tok_s:7.1f} tok/s {found.error}", file=sys.stderr, flush=True)
    return runs


# --- reporting
# ----------------------------------------------------------------------------------------------------------


def figures(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Reduce the runs to one entry per level; runs with a failed request are counted, not measured."""
    found: dict[str, dict[str, Any]] = {}
    for level in LEVEL_NAMES:
        mine = [run for run in runs if run.level == level]
        good = [run for run in mine if run.summary.n_complete == run.summary.n_requests]
        found[level] = {
            "tok_s": [run.summary.tok_s for run in good],
            "median_tok_s": median([run.summary.tok_s for run in good]) if good else None,
            "cpu_ms_per_token": median([run.cpu_ms_per_token for run in good]) if good else None,
            "itl_p50_ms": median([run.summary.itl_ms["p50"] for run in good]) if good else None,
            "spans_per_run": median([run.n_exported for run in good]) if good else None,
            "dropped": sum(run.n_dropped for run in mine),
            "failed": len(mine) - len(good),
        }
    base = found["off"]["median_tok_s"]
    for entry in found.values():
        entry["ratio"] = entry["median_tok_s"] / base if base and entry["median_tok_s"] else None
        cpu_ms, cpu_off_ms = entry["cpu_ms_per_token"], found["off"]["cpu_ms_per_token"]
        entry["cpu_ratio"] = cpu_off_ms / cpu_ms if cpu_ms and cpu_off_ms else None
    return found


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def show(found: dict[str, dict[str, Any]], plan: Plan) -> None:
    """Print one line per level."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    title = f"tracing at {plan.n_streams} streams, {plan.n_stages} stages, {plan.n_tokens} tokens, {plan.repeats} runs"
    table = Table(title=title, title_justify="left")
    for heading in (
        "level", "tok/s", "of off", "min-max", "CPU ms/token", "off / it", "ITL p50 ms", "spans a run", "dropped",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "level" else "right")
    for level in plan.levels:
        entry = found[level]
        if entry["median_tok_s"] is None:
            table.add_row(level, "failed")
            continue
        table.add_row(
            level, f"{entry['median_tok_s']:.1f}", _ratio(entry["ratio"]),
            f"{min(entry['tok_s']):.0f}-{max(entry['tok_s']):.0f}", f"{entry['cpu_ms_per_token']:.2f}",
            _ratio(entry["cpu_ratio"]), f"{entry['itl_p50_ms']:.2f}",
            f"{entry['spans_per_run']:.0f}", str(entry["dropped"]),
        )  # fmt: skip
    console.print(table)
    console.print(f"goal: summary costs at most {SUMMARY_COST_MAX:.0%} of the tokens per second")


async def main(options: argparse.Namespace) -> int:
    """Measure, print and write tracing.json; exit code 1 if a request failed."""
    plan = Plan(
        n_streams=options.streams or (4 if options.quick else 16),
        n_tokens=options.tokens or (8 if options.quick else 192),
        repeats=options.repeats or (1 if options.quick else 8),
        n_stages=options.stages,
        levels=options.levels,
        shape=options.shape,
    )
    facts = machine.facts()
    with tempfile.TemporaryDirectory(prefix="relayline-bench-") as logs:
        runs = await measure(plan, Path(logs))
    found = figures(runs)
    results = {"machine": facts, "plan": dataclasses.asdict(plan), "levels": found}
    await asyncio.to_thread(machine.write_json, options.out / "tracing.json", results)
    show(found, plan)
    return int(any(entry["failed"] for entry in found.values()))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benches.tracing", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few streams, once: checks the bench itself")
    parser.add_argument("--streams", type=number, default=0)
    parser.add_argument("--tokens", type=number, default=0, help="of every answer")
    parser.add_argument("--repeats", type=number, default=0, help="of every level")
    parser.add_argument("--stages", type=number, default=3)
    levels = f"some of {','.join(LEVEL_NAMES)}; without off there is nothing to take ratios of"
    parser.add_argument("--levels", type=some_of(LEVEL_NAMES), default=tuple(LEVEL_NAMES), help=levels)
    parser.add_argument("--shape", choices=list(SHAPES), default="", help="instead of the small demonstration model")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--sink", action="store_true", help="only run the collector, which drops all spans")
    return parser.parse_args(argv)


if __name__ == "__main__":
    given = parse()
    if given.sink:
        sink()
    else:
        sys.exit(interrupt.run(main(given)))
