"""Says whether the installed llama.cpp was built with the files that lie here; exit code 1 if not.

pip's cache knows a wheel by its version alone, and may have one from before these files changed. Standard library only.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
MARK = Path("llama_cpp") / "lib" / "relayline-build.txt"  # where llama_minimal.cmake has it installed


def told() -> str:
    """Return what llama_minimal.cmake leaves in a wheel that is built now: each file's name and digest, by name."""
    files = sorted(path for pattern in ("*.cmake", "*.cpp", "*.h") for path in HERE.glob(pattern))
    return "".join(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in files)


def main() -> int:
    """Compare; say nothing."""
    mark = Path(sysconfig.get_path("platlib")) / MARK
    return 0 if mark.is_file() and mark.read_text() == told() else 1


if __name__ == "__main__":
    sys.exit(main())
