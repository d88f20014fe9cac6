"""relayline on one GPU: `python -m benches.gpu`. Optional, since nothing of the project may depend on a GPU.

1. llama.cpp is built with CUDA for one architecture into the cache (`--installed` takes the installed
   llama-cpp-python instead, `--backend cpu` builds without CUDA, which checks this bench).
2. A step of a whole model (llama-8b, Q4_0, random weights) by its rows, 1 to 256: the cost curve, and the engine beside
   `llama-batched-bench` (goal: within 3 %).
3. Two stages as two processes on that GPU, 1 to 64 streams over HTTP, beside batching off and an unsplit llama-server.

Without a network: `--sources` names the source distribution of the pinned llama-cpp-python.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benches import compare, interrupt, machine, plot
from benches.arguments import number, numbers, some_of
from benches.gpu import pack, short, steps
from benches.gpu.build import BACKENDS, at, build, preloaded
from benches.models import MIXES, SHAPES, model
from benches.peers import LIBRARIES, Kernels, Peers, PeersUnavailableError, find_peers
from relayline.deploy.launch.splits import split_for
from relayline.stage.engine import ggml
from relayline.wire.common.errors import RelaylineError

STREAMS = (1, 2, 4, 8, 16, 32, 64)
BEGAN = "RELAYLINE_GPU_BENCH_BEGAN_NS"  # when the run began, on the monotonic clock
QUICK_ROWS, QUICK_STREAMS = (1, 4), (1, 2)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a toy model and few points: checks the bench itself")
    parser.add_argument("--backend", choices=list(BACKENDS), default="cuda", help="what llama.cpp is built with")
    parser.add_argument("--arch", default="native", help="CUDA architecture to build for, such as 90 (default: native)")
    parser.add_argument("--sources", type=Path, help="source distribution of llama-cpp-python, instead of downloading")
    parser.add_argument("--jobs", type=number, default=len(os.sched_getaffinity(0)), help="compilers at once")
    parser.add_argument("--installed", action="store_true", help="build nothing: measure the installed llama.cpp")
    parser.add_argument(
        "--built", type=Path, help="directory of llama.cpp's programs and libraries, instead of building"
    )
    parser.add_argument("--build-only", action="store_true")
    short_mode = "a GPU that is at hand for so many minutes, the build included: see benches/gpu/short.py"
    parser.add_argument("--minutes", type=float, default=0.0, help=short_mode)
    parser.add_argument("--parts", type=some_of(short.PARTS), default=(), help=f"some of {','.join(short.PARTS)}")
    packed = (
        "leave in this directory what a host without a network needs for --minutes, and end: see benches/gpu/pack.py"
    )
    parser.add_argument("--pack", type=Path, help=packed)
    has = "packages that the host has already, such as numpy,uvloop, for --pack"
    parser.add_argument("--host-has", type=lambda text: text.split(","), default=[], help=has)
    parser.add_argument("--shape", choices=list(SHAPES), default=None)
    parser.add_argument("--type", choices=list(MIXES), default="q4_0")
    parser.add_argument("--rows", type=numbers, default=(), help="of a step, such as 1,8,32")
    parser.add_argument("--streams", type=numbers, default=(), help="such as 1,8,64")
    parser.add_argument("--tokens", type=number, default=0, help="of every answer")
    parser.add_argument("--repeats", type=number, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(argv)
    options.shape = options.shape or ("toy" if options.quick else "llama-8b")
    options.rows = options.rows or (QUICK_ROWS if options.quick else steps.ROWS)
    if not options.minutes:
        options.streams = options.streams or (QUICK_STREAMS if options.quick else STREAMS)
    options.repeats = options.repeats or (1 if options.quick else 3)
    return options


def programs(options: argparse.Namespace) -> Peers | None:
    """Return llama.cpp's programs for this run. Does not return where its libraries are not those of this process:
    then the bench starts anew with them.
    """
    if options.installed and not options.built:
        # What was built for a processor says nothing about a GPU.
        return None if _gpus() else find_peers(Kernels.OURS)
    built = at(options.built) if options.built else build_with_model(options)
    if os.environ.get(LIBRARIES) != str(built.directory) and not options.build_only:
        os.environ[LIBRARIES] = str(built.directory)
        os.environ |= preloaded(options.backend)
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "benches.gpu", *sys.argv[1:]])
    return built


def build_with_model(options: argparse.Namespace) -> Peers:
    """Build, and in a short run write the random model meanwhile."""
    if not options.minutes:
        return build(options.backend, options.arch, options.jobs, options.sources)
    writing = subprocess.Popen(
        [sys.executable, "-m", "benches.models", "--shape", options.shape, "--type", options.type],
        stdout=subprocess.DEVNULL,
    )
    try:
        return build(options.backend, options.arch, options.jobs, options.sources)
    finally:
        writing.wait()


def _gpus() -> list[str]:
    return [device for device in ggml.devices() if not device.startswith(("CPU", "BLAS"))]


def by_rows(options: argparse.Namespace, peers: Peers | None, gpu_layers: int) -> list[dict[str, float]]:
    """Measure steps of the whole model."""
    path = model(SHAPES[options.shape], options.type)
    artifact = split_for(path, 1, None, None) / "stage-0.gguf"
    n_threads = len(os.sched_getaffinity(0))
    command = steps.bare_command(peers, path, options.rows, n_threads, gpu_layers) if peers else None
    with steps.open_engine(artifact, max(options.rows), n_threads, gpu_layers) as engine:
        return steps.measure(engine, command, options.rows, options.repeats)


def show(entries: Sequence[dict[str, float]]) -> None:
    """Print the steps as a table."""
    table = Table(title=f"a step of the whole model (goal: ratio <= {steps.GOAL_RATIO})", title_justify="left")
    columns = ("rows", "engine_ms", "row_ms", "tok_s", "bare_ms", "ratio")
    for name in columns:
        table.add_column(name, justify="right")
    for each in entries:
        table.add_row(*(f"{each[name]:.3f}".rstrip("0").rstrip(".") if name in each else "-" for name in columns))
    Console().print(table)


def draw(entries: Sequence[dict[str, float]], path: Path) -> None:
    """Plot the cost curve."""
    rows = [int(each["rows"]) for each in entries]
    lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        "engine": (rows, [each["engine_ms"] for each in entries])
    }
    if "bare_ms" in entries[0]:
        lines["llama-batched-bench"] = (rows, [each["bare_ms"] for each in entries])
    plot.lines(path, "a step of the whole model", [("ms", "log", lines)])


async def pipeline(options: argparse.Namespace, peers: Peers | None, gpu_layers: int) -> int:
    """Two stages as two processes on one GPU, over HTTP."""
    arguments = [
        "--shape", options.shape, "--type", options.type, "--streams", ",".join(map(str, options.streams)),
        "--systems", "auto,single,unsplit", "--repeats", str(options.repeats), "--only-streams",
        "--gpu-layers", str(gpu_layers), "--cores", str(len(os.sched_getaffinity(0))),
        "--tokens", str(options.tokens or (8 if options.quick else 64)),
    ]  # fmt: skip
    rivals = {Kernels.SHIPPED: peers} if peers else {}  # on a GPU they are the same
    plan = compare.plan_of(compare.parse(arguments), rivals)
    return await compare.compare(plan, rivals, options.out / "gpu-streams", wants_peers=True)


def in_minutes(options: argparse.Namespace, peers: Peers | None, gpus: Sequence[str], deadline_ns: int) -> int:
    """Measure what a short time allows."""
    streams = options.streams or (QUICK_STREAMS if options.quick else short.STREAMS)
    n_tokens = options.tokens or (8 if options.quick else 128)
    repeats = 1 if options.quick else 2
    plan = short.Plan(options.shape, options.type, streams, n_tokens, repeats, -1 if gpus else 0, options.out)
    return interrupt.run(short.run(plan, peers, {"devices": gpus}, deadline_ns, options.parts))


def main() -> int:
    """Build and measure; exit code 1 if a run did not count."""
    options = parse()
    began_ns = int(os.environ.setdefault(BEGAN, str(time.monotonic_ns())))  # before it started anew with its libraries
    try:
        if options.pack:
            return pack.main(options)
        peers = programs(options)
        if options.build_only:
            print(peers.directory if peers else "nothing to build")
            return 0
        gpus = _gpus()
        gpu_layers = -1 if gpus else 0
        print("on " + (", ".join(gpus) or "this processor: llama.cpp sees no GPU"), file=sys.stderr, flush=True)
        if options.minutes:
            return in_minutes(options, peers, gpus, began_ns + int(options.minutes * 60e9))
        entries = by_rows(options, peers, gpu_layers)
    except (PeersUnavailableError, RelaylineError) as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 1
    show(entries)
    draw(entries, options.out / "gpu-steps.png")
    results: dict[str, Any] = {"machine": machine.facts(), "devices": gpus, "shape": options.shape, "steps": entries}
    machine.write_json(options.out / "gpu-steps.json", results)
    return interrupt.run(pipeline(options, peers, gpu_layers))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(interrupt.INTERRUPTED)
