"""Checks whether the installed llama.cpp was built with the requested kernels, from the files in this folder.

    python built_with.py "CMAKE_ARGS of the build"

Exit code 0 if so; otherwise 1, and one line with the difference. pip's cache knows a wheel by its version alone, and
may have one from before these files changed. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

DEPLOY = Path(__file__).parents[1]
FILES = ("build/*.cmake", "kernels/*.cmake", "kernels/*.cpp", "kernels/*.h", "kernels/*.patch")
MARK = Path("llama_cpp") / "lib" / "relayline-build.txt"  # where llama_minimal.cmake has it installed


def kernels_asked(cmake_args: str, environment: Mapping[str, str]) -> str:
    """Return ON or OFF: what CMake understands from its arguments, or from the environment (kernels/mode.cmake)."""
    given = re.findall(r"-DRELAYLINE_KERNELS(?::\w+)?=[\"']?(\w+)", cmake_args)
    asked = given[-1] if given else environment.get("RELAYLINE_KERNELS", "")
    return "OFF" if asked.upper() == "OFF" else "ON"


def mark_text(kernels: str) -> str:
    """Return what llama_minimal.cmake leaves in a wheel that is built now: the kernels, each file's name and digest."""
    files = sorted(path for pattern in FILES for path in DEPLOY.glob(pattern))
    digests = (f"{path.relative_to(DEPLOY)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in files)
    return f"kernels {kernels}\n" + "".join(digests)


def trouble(mark: Path, kernels: str) -> str:
    """Return how the wheel that left this mark differs; empty if it does not."""
    if not mark.is_file():
        return "the installed llama.cpp was not built from this source tree"
    found, wanted = mark.read_text().splitlines(), mark_text(kernels).splitlines()
    if found == wanted:
        return ""
    if found[:1] != wanted[:1] and found[:1] in (["kernels ON"], ["kernels OFF"]):
        return f"the installed llama.cpp was built with {found[0]}, not with {wanted[0]}"
    names = sorted({line.partition(" ")[0] for line in {*found} ^ {*wanted}})
    return f"the installed llama.cpp was built from other files: {', '.join(names)}"


def main() -> int:
    """Compare the mark of the installed wheel."""
    kernels = kernels_asked(" ".join(sys.argv[1:]), os.environ)
    text = trouble(Path(sysconfig.get_path("platlib")) / MARK, kernels)
    if text:
        print(text, file=sys.stderr)
    return 1 if text else 0


if __name__ == "__main__":
    sys.exit(main())
