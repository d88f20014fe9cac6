"""Builds the part of llama.cpp with CUDA that the GPU benchmark needs, for one architecture.

The libraries are shared: relayline's stages load them in place of the installed llama-cpp-python's own (`LIBRARIES`,
which its binding reads), and llama.cpp's own programs run the very same kernels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from benches.peers import (
    CMAKE_OPTIONS,
    Kernels,
    Peers,
    PeersUnavailableError,
    build_programs,
    digest_of,
    pinned_version,
    sources,
)
from relayline.wire.common.places import cache_dir

TARGETS = ("llama-server", "llama-batched-bench", "ggml-rpc-server")
BACKENDS: dict[str, tuple[str, ...]] = {"cuda": ("-DGGML_CUDA=ON",), "cpu": ()}
BUILD_MINUTES = 15  # on 16 cores, for the message only; CUDA's kernels are most of it


def options_of(backend: str, architecture: str) -> tuple[str, ...]:
    """Return CMake's options; `architecture` is one of CMAKE_CUDA_ARCHITECTURES, such as native or 90."""
    only = (f"-DCMAKE_CUDA_ARCHITECTURES={architecture}",) if backend == "cuda" else ()
    return (*CMAKE_OPTIONS, *BACKENDS[backend], *only)


def build(backend: str, architecture: str, n_jobs: int, archive: Path | None) -> Peers:
    """Return programs and libraries, building them first if needed. Raises PeersUnavailableError."""
    options = options_of(backend, architecture)
    home = cache_dir() / f"gpu-{pinned_version()}-{digest_of(options, Kernels.OURS)}"
    built = Peers(home / "bin", pinned_version())
    if not all((built.directory / name).is_file() for name in (*TARGETS, "libllama.so")):
        if backend == "cuda" and shutil.which("nvcc") is None:
            raise PeersUnavailableError("nvcc was not found; install CUDA's toolkit and put its bin directory on PATH")
        build_programs(home, TARGETS, options, Kernels.OURS, n_jobs, BUILD_MINUTES, archive)
    return built


def at(directory: Path) -> Peers:
    """Return programs that were built before. Raises PeersUnavailableError if one is missing."""
    for name in (*TARGETS, "libllama.so"):
        if not (directory / name).is_file():
            raise PeersUnavailableError(f"{directory} has no {name}")
    return Peers(directory.resolve(), pinned_version())


def preloaded(backend: str) -> dict[str, str]:
    """Return the environment of a process that loads the build. Some CUDA packages for Python carry a libstdc++ that is
    older than the compiler's. A process uses the first one that it loads, so the compiler's must come first.
    """
    if backend == "cpu" or "LD_PRELOAD" in os.environ or not (compiler := shutil.which("c++")):
        return {}
    found = subprocess.run(
        [compiler, "-print-file-name=libstdc++.so.6"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {"LD_PRELOAD": found} if Path(found).is_absolute() else {}


def fetched(scratch: Path, archive: Path | None) -> Path:
    """Unpack the source distribution of the pinned llama-cpp-python below `scratch`, downloading it if it is not there.

    Returns its root. Raises PeersUnavailableError.
    """
    return sources(scratch, pinned_version(), archive)
