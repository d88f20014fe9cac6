"""The part of a cache's key that a measured time depends on: this machine's processor, and this build of llama.cpp."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from relayline.wire.common.versions import version_of

ENGINE_PACKAGE = "llama-cpp-python"
_LIBRARIES = "llama_cpp/lib"
_BUILT_WITH = ".txt"  # digests of the files of deploy/kernels, which llama_minimal.cmake puts next to the libraries
_KERNELS = "RELAYLINE_KERNELS"
_CPUINFO = Path("/proc/cpuinfo")


def machine_facts() -> tuple[str, ...]:
    """Return what identifies host, processor and native build. Loads nothing native.

    A build with other flags has the same version, but other libraries, libraries of another size, or another mark. A
    process whose environment says RELAYLINE_KERNELS=off uses none of the kernels of its build.
    """
    kernels = os.environ.get(_KERNELS, "").lower()
    return (
        platform.node(),
        processor_name(),
        str(os.cpu_count()),
        version_of(ENGINE_PACKAGE),
        *_libraries(),
        kernels,
    )


def processor_name() -> str:
    """Return the processor's name; Python itself knows none on most Linux systems."""
    try:
        lines = _CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _libraries() -> list[str]:
    directory = Path(str(metadata.distribution(ENGINE_PACKAGE).locate_file(_LIBRARIES)))
    try:
        return sorted(f"{file.name}={_fingerprint(file)}" for file in directory.iterdir())
    except OSError:
        return []


def _fingerprint(file: Path) -> str:
    return file.read_text(errors="replace") if file.suffix == _BUILT_WITH else str(file.stat().st_size)
