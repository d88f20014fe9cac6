"""Every benchmark of the project, one after the other: `python -m benches [--quick | --full] [--only NAME,...]`.

Each runs in its own process, so that none inherits another's memory, threads or open models. Each prints its tables and
writes NAME.json (and plots) to the output directory. `results.json` holds all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benches import machine
from benches.arguments import some_of


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """One benchmark: its module, and its arguments in `make bench` and in a full run."""

    module: str
    takes_out: bool = False  # whether it has --out
    short: tuple[str, ...] | None = ()  # None: only in a full run
    full: tuple[str, ...] = ()
    always: tuple[str, ...] = ()


# 10 minutes on two cores, 15 on slow ones, are enough for every comparison at every number of streams. Answers and the
# long prompt are shorter than in a full run, and the time left decides the number of repeats.
BENCHES: dict[str, Bench] = {
    "envelope": Bench("benches.bench_envelope"),
    "engine": Bench("benches.bench_engine"),
    "hop": Bench("benches.hop", True),
    "quantisation": Bench("benches.quantisation", True, short=("--steps", "3")),
    "contexts": Bench("benches.contexts", True, short=None),
    "windows": Bench("benches.windows", True, short=None),
    "adapters": Bench("benches.adapters", True, short=None),
    "draft_model": Bench("benches.draft_model", True, short=None),
    "cliffs": Bench("benches.cliffs", True, short=None),
    "simulation": Bench("benches.simulation", short=("--quick",)),
    "compare": Bench(
        "benches.compare",
        True,
        short=(
            "--prompt", "8", "--tokens", "12", "--repeats", "3", "--repeat-minutes", "3", "--delay-streams", "1,8",
            "--long-prompt", "256",
        ),
        full=("--sweep",),
    ),
    "hybrid": Bench(
        "benches.compare",
        True,
        short=("--prompt", "8", "--tokens", "12", "--streams", "1,8", "--repeats", "1"),
        full=("--streams", "1,8,32"),
        always=("--hybrid",),
    ),
    "tracing": Bench("benches.tracing", True, short=None),
    "plan_accuracy": Bench("benches.plan_accuracy", True, short=None),
    "hosts": Bench("benches.hosts", True, short=None),
    "layers": Bench("benches.layers", True, short=None),
}  # fmt: skip


def run_one(name: str, options: argparse.Namespace) -> tuple[int, float]:
    """Run one benchmark to its end; returns (exit code, seconds). Its output goes to the terminal, and to NAME.txt."""
    bench = BENCHES[name]
    sized = ("--quick",) if options.quick else bench.full if options.full else bench.short or ()
    command = [sys.executable, "-m", bench.module, *bench.always, *sized]
    if bench.takes_out:
        command += ["--out", str(options.out)]
    print(f"\n=== {name}: {' '.join(command[1:])}", flush=True)
    started_s = time.monotonic()
    with (options.out / f"{name}.txt").open("w") as kept:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        try:
            for line in child.stdout:
                print(line, end="", flush=True)
                kept.write(line)
            code = child.wait()
        except BaseException:
            # The benchmark ends what it started before it exits. Ctrl-C at a terminal has already reached it; a second
            # one does no harm.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            child.send_signal(signal.SIGINT)
            child.wait()
            raise
    return code, time.monotonic() - started_s


def collect(out: Path, names: Sequence[str], took_s: dict[str, float], facts: dict[str, Any]) -> dict[str, Any]:
    """Return the results of all benchmarks of this run."""
    found: dict[str, Any] = {"machine": facts, "took_s": took_s}
    for name in names:
        written, text = out / f"{name}.json", out / f"{name}.txt"
        if written.exists():
            found[name] = json.loads(written.read_text())
        elif text.exists():
            found[name] = text.read_text().splitlines()
    return found


def forget(out: Path, names: Sequence[str]) -> None:
    """Remove the results of earlier runs. When a benchmark fails, an old result must not pass for a new one."""
    for left in ("results.json", *(f"{name}.{kind}" for name in names for kind in ("json", "png", "txt"))):
        (out / left).unlink(missing_ok=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benches", description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="toy models and few points, about 2 minutes on 2 cores")
    size.add_argument("--full", action="store_true", help="longer answers, every part and all repeats: hours")
    parser.add_argument("--only", type=some_of(BENCHES), default=(), help=f"some of {','.join(BENCHES)}")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(argv)
    every = options.quick or options.full
    options.names = [name for name, bench in BENCHES.items() if every or bench.short is not None]
    if options.only:
        options.names = list(options.only)
    return options


def main() -> int:
    """Run the chosen benchmarks; exit code 1 if one of them failed."""
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    forget(options.out, options.names)
    facts = machine.facts()
    took_s: dict[str, float] = {}
    failed: list[str] = []
    for name in options.names:
        if importlib.util.find_spec(BENCHES[name].module) is None:
            print(f"note: {name} is not in this checkout")
            continue
        code, took_s[name] = run_one(name, options)
        if code:
            failed.append(f"{name} (exit code {code})")
    results = collect(options.out, options.names, took_s, facts)
    machine.write_json(options.out / "results.json", results)
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in took_s.items())
    print(f"\n{times}; results in {options.out}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _terminated(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        os.write(2, b"interrupted\n")
        sys.exit(130)
