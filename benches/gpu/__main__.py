"""relayline on one GPU: `python -m benches.gpu`. Optional: no other part of the project depends on a GPU.

1. llama.cpp is built with CUDA for one architecture into the cache (`--installed` takes the installed
   llama-cpp-python instead, `--backend cpu` builds without CUDA, which checks this bench).
2. A step of a whole model (llama-8b, Q4_0, random weights) by its rows, 1 to 256: the cost curve, and the engine
   compared with `llama-batched-bench` (goal: within 3 %).
3. Two stages as two processes on that GPU, 1 to 64 streams over HTTP, compared with batching off and with an unsplit
   llama-server.

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

from benches import interrupt
from benches.arguments import number, numbers, some_of
from benches.gpu import keep, pack
from benches.gpu.build import BACKENDS, at, build, preloaded
from benches.gpu.what import PARTS, QUICK_ROWS, QUICK_STREAMS, ROWS, STREAMS
from benches.models import MIXES, SHAPES
from benches.peers import LIBRARIES, Kernels, Peers, PeersUnavailableError, find_peers
from relayline.wire.common.errors import RelaylineError

BEGAN = "RELAYLINE_GPU_BENCH_BEGAN_NS"  # when the run began, on the monotonic clock


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a toy model and few points: checks the bench itself")
    parser.add_argument("--backend", choices=list(BACKENDS), default="cuda", help="backend of the build of llama.cpp")
    parser.add_argument("--arch", default="native", help="CUDA architecture to build for, such as 90 (default: native)")
    parser.add_argument("--sources", type=Path, help="source distribution of llama-cpp-python, instead of downloading")
    parser.add_argument("--jobs", type=number, default=len(os.sched_getaffinity(0)), help="compilers at once")
    parser.add_argument("--installed", action="store_true", help="build nothing: measure the installed llama.cpp")
    parser.add_argument(
        "--built", type=Path, help="directory of llama.cpp's programs and libraries, instead of building"
    )
    parser.add_argument("--build-only", action="store_true")
    short_mode = "for a GPU that is available for this many minutes, including the build: see benches/gpu/short.py"
    parser.add_argument("--minutes", type=float, default=0.0, help=short_mode)
    parser.add_argument("--parts", type=some_of(PARTS), default=(), help=f"some of {','.join(PARTS)}")
    packed = "write all that a host without a network needs for --minutes to this directory: see benches/gpu/pack.py"
    parser.add_argument("--pack", type=Path, help=packed)
    has = "packages that the host has already, such as numpy,uvloop, for --pack"
    parser.add_argument("--host-has", type=lambda text: text.split(","), default=[], help=has)
    parser.add_argument(
        "--keep", type=Path, help="gpu-short.json of a run: make benches/results/gpu.json from it, and end"
    )
    parser.add_argument("--shape", choices=list(SHAPES), default=None)
    parser.add_argument("--type", choices=list(MIXES), default="q4_0")
    parser.add_argument("--rows", type=numbers, default=(), help="of a step, such as 1,8,32")
    parser.add_argument("--streams", type=numbers, default=(), help="such as 1,8,64")
    parser.add_argument("--tokens", type=number, default=0, help="of every answer")
    parser.add_argument("--repeats", type=number, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(argv)
    options.shape = options.shape or ("toy" if options.quick else "llama-8b")
    options.rows = options.rows or (QUICK_ROWS if options.quick else ROWS)
    if not options.minutes:
        options.streams = options.streams or (QUICK_STREAMS if options.quick else STREAMS)
    options.repeats = options.repeats or (1 if options.quick else 3)
    return options


def programs(options: argparse.Namespace) -> Peers | None:
    """Return llama.cpp's programs for this run. If this process has not loaded their libraries, it is replaced by a new
    one that does, and the call does not return.
    """
    if options.installed and not options.built:
        # A build for the CPU says nothing about a GPU.
        return None if _sees_gpus() else find_peers(Kernels.OURS)
    built = at(options.built) if options.built else build_with_model(options)
    if os.environ.get(LIBRARIES) != str(built.directory) and not options.build_only:
        environment = os.environ | {LIBRARIES: str(built.directory)} | preloaded(options.backend)
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, "-m", "benches.gpu", *sys.argv[1:]], environment)
    return built


def build_with_model(options: argparse.Namespace) -> Peers:
    """Build; in a short run write the random model at the same time."""
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


def _sees_gpus() -> bool:
    from relayline.stage.engine import ggml  # loads the installed llama.cpp

    return bool(ggml.gpus())


def main() -> int:
    """Build and measure; exit code 1 if a run did not count."""
    options = parse()
    began_ns = int(os.environ.setdefault(BEGAN, str(time.monotonic_ns())))  # the clock of the process that was replaced
    try:
        if options.pack:
            return pack.main(options)
        if options.keep:
            print(keep.keep(options.keep))
            return 0
        peers = programs(options)
        if options.build_only:
            print(peers.directory if peers else "nothing to build")
            return 0
        # The measuring module loads llama.cpp, and the host's binding may have no libraries but the built or named
        # ones.
        from benches.gpu import measure

        return measure.main(options, peers, began_ns)
    except (PeersUnavailableError, RelaylineError, OSError, ValueError) as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(interrupt.INTERRUPTED)
