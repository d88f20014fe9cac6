"""The speed of reading a prompt alone, beside an unsplit llama-server: `python -m benches.reading [--quick]`.

`relayline up` and llama-server run in turns on the same cores, each with one lane. Each reads prompts of random tokens,
one at a time, none of which begins like another. The figure is the tokens of a prompt divided by the time to the first
token of its answer, as the client sees it. Medians over the rounds. llama-server is built as llama.cpp ships, by the
first bench that needs it (benches/peers.py).

A round of the default lengths takes about 7 minutes with two stages on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

from benches import interrupt
from benches.arguments import number, numbers
from benches.models import MIXES, SHAPES, model
from benches.origin import origin
from benches.peers import Peers, PeersUnavailableError, build_peers
from benches.reference import prompts_for
from benches.servers import Setup, llama_server, relayline_up
from relayline.deploy.cli import load
from relayline.deploy.cli.load import Request, Target

Speeds: TypeAlias = "dict[int, list[float]]"  # tokens of the prompt -> tok/s of each round

PROMPTS, PROMPTS_QUICK = (256, 1_024, 4_000, 8_000), (32, 64)
REPEATS, REPEATS_QUICK = 2, 1
WARM_UP_TOKENS = 64
SPARE_TOKENS = 16  # of a lane, beside the longest prompt
GOALS = {2: "1", 4: "1.6"}  # of unsplit, by stages


async def read(target: Target, prompts: Sequence[Sequence[int]], found: Speeds) -> None:
    """Read these prompts one after the other, and add their speeds. Raises RuntimeError where an answer fails."""
    async with load.client() as session:
        for prompt in prompts:
            request = await load.complete(session, target, prompt, Request(0, 1, time.monotonic_ns()))
            if not request.is_complete:
                raise RuntimeError(f"a prompt of {len(prompt)} tokens was not answered: {request.error or 'no token'}")
            found.setdefault(len(prompt), []).append(len(prompt) / (request.token_ns[0] - request.due_ns) * 1e9)


async def measure(options: argparse.Namespace, peers: Peers, log_dir: Path) -> dict[str, Speeds]:
    """Start both servers in turns, each as often as there are rounds; the turns change their order."""
    shape, cores = SHAPES[options.shape], tuple(sorted(os.sched_getaffinity(0)))
    ctx_tokens = max(options.prompts) + SPARE_TOKENS
    setup = Setup(model(shape, options.type), options.stages, 1, ctx_tokens, cores, log_dir)
    found: dict[str, Speeds] = {"ours": {}, "unsplit": {}}
    for repeat in range(options.repeats):
        lengths = (WARM_UP_TOKENS, *options.prompts)
        prompts = [
            prompts_for(1, n_tokens, shape.n_vocab, seed=100 * repeat + at)[0] for at, n_tokens in enumerate(lengths)
        ]
        for name in sorted(found, reverse=bool(repeat % 2)):
            label = f"{name}-{repeat}"
            async with contextlib.AsyncExitStack() as stack:
                if name == "ours":
                    target = await stack.enter_async_context(relayline_up(label, [], setup))
                else:
                    target = await stack.enter_async_context(llama_server(label, [], setup, peers, len(cores)))
                await read(target, prompts[:1], {})
                await read(target, prompts[1:], found[name])
            latest = ", ".join(f"{n_tokens:,}: {speeds[-1]:.1f}" for n_tokens, speeds in found[name].items())
            print(f"{label}, tok/s: {latest}", file=sys.stderr, flush=True)
    return found


def table_of(found: Mapping[str, Speeds], model_name: str, n_stages: int, n_threads: tuple[int, int]) -> dict[str, Any]:
    """Return the measurement in the form of benches/results, but for machine, date and commit. Pure.

    n_threads: of one stage, and of llama-server.
    """
    lengths = list(found["ours"])
    labels = {
        "ours": f"{_counted(n_stages, 'stage')} of {_counted(n_threads[0], 'thread')}",
        "unsplit": f"unsplit `llama-server`, {_counted(n_threads[1], 'thread')}",
    }
    rows: list[dict[str, Any]] = [
        {"id": name, "label": label, "values": [round(statistics.median(found[name][each]), 1) for each in lengths]}
        for name, label in labels.items()
    ]
    goal = {"goal": f"{GOALS[n_stages]} at 256 to 8,000"} if n_stages in GOALS else {}
    rows.append({"label": "ratio", "divide": ["ours", "unsplit"]} | goal)
    columns = [f"{n_tokens:,}" for n_tokens in lengths]
    return {"corner": f"{model_name}, tok/s; tokens of the prompt", "columns": columns, "rows": rows}


def _counted(count: int, noun: str) -> str:
    words = {1: "one", 2: "two", 3: "three", 4: "four"}
    return f"{words.get(count, count)} {noun}{'s' if count > 1 else ''}"


def show(found: Mapping[str, Any]) -> None:
    """Print the measurement."""
    table = Table(str(found["corner"]), *found["columns"])
    ours, unsplit = (row["values"] for row in found["rows"][:2])
    for row in found["rows"][:2]:
        table.add_row(row["label"], *map(str, row["values"]))
    table.add_row("ratio", *(f"{a / b:.2f}" for a, b in zip(ours, unsplit, strict=True)))
    Console().print(table)


async def main(options: argparse.Namespace) -> int:
    """Measure, print, and write the results if asked to."""
    try:
        peers = build_peers(len(os.sched_getaffinity(0)))
    except PeersUnavailableError as error:
        print(f"llama-server cannot be had: {error}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="relayline-bench-") as logs:
        speeds = await measure(options, peers, Path(logs))
    n_cores = len(os.sched_getaffinity(0))
    threads = max(1, n_cores // options.stages), n_cores
    found = table_of(speeds, f"{options.shape} {options.type.upper()}", options.stages, threads)
    show(found)
    if options.out:
        head = origin("benches.reading", options.machine)
        options.out.write_text(json.dumps(head | found, indent=2) + "\n")
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.reading", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a toy model, short prompts, once: checks the bench itself"
    )
    parser.add_argument("--shape", choices=list(SHAPES), default=None)
    parser.add_argument("--type", choices=list(MIXES), default="q4_0")
    parser.add_argument("--stages", type=number, default=2)
    parser.add_argument("--prompts", type=numbers, default=(), help="tokens of each, such as 256,1024")
    parser.add_argument("--repeats", type=number, default=0, help="rounds")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the measurement to this file")
    parser.add_argument("--machine", default="avx512", help="its name in benches/results/machines.json")
    options = parser.parse_args(argv)
    options.shape = options.shape or ("toy" if options.quick else "llama-1b")
    options.prompts = options.prompts or (PROMPTS_QUICK if options.quick else PROMPTS)
    options.repeats = options.repeats or (REPEATS_QUICK if options.quick else REPEATS)
    return options


if __name__ == "__main__":
    sys.exit(interrupt.run(main(parse())))
