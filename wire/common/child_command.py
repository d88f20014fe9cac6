"""Runs a module of this package in a new process, from any working directory.

`python -m` alone would look for modules in the current directory first: a user's `grpc.py` there would be imported in
place of the library. The package itself is found where it is installed, or by PYTHONPATH.
"""

from __future__ import annotations

import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `python -m module arguments` with the package's own modules."""
    return [sys.executable, "-P", "-m", module, *arguments]


def code_command(code: str, *arguments: str) -> list[str]:
    """Return the command that runs `python -c code arguments` with the package's own modules."""
    return [sys.executable, "-P", "-c", code, *arguments]
