"""Missing requirements of a GPU build are named before it begins, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayline.deploy.build.gpu_needs import fault

HEADER = """#define VK_HEADER_VERSION {patch}
#define VK_HEADER_VERSION_COMPLETE VK_MAKE_API_VERSION(0, 1, 3, VK_HEADER_VERSION)
{extensions}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system with glslc in PATH and nothing else."""
    program = tmp_path / "bin" / "glslc"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return tmp_path


def need_of(arguments: str, root: Path, platform: str = "linux", **environment: str) -> str:
    line = fault(arguments, {"PATH": str(root / "bin")} | environment, platform, root)
    assert "\n" not in line
    return line


def write_header(directory: Path, patch: int, extensions: str) -> None:
    path = directory / "vulkan" / "vulkan_core.h"
    path.parent.mkdir(parents=True)
    path.write_text(HEADER.format(patch=patch, extensions=extensions))


def test_a_build_for_the_processor_needs_nothing(root: Path) -> None:
    for arguments in ("", "-DGGML_NATIVE=off", "-DGGML_CUDA=off -DGGML_VULKAN=0"):
        assert need_of(arguments, root) == ""


def test_cuda_needs_its_compiler(root: Path) -> None:
    assert "needs nvcc" in need_of("-DGGML_CUDA=on", root)
    assert "needs nvcc" in need_of("-DGGML_CUDA:BOOL=1", root)
    assert need_of("-DGGML_CUDA=on", root, CUDACXX="/somewhere/nvcc") == ""
    assert need_of("-DGGML_CUDA=on -DCMAKE_CUDA_COMPILER=/x/nvcc", root) == "", "CMake has the path"
    nvcc = root / "usr/local/cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    assert need_of("-DGGML_CUDA=on", root) == ""


def test_vulkan_headers_that_are_too_old_are_named(root: Path) -> None:
    assert "needs the Vulkan headers" in need_of("-DGGML_VULKAN=on", root)
    write_header(root / "usr/include", 239, "#define VK_KHR_maintenance4 1")  # as Debian 12 has them
    assert "are 1.3.239, and llama.cpp needs 1.3.255 or newer" in need_of("-DGGML_VULKAN=on", root)
    write_header(root / "kit/include", 283, "#define VK_KHR_cooperative_matrix 1")
    (root / "kit/share/cmake/SPIRV-Headers").mkdir(parents=True)
    assert need_of("-DGGML_VULKAN=on", root, VULKAN_SDK=str(root / "kit")) == ""
    assert need_of("-DGGML_VULKAN=on -DVulkan_INCLUDE_DIR=/x -DSPIRV-Headers_DIR=/y", root) == ""
    (root / "bin" / "glslc").unlink()
    assert "needs glslc" in need_of("-DGGML_VULKAN=on", root, VULKAN_SDK=str(root / "kit"))


def test_vulkan_needs_the_headers_of_spirv_too(root: Path) -> None:
    write_header(root / "usr/include", 309, "#define VK_KHR_cooperative_matrix 1")
    line = "needs SPIRV-Headers; install spirv-headers or the Vulkan SDK"
    assert line in need_of("-DGGML_VULKAN=on", root)
    assert line in need_of("-DGGML_VULKAN=on -DVulkan_INCLUDE_DIR=/x", root)
    assert need_of("-DGGML_VULKAN=on", root, CMAKE_PREFIX_PATH="/x") == ""  # CMake may find them there
    (root / "usr/share/cmake/SPIRV-Headers").mkdir(parents=True)
    assert need_of("-DGGML_VULKAN=on", root) == ""


def test_metal_is_for_macos(root: Path) -> None:
    assert "is for macOS" in need_of("-DGGML_METAL=on", root)
    assert need_of("-DGGML_METAL=on", root, "darwin") == ""
