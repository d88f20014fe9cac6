"""What relayline adds to llama.cpp's build: a header that makes GCC's AMX intrinsic tell the truth."""

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
    "ggml/src": "add_library(ggml-cpu OBJECT ggml-cpu/amx/mmq.cpp ggml-cpu/amx/amx.cpp)\n",
}


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


def test_the_header_is_included_by_that_file_alone(tmp_path: Path) -> None:
    need_gcc_for_amx()
    if shutil.which("cmake") is None or shutil.which("make") is None:
        pytest.skip("cmake or make is not installed")
    for directory, text in ({".": CMAKE_LISTS} | GGML_LISTS).items():
        (tmp_path / directory).mkdir(exist_ok=True)
        (tmp_path / directory / "CMakeLists.txt").write_text(text)
    (tmp_path / "ggml" / "src" / "ggml-cpu" / "amx").mkdir(parents=True)
    for name in ("mmq.cpp", "amx.cpp"):
        (tmp_path / "ggml" / "src" / "ggml-cpu" / "amx" / name).write_text("")
    include = f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={BUILD / 'llama_minimal.cmake'}"
    options = [include, "-DCMAKE_CXX_COMPILER=g++", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    command = ["cmake", "-S", tmp_path, "-B", tmp_path / "build", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    entries = json.loads((tmp_path / "build" / "compile_commands.json").read_text())
    assert len(entries) == 2
    assert [Path(e["file"]).name for e in entries if "amx_tile_config.h" in e["command"]] == ["mmq.cpp"]
