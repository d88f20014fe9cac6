"""llama.cpp with CUDA for one architecture, and no more of it than the GPU benchmark needs.

The libraries are shared: relayline's stages load them in place of the installed llama-cpp-python's own
(`LIBRARIES`, which its binding reads), and llama.cpp's programs beside them run the very same kernels.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from benches.peers import (
    PROGRAM_OPTIONS,
    SHARED_OPTIONS,
    Kernels,
    Peers,
    PeersUnavailableError,
    build_programs,
    digest_of,
    pinned_version,
)
from relayline.wire.common.places import cache_dir

TARGETS = ("llama-server", "llama-batched-bench")
BACKENDS: dict[str, tuple[str, ...]] = {"cuda": ("-DGGML_CUDA=ON",), "cpu": ()}
BUILD_MINUTES = 15  # on 16 cores, for the message only; CUDA's kernels are most of it


def options_of(backend: str, architecture: str) -> tuple[str, ...]:
    """Return CMake's options; `architecture` is one of CMAKE_CUDA_ARCHITECTURES, such as native or 90."""
    only = (f"-DCMAKE_CUDA_ARCHITECTURES={architecture}",) if backend == "cuda" else ()
    return (*SHARED_OPTIONS, *PROGRAM_OPTIONS, *BACKENDS[backend], *only)


def build(backend: str, architecture: str, n_jobs: int, archive: Path | None) -> Peers:
    """Return programs and libraries, built first if need be. Raises PeersUnavailableError."""
    options = options_of(backend, architecture)
    home = cache_dir() / f"gpu-{pinned_version()}-{digest_of(options, Kernels.OURS)}"
    built = Peers(home / "bin", pinned_version())
    if not all((built.directory / name).is_file() for name in (*TARGETS, "libllama.so")):
        if backend == "cuda" and shutil.which("nvcc") is None:
            raise PeersUnavailableError("nvcc was not found; install CUDA's toolkit and put its bin directory on PATH")
        build_programs(home, TARGETS, options, Kernels.OURS, n_jobs, BUILD_MINUTES, archive)
    return built
