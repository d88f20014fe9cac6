"""The program of `make check-native`: the C extensions with AddressSanitizer and UBSan, through table tests and a fuzz.

It builds the extensions that pyproject.toml lists into a separate folder. The same file then runs as the child: with
the sanitizers' library loaded first, which the interpreter does not do, and with those extensions in place of the
installed ones. --seed and --seconds go to the fuzz.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import random
import re
import runpy
import shlex
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "native"
HEADERS = ROOT / "deploy" / "build" / "headers"
FLAGS = ("-g", "-O1", "-fPIC", "-shared", "-fno-omit-frame-pointer", "-Wall", "-Wextra", "-Werror")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
TESTS = (
    "wire/envelopes/test_plain_envelopes.py",
    "wire/envelopes/test_rows.py",
    "stage/engine/test_capture_rows.py",
)
FUZZ = "support/native_fuzz.py"
DEFAULT_SECONDS = "25"


def compiler() -> list[str]:
    """Return the C compiler, as the environment or the interpreter names it."""
    return shlex.split(os.environ.get("CC", "") or sysconfig.get_config_var("CC") or "cc")


def extensions() -> dict[str, list[Path]]:
    """Return the sources of each extension by its module's name."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    return {each["name"]: [ROOT / source for source in each["sources"]] for each in listed}


def built_path(name: str) -> Path:
    """Return the path of an extension with sanitizers."""
    return BUILT / (name + (sysconfig.get_config_var("EXT_SUFFIX") or ".so"))


def build() -> None:
    """Compile every extension."""
    BUILT.mkdir(parents=True, exist_ok=True)
    include = (f"-I{sysconfig.get_path('include')}", "-idirafter", str(HEADERS))
    for name, sources in extensions().items():
        command = [*compiler(), *FLAGS, *SANITIZERS, *include, *map(str, sources), "-o", str(built_path(name))]
        if subprocess.run(command, check=False).returncode != 0:
            sys.exit(f"{name} does not compile with sanitizers; see above")


def sanitizer_library() -> str:
    """Return the library that must be loaded before the interpreter, empty where the compiler links it itself."""
    names = ("libasan.so", "libclang_rt.asan-x86_64.so", "libclang_rt.asan-aarch64.so", "libclang_rt.asan.so")
    for name in names:
        printed = subprocess.run([*compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        path = Path(printed.stdout.strip())
        if path.is_absolute() and path.exists():
            # The file that a linker script of that name refers to.
            real = re.search(r"/\S+\.so[.\d]*", path.read_text()) if path.stat().st_size < 4_096 else None
            return real[0] if real else str(path.resolve())
    sys.exit("the compiler has no AddressSanitizer library; install libasan (gcc) or compiler-rt (clang)")


class Sanitized:
    """Finds the extensions with sanitizers before anything else does."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return where a module of ours with sanitizers is; None for every other."""
        if name not in extensions():
            return None
        loader = importlib.machinery.ExtensionFileLoader(name, str(built_path(name)))
        return importlib.util.spec_from_file_location(name, built_path(name), loader=loader)


def child(tool: str, arguments: list[str]) -> None:
    """Run pytest, or a file of tests/, on the extensions with sanitizers."""
    sys.path.insert(0, str(ROOT))
    sys.meta_path.insert(0, Sanitized)
    for name in extensions():
        module = importlib.import_module(name)
        if Path(str(module.__file__)) != built_path(name):
            sys.exit(f"{name} comes from {module.__file__}, which has no sanitizers")
    if tool == "pytest":
        import pytest

        sys.exit(pytest.main(arguments))
    sys.argv = [tool, *arguments]
    runpy.run_path(str(ROOT / "tests" / tool), run_name="__main__")


def run_child(tool: str, *arguments: str) -> None:
    """Run `child` in a separate process; ends this one if that failed."""
    environment = os.environ | {
        "LD_PRELOAD": sanitizer_library(),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONMALLOC": "malloc",  # the interpreter's own allocator would hide overruns of an object
        "RELAYLINE_SANITIZED": "1",
    }
    command = [sys.executable, "-X", "faulthandler", str(Path(__file__)), "--child", tool, *arguments]
    if subprocess.run(command, check=False, env=environment, cwd=ROOT).returncode != 0:
        sys.exit(f"check-native: {tool} {' '.join(arguments)} failed; see above")


def main() -> None:
    """Build, test, fuzz."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
        return
    arguments = sys.argv[1:]
    if "--seed" not in arguments:
        arguments += ["--seed", str(random.SystemRandom().getrandbits(32))]
    if "--seconds" not in arguments:
        arguments += ["--seconds", DEFAULT_SECONDS]
    build()
    tests = [str(ROOT / "tests" / name) for name in TESTS]
    run_child("pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests)
    run_child(FUZZ, *arguments)


if __name__ == "__main__":
    main()
