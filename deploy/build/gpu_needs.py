"""Checks the needs of a GPU build of llama.cpp before it is compiled: one line now instead of an error after some
minutes.

    python gpu_needs.py '-DGGML_VULKAN=on ...'

Only certain faults are reported. CMake may find things in places that are not checked here, so a build whose CMAKE_ARGS
name the compiler or the headers is allowed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

_ON = {"1", "ON", "YES", "TRUE", "Y"}
_COOPERATIVE = "VK_KHR_cooperative_matrix"  # of Vulkan 1.3.255; ggml-vulkan.cpp uses its types without asking
_PARTS = ("share", "lib", "lib64", "lib/*")  # of a prefix, where CMake looks for packages
_SPIRV = "SPIRV-Headers"  # a package of CMake's, which ggml-vulkan requires
CUDA_HOMES = ("/usr/local/cuda", "/opt/cuda")


def switches(arguments: str) -> dict[str, str]:
    """Return the -D definitions of CMAKE_ARGS by name."""
    found = {}
    for word in shlex.split(arguments):
        name, _, value = word.removeprefix("-D").partition("=")
        if word.startswith("-D"):
            found[name.partition(":")[0]] = value
    return found


def fault(
    arguments: str,
    environment: Mapping[str, str] = os.environ,
    platform: str = sys.platform,
    root: Path = Path("/"),
) -> str:
    """Return why this build cannot succeed and what to do, empty for no reason that is known."""
    given = switches(arguments)
    if _is_on(given, "GGML_METAL") and platform != "darwin":
        return "-DGGML_METAL=on is for macOS; use -DGGML_CUDA=on for NVIDIA or -DGGML_VULKAN=on for other GPUs"
    if _is_on(given, "GGML_CUDA") and "CMAKE_CUDA_COMPILER" not in given and not _has_nvcc(environment, root):
        return (
            "-DGGML_CUDA=on needs nvcc, which is neither in PATH nor in /usr/local/cuda; install the CUDA toolkit, or "
            "set CUDACXX to its nvcc"
        )
    if _is_on(given, "GGML_VULKAN"):
        is_found = any(name.startswith("Vulkan_") for name in given)
        return ("" if is_found else _vulkan_fault(environment, root)) or _spirv_fault(given, environment, root)
    return ""


def _is_on(given: Mapping[str, str], name: str) -> bool:
    return given.get(name, "").upper() in _ON


def _has_nvcc(environment: Mapping[str, str], root: Path) -> bool:
    if environment.get("CUDACXX") or shutil.which("nvcc", path=environment.get("PATH", "")):
        return True
    homes = [environment.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT")]
    places = [Path(home) for home in homes if home] + [root / home.lstrip("/") for home in CUDA_HOMES]
    return any((place / "bin" / "nvcc").exists() for place in places)


def _vulkan_fault(environment: Mapping[str, str], root: Path) -> str:
    kit = environment.get("VULKAN_SDK", "")
    path = os.pathsep.join(filter(None, (str(Path(kit, "bin")) if kit else "", environment.get("PATH", ""))))
    if shutil.which("glslc", path=path) is None:
        return "-DGGML_VULKAN=on needs glslc, which is not in PATH; install glslc or the Vulkan SDK"
    places = [Path(kit, "include")] if kit else []
    places += [root / "usr/include", root / "usr/local/include"]
    header = next((found for place in places if (found := place / "vulkan/vulkan_core.h").is_file()), None)
    if header is None:
        return "-DGGML_VULKAN=on needs the Vulkan headers; install libvulkan-dev, vulkan-headers or the Vulkan SDK"
    text = header.read_text(errors="replace")
    if _COOPERATIVE in text:
        return ""
    version = re.search(r"VK_HEADER_VERSION_COMPLETE VK_MAKE_API_VERSION\(0, (\d+), (\d+)", text)
    patch = re.search(r"define VK_HEADER_VERSION (\d+)", text)
    named = f"{version[1]}.{version[2]}.{patch[1]}" if version and patch else "an older version"
    return (
        f"the Vulkan headers in {header.parent} are {named}, and llama.cpp needs 1.3.255 or newer ({_COOPERATIVE}); "
        "install the Vulkan SDK and set VULKAN_SDK"
    )


def _spirv_fault(given: Mapping[str, str], environment: Mapping[str, str], root: Path) -> str:
    if any(name.startswith((_SPIRV, "CMAKE_PREFIX_PATH")) for name in given):
        return ""
    if any(environment.get(name) for name in ("CMAKE_PREFIX_PATH", f"{_SPIRV}_DIR", f"{_SPIRV}_ROOT")):
        return ""
    kit = environment.get("VULKAN_SDK", "")
    places = ([Path(kit)] if kit else []) + [root / "usr", root / "usr/local"]
    folders = [Path(word).parent for word in environment.get("PATH", "").split(os.pathsep) if word]  # CMake looks there
    if any(next(place.glob(f"{part}/cmake/{_SPIRV}"), None) for place in places + folders for part in _PARTS):
        return ""
    return "-DGGML_VULKAN=on needs SPIRV-Headers; install spirv-headers or the Vulkan SDK"


if __name__ == "__main__":
    line = fault(" ".join(sys.argv[1:]))
    if line:
        sys.exit(f"      {line}")
