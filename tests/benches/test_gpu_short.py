"""The short GPU run: late parts are left out, each part's result is written when it ends, and the packing."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from benches.gpu import pack, short
from benches.gpu.what import PARTS
from benches.peers import LIBRARIES, Peers

HOUR_NS = 3600 * 10**9


def parts_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())["parts"]
    return found


async def test_each_part_is_written_when_it_ends_and_a_late_one_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "short.json"
    notebook = short.Notebook(path, time.monotonic_ns() + HOUR_NS, {"shape": "toy"})

    async def seven() -> int:
        return 7

    async def broken() -> int:
        raise RuntimeError("no device")

    async def never() -> int:
        raise AssertionError("it would have ended too late")

    await notebook.part("first", 10, seven)
    assert parts_of(path)["first"]["found"] == 7
    await notebook.part("second", 10, broken)
    await notebook.part("third", 2 * 3600, never)
    await notebook.part("fourth", 10, seven)
    found = parts_of(path)
    assert list(found) == ["first", "second", "third", "fourth"]
    assert found["second"]["failed"] == "RuntimeError: no device"
    assert found["third"]["left_out"].endswith("it needs about 7200")
    assert found["fourth"]["found"] == 7, "one that fails does not stop the others"


async def test_parts_run_in_the_order_of_their_worth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    class Book:
        def __init__(self) -> None:
            self.results: dict[str, Any] = {"parts": {}}

        async def part(self, name: str, _needs_s: float, _measure: Callable[[], Any]) -> None:
            ran.append(name)

    plan = short.Plan("toy", "q4_0", (1,), 8, 1, 0, tmp_path)
    monkeypatch.setattr(short, "model", lambda *_: tmp_path / "model.gguf")
    with_peers = short.Short(plan, Peers(tmp_path, "1"), tmp_path)
    assert await short.measure(Book(), with_peers, ()) == 0  # type: ignore[arg-type]
    assert ran == list(PARTS)
    ran.clear()
    await short.measure(Book(), short.Short(plan, None, tmp_path), ("rpc", "certify", "engine"))  # type: ignore[arg-type]
    assert ran == ["engine", "certify"], "without llama.cpp's programs nothing is compared"


def test_installed_packages_are_not_packed() -> None:
    project = (
        '[project]\ndependencies = ["numpy>=2", "llama-cpp-python==0.3.36", "uvloop; sys_platform == \'linux\'"]\n'
    )
    assert pack.requirements(project, ()) == ["numpy>=2", "uvloop", *pack.ALSO]
    assert pack.requirements(project, ("numpy", "py-spy")) == ["uvloop", *pack.ALSO[:-1]]


def test_libraries_that_were_built_do_where_the_binding_has_none(tmp_path: Path) -> None:
    package = Path(llama_cpp.__file__).parent
    shutil.copytree(package, tmp_path / "site" / "llama_cpp", ignore=shutil.ignore_patterns("lib", "__pycache__"))
    environment = {name: value for name, value in os.environ.items() if name != LIBRARIES}
    environment |= {"PYTHONPATH": str(tmp_path / "site"), "XDG_CACHE_HOME": str(tmp_path)}
    built = tmp_path / "built"
    built.mkdir()
    for library in (package / "lib").glob("lib*.so*"):
        (built / library.name).symlink_to(library.resolve())
    for name in ("llama-server", "llama-batched-bench", "ggml-rpc-server"):
        (built / name).touch()
    command = [sys.executable, "-m", "benches.gpu", "--backend", "cpu", "--built", str(built)]

    def run(*more: str) -> argparse.Namespace:
        done = subprocess.run(
            [*command, *more], env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        return argparse.Namespace(code=done.returncode, out=done.stdout, errors=done.stderr)

    only = run("--build-only")
    assert (only.code, only.out) == (0, f"{built}\n"), only.errors
    # No time is left for any part, but all code of the measurements has been loaded.
    late = run("--quick", "--minutes", "0.001", "--parts", "certify", "--out", str(tmp_path / "out"))
    assert "llama.cpp sees no GPU" in late.errors, late.errors


def test_a_part_says_where_the_time_of_several_stages_goes() -> None:
    point = {"streams": 8, "decode_tok_s": 640.4, "step_ms": [3.801, 3.7], "way_ms": [0.9, 1.649]}
    assert short._brief([point]) == "8: 640 tok/s (steps 3.80 + 3.70 ms, ways 0.90 + 1.65 ms)"
    assert short._brief([point | {"step_ms": [7.0], "way_ms": [1.0]}]) == "8: 640 tok/s"
