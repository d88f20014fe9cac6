"""What relayline tells GCC about llama.cpp's files: what AMX's intrinsic reads, and how to schedule other kernels."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[1] / "deploy" / "build"
# As llama.cpp has it: a local configuration that nothing but ldtilecfg reads. `last` is the last of its 64 bytes.
KERNEL = """
#include <immintrin.h>
void configure(unsigned char last) {
    alignas(64) unsigned char config[64] = {1};
    config[63] = last;
    _tile_loadconfig(config);
}
"""
CMAKE_LISTS = """
cmake_minimum_required(VERSION 3.14)
project(llama_cpp CXX)
add_subdirectory(ggml)
"""
GGML_LISTS = {
    "ggml": 'cmake_minimum_required(VERSION 3.14)\nproject("ggml" CXX)\nadd_subdirectory(src)\n',
    "ggml/src": "add_library(ggml-cpu OBJECT {})\n",
}
SOURCES = ("ggml-cpu/amx/mmq.cpp", "ggml-cpu/amx/amx.cpp", "ggml-cpu/arch/x86/repack.cpp", "ggml-cpu/repack.cpp")
# Says of this machine's processor what a test wants to hear, and is g++ else.
COMPILER = """#!/bin/sh
case "$*" in *"-march=native -dM"*) echo "{macros}"; exit;; esac
exec g++ "$@"
"""


def need_gcc_for_amx() -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    probe = [compiler, "-mamx-tile", "-dM", "-E", "-x", "c++", "/dev/null"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    if "__AMX_TILE__" not in done.stdout or "__clang__" in done.stdout:
        pytest.skip("this g++ is not GCC for a processor with AMX")
    return compiler


def test_gcc_writes_the_whole_tile_configuration() -> None:
    command = [need_gcc_for_amx(), "-O3", "-mamx-tile", "-S", "-x", "c++", "-o", "-", "-"]
    with_header = [*command[:1], "-include", str(BUILD / "amx_tile_config.h"), *command[1:]]
    made = subprocess.run(with_header, input=KERNEL, capture_output=True, text=True, check=True).stdout
    assert "ldtilecfg" in made
    assert re.search(r"%dil\b|%edi\b", made), "the argument is never stored: the compiler thinks that nobody reads it"
    with_header[with_header.index("-S")] = "-E"
    read = subprocess.run(with_header, input=KERNEL, capture_output=True, text=True, check=True).stdout
    assert "[64])(config)" in read.rpartition("config[63]")[2], "mended compilers need no header, and show nothing"


def compile_commands(root: Path, macros: str = "") -> dict[str, str]:
    """Return how the files would be compiled on a processor with these macros, by their place under src/."""
    if shutil.which("cmake") is None or shutil.which("make") is None:
        pytest.skip("cmake or make is not installed")
    for directory, text in ({".": CMAKE_LISTS} | GGML_LISTS).items():
        (root / directory).mkdir(exist_ok=True)
        (root / directory / "CMakeLists.txt").write_text(text.format(" ".join(SOURCES)))
    for source in SOURCES:
        (root / "ggml" / "src" / source).parent.mkdir(parents=True, exist_ok=True)
        (root / "ggml" / "src" / source).write_text("")
    compiler = root / "compiler"
    compiler.write_text(COMPILER.format(macros=macros))
    compiler.chmod(0o755)
    include = f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={BUILD / 'llama_minimal.cmake'}"
    options = [include, f"-DCMAKE_CXX_COMPILER={compiler}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    command = ["cmake", "-S", root, "-B", root / "build", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    entries = json.loads((root / "build" / "compile_commands.json").read_text())
    return {entry["file"].rpartition("/src/")[2]: entry["command"] for entry in entries}


def test_the_header_is_included_by_that_file_alone(tmp_path: Path) -> None:
    need_gcc_for_amx()
    commands = compile_commands(tmp_path)
    assert len(commands) == len(SOURCES)
    assert [name for name, command in commands.items() if "amx_tile_config.h" in command] == ["ggml-cpu/amx/mmq.cpp"]


@pytest.mark.parametrize(
    ("macros", "expected"),
    [
        ("#define __AVX2__ 1", "-fschedule-insns -fsched-pressure"),
        (
            "#define __AVX2__ 1\n#define __AVX512F__ 1",
            "-fschedule-insns -fsched-pressure --param=sched-pressure-algorithm=2",
        ),
        ("#define __AVX__ 1", ""),
        ("", ""),
    ],
)
def test_kernels_that_need_more_registers_than_there_are_are_scheduled_with_an_eye_on_them(
    tmp_path: Path, macros: str, expected: str
) -> None:
    need_gcc_for_amx()
    commands = compile_commands(tmp_path, macros)
    told = {name: " ".join(re.findall(r"\S*sched\S*", command)) for name, command in commands.items()}
    assert told == {name: expected if name == "ggml-cpu/arch/x86/repack.cpp" else "" for name in SOURCES}
