"""The gain by grants: `python -m benches.grants [--quick] [--out FILE]`.

The demonstration model over three stages answers streamed chats, drafts off. Pipelines without grants and with grants
of 8 and 32 steps take turns, near their coordinator and with the coordinator's messages delayed by 10 ms each way
(benches/far_serve). A figure is the median of its runs: tokens per second of all streams, from the first request on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benches import far_serve, interrupt, machine, servers
from benches.arguments import number, numbers
from benches.coordinator import Server, ask
from benches.origin import origin
from benches.proxy import delayed
from benches.servers import Setup, relayline
from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.deploy.models.splits import split_for
from relayline.deploy.testing.paths import DEMO_MODEL

N_STAGES, CTX_TOKENS = 3, 512
VARIANTS = {"off": "without", "8": "8 steps", "32": "32 steps"}
DELAYS_MS = {0: "near", 10: "10 ms away"}


@contextlib.asynccontextmanager
async def serving(grant_steps: str, delay_ms: int, n_lanes: int, logs: Path) -> AsyncIterator[Server]:
    """Run three stages and their coordinator."""
    await asyncio.to_thread(logs.mkdir)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    setup = Setup(DEMO_MODEL, N_STAGES, n_lanes, CTX_TOKENS, cores, logs, n_threads=1)
    directory = await asyncio.to_thread(split_for, setup.model, N_STAGES, None, None)
    async with contextlib.AsyncExitStack() as stack:
        addresses: list[str] = []
        for stage in load_pipeline(directory).stages:
            arguments = ["stage", "--artifact", str(directory / stage.file), "--listen", "127.0.0.1:0",
                         "--exit-with-stdin", "--ctx", str(CTX_TOKENS), "--lanes", str(n_lanes),
                         "--threads", "1"]  # fmt: skip
            ready = await stack.enter_async_context(relayline(f"stage-{stage.index}", arguments, setup))
            addresses.append(ready["address"])
        if delay_ms:
            proxies = await stack.enter_async_context(delayed(addresses, delay_ms / 1e3))
            behind = ",".join(f"{each.address}={address}" for each, address in zip(proxies, addresses, strict=True))
            addresses = [each.address for each in proxies]
            stack.enter_context(mock.patch.dict(os.environ, {far_serve.VARIABLE: behind}))
            stack.enter_context(mock.patch.object(servers, "RELAYLINE", (sys.executable, "-m", "benches.far_serve")))
        arguments = ["serve", "--pipeline", str(directory), "--stages", ",".join(addresses), "--http", "127.0.0.1:0",
                     "--no-share", "--draft", "off", "--grant-steps", grant_steps, "--exit-with-stdin"]  # fmt: skip
        ready = await stack.enter_async_context(relayline("serve", arguments, setup))
        yield Server(ready["url"], ready["model"], os.getpid(), ())


async def measure(options: argparse.Namespace, delay_ms: int, logs: Path) -> dict[int, list[float]]:
    """Return tok/s of each variant by the number of streams."""
    found: dict[tuple[str, int], list[float]] = {}
    async with contextlib.AsyncExitStack() as stack:
        up = {}
        for steps in VARIANTS:
            serve = serving(steps, delay_ms, max(options.streams), logs / f"{delay_ms}-{steps}")
            up[steps] = await stack.enter_async_context(serve)
        for server in up.values():  # what is loaded and made once
            await asyncio.to_thread(ask, server, max(options.streams), 16, 1)
        for repeat in range(options.repeats):
            for n_streams in options.streams:
                for steps in sorted(VARIANTS, reverse=bool(repeat % 2)):
                    run = await asyncio.to_thread(ask, up[steps], n_streams, options.tokens, 1)
                    took_s = max(answer["last_ms"] for answer in run.waves[0]) / 1e3
                    found.setdefault((steps, n_streams), []).append(n_streams * options.tokens / took_s)
                    line = f"#{repeat} {DELAYS_MS[delay_ms]}, {n_streams} streams, {VARIANTS[steps]}: "
                    print(f"{line}{found[steps, n_streams][-1]:.0f} tok/s", file=sys.stderr, flush=True)
    return {
        n_streams: [statistics.median(found[steps, n_streams]) for steps in VARIANTS] for n_streams in options.streams
    }


def table_of(found: dict[int, dict[int, list[float]]], n_tokens: int) -> dict[str, Any]:
    """Return the measurement in the form of benches/results, but for machine, date and commit. Pure."""
    rows = []
    for delay_ms, by_streams in found.items():
        for n_streams, tok_s in by_streams.items():
            label = f"{DELAYS_MS[delay_ms]}, {n_streams} {'stream' if n_streams == 1 else 'streams'}"
            rows.append({"label": label, "values": list(map(round, tok_s))})
    return {"corner": f"tok/s, answers of {n_tokens} tokens", "columns": list(VARIANTS.values()), "rows": rows}


async def main(options: argparse.Namespace) -> int:
    """Measure, print, and write the results if asked to."""
    facts = machine.facts()
    with tempfile.TemporaryDirectory(prefix="relayline-bench-") as logs:
        found = {delay_ms: await measure(options, delay_ms, Path(logs)) for delay_ms in DELAYS_MS}
    measured = table_of(found, options.tokens)
    for row in measured["rows"]:
        print(f"{row['label']}: {row['values']}")
    print(f"load {facts['load_average']} -> {os.getloadavg()}")
    if options.out:
        head = origin("benches.grants", options.machine)
        options.out.write_text(json.dumps(head | measured, indent=2) + "\n")
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.grants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short answers, once: checks the bench itself")
    parser.add_argument("--streams", type=numbers, default=(1, 8), help="such as 1,8")
    parser.add_argument("--tokens", type=number, default=0, help="of every answer")
    parser.add_argument("--repeats", type=number, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the measurement to this file")
    parser.add_argument("--machine", default="busy", help="its name in benches/results/machines.json")
    options = parser.parse_args(argv)
    options.tokens = options.tokens or (16 if options.quick else 256)
    options.repeats = options.repeats or (1 if options.quick else 5)
    return options


if __name__ == "__main__":
    sys.exit(interrupt.run(main(parse())))
