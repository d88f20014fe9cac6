"""The compiler flags that relayline adds for llama.cpp's files: the header for AMX, instruction scheduling, and which
kernel serves which number of rows.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

from relayline.deploy.build import built_with
from relayline.deploy.testing.paths import DEPLOY, ROOT
from relayline.stage.engine import ggml

BUILD, KERNELS = DEPLOY / "build", DEPLOY / "kernels"
# As in llama.cpp: a local configuration that only ldtilecfg reads. `last` is the last of its 64 bytes.
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
project(llama_cpp C CXX)
add_subdirectory(ggml)
"""
GGML_LISTS = {
    "ggml": 'cmake_minimum_required(VERSION 3.14)\nproject("ggml" C CXX)\nadd_subdirectory(src)\n',
    "ggml/src": """
option(GGML_NATIVE "" ON)
if(NOT GGML_CPU_ALL_VARIANTS)
    add_library(ggml-cpu OBJECT {})
    target_compile_options(ggml-cpu PRIVATE "$<$<COMPILE_LANGUAGE:C>:-Wshadow;-Wpointer-arith>")
    foreach(NAME avx2 fma f16c)
        string(TOUPPER GGML_$NAME OPTION)
        if(NOT GGML_NATIVE AND $OPTION)
            target_compile_options(ggml-cpu PRIVATE -m$NAME)
        endif()
    endforeach()
    if(GGML_NATIVE)
        target_compile_options(ggml-cpu PRIVATE -march=native)
    endif()
endif()
""".replace("$NAME", "${{NAME}}").replace("$OPTION", "${{OPTION}}"),
}
REPACKED, FEW_ROWS = "ggml-cpu/arch/x86/repack.cpp", "repack_few_rows.cpp"
OTHERS = ("ggml-cpu/repack.cpp", "ggml-cpu/ops.cpp", "ggml-cpu/ggml-cpu.c")  # those whose copies are compiled
SOURCES = ("ggml-cpu/amx/mmq.cpp", "ggml-cpu/amx/amx.cpp", REPACKED, *OTHERS)
# Excerpts of the three files, at the pinned version, around each place that llama.cpp.patch changes.
EXCERPTS = {name: ROOT / "tests" / "golden" / "llama_cpp" / f"{Path(name).name}.txt" for name in OTHERS}
# Describes this machine's processor as a test wants it, and is g++ otherwise.
COMPILER = """#!/bin/sh
case "$*" in *"-march=native"*" -dM "*) echo "{macros}"; exit;; esac
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
    with_header = [*command[:1], "-include", str(KERNELS / "amx_tile_config.h"), *command[1:]]
    made = subprocess.run(with_header, input=KERNEL, capture_output=True, text=True, check=True).stdout
    assert "ldtilecfg" in made
    assert re.search(r"%dil\b|%edi\b", made), "the argument is never stored: the compiler thinks that nothing reads it"
    with_header[with_header.index("-S")] = "-E"
    read = subprocess.run(with_header, input=KERNEL, capture_output=True, text=True, check=True).stdout
    assert "[64])(config)" in read.rpartition("config[63]")[2], "mended compilers need no header, and show nothing"


MINIMAL = f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={BUILD / 'llama_minimal.cmake'}"


def compile_commands(
    root: Path, macros: str = "", *options_given: str, included: str = MINIMAL, kernels: str = ""
) -> dict[str, str]:
    """Return how the files would be compiled on a processor with these macros, by their place under src/.

    `kernels` is RELAYLINE_KERNELS in the environment of the build.
    """
    if shutil.which("cmake") is None or shutil.which("make") is None:
        pytest.skip("cmake or make is not installed")
    for directory, text in ({".": CMAKE_LISTS} | GGML_LISTS).items():
        (root / directory).mkdir(exist_ok=True)
        (root / directory / "CMakeLists.txt").write_text(text.format(" ".join(SOURCES)))
    for source in SOURCES:
        (root / "ggml" / "src" / source).parent.mkdir(parents=True, exist_ok=True)
        (root / "ggml" / "src" / source).write_text(EXCERPTS[source].read_text() if source in EXCERPTS else "")
    compiler = root / "compiler"
    compiler.write_text(COMPILER.format(macros=macros))
    compiler.chmod(0o755)
    works = [f"-DCMAKE_{language}_{what}=1" for language in ("C", "CXX") for what in ("COMPILER_WORKS", "ABI_COMPILED")]
    options = [
        included,
        f"-DCMAKE_CXX_COMPILER={compiler}",
        "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
        *works,
        *options_given,
    ]
    command = ["cmake", "-S", root, "-B", root / "build", *options]
    environment = os.environ | {"RELAYLINE_KERNELS": kernels}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    (root / "said").write_text(done.stdout)
    entries = json.loads((root / "build" / "compile_commands.json").read_text())
    return {entry["file"].rpartition("/src/")[2]: entry["command"] for entry in entries}


AMX_HEADERS = {"ggml-cpu/amx/mmq.cpp": "amx_batches.h", "ggml-cpu/amx/amx.cpp": "amx_operands.h"}


def headers_in(commands: dict[str, str]) -> dict[str, str]:
    """Return which header of ours is ahead of which file."""
    found = {name: re.search(r" -include \S*/(\S+)", command) for name, command in commands.items()}
    return {name: match[1] for name, match in found.items() if match}


def test_the_headers_for_amx_are_ahead_of_its_files_alone(tmp_path: Path) -> None:
    need_gcc_for_amx()
    commands = compile_commands(tmp_path)
    assert len(commands) == len(SOURCES)
    assert headers_in(commands) == AMX_HEADERS


def test_unpatched_peers_get_those_headers_and_no_other_flag(tmp_path: Path) -> None:
    need_gcc_for_amx()
    included = f"-DCMAKE_PROJECT_ggml_INCLUDE={KERNELS / 'ggml_amx.cmake'}"
    macros = "#define __AVX2__ 1\n#define __FMA__ 1\n#define __F16C__ 1"
    commands = compile_commands(tmp_path, macros, included=included)
    assert sorted(commands) == sorted(SOURCES), "files of ours, or copies"
    changed = {name for name, command in commands.items() if re.search(r" -(include|fsched\S*|D\S*_llama) ", command)}
    assert changed == set(AMX_HEADERS)
    assert headers_in(commands) == AMX_HEADERS


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
    flags = {name: " ".join(re.findall(r"\S*sched\S*", command)) for name, command in commands.items()}
    assert flags == {name: expected if name == REPACKED else "" for name in SOURCES}


@pytest.mark.parametrize(
    ("macros", "is_by_rows"),
    [
        (("AVX2", "AVX512F", "AVX512BW", "znver3__", "znver3"), True),  # GCC 12 on Zen 4, which it does not know
        (("AVX2", "AVX512F", "AVX512BW", "znver4"), True),
        (("AVX2", "AVX512F", "AVX512BW", "AVXVNNI", "znver5"), False),
        (("AVX2", "AVX512F", "AVX512BW", "icelake_server"), False),
        (("AVX2", "znver3"), False),
    ],
)
def test_few_rows_have_separate_kernels_where_512_bits_are_two_halves(
    tmp_path: Path, macros: tuple[str, ...], is_by_rows: bool
) -> None:
    need_gcc_for_amx()
    commands = compile_commands(tmp_path, "\n".join(f"#define __{name}__ 1" for name in macros))
    (few_rows,) = [command for name, command in commands.items() if name.endswith(FEW_ROWS)] or [""]
    renamed = renamed_by(commands, "wide")
    products = set(re.findall(r"^BY_ROWS\((\w+)", (KERNELS / FEW_ROWS).read_text(), re.MULTILINE))
    assert bool(few_rows) == is_by_rows
    assert renamed.pop(REPACKED) == ({f"ggml_gemm_{name}" for name in products} if is_by_rows else set())
    assert not any(renamed.values())
    assert ("sched-pressure" in few_rows) == is_by_rows


AMX = ("AVX2", "FMA", "F16C", "AVX512VNNI", "AMX_INT8")


@pytest.mark.parametrize(
    ("macros", "kernels", "is_chosen"),
    [
        (AMX, "", True),
        (AMX, "off", False),
        (AMX[:-1], "", False),
        (("AVX2", "FMA", "F16C", "AMX_INT8"), "", False),  # llama.cpp's file is empty there
    ],
    ids=["amx", "switched off", "no tiles", "no dot products"],
)
def test_few_rows_by_amx_are_chosen_where_it_is(
    tmp_path: Path, macros: tuple[str, ...], kernels: str, is_chosen: bool
) -> None:
    need_gcc_for_amx()
    commands = compile_commands(tmp_path, "\n".join(f"#define __{name}__ 1" for name in macros), kernels=kernels)
    chosen = {name for name, command in commands.items() if "-DRELAYLINE_AMX_FEW_ROWS" in command}
    assert chosen == ({"ggml-cpu/amx/mmq.cpp"} if is_chosen else set())
    assert headers_in(commands) == AMX_HEADERS
    said = re.search("relayline's kernels in this build of llama.cpp: (.*)", (tmp_path / "said").read_text())
    assert ("amx" in said[1].split() if said else False) == is_chosen


@pytest.mark.parametrize(
    ("macros", "is_ours"),
    [
        (("AVX2", "FMA", "F16C"), True),
        (("AVX2", "FMA", "F16C", "AVX512F", "AVX512BW", "znver4"), True),
        (("AVX2", "FMA"), False),
        (("AVX",), False),
    ],
)
def test_products_of_four_bits_and_attention_are_ours_on_capable_processors(
    tmp_path: Path, macros: tuple[str, ...], is_ours: bool
) -> None:
    need_gcc_for_amx()
    commands = compile_commands(tmp_path, "\n".join(f"#define __{name}__ 1" for name in macros))
    (ours,) = [command for name, command in commands.items() if name.endswith("repack_4_bit.cpp")] or [""]
    renamed = renamed_by(commands, "llama")
    files = [KERNELS / name for name in ("repack_4_bit.cpp", "repack_q4_k.cpp")]
    products = [name for file in files for name in re.findall(r"^PRODUCTS\((\w+)", file.read_text(), re.MULTILINE)]
    defined = {f"ggml_{kind}_{name}" for name in products for kind in ("gemm", "gemv")}
    assert bool(ours) == is_ours
    assert products == ["q4_0_8x8_q8_0", "mxfp4_8x8_q8_0", "q4_K_8x8_q8_K"]
    assert renamed.pop(REPACKED) == (defined if is_ours else set())
    assert not any(renamed.values())
    assert ("sched-pressure" in ours) == is_ours
    for name in (
        "repack_q4_k.cpp",
        "stored_products.cpp",
        "stored_k_quants.cpp",
        "stored_q8_0.cpp",
        "attend_own_cells.cpp",
        "cell_order.cpp",
        "switch.cpp",
    ):
        assert any(source.endswith(name) for source in commands) == is_ours
    copies = {path.name: path for path in tmp_path.glob("build/**/relayline/ggml-cpu/*.c*") if path.suffix != ".orig"}
    assert set(copies) == ({Path(name).name for name in OTHERS} if is_ours else set())
    assert all((name in commands) != is_ours for name in OTHERS)  # copies take their place
    if is_ours:
        assert {str(path) for path in copies.values()} <= set(commands)
        repacked, attention, stored = (copies[Path(name).name].read_text() for name in OTHERS)
        assert "AT_ONCE ? nb1 / nb0 : ne01" in repacked
        assert "iter++" not in repacked
        assert "if (!relayline_multiplies(dst) && ggml_compute_forward_mul_mat_tiled(params, dst))" in stored
        assert "if (src1->type != vec_dot_type && !relayline_multiplies(dst)) {" in stored
        assert stored.index("relayline_multiply(dst, wdata, ") < stored.index("// attempt to reduce false-sharing")
        assert attention.index("if (relayline_attend(params, dst))") < attention.index("if (use_split_kv_path)")
        before, _, after = attention.partition("relayline_note_rows(params, dst);")
        assert "void ggml_compute_forward_set_rows(" in before
        assert "ggml_compute_forward_set_rows_impl<float, int64_t>(params, dst)" in after


def test_the_patch_fits_the_pinned_sources_and_changes_only_the_named_places(tmp_path: Path) -> None:
    """The excerpts are of the pinned version. LLAMA_CPP_SOURCES, a folder of llama.cpp, has all of the files tried."""
    files = {name: excerpt.read_text() for name, excerpt in EXCERPTS.items()}
    if sources := os.environ.get("LLAMA_CPP_SOURCES"):
        whole = {name: Path(sources, "ggml", "src", name).read_text() for name in OTHERS}
        assert all(piece in whole[name] for name, text in files.items() for piece in pieces(text)), "old excerpts"
        files = whole
    patched = apply_patch(tmp_path, files)
    counts = {name: text.count("relayline_") - files[name].count("relayline_") for name, text in patched.items()}
    assert counts == {"ggml-cpu/repack.cpp": 0, "ggml-cpu/ops.cpp": 3, "ggml-cpu/ggml-cpu.c": 5}
    assert "AT_ONCE" in patched["ggml-cpu/repack.cpp"]


def test_git_applies_the_patch_as_well_as_patch_does(tmp_path: Path) -> None:
    """Inside a repository, where git would pass over files that it does not know of."""
    need_gcc_for_amx()
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    by_patch, by_git, by_neither = (tmp_path / name for name in ("patch", "git", "neither"))
    for root, options in ((by_patch, ()), (by_git, ("-DRELAYLINE_PATCH=OFF",))):
        root.mkdir()
        compile_commands(root, NEW_MACHINE, *options)
    for name in OTHERS:
        (one,), (other,) = (list(root.glob(f"build/**/relayline/{name}")) for root in (by_patch, by_git))
        assert one.read_text() == other.read_text() != EXCERPTS[name].read_text()
    by_neither.mkdir()
    with pytest.raises(AssertionError, match=r"(?s)need\s+patch\s+or\s+git.*RELAYLINE_KERNELS=off\s+builds"):
        compile_commands(by_neither, NEW_MACHINE, "-DRELAYLINE_PATCH=OFF", "-DRELAYLINE_GIT=OFF")


@pytest.mark.parametrize(
    ("name", "known"),
    [(OTHERS[0], "1 /* nrows */"), (OTHERS[1], "if (use_split_kv_path)"), (OTHERS[2], "forward_mul_mat_tiled(params")],
)
def test_another_llama_cpp_than_the_patch_is_made_for_stops_the_build_unless_it_is_for_a_gpu(
    name: str, known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_gcc_for_amx()
    other = tmp_path / "other"
    other.write_text(EXCERPTS[name].read_text().replace(known, "other"))
    monkeypatch.setitem(EXCERPTS, name, other)
    with pytest.raises(AssertionError, match=rf"(?s)llama.cpp.patch\s+does\s+not\s+fit.*{Path(name).name}"):
        compile_commands(tmp_path, NEW_MACHINE)
    commands = compile_commands(tmp_path, NEW_MACHINE, "-DGGML_CUDA=ON")
    assert sorted(commands) == sorted(SOURCES), "files of ours, or copies"
    assert "kernels are left out" in (tmp_path / "said").read_text()
    with pytest.raises(AssertionError, match="left out"):
        compile_commands(tmp_path, NEW_MACHINE, "-DGGML_CUDA=ON", "-DRELAYLINE_KERNELS=REQUIRED")


@pytest.mark.parametrize(
    ("option", "kernels", "is_in"),
    [
        ("-DRELAYLINE_KERNELS=off", "", False),
        ("-DRELAYLINE_KERNELS=OFF", "required", False),
        ("", "off", False),
        ("-DRELAYLINE_KERNELS=on", "off", True),
        ("", "", True),
    ],
)
def test_the_switch_leaves_everything_but_the_headers_for_amx_out(
    option: str, kernels: str, is_in: bool, tmp_path: Path
) -> None:
    need_gcc_for_amx()
    options = [option] * bool(option) + ["-DSKBUILD_PLATLIB_DIR=/wheel"]
    commands = compile_commands(tmp_path, NEW_MACHINE, *options, kernels=kernels)
    assert any(name.endswith("attend_own_cells.cpp") for name in commands) == is_in
    assert any(renamed_by(commands, "llama").values()) == is_in
    assert any("sched-pressure" in command for command in commands.values()) == is_in
    assert headers_in(commands) == AMX_HEADERS
    (mark,) = tmp_path.glob("build/**/relayline-build.txt")
    environment = os.environ | {"RELAYLINE_KERNELS": kernels}
    asked = built_with.kernels_asked(option, environment)
    assert asked == ("ON" if is_in else "OFF")
    assert built_with.trouble(mark, asked) == ""
    assert "not with kernels" in built_with.trouble(mark, "OFF" if is_in else "ON")


def test_a_word_that_the_switch_does_not_know_stops_the_build(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="say on, off or required"):
        compile_commands(tmp_path, NEW_MACHINE, "-DRELAYLINE_KERNELS=of")


V3 = {f"-DGGML_{name}=ON" for name in ("AVX2", "FMA", "F16C")}
OLD_MACHINE, NEW_MACHINE = "#define __SSE2__ 1", "#define __AVX2__ 1\n#define __FMA__ 1\n#define __F16C__ 1"
ZEN_4 = NEW_MACHINE + "\n#define __AVX512F__ 1\n#define __AVX512BW__ 1\n#define __znver4__ 1"


@pytest.mark.parametrize("features", [V3, V3 - {"-DGGML_FMA=ON"}, set[str]()], ids=["v3", "no FMA", "baseline"])
def test_a_build_for_other_machines_has_the_same_kernels_whoever_builds_it(tmp_path: Path, features: set[str]) -> None:
    need_gcc_for_amx()
    builds = []
    for macros in (OLD_MACHINE, NEW_MACHINE, ZEN_4):
        root = tmp_path / str(len(builds))
        root.mkdir()
        commands = compile_commands(root, macros, "-DGGML_NATIVE=OFF", *sorted(features))
        builds.append({name.replace(str(root), ""): text.replace(str(root), "") for name, text in commands.items()})
        assert any(name.endswith("repack_4_bit.cpp") for name in commands) == (features == V3)
        assert any(renamed_by(commands, "llama").values()) == (features == V3)
        assert not any(name.endswith(FEW_ROWS) for name in commands)
    assert builds[0] == builds[1] == builds[2]


def test_flags_of_the_whole_build_count_as_much_as_ggmls(tmp_path: Path) -> None:
    need_gcc_for_amx()
    commands = compile_commands(tmp_path, OLD_MACHINE, "-DGGML_NATIVE=OFF", "-DCMAKE_CXX_FLAGS=-O2 -march=x86-64-v3")
    assert any(name.endswith("repack_4_bit.cpp") for name in commands)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "without AVX2"),
        (("-DGGML_AVX2=ON",), "without FMA or F16C"),
        (("-DGGML_CPU_ALL_VARIANTS=ON",), "GGML_CPU_ALL_VARIANTS"),
        ((*V3, "-DCMAKE_CXX_COMPILER_ID=Clang"), "need GCC"),
    ],
)
def test_a_build_that_needs_them_stops_where_it_would_not_have_them(
    tmp_path: Path, options: tuple[str, ...], reason: str
) -> None:
    need_gcc_for_amx()
    with pytest.raises(AssertionError, match=f"(?s)left out.*{reason}"):
        compile_commands(tmp_path, NEW_MACHINE, "-DGGML_NATIVE=OFF", "-DRELAYLINE_KERNELS=REQUIRED", *options)


def test_the_image_states_its_processors_and_needs_the_kernels() -> None:
    text = (BUILD.parent / "Containerfile").read_text()
    arguments = text.partition("x86_64)")[2].partition(";;")[0]
    v3 = ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")
    assert set(re.findall(r"-DGGML_(\w+)=ON", arguments)) == set(v3), (
        "ggml's defaults depend on SOURCE_DATE_EPOCH, for one"
    )
    assert "-DRELAYLINE_KERNELS=REQUIRED" in arguments


def pieces(excerpt: str) -> list[str]:
    """Return the parts of an excerpt, each of which is in the whole file unchanged."""
    return [piece for piece in re.split(r"^// \.\.\. \(to line \d+\)\n", excerpt, flags=re.MULTILINE) if piece.strip()]


def apply_patch(directory: Path, files: dict[str, str]) -> dict[str, str]:
    """Return files with llama.cpp.patch in them, by the same command as kernels.cmake's."""
    if shutil.which("patch") is None:
        pytest.skip("patch is not installed")
    for name, text in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    command = ["patch", "--batch", "--forward", "--fuzz=0", "--strip=1", f"--input={KERNELS / 'llama.cpp.patch'}"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return {name: (directory / name).read_text() for name in files}


def renamed_by(commands: dict[str, str], suffix: str) -> dict[str, set[str]]:
    """Return which of llama.cpp's functions in each file get this suffix."""
    return {name: set(re.findall(rf"-D(ggml_\w+)=\1_{suffix}", command)) for name, command in commands.items()}


def test_a_wheel_records_what_it_was_built_with_for_make_setup(tmp_path: Path) -> None:
    """Said by CMake and by Python: were these two not the same, every set-up would compile twice."""
    compile_commands(tmp_path, "", "-DSKBUILD_PLATLIB_DIR=/wheel")
    (mark,) = tmp_path.glob("build/**/relayline-build.txt")
    assert mark.read_text() == built_with.mark_text("ON")
    named = {line.split()[0] for line in mark.read_text().splitlines()[1:]}
    kernels = {f"kernels/{path.name}" for path in KERNELS.iterdir() if path.suffix not in {".md", ".py"}}
    assert named == {"build/llama_minimal.cmake"} | {name for name in kernels if "__" not in name}
    mark.write_text(mark.read_text().replace("kernels/switch.cpp ", "kernels/switch.cpp 0"))
    assert built_with.trouble(mark, "ON").endswith("built from other files: kernels/switch.cpp")
    assert "not built from this source tree" in built_with.trouble(tmp_path / "none", "ON")


PRODUCTS_OF_A_PROCESS = """
import hashlib
import numpy as np
from relayline.stage.engine import ggml
from tests.deploy.kernels.test_native_build import repacked_product, set_scales

print(ggml.kernels().split(), ggml.attends_own_cells(n_rows=1, n_heads=4, n_kv_heads=1))
for product, weights_bytes in (("q4_0_8x8_q8_0", 144), ("mxfp4_8x8_q8_0", 136)):
    for kind, count, shape in (("gemm", 8, (2, 4, 136)), ("gemv", 3, (3, 4, 34)), ("gemv", 1, (1, 4, 34))):
        generator = np.random.default_rng(7)
        weights = generator.integers(0, 256, (2, 4, weights_bytes), dtype=np.uint8)
        rows = generator.integers(-127, 128, shape).astype(np.int8).view(np.uint8)
        set_scales(product, weights, rows)
        out = np.zeros((count, 16), np.float32)
        places = (out.ctypes.data, 16, weights.ctypes.data, rows.ctypes.data)
        repacked_product(f"{kind}_{product}")(128, *places, count, 16)
        print(product, kind, count, len(np.unique(out)) > 8 * count, hashlib.sha256(out.tobytes()).hexdigest())
"""


def test_a_process_may_leave_the_kernels_that_it_has_unused() -> None:
    """Products pass on to llama.cpp's own, which have the same bits. The switch is read once, so in new processes."""
    if not hasattr(llama_cpp.llama_cpp._lib, "relayline_kernels"):
        pytest.skip("llama.cpp was built without relayline's kernels")
    command, outputs = [sys.executable, "-c", PRODUCTS_OF_A_PROCESS], []
    for switch in ("on", "off"):
        environment = os.environ | {"RELAYLINE_KERNELS": switch}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
        outputs.append(done.stdout.splitlines())
    (on, *ours), (off, *theirs) = outputs
    assert on.startswith("['q4_0', 'mxfp4', 'q4_K', 'q5_K', 'q6_K'")
    assert on.endswith(("'attention'] True", "'attention', 'iq4_nl', 'q2_K'] True", "'attention', 'amx'] True"))
    assert off == "[] False"
    assert ours == theirs
    assert len(ours) == 6
    assert all(" True " in line for line in ours)


# name of a product, values in a block, bytes in a block of weights of eight columns and in one of four rows
@pytest.mark.parametrize(
    ("product", "per_block", "weights_bytes", "rows_bytes"),
    [
        ("q4_0_8x8_q8_0", 32, 8 * 18, 4 * 34),
        ("iq4_nl_8x8_q8_0", 32, 8 * 18, 4 * 34),
        ("mxfp4_8x8_q8_0", 32, 8 * 17, 4 * 34),
        ("q4_K_8x8_q8_K", 256, 8 * 144, 4 * 292),
        ("q2_K_8x8_q8_K", 256, 8 * 84, 4 * 292),
    ],
)
def test_rows_together_have_the_products_that_they_have_in_fours(
    product: str, per_block: int, weights_bytes: int, rows_bytes: int
) -> None:
    """Holds on any build; where kernels are chosen by rows it says that both give the same bits, of the right rows."""
    multiply = repacked_product(f"gemm_{product}")
    n_values, n_columns, n_rows = 512, 48, 28
    n_blocks = n_values // per_block
    generator = np.random.default_rng(2025)
    weights = generator.integers(0, 256, (n_columns // 8, n_blocks, weights_bytes), dtype=np.uint8)
    rows = generator.integers(0, 256, (n_rows // 4, n_blocks, rows_bytes), dtype=np.uint8)
    set_scales(product, weights, rows)

    def products(first: int, count: int) -> npt.NDArray[np.float32]:
        out = np.zeros((count, n_columns), np.float32)
        part = np.ascontiguousarray(rows[first // 4 : (first + count) // 4])
        multiply(n_values, out.ctypes.data, n_columns, weights.ctypes.data, part.ctypes.data, count, n_columns)
        return out

    together = products(0, n_rows)
    assert np.isfinite(together).all()
    assert len(np.unique(together)) > n_rows * n_columns // 2
    assert np.array_equal(together, np.concatenate([products(first, 4) for first in range(0, n_rows, 4)]))


@pytest.mark.parametrize("n_values", [32, 2048, 2432, 8192])  # passes side by side begin between the second and third
@pytest.mark.parametrize("n_columns", [8, 32, 72])
@pytest.mark.parametrize("product", ["q4_0_8x8_q8_0", "mxfp4_8x8_q8_0"])
def test_products_of_four_bits_are_those_of_llama_cpp_to_the_bit(product: str, n_columns: int, n_values: int) -> None:
    generator = np.random.default_rng(n_values + n_columns)
    n_blocks, weights_bytes = n_values // 32, 8 * 18 if product.startswith("q4_0") else 8 * 17
    weights = generator.integers(0, 256, (n_columns // 8, n_blocks, weights_bytes), dtype=np.uint8)

    def products(function: str, rows: npt.NDArray[np.uint8], n_rows: int) -> npt.NDArray[np.float32]:
        out = np.full((n_rows, n_columns + 8), 7, np.float32)  # nothing may be written outside the products
        places = (out.ctypes.data, n_columns + 8, weights.ctypes.data, rows.ctypes.data)
        repacked_product(function)(n_values, *places, n_rows, n_columns)
        return out

    for kind, n_rows, shape in (
        ("gemm", 12, (3, n_blocks, 4 * 34)),
        *(("gemv", n, (n, n_blocks, 34)) for n in (1, 2, 3)),
    ):
        rows = generator.integers(-127, 128, shape).astype(np.int8).view(np.uint8)  # the range of Q8_0; never -128
        set_scales(product, weights, rows)
        ours = products(f"{kind}_{product}", rows, n_rows)
        assert np.isfinite(ours).all()
        assert len(np.unique(ours)) > n_rows * n_columns // 2
        one_by_one = rows if kind == "gemv" else [rows]  # llama.cpp takes rows left over by fours one at a time
        theirs = [products(f"{kind}_{product}_llama", part, n_rows // len(one_by_one)) for part in one_by_one]
        assert np.array_equal(ours, np.concatenate(theirs))


@pytest.mark.parametrize("n_values", [256, 2048, 8192])  # passes side by side begin between the second and third
@pytest.mark.parametrize("n_columns", [8, 72])
def test_a_row_by_q4_k_has_the_same_bits_alone_as_among_others(n_columns: int, n_values: int) -> None:
    """Alone it has llama.cpp's, too; of four rows and more llama.cpp adds up a block in other steps."""
    if "q4_K" not in ggml.kernels().split():
        pytest.skip("llama.cpp's own products are in use")
    generator, n_rows = np.random.default_rng(n_values + n_columns), 19
    n_blocks, name = n_values // 256, "q4_K_8x8_q8_K"
    weights = generator.integers(0, 256, (n_columns // 8, n_blocks, 8 * 144), dtype=np.uint8)
    values = generator.integers(-127, 128, (n_rows, n_blocks, 256)).astype(np.int8)
    scales = generator.uniform(0.01, 0.05, (n_rows, n_blocks, 1)).astype(np.float32)
    set_scales(name, weights, np.zeros((1, 1, 16), np.uint8))
    sixteens = values.reshape(n_rows, n_blocks, 16, 16).sum(3, dtype=np.int16)
    apart = np.concatenate([part.view(np.uint8) for part in (scales, values, sixteens)], axis=2)

    def products(kind: str, rows: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.float32]:
        out, rows = np.full((count, n_columns + 8), 7, np.float32), np.ascontiguousarray(rows)
        places = (out.ctypes.data, n_columns + 8, weights.ctypes.data, rows.ctypes.data)
        repacked_product(kind)(n_values, *places, count, n_columns)
        assert (out[:, n_columns:] == 7).all(), "nothing may be written outside the products"
        return out[:, :n_columns]

    alone = np.concatenate([products(f"gemv_{name}_llama", row, 1) for row in apart])
    assert len(np.unique(alone)) > n_rows * n_columns // 2
    for count in (1, 2, 3):
        parts = [apart[at : at + count] for at in range(0, n_rows - count + 1, count)]
        found = np.concatenate([products(f"gemv_{name}", part, count) for part in parts])
        assert np.array_equal(found, alone[: len(found)])
    for first, count in ((0, 16), (3, 16), (1, 4), (0, 12)):
        fours = slice(first, first + count)
        turned = [
            scales[fours].reshape(-1, 4, n_blocks, 1).transpose(0, 2, 1, 3).reshape(-1, n_blocks, 4),
            values[fours].reshape(-1, 4, n_blocks, 32, 8).transpose(0, 2, 3, 1, 4).reshape(-1, n_blocks, 1024),
            sixteens[fours].reshape(-1, 4, n_blocks, 4, 4).transpose(0, 2, 3, 1, 4).reshape(-1, n_blocks, 64),
        ]
        rows = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in turned], axis=2)
        assert np.array_equal(products(f"gemm_{name}", rows, count), alone[fours])
        np.testing.assert_allclose(products(f"gemm_{name}_llama", rows, count), alone[fours], rtol=1e-4, atol=1e-3)


def repacked_product(name: str) -> Callable[..., None]:
    """Return a product of rows by repacked weights by its name without ggml_, as it was built here."""
    directory = Path(llama_cpp.__file__).parent / "lib"
    base, library = directory / "libggml-base.so", directory / "libggml-cpu.so"
    if not library.is_file():
        pytest.skip("llama.cpp's library for processors lies elsewhere here")
    ctypes.CDLL(str(base), mode=ctypes.RTLD_GLOBAL)
    native = ctypes.CDLL(str(library))
    native.ggml_cpu_init()  # its table of half floats
    multiply = getattr(native, f"ggml_{name}", None)
    if multiply is None:
        pytest.skip("this processor has other products")
    multiply.restype = None
    pointer = ctypes.c_void_p
    multiply.argtypes = [ctypes.c_int, pointer, ctypes.c_size_t, pointer, pointer, ctypes.c_int, ctypes.c_int]
    return cast("Callable[..., None]", multiply)


def set_scales(product: str, weights: npt.NDArray[np.uint8], rows: npt.NDArray[np.uint8]) -> None:
    """Put finite scales where random bytes might be none: half floats, or their stand-ins."""

    def halves(blocks: npt.NDArray[np.uint8], begin: int, count: int) -> None:
        some = np.random.default_rng(7).uniform(0.01, 0.1, (*blocks.shape[:2], count)).astype(np.float16)
        blocks[:, :, begin : begin + 2 * count] = some.view(np.uint8)

    if product.startswith("mxfp4"):
        weights[:, :, :8] = 120 + weights[:, :, :8] % 8  # powers of two
    else:
        halves(weights, 0, 8 if product.endswith("q8_0") else 16)
    if product.endswith("q8_0"):
        halves(rows, 0, rows.shape[2] // 34)
    else:
        rows[:, :, :16] = np.full((*rows.shape[:2], 4), 0.03, np.float32).view(np.uint8)
