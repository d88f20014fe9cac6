"""The programs that relayline is compared with, built from the sources of its own dependency: `python -m
benches.peers`.

The source distribution of the pinned llama-cpp-python carries all of llama.cpp. So `llama-server`, `ggml-rpc-server`
and `llama-batched-bench` are built from the same revision that relayline's stages run. By default they are built as
llama.cpp ships. `--our-kernels` builds them with relayline's kernels, which separates the gain of the kernels from the
gain of splitting and batching. Neither build repacks the weights of an RPC worker, although it repacks a local model's.
So a worker's steps of few rows take longer (see docs/results/serving.md). Everything is kept in the user's cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benches.arguments import number
from relayline.deploy.testing.paths import DEPLOY
from relayline.wire.common.places import cache_dir

TARGETS = ("llama-server", "llama-batched-bench", "ggml-rpc-server")
BUILD_MINUTES = 10  # on 2 cores, for the message only
# Parts that none of the programs needs are left out: llama-server's web page, TLS, tests, examples.
PROGRAM_OPTIONS = (
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_CURL=OFF",
)
# Programs find the libraries in their own folder, so both can be moved together. Our processes can load these libraries
# as well, so that a rival's answers are compared with an unsplit model that computes in the same way.
SHARED_OPTIONS = ("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON")
LIBRARIES = "LLAMA_CPP_LIB_PATH"  # where llama-cpp-python looks for libllama first
CMAKE_OPTIONS = (*SHARED_OPTIONS, "-DGGML_RPC=ON", *PROGRAM_OPTIONS)
KERNELS = DEPLOY / "kernels"


class Kernels(enum.Enum):
    """Whose kernels a build of llama.cpp has. The values are the options of CMake."""

    # Without these the programs crash on AMX.
    SHIPPED = ("ggml_amx.cmake", "amx_batches.h", "amx_operands.h", "amx_tile_config.h")
    OURS = (
        "kernels.cmake",
        "mode.cmake",
        *SHIPPED,
        "llama.cpp.patch",
        "relayline_hooks.h",
        "switch.cpp",
        "amx_few_rows.h",
        "repack_few_rows.cpp",
        "repack_rows.h",
        "repack_4_bit.cpp",
        "add_products.h",
        "repack_q4_k.cpp",
        "stored_rows.h",
        "stored_products.cpp",
        "stored_k_quants.cpp",
        "stored_q8_0.cpp",
        "attend_own_cells.cpp",
        "cell_order.cpp",
        "cell_order.h",
    )


LOG_LINES_SHOWN = 20


class PeersUnavailableError(Exception):
    """The peers cannot be had on this machine. The text is one line: why, and what would help."""


class NothingToBuildWithError(PeersUnavailableError):
    """The tools or the sources of the build are missing, so no build was tried."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peers:
    """Where the built programs are."""

    directory: Path
    version: str  # version of llama-cpp-python that has the sources

    @property
    def server(self) -> Path:
        """llama-server, OpenAI-compatible HTTP."""
        return self.directory / "llama-server"

    @property
    def batched_bench(self) -> Path:
        """llama-batched-bench."""
        return self.directory / "llama-batched-bench"

    @property
    def rpc_server(self) -> Path:
        """ggml-rpc-server."""
        return self.directory / "ggml-rpc-server"


def pinned_version() -> str:
    """Return the version of llama-cpp-python that is installed, which is the one that pyproject.toml pins."""
    return importlib.metadata.version("llama_cpp_python")


def _home(version: str, kernels: Kernels) -> Path:
    """The programs' folder. Other sources or other options get another folder."""
    return cache_dir() / f"peers-{version}-{digest_of(CMAKE_OPTIONS, kernels)}"


def digest_of(options: Sequence[str], kernels: Kernels) -> str:
    """Return the identity of a build of llama.cpp: its options, and the contents of our files."""
    kernels_text = b"".join((KERNELS / name).read_bytes() for name in kernels.value)
    return hashlib.sha256(" ".join(options).encode() + kernels_text).hexdigest()[:8]


def find_peers(kernels: Kernels = Kernels.SHIPPED) -> Peers | None:
    """Return the peers if an earlier run has built them."""
    version = pinned_version()
    peers = Peers(_home(version, kernels) / "bin", version)
    return peers if all((peers.directory / name).is_file() for name in (*TARGETS, "libllama.so")) else None


def build_peers(n_jobs: int, kernels: Kernels = Kernels.SHIPPED) -> Peers:
    """Return the peers, building them first if need be. Raises PeersUnavailableError."""
    if found := find_peers(kernels):
        return found
    build_programs(_home(pinned_version(), kernels), TARGETS, CMAKE_OPTIONS, kernels, n_jobs, BUILD_MINUTES)
    found = find_peers(kernels)
    assert found is not None
    return found


def build_programs(
    home: Path,
    targets: Sequence[str],
    options: Sequence[str],
    kernels: Kernels,
    n_jobs: int,
    minutes: int,
    archive: Path | None = None,
) -> None:
    """Build programs of llama.cpp, and their libraries where those are shared, into home/bin: all of them or none of
    them.

    `archive` is the source distribution of the pinned llama-cpp-python, None to download it. `minutes` is only printed.
    Raises PeersUnavailableError.
    """
    for tool, package in (("cmake", "cmake"), ("c++", "a C++ compiler")):
        if shutil.which(tool) is None:
            raise NothingToBuildWithError(f"{tool} was not found; install {package} to build llama.cpp's programs")
    version = pinned_version()
    home.mkdir(parents=True, exist_ok=True)
    what = f"{', '.join(targets)} of llama-cpp-python {version}"
    print(f"building {what}: about {minutes} minutes", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=home) as scratch:
        source = sources(Path(scratch), version, archive) / "vendor" / "llama.cpp"
        build = Path(scratch) / "build"
        generator = ("-G", "Ninja") if shutil.which("ninja") else ()
        included = f"-DCMAKE_PROJECT_ggml_INCLUDE={KERNELS / kernels.value[0]}"
        arguments = [*options, included, "-DRELAYLINE_KERNELS=ON"]  # not from the environment
        _run(["cmake", "-S", str(source), "-B", str(build), *generator, *arguments], home / "configure.log")
        _run(["cmake", "--build", str(build), "-j", str(n_jobs), "--target", *targets], home / "build.log")
        shutil.rmtree(home / "bin", ignore_errors=True)
        (build / "bin").rename(home / "bin")


def sources(scratch: Path, version: str, archive: Path | None) -> Path:
    """Unpack the source distribution, downloading it first if need be; returns its root."""
    name = f"llama_cpp_python-{version}"
    if archive is None:
        requirement = f"llama-cpp-python=={version}"
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
        try:
            _run([*fetch, "--dest", str(scratch), requirement], scratch.parent / "download.log")
        except PeersUnavailableError as error:
            raise NothingToBuildWithError(str(error)) from error
        archive = scratch / f"{name}.tar.gz"
        if not archive.exists():
            raise PeersUnavailableError(f"pip found no source distribution of {requirement}")
    try:
        with tarfile.open(archive) as opened:
            opened.extractall(scratch, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise PeersUnavailableError(f"{archive} cannot be unpacked: {error}") from error
    if not (scratch / name).is_dir():
        raise PeersUnavailableError(f"{archive} is not the source distribution of llama-cpp-python {version}")
    return scratch / name


def _run(command: Sequence[str], log: Path) -> None:
    """Run one step with its output in `log`; raises PeersUnavailableError with the last line that explains it."""
    started_s = time.monotonic()
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        telling = [line for line in lines[-LOG_LINES_SHOWN:] if "error" in line.lower()] or lines[-1:] or ["no output"]
        raise PeersUnavailableError(f"{command[0]} {command[1]} failed: {telling[0]} (whole log: {log})")
    print(f"  {Path(command[0]).name} {command[1]}: {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    """Build the peers, or say that they are there."""
    parser = argparse.ArgumentParser(prog="python -m benches.peers", description=__doc__)
    parser.add_argument("--jobs", type=number, default=len(os.sched_getaffinity(0)), help="compilers at once")
    without = "print a note and exit with 0 if the build tools are missing, such as cmake"
    parser.add_argument("--if-possible", action="store_true", help=without)
    with_ours = "build with relayline's kernels, for the systems that python -m benches.compare calls +kernels"
    parser.add_argument("--our-kernels", action="store_true", help=with_ours)
    options = parser.parse_args()
    try:
        print(build_peers(options.jobs, Kernels.OURS if options.our_kernels else Kernels.SHIPPED).directory)
    except PeersUnavailableError as error:
        if not (options.if_possible and isinstance(error, NothingToBuildWithError)):
            sys.exit(f"peers: {error}")
        print(f"note: peers: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
