"""How the C extensions that pyproject.toml lists are compiled: hardened, by whatever of it the compiler knows, and also
where the interpreter came without its headers.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

# A stack that is written past its end stops the process, and so does a copy past the end of what it is for. The level
# that the interpreter was built with is taken back first: two of them are a warning.
HARDENING = (
    ("-fstack-protector-strong",),
    ("-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=3"),
)
# Looked in last: the interpreter's own Python.h comes first if there is one.
HEADERS = ("-idirafter", str(Path(__file__).resolve().parent / "deploy" / "build" / "headers"))


class HardenedBuild(build_ext):
    """As setuptools does it, with the flags above."""

    def build_extensions(self) -> None:
        """Ask the compiler which flags it knows, then compile everything with them."""
        headers = HEADERS if has_stable_abi() else ()
        known = [flag for flags in HARDENING if knows(self.compiler, flags) for flag in flags]
        for extension in self.extensions:
            extension.extra_compile_args = [*known, *headers, *extension.extra_compile_args]
        super().build_extensions()


def has_stable_abi() -> bool:
    """Return whether the header of HEADERS is true of this interpreter: free-threaded ones have another layout."""
    return sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")


def knows(compiler: Any, flags: tuple[str, ...]) -> bool:
    """Return whether a compiler takes flags without an error; one that only warns leaves them out by itself."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "nothing.c")
        source.write_text("int main(void) { return 0; }\n")
        try:
            compiler.compile([str(source)], output_dir=scratch, extra_postargs=list(flags))
        except CompileError:
            return False
    return True


if __name__ == "__main__":  # as every builder runs it
    setup(cmdclass={"build_ext": HardenedBuild})
