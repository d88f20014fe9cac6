"""Packs everything that a GPU host without a network needs for `python -m benches.gpu --minutes N` into one folder:
`--pack DIR`.

DIR/wheels: relayline's dependencies, for the host's Python. DIR/sources.tar.gz: llama.cpp, cut to one shape's kernels.
DIR/llama_cpp and its dist-info: the binding without its libraries. DIR/project: this checkout. DIR/start.sh: installs
them and runs the bench; its arguments are the bench's.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from benches.gpu.build import fetched
from benches.gpu.trim import pack_sources, trim
from benches.models import MIXES, SHAPES
from benches.peers import PeersUnavailableError

ROOT = Path(__file__).parents[2]
PYTHON = "3.12"
# In addition to pyproject.toml: the binding's dependencies, and the build tools of our extension.
ALSO = ("diskcache", "typing-extensions", "setuptools>=77", "py-spy")
GLIBC = range(5, 40)  # pip wants each tag separately: manylinux_2_5 to manylinux_2_39
START = """\
#!/bin/bash
# Installs the packages in this folder and runs the GPU bench for some minutes. Its arguments are the bench's.
set -e
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
site=${SITE:-$here/site}
$python -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" "$here"/wheels/*.whl
cp -r "$here"/llama_cpp "$here"/llama_cpp_python-*.dist-info "$site"/
export PYTHONPATH=$site PATH=$site/bin:$PATH
cd "$here/project"
$python -m pip install -q --no-index --no-deps --no-build-isolation --target "$site" .
exec $python -m benches.gpu --sources "$here/sources.tar.gz" "$@"
"""


def requirements(pyproject: str, without: tuple[str, ...]) -> list[str]:
    """Return the packages to download: the project's dependencies and ALSO, without those that the host has. Pure."""
    named = tomllib.loads(pyproject)["project"]["dependencies"]
    wanted = [text.split(";")[0].strip() for text in named if not text.startswith("llama-cpp-python")]
    return [text for text in (*wanted, *ALSO) if not text.startswith(without)]


def download(directory: Path, needs: list[str]) -> None:
    """Download wheels with all their dependencies. Raises PeersUnavailableError."""
    platforms = [part for minor in GLIBC for part in ("--platform", f"manylinux_2_{minor}_x86_64")]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--python-version", PYTHON,
        "--implementation", "cp", "--abi", f"cp{PYTHON.replace('.', '')}", "--abi", "abi3", "--abi", "none",
        *platforms, "--platform", "manylinux2014_x86_64", "--dest", str(directory), *needs,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeersUnavailableError(f"pip download failed: {done.stderr.strip().splitlines()[-1]}")


def copy_project(directory: Path) -> None:
    """Copy the files of this checkout that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if name.startswith(("tests/", "docs/")) or not (ROOT / name).is_file():
            continue
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, directory / name)


def copy_binding(directory: Path) -> None:
    """Copy the installed llama-cpp-python without its libraries."""
    found = importlib.metadata.distribution("llama_cpp_python")
    package, site_packages = Path(str(found.locate_file("llama_cpp"))), Path(str(found.locate_file("")))
    shutil.copytree(package, directory / "llama_cpp", ignore=shutil.ignore_patterns("lib", "__pycache__"))
    name = next(site_packages.glob("llama_cpp_python-*.dist-info")).name
    shutil.copytree(site_packages / name, directory / name)


def pack(directory: Path, shape: str, mix: str, archive: Path | None, host_has: tuple[str, ...]) -> None:
    """Fill `directory`, which must be new or empty. Raises PeersUnavailableError."""
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise PeersUnavailableError(f"{directory} is not empty")
    with tempfile.TemporaryDirectory(prefix="relayline-pack-") as scratch:
        root = fetched(Path(scratch), archive)
        trim(root, SHAPES[shape].head_dim, {kind.name for kind in MIXES[mix]})
        pack_sources(root, directory / "sources.tar.gz")
    (directory / "wheels").mkdir()
    download(directory / "wheels", requirements((ROOT / "pyproject.toml").read_text(), host_has))
    for wheel in (directory / "wheels").iterdir():  # its dependencies are in the folder as well
        if wheel.name.startswith(host_has or ("/",)):
            wheel.unlink()
    copy_binding(directory)
    copy_project(directory / "project")
    (directory / "start.sh").write_text(START)
    (directory / "start.sh").chmod(0o755)


def main(options: argparse.Namespace) -> int:
    """Pack, and print the size."""
    pack(options.pack, options.shape, options.type, options.sources, tuple(options.host_has))
    n_bytes = sum(path.stat().st_size for path in options.pack.rglob("*") if path.is_file())
    run = f"{options.pack.name}/start.sh --minutes 10 --out DIR"
    print(f"{options.pack}: {n_bytes / 2**20:.0f} MiB; on the host run {run}")
    return 0
