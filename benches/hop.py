"""The budget of one hop: from "rows ready at stage i" to "native step starts at stage i+1". `python -m benches.hop`

Two stage processes and a coordinator over loopback, with everything real except the engine: `stage.process.serve` with
its gRPC server, decode thread, batcher, executor and envelopes; the engine computes nothing and records the time. A
second run has an engine that reads enough memory in each step to fill the caches. After such a step, as after a real
one, caches are cold, and every part takes longer. CLOCK_MONOTONIC is the same in all processes of a host, so stamps of
both ends can be subtracted.

The parts, which add up to the hop:

* encode: from rows out of the engine to the sealed envelope, on the decode thread of stage i.
* send: until the link's `send` is entered, on the event loop of stage i.
* wire: until the event loop of stage i+1 has the message. gRPC is on both ends, over loopback.
* receive: until the message is checked and turned into frames.
* queue: until the batcher takes the frames on the decode thread.
* assembly: until rows are converted and placed, and the native step begins.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benches import interrupt, machine
from benches.arguments import number
from benches.hop_floor import one_way_us, wake_us
from benches.hop_stage import N_VOCAB, PIPELINE_ID, SOURCE_SHA256, Stamps
from relayline.coordinator.engine.connection import Connection, EpochEvents, EpochTerms, Peers
from relayline.coordinator.model.pipeline_file import ArtifactFile, PipelineFile, Source, StageFile
from relayline.deploy.cli.load import percentile
from relayline.deploy.machine.cores import shares, write_cores
from relayline.wire.common.errors import RelaylineError
from relayline.wire.envelopes.buffers import with_extras
from relayline.wire.envelopes.dtypes import DTYPE_F16
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

PARTS = ("encode", "send", "wire", "receive", "queue", "assembly")
ROWS = (1, 8, 32)
WIDTH = 4_096
GOAL_ROWS, GOAL_P50_US = 8, 250.0
SWEPT_BYTES = 32 << 20  # more than a core's caches hold
WARM_STEPS = 30  # connections, caches and buffers settle
ROUTE, EPOCH = 1, 1


# --- the coordinator's side -------------------------------------------------------------------------------------------


def _pipeline(width: int) -> PipelineFile:
    stages = tuple(StageFile(index, "hop.gguf", 0, "", index, index + 1) for index in range(2))
    source, tokenizer = Source((), SOURCE_SHA256), ArtifactFile("", 0, "")
    return PipelineFile(1, PIPELINE_ID, source, "none", "hop", 2, width, N_VOCAB, 0, (1,), tokenizer, stages)


class Driver:
    """Sends one token of each of n sessions, waits for the n samples, sends the next."""

    def __init__(self) -> None:
        self.connection: Connection
        self._sequence = 0
        self._answered = 0
        self._wanted = 0
        self._done = asyncio.Event()
        self._failure: str | None = None

    def on_return(self, message: pb.ReturnResponse) -> None:
        """Count samples; a fault ends the run."""
        self._answered += len(message.samples)
        for fault in message.faults:
            self._failure = f"stage {fault.stage_index}: {fault.message}"
        if self._answered >= self._wanted or self._failure:
            self._done.set()

    def on_lost(self, error: RelaylineError) -> None:
        """A lost stage ends the run."""
        self._failure = error.message
        self._done.set()

    async def _send(self, flags: int, n_sessions: int, first_session: int, position: int) -> None:
        link, opens = self.connection.link, bool(flags & Flag.OPEN)
        buffer = link.pool.lease(n_sessions, 0 if opens else n_sessions)
        buffer.payload[:] = 0
        records, now_ns = buffer.frames, time.monotonic_ns()
        records["session_id"] = range(first_session, first_session + n_sessions)
        records["epoch"], records["position"], records["n_rows"] = EPOCH, position, int(not opens)
        records["flags"], records["argument"], records["enqueued_ns"] = flags, 0, now_ns
        self._sequence += 1
        buffer.seal(EPOCH, self._sequence, now_ns)
        options = [pb.SessionOptions(temperature=0.0, top_p=1.0, n_logprobs=-1)] * (n_sessions if opens else 0)
        await link.send(buffer, with_extras(buffer, None, options))

    async def steps(self, n_sessions: int, first_session: int, n_steps: int) -> None:
        """Open sessions, run lock-step decode steps, close them. Raises RuntimeError when a stage failed."""
        await self._send(int(Flag.OPEN), n_sessions, first_session, 0)
        for position in range(n_steps):
            self._answered, self._wanted = 0, n_sessions
            self._done.clear()
            if not self._failure:  # a fault between two steps would be cleared, and the wait would not end
                await self._send(int(Flag.WANTS_SAMPLE), n_sessions, first_session, position)
                await self._done.wait()
            if self._failure:
                raise RuntimeError(self._failure)
        for session in range(first_session, first_session + n_sessions):
            await self._close(session)

    async def _close(self, session: int) -> None:
        link = self.connection.link
        buffer, now_ns = link.pool.lease(1, 0), time.monotonic_ns()
        records = buffer.frames
        records["session_id"], records["epoch"], records["position"] = session, EPOCH, 0
        records["n_rows"], records["flags"], records["argument"] = 0, int(Flag.CLOSE), 0
        records["enqueued_ns"] = now_ns
        self._sequence += 1
        buffer.seal(EPOCH, self._sequence, now_ns)
        await link.send(buffer, with_extras(buffer, None, []))


@asynccontextmanager
async def _stage(index: int, width: int, out: Path, swept_bytes: int) -> AsyncIterator[str]:
    """Run one stage process, on its share of the cores, as `relayline up` gives it one; yields its address."""
    cores = (shares([1, 1]) or [(), ()])[index]
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benches.hop_stage", str(index), str(width), str(out), str(swept_bytes),
        *([write_cores(cores)] if cores else []),
        stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        line = (await child.stdout.readline()).decode().strip()
        if not line:
            raise RuntimeError(f"stage {index} of the hop bench did not start")
        yield line
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()


async def measure(width: int, rows: tuple[int, ...], n_steps: int, swept_bytes: int = 0) -> list[dict[str, Any]]:
    """Return one entry per number of rows: bytes, and p50/p99 in microseconds of every part and of the whole.

    `swept_bytes` go through the caches in every step, as weights do in a real one.
    """
    with tempfile.TemporaryDirectory() as scratch:
        outs = [Path(scratch) / f"{index}.json" for index in range(2)]
        async with (
            _stage(0, width, outs[0], swept_bytes) as first,
            _stage(1, width, outs[1], swept_bytes) as second,
        ):
            driver = Driver()
            driver.connection = await Connection.open(
                Peers([first, second]),
                _pipeline(width),
                EpochTerms(ROUTE, EPOCH, DTYPE_F16),
                EpochEvents(driver.on_return, driver.on_lost),
            )
            try:
                session = 1
                for n_rows in rows:
                    await driver.steps(n_rows, session, WARM_STEPS + n_steps)
                    session += n_rows
            finally:
                await driver.connection.close()
        sides = [[Stamps(*entry) for entry in json.loads(out.read_text())] for out in outs]
    if len(sides[0]) != len(sides[1]):
        raise RuntimeError(f"{len(sides[0])} steps at stage 0, {len(sides[1])} at stage 1: batches were regrouped")
    pairs = iter(list(zip(*sides, strict=True)))
    return [_figures(n_rows, _after_warming(pairs, WARM_STEPS, n_steps), width) for n_rows in rows]


def _after_warming(pairs: Iterator[tuple[Stamps, Stamps]], n_warm: int, n_steps: int) -> list[tuple[Stamps, Stamps]]:
    taken = [next(pairs) for _ in range(n_warm + n_steps)]
    return taken[n_warm:]


def parts_us(sender: Stamps, receiver: Stamps) -> dict[str, float]:
    """Return the parts of one hop in microseconds, in order; they add up to the whole."""
    moments = (
        sender.ready_ns, sender.sealed_ns, sender.send_ns,
        receiver.parsed_ns, receiver.pushed_ns, receiver.taken_ns, receiver.begin_ns,
    )  # fmt: skip
    return {name: (later - earlier) / 1e3 for name, earlier, later in zip(PARTS, moments, moments[1:], strict=False)}


def _figures(n_rows: int, pairs: list[tuple[Stamps, Stamps]], width: int) -> dict[str, Any]:
    if any(sender.n_rows != n_rows or receiver.n_rows != n_rows for sender, receiver in pairs):
        raise RuntimeError(f"a step did not hold the {n_rows} rows that were sent together")
    split = [parts_us(sender, receiver) for sender, receiver in pairs]
    whole = [sum(parts.values()) for parts in split]
    return {
        "rows": n_rows,
        "width": width,
        "n_steps": len(pairs),
        "message_bytes": pairs[-1][0].message_bytes,
        "payload_bytes": n_rows * width * 2,
        "p50_us": {part: percentile([one[part] for one in split], 0.5) for part in PARTS},
        "p99_us": {part: percentile([one[part] for one in split], 0.99) for part in PARTS},
        "total_p50_us": percentile(whole, 0.5),
        "total_p99_us": percentile(whole, 0.99),
    }


def show(found: list[dict[str, Any]], title: str) -> None:
    """Print one line per number of rows."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(title=title, title_justify="left")
    for heading in ("rows x width", "bytes", *PARTS, "whole"):
        table.add_column(heading, justify="right")
    for entry in found:
        cells = [f"{entry['p50_us'][part]:.0f} / {entry['p99_us'][part]:.0f}" for part in PARTS]
        whole = f"{entry['total_p50_us']:.0f} / {entry['total_p99_us']:.0f}"
        table.add_row(f"{entry['rows']} x {entry['width']}", str(entry["message_bytes"]), *cells, whole)
    console.print(table)


async def _report(width: int, n_steps: int, out: Path) -> int:
    facts = machine.facts()
    found = await measure(width, ROWS, n_steps)
    cold = await measure(width, ROWS, max(50, n_steps // 10), SWEPT_BYTES)
    bare_us = await one_way_us([entry["message_bytes"] for entry in found], max(50, n_steps // 5))
    floor = {"grpc_one_way_us": bare_us, "wake_us": wake_us(max(50, n_steps // 5))}
    results = {
        "machine": facts, "goal": {"rows": GOAL_ROWS, "total_p50_us": GOAL_P50_US}, "figures": found, "floor": floor,
        "swept_bytes": SWEPT_BYTES, "figures_cold": cold,
    }  # fmt: skip
    machine.write_json(out / "hop.json", results)
    show(found, "one hop, microseconds p50 / p99")
    print(f"goal: p50 of the whole at {GOAL_ROWS} rows x {WIDTH} at most {GOAL_P50_US:.0f} us")
    show(cold, f"behind steps that read {SWEPT_BYTES >> 20} MiB, as weights go through the caches of real ones")
    print("\n".join(floor_lines(found, bare_us)))
    print(f"waking a thread: {floor['wake_us']:.0f} us")
    return 0


def floor_lines(found: list[dict[str, Any]], bare_us: dict[int, float]) -> list[str]:
    """Return the time of a bare stream next to the hop's `wire`, with a warning if it is not a lower bound."""
    medians = ", ".join(
        f"{bare_us[entry['message_bytes']]:.0f} us for {entry['message_bytes']} bytes ({entry['p50_us']['wire']:.0f})"
        for entry in found
    )
    lines = [f"a bare grpc.aio stream takes, one way, p50 (the hop's wire): {medians}"]
    above = [entry["rows"] for entry in found if bare_us[entry["message_bytes"]] > entry["p50_us"]["wire"]]
    if above:
        rows = ", ".join(map(str, above))
        lines.append(
            f"note: at {rows} rows that exceeds the hop's own wire and is no lower bound: measure on a quiet machine"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write hop.json."""
    parser = argparse.ArgumentParser(prog="python -m benches.hop", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--width", type=number, default=WIDTH)
    parser.add_argument("--steps", type=number, default=0, help="per number of rows [default: 2000, quick 200]")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(argv)
    n_steps = options.steps or (200 if options.quick else 2_000)
    # Under uvloop like every process of relayline: the floor's client runs in this one.
    sys.exit(interrupt.run(_report(options.width, n_steps, options.out), uvloop.new_event_loop))


if __name__ == "__main__":
    main()
