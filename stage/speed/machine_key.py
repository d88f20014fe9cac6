"""The part of a cache's key that a measured time depends on: this machine's processor, and this build of llama.cpp."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from relayline.wire.common.versions import version_of

ENGINE_PACKAGE = "llama-cpp-python"
_LIBRARIES = "llama_cpp/lib"
_BUILT_WITH = ".txt"  # digests of the files of deploy/kernels, which llama_minimal.cmake puts next to the libraries
_KERNELS = "RELAYLINE_KERNELS"
_CPUINFO = Path("/proc/cpuinfo")
# Names of the usual cores, by implementer and part: the numbers that /proc/cpuinfo has for them on Arm.
ARM_CORES = {
    ("0x41", "0xd03"): "Cortex-A53", ("0x41", "0xd05"): "Cortex-A55", ("0x41", "0xd07"): "Cortex-A57",
    ("0x41", "0xd08"): "Cortex-A72", ("0x41", "0xd09"): "Cortex-A73", ("0x41", "0xd0a"): "Cortex-A75",
    ("0x41", "0xd0b"): "Cortex-A76", ("0x41", "0xd0c"): "Neoverse-N1", ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd41"): "Cortex-A78", ("0x41", "0xd42"): "Cortex-A78AE", ("0x41", "0xd44"): "Cortex-X1",
    ("0x41", "0xd49"): "Neoverse-N2", ("0x41", "0xd4f"): "Neoverse-V2", ("0x41", "0xd80"): "Cortex-A520",
    ("0x41", "0xd81"): "Cortex-A720", ("0x41", "0xd84"): "Neoverse-V3", ("0x41", "0xd85"): "Cortex-X925",
    ("0x41", "0xd87"): "Cortex-A725", ("0x46", "0x001"): "A64FX", ("0x48", "0xd01"): "Kunpeng-920",
    ("0x51", "0x001"): "Oryon", ("0x61", "0x022"): "Apple M1 Icestorm", ("0x61", "0x023"): "Apple M1 Firestorm",
    ("0x61", "0x032"): "Apple M2 Blizzard", ("0x61", "0x033"): "Apple M2 Avalanche", ("0x6d", "0xd49"): "Cobalt 100",
    ("0xc0", "0xac3"): "AmpereOne", ("0xc0", "0xac4"): "AmpereOne",
}  # fmt: skip


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
    facts = [(key.strip(), value.strip()) for key, colon, value in (line.partition(":") for line in lines) if colon]
    names = [value for key, value in facts if key == "model name"]
    return next(iter(names), "") or _arm_name(facts) or platform.processor() or platform.machine()


def _arm_name(facts: Sequence[tuple[str, str]]) -> str:
    """Return the kinds of cores, after the board's name if it has one; empty for other facts than of Arm."""
    implementers = [value.lower() for key, value in facts if key == "CPU implementer"]
    parts = [value.lower() for key, value in facts if key == "CPU part"]
    kinds = dict.fromkeys(zip(implementers, parts, strict=False))
    cores = ", ".join(ARM_CORES.get(kind, f"Arm core {'/'.join(kind)}") for kind in kinds)
    boards = [value for key, value in facts if key == "Model"]
    return ", ".join([*boards[:1], cores]) if cores else ""


def _libraries() -> list[str]:
    directory = Path(str(metadata.distribution(ENGINE_PACKAGE).locate_file(_LIBRARIES)))
    try:
        return sorted(f"{file.name}={_fingerprint(file)}" for file in directory.iterdir())
    except OSError:
        return []


def _fingerprint(file: Path) -> str:
    return file.read_text(errors="replace") if file.suffix == _BUILT_WITH else str(file.stat().st_size)
