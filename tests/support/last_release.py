"""The last release next to the tree: its files from git's history, its extensions compiled, its commands run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from relayline.wire.common import bounds

# The commit that counts as the last release. No release speaks protocol 7 yet, so it is the commit that began it. A
# release puts its own commit here.
LAST_RELEASE = "44ba09a2c0927841fef2d016d36ba504cbca9ee8"
ROOT = Path(__file__).parents[2]
ROOMS = ("wire", "stage", "coordinator", "deploy")


def unpacked(directory: Path) -> Path:
    """Return the folder for PYTHONPATH from which the last release is imported.

    `directory` is empty. Its C extensions are compiled with this environment. Skips if git lacks it.
    """
    there = _git("cat-file", "-e", f"{LAST_RELEASE}^{{commit}}")
    if there is None or there.returncode:
        pytest.skip(f"git's history is not here, or not whole: the last release is its commit {LAST_RELEASE[:7]}")
    _check_protocol()
    tree, package = directory / "tree", directory / "path" / "relayline"
    archived = directory / "tree.tar"
    done = _git("archive", "--output", str(archived), LAST_RELEASE)
    assert done is not None
    assert done.returncode == 0, done.stderr
    with tarfile.open(archived) as files:
        files.extractall(tree, filter="data")
    package.mkdir(parents=True)
    for room in ROOMS:
        (package / room).symlink_to(tree / room)
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    built = subprocess.run(
        command, cwd=tree, env=os.environ | {"CFLAGS": "-O1"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert built.returncode == 0, built.stderr
    return package.parent


def prefix(path: Path | None) -> list[str]:
    """Return the prefix with which a command runs from there; None: from the tree."""
    return [] if path is None else ["env", f"PYTHONPATH={path}"]


def runs_from(pid: int, path: Path | None) -> bool:
    """Whether a process has loaded its extensions from there; None: from the tree."""
    found = re.findall(r"(/\S+)/wire/envelopes/_frames\S*\.so", Path(f"/proc/{pid}/maps").read_text())
    root = ROOT if path is None else (path / "relayline" / "wire").resolve().parent
    return bool(found) and {Path(each).resolve() for each in found} <= {root, path and (path / "relayline").resolve()}


def _check_protocol() -> None:
    done = _git("show", f"{LAST_RELEASE}:wire/common/bounds.py")
    assert done is not None
    found = re.search(r"^PROTOCOL_VERSION = (\d+)", done.stdout, re.MULTILINE)
    assert found, "the commit of the last release has no PROTOCOL_VERSION"
    if int(found[1]) != bounds.PROTOCOL_VERSION:
        text = f"the last release speaks protocol {found[1]}, the tree {bounds.PROTOCOL_VERSION}: they do not mix"
        pytest.skip(f"{text}; once a commit of the new protocol is out, name it in tests/support/last_release.py")


def _git(*arguments: str) -> subprocess.CompletedProcess[str] | None:
    """Run git in the tree; None without git."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return None
