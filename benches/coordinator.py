"""The coordinator's processor time per token and per request: `python -m benches.coordinator [--quick] [--out FILE]`.

Stages of the demonstration model serve streamed chats over HTTP, drafts off. Their steps sleep until they have taken
as long as on an H200 (benches/slowed), so that a step leaves the processor to the coordinator as a GPU's does. A cheap
client in a separate process sends all requests at once. The clock is the coordinator's own processor time, all its
threads together, in nanoseconds as the kernel counts them. Other work on the host moves it less than the wall clock,
and only upwards: so the least of some runs counts.

A request's cost is that of an answer of one token. A token's is what each further token of a longer answer adds. Its
wall time beside the arithmetic is the time between two tokens of a stream, less one native step of every stage as the
stages themselves count them; the least of some runs counts here too. Where streams go in several groups, it has the
steps of the others.

Several numbers of `--stages` give a table by stages and streams of the figures of a token alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

from rich.console import Console
from rich.table import Table

from benches import interrupt, servers
from benches.arguments import number, numbers
from benches.origin import origin
from benches.servers import Setup, relayline
from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.deploy.models.splits import split_for
from relayline.deploy.testing.paths import DEMO_MODEL
from relayline.deploy.testing.slow_hosts import SLOWED

Found: TypeAlias = "dict[int, dict[str, float]]"  # figures by the number of streams

STEPS_MS = "1:3.1,8:6.3,32:11,64:14"  # of an H200, llama-8b in Q4_0
STAGES, STREAMS, STREAMS_QUICK = (1,), (1, 8, 32, 64, 255), (1, 4)
TOKENS, TOKENS_QUICK = 96, 8
REPEATS, REPEATS_QUICK = 5, 1
REQUESTS = 64  # at least, of one token, in each run
CTX_TOKENS = 256
GOAL_TOKEN_US = 80
GOAL_STEP_MS, GOAL_STAGE_MS = 0.8, 0.5  # of one stream beside its arithmetic: one stage, and each further one


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """The measured coordinator."""

    url: str
    model: str
    pid: int
    stage_pids: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One run of the client: all its answers, wave by wave, and the processor time that they took."""

    waves: Sequence[Sequence[dict[str, float]]]
    cpu_ns: int  # of the coordinator's process
    workers_ns: int  # of the processes that read bodies for it
    admitted_ms: float = 0.0  # of the last wave: from the first request that came until the last one had its lane
    stages_ns: int = 0  # of the stages' processes, arithmetic included
    steps: Sequence[tuple[int, int]] = ()  # of every stage: native steps, and their time in nanoseconds

    @property
    def n_answers(self) -> int:
        """Answers of all waves."""
        return sum(map(len, self.waves))


def cpu_ns(pid: int) -> int:
    """Return a process's processor time, all threads together, those that have ended left out."""
    times = [path.read_text().split()[0] for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(map(int, times))


def descendants(pid: int) -> list[int]:
    """Return the processes that this one has started, and those that they have."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


@contextlib.asynccontextmanager
async def serving(
    n_stages: int, n_lanes: int, steps_ms: str, flags: Sequence[str], log_dir: Path
) -> AsyncIterator[Server]:
    """Run slowed stages and their coordinator."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    setup = Setup(DEMO_MODEL, n_stages, n_lanes, CTX_TOKENS, cores, log_dir, n_threads=1)
    directory = await asyncio.to_thread(split_for, setup.model, n_stages, None, None)
    slowed = {"SLOWED_STEPS_MS": steps_ms, "PYTHONPATH": str(SLOWED)}
    async with contextlib.AsyncExitStack() as stack:
        addresses: list[str] = []
        pids: list[int] = []
        for at, stage in enumerate(load_pipeline(directory).stages):
            before = set(descendants(os.getpid()))
            arguments = ["stage", "--artifact", str(directory / stage.file), "--listen", "127.0.0.1:0",
                         "--exit-with-stdin", "--ctx", str(CTX_TOKENS), "--lanes", str(n_lanes),
                         "--threads", "1"]  # fmt: skip
            with mock.patch.dict(os.environ, slowed):
                ready = await stack.enter_async_context(relayline(f"stage-{at}", arguments, setup))
            addresses.append(ready["address"])
            pids.append(min(set(descendants(os.getpid())) - before))
        before = set(descendants(os.getpid()))
        arguments = ["serve", "--pipeline", str(directory), "--stages", ",".join(addresses), "--http", "127.0.0.1:0",
                     "--no-share", "--draft", "off", "--exit-with-stdin", *flags]  # fmt: skip
        ready = await stack.enter_async_context(relayline("serve", arguments, setup))
        # The command's own process comes first; the fork server of its body workers is a child of it.
        pid = min(set(descendants(os.getpid())) - before)
        yield Server(ready["url"], ready["model"], pid, pids)


def ask(server: Server, n_streams: int, n_tokens: int, n_waves: int) -> Run:
    """Run the client once. Raises CalledProcessError where an answer is incomplete."""
    name = f"bench-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "benches.sse_client", server.url, server.model]
    command += [*(str(each) for each in (n_streams, n_tokens, n_waves)), name]
    workers, steps = descendants(server.pid), steps_of(server.url)
    before_ns, workers_ns, stages_ns = (sum(map(cpu_ns, pids)) for pids in ([server.pid], workers, server.stage_pids))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after_ns = cpu_ns(server.pid)
    waves, taken_ns = json.loads(done.stdout), sum(map(cpu_ns, workers)) - workers_ns
    stages_ns = sum(map(cpu_ns, server.stage_pids)) - stages_ns
    done_steps = [
        (n - n_before, busy_ns - busy_before_ns)
        for (n, busy_ns), (n_before, busy_before_ns) in zip(steps_of(server.url), steps, strict=True)
    ]
    ids = [f"{name}-{n_waves - 1}-{stream}" for stream in range(n_streams)] if n_tokens == 1 else []
    return Run(waves, after_ns - before_ns, taken_ns, admitted_ms(server.url, ids), stages_ns, done_steps)


def steps_of(url: str) -> list[tuple[int, int]]:
    """Return of every stage how many native steps it has made, and their time in nanoseconds."""
    with urllib.request.urlopen(f"{url}/v1/pipeline") as answer:
        return [(stage["steps"], stage["busy_ns"]) for stage in json.load(answer)["stages"]]


def admitted_ms(url: str, ids: Sequence[str]) -> float:
    """Return the time from the first of these requests that came until the last one had its lane."""
    came_ms, started_ms = [], []
    for each in ids:
        with urllib.request.urlopen(f"{url}/v1/traces/{each}") as answer:
            life = json.load(answer)
        (stream,) = life["streams"]
        came_ms.append(life["received_unix_ms"])
        started_ms.append(came_ms[-1] + stream["admitted_at_ms"] + stream["queue_ms"])
    return max(started_ms) - min(came_ms) if ids else 0.0


def decode_ms(short: Run, long: Run) -> float:
    """Return the time of one native step of every stage, summed: of the steps that only the longer answers took. Pure.

    The rest are those that read the prompts, with which the shorter answers end.
    """
    found = 0.0
    for (n_short, short_ns), (n_long, long_ns) in zip(short.steps, long.steps, strict=True):
        n_waves = len(short.waves)
        found += (long_ns - short_ns / n_waves) / max(1.0, n_long - n_short / n_waves) / 1e6
    return found


def figures(short: Sequence[Run], long: Sequence[Run], n_tokens: int) -> dict[str, float]:
    """Reduce the runs of one number of streams: answers of one token, and of `n_tokens`. Pure.

    Processor times, and the wall time of a token beside the arithmetic, are the least of the runs, other wall times the
    medians.
    """
    request_us = min(run.cpu_ns / run.n_answers for run in short) / 1e3
    answer_us = min(run.cpu_ns / run.n_answers for run in long) / 1e3
    beside_ms = [
        statistics.fmean((each["last_ms"] - each["first_ms"]) / (n_tokens - 1) for wave in run.waves for each in wave)
        - decode_ms(brief, run)
        for brief, run in zip(short, long, strict=False)
    ]
    lasts_ms = [max(each["last_ms"] for each in wave) for run in long for wave in run.waves]
    firsts_ms = [max(each["first_ms"] for each in wave) for run in short for wave in run.waves]
    n_streams = len(long[0].waves[0])
    return {
        "token_us": (answer_us - request_us) / (n_tokens - 1),
        "request_us": request_us,
        "worker_us": min(run.workers_ns / run.n_answers for run in short) / 1e3,
        "whole_us": answer_us / n_tokens,
        "stages_us": min(run.stages_ns / run.n_answers for run in long) / n_tokens / 1e3,
        "step_ms": min(beside_ms),
        "step_mid_ms": statistics.median(beside_ms),
        "tok_s": n_streams * n_tokens / statistics.median(lasts_ms) * 1e3,
        "admitted_ms": statistics.median(run.admitted_ms for run in short),
        "started_ms": statistics.median(firsts_ms),
    }


async def measure(options: argparse.Namespace, n_stages: int, log_dir: Path) -> list[Found]:
    """Measure each number of streams; the repeats take turns over them, and over both coordinators if there are two."""
    runs: list[dict[int, tuple[list[Run], list[Run]]]] = []
    async with contextlib.AsyncExitStack() as stack:
        servers_up: list[Server] = []
        for at, checkout in enumerate([None, options.beside] if options.beside else [None]):
            logs = log_dir / f"{n_stages}-{at}"
            logs.mkdir()
            command = (str(checkout / ".venv/bin/python"), *servers.RELAYLINE[1:]) if checkout else servers.RELAYLINE
            with mock.patch.object(servers, "RELAYLINE", command):
                serve = serving(n_stages, max(options.streams), options.steps_ms, options.flags, logs)
                servers_up.append(await stack.enter_async_context(serve))
            runs.append({n_streams: ([], []) for n_streams in options.streams})
        for server in servers_up:
            for n_streams in options.streams:  # what is loaded and made once
                await asyncio.to_thread(ask, server, n_streams, 2, 1)
        for repeat in range(options.repeats):
            for n_streams in options.streams:
                for at in sorted(range(len(servers_up)), reverse=bool(repeat % 2)):
                    short, long = runs[at][n_streams]
                    n_waves = -(-REQUESTS // n_streams)
                    short.append(await asyncio.to_thread(ask, servers_up[at], n_streams, 1, n_waves))
                    long.append(await asyncio.to_thread(ask, servers_up[at], n_streams, options.tokens, 1))
                    token_us = long[-1].cpu_ns / n_streams / options.tokens / 1e3
                    line = f"#{repeat}.{at} {n_stages} stages, {n_streams:3} streams: {token_us:6.1f} us a token"
                    print(line, file=sys.stderr, flush=True)
    return [
        {n_streams: figures(short, long, options.tokens) for n_streams, (short, long) in each.items()} for each in runs
    ]


LABELS = {
    "token_us": ("processor time a token, us", 0, f"{GOAL_TOKEN_US} from 32 streams on"),
    "whole_us": ("the same with the request's own, us", 0, ""),
    "request_us": ("processor time a request, us", 0, ""),
    "worker_us": ("the same of the processes that read bodies, us", 0, ""),
    "step_ms": ("a step's wall time beside its arithmetic, ms", 2, ""),
    "admitted_ms": ("all at once: the last one is admitted after, ms", 0, ""),
    "started_ms": ("and has its first token after, ms", 0, ""),
    "tok_s": ("tok/s", 0, ""),
}
LABELS_BY_STAGES = {
    "token_us": ("the coordinator's processor time a token, us", 0),
    "stages_us": ("the stages' own, arithmetic included, us", 0),
    "step_ms": ("a token's wall time beside the arithmetic, ms", 2),
    "step_mid_ms": ("the same, median of the runs, ms", 2),
}


def rows_of(
    found: Sequence[Found], labels: dict[str, tuple[str, int, str]], suffix: str = "", before: str = ""
) -> list[dict[str, Any]]:
    """Return the rows of these figures: of this checkout, and perhaps of another one, which counts as before. Pure.

    `suffix` goes to each id, and `before` stands before each label.
    """
    rows = []
    for name, (label, digits, goal) in labels.items():
        for each, ending, when in zip(found, ("", "_before"), ("", ", before"), strict=False):
            values = [round(one[name], digits or None) for one in each.values()]
            own_goal = {"goal": goal} if goal and not ending else {}
            row = {"id": f"{name}{suffix}{ending}", "label": f"{before}{label}{when}", "values": values}
            rows.append(row | own_goal)
    return rows


def table_of(found: dict[int, list[Found]], n_tokens: int) -> dict[str, Any]:
    """Return the measurement in the form of benches/results, but for machine, date and commit. Pure.

    `found`: by the number of stages, what `rows_of` takes. Of several numbers only a token's figures are shown.
    """
    whose = "coordinator, " if len(found) == 1 else ""
    if len(found) == 1:
        rows = [row for each in found.values() for row in rows_of(each, LABELS)]
    else:
        rows = []
        for n_stages, each in found.items():
            before = f"{n_stages} {'stage' if n_stages == 1 else 'stages'}: "
            goal = f"{GOAL_STEP_MS + GOAL_STAGE_MS * (n_stages - 1):.1f} at one stream"
            labels = {name: (*label, goal if name == "step_ms" else "") for name, label in LABELS_BY_STAGES.items()}
            rows += rows_of(each, labels, f"_{n_stages}", before)
    columns = [str(n_streams) for n_streams in next(iter(found.values()))[0]]
    return {"corner": f"{whose}answers of {n_tokens} tokens; streams", "columns": columns, "rows": rows}


async def main(options: argparse.Namespace) -> int:
    """Measure, print, and write the results if asked to."""
    with tempfile.TemporaryDirectory(prefix="relayline-bench-") as logs:
        each = {n_stages: await measure(options, n_stages, Path(logs)) for n_stages in options.stages}
    found = table_of(each, options.tokens)
    table = Table(str(found["corner"]), *found["columns"], "goal")
    for row in found["rows"]:
        table.add_row(row["label"], *map(str, row["values"]), row.get("goal", ""))
    Console().print(table)
    if options.out:
        head = origin("benches.coordinator", options.machine)
        options.out.write_text(json.dumps(head | found, indent=2) + "\n")
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.coordinator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few streams, once: checks the bench itself")
    parser.add_argument("--stages", type=numbers, default=STAGES, help="numbers of them, such as 1,2,3; default 1")
    parser.add_argument("--streams", type=numbers, default=(), help="such as 1,8,64")
    parser.add_argument("--tokens", type=number, default=0, help="of every answer")
    parser.add_argument("--repeats", type=number, default=0)
    parser.add_argument("--steps-ms", default=STEPS_MS, help=f"of a step by its rows; default {STEPS_MS}")
    parser.add_argument("--flags", type=str.split, default=[], help="further flags of `relayline serve`, in one word")
    beside = "another checkout, with an environment of its own, that is measured in turns: what was before"
    parser.add_argument("--beside", type=Path, help=beside)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the measurement to this file")
    parser.add_argument("--machine", default="busy", help="its name in benches/results/machines.json")
    options = parser.parse_args(argv)
    options.streams = options.streams or (STREAMS_QUICK if options.quick else STREAMS)
    options.tokens = max(2, options.tokens or (TOKENS_QUICK if options.quick else TOKENS))
    options.repeats = options.repeats or (REPEATS_QUICK if options.quick else REPEATS)
    return options


if __name__ == "__main__":
    sys.exit(interrupt.run(main(parse())))
