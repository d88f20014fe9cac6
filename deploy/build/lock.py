"""Writes constraints.txt: the versions that this environment holds. `make lock` takes the newest ones first.

The suite decides whether that set is kept: run `make test` behind it, and commit both or neither.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).with_name("constraints.txt")
HEADER = "# The tested versions. Made by `make lock`; `LATEST=1 make setup` takes the newest.\n"
NOT_OURS = {"relayline", "pip", "setuptools"}


def installed() -> dict[str, str]:
    """Return name -> version of every package in the environment that runs this."""
    command = [sys.executable, "-m", "pip", "list", "--format", "json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return {package["name"].lower().replace("_", "-"): package["version"] for package in json.loads(done.stdout)}


def main() -> None:
    """Write the file in the order of names."""
    versions = installed()
    lines = [f"{name}=={versions[name]}\n" for name in sorted(versions) if name not in NOT_OURS]
    CONSTRAINTS.write_text(HEADER + "".join(lines))
    print(f"{CONSTRAINTS.name}: {len(lines)} versions")


if __name__ == "__main__":
    main()
