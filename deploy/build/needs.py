"""Checks what `make setup` needs of this machine before it begins: one line now instead of a long log later.

    python needs.py [.venv]

The argument is the environment, which may exist already. Standard library only: this runs before anything is installed,
on an interpreter that is new enough.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

DEBIAN = "on Debian and Ubuntu: apt install"
COMPILERS = (("C", "CC", "cc", "gcc"), ("C++", "CXX", "c++", "g++"))  # the variable, the default, Debian's package


def fault(
    environment: Mapping[str, str] = os.environ,
    config: Callable[[str], Any] = sysconfig.get_config_var,
    *,
    has_pip: bool = False,
    venv_modules: tuple[str, ...] = ("venv", "ensurepip"),
) -> str:
    """Return what is missing and how to get it, empty if nothing is. `has_pip`: the environment exists already, with
    pip in it.
    """
    if not has_pip and any(importlib.util.find_spec(name) is None for name in venv_modules):
        version = platform.python_version_tuple()
        return (
            f"{sys.executable} cannot make environments: its modules venv and ensurepip are a package of their own "
            f"({DEBIAN} python{version[0]}.{version[1]}-venv)"
        )
    for language, variable, default, package in COMPILERS:
        # As setuptools and scikit-build-core choose it.
        command = environment.get(variable, "") or config(variable) or default
        program = (shlex.split(command) or [""])[0]
        if shutil.which(program, path=environment.get("PATH")) is None:
            return (
                f"there is no {language} compiler: {program} is not in PATH; install it ({DEBIAN} {package}), or name "
                f"another one in {variable}"
            )
    return _missing_headers(config)


def _missing_headers(config: Callable[[str], Any]) -> str:
    # setup.py has a header for every other interpreter.
    header = Path(sysconfig.get_path("include"), "Python.h")
    if config("Py_GIL_DISABLED") and not header.is_file():
        return f"the free-threaded {sys.executable} needs its headers, {header}; install its development package"
    return ""


def has_pip(environment: Path) -> bool:
    """Return whether an environment is there and has pip. A creation that failed leaves one without."""
    python = environment / "bin" / "python"
    return python.exists() and not subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode


if __name__ == "__main__":
    line = fault(has_pip=has_pip(Path(sys.argv[1] if len(sys.argv) > 1 else ".venv")))
    if line:
        sys.exit(f"      {line}")
