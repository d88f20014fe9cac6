"""The GPU benchmark as far as it runs without a GPU: its builds, its requests, and a whole quick run."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from benches import peers
from benches.gpu import __main__ as bench
from benches.gpu import steps
from benches.gpu.build import TARGETS, build, options_of
from benches.peers import LIBRARIES, Kernels, Peers, PeersUnavailableError

LINE = '{{"n_kv_max": 256, "pp": 16, "tg": 32, "pl": {rows}, "t_pp": 0.1, "t_tg": {seconds}}}\n'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def archive_of(directory: Path, version: str) -> Path:
    """A source distribution without sources."""
    root = directory / f"llama_cpp_python-{version}"
    (root / "vendor" / "llama.cpp").mkdir(parents=True)
    with tarfile.open(directory / "sources.tar.gz", "w:gz") as archive:
        archive.add(root, root.name)
    return directory / "sources.tar.gz"


class Tools:
    """A fake cmake: records its arguments, and makes programs and libraries as the real one would."""

    def __init__(self) -> None:
        self.commands: list[Sequence[str]] = []

    def __call__(self, command: Sequence[str], _log: Path) -> None:
        self.commands.append(command)
        if "--build" in command:
            binaries = Path(command[command.index("--build") + 1]) / "bin"
            binaries.mkdir(parents=True)
            for name in (*TARGETS, "libllama.so"):
                (binaries / name).touch()


def test_one_architecture_is_built_once_from_sources_at_hand(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = Tools()
    monkeypatch.setattr(peers, "_run", tools)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    archive = archive_of(tmp_path, peers.pinned_version())
    built = build("cuda", "90", 4, archive)
    configure, make = tools.commands
    assert {"-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90", "-DBUILD_SHARED_LIBS=ON"} <= set(configure)
    assert make[-len(TARGETS) :] == list(TARGETS)
    assert built.directory.is_relative_to(cache)
    assert built.server.is_file()
    assert build("cuda", "90", 4, archive) == built
    assert len(tools.commands) == 2, "it was there"
    assert build("cuda", "80", 4, archive).directory != built.directory


def test_without_cuda_or_its_sources_one_line_says_so(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None if name == "nvcc" else f"/bin/{name}")
    with pytest.raises(PeersUnavailableError, match="nvcc was not found"):
        build("cuda", "native", 1, None)
    with pytest.raises(PeersUnavailableError, match=r"none\.tar\.gz cannot be unpacked"):
        build("cpu", "native", 1, tmp_path / "none.tar.gz")
    with pytest.raises(PeersUnavailableError, match="is not the source distribution of llama-cpp-python"):
        build("cpu", "native", 1, archive_of(tmp_path, "0.0.1"))
    assert not list(cache.rglob("bin"))
    assert not any("CUDA" in option for option in options_of("cpu", "native"))


def test_the_bench_starts_again_with_the_libraries_that_were_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], str]] = []
    built = Peers(tmp_path, "1")
    monkeypatch.setattr(bench, "build", lambda *_: built)
    monkeypatch.setattr(os, "execve", lambda _, command, new: started.append((command, new[LIBRARIES])))
    monkeypatch.setattr(sys, "argv", ["gpu", "--quick"])
    monkeypatch.setenv(LIBRARIES, "elsewhere")
    options = bench.parse(["--quick"])
    before = dict(os.environ)
    assert bench.programs(options) == built
    assert started == [([sys.executable, "-m", "benches.gpu", "--quick"], str(tmp_path))]
    assert os.environ == before, "what comes after in this process would see it, too"
    monkeypatch.setenv(LIBRARIES, str(tmp_path))
    bench.programs(options)
    assert len(started) == 1, "these are its libraries already"


def test_results_of_a_processor_are_not_compared_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Peers(Path("mine"), "1")
    monkeypatch.setattr(bench, "find_peers", {Kernels.OURS: mine}.get)
    options = bench.parse(["--installed"])
    monkeypatch.setattr(bench, "_sees_gpus", lambda: False)
    assert bench.programs(options) == mine
    monkeypatch.setattr(bench, "_sees_gpus", lambda: True)
    assert bench.programs(options) is None


def test_the_measuring_program_takes_the_same_steps() -> None:
    command = steps.bare_command(Peers(Path("bin"), "1"), Path("m.gguf"), (1, 4), 2, -1)
    asked = dict(itertools.pairwise(command))
    assert (asked["--n-gpu-layers"], asked["--ctx-size"], asked["--batch-size"]) == ("all", "256", "4")
    assert (asked["-npp"], asked["-ntg"], asked["-npl"]) == ("16", "32", "1,4,1")
    on_processor = steps.bare_command(Peers(Path("bin"), "1"), Path("m.gguf"), (1,), 2, 0)
    assert dict(itertools.pairwise(on_processor))["--n-gpu-layers"] == "0"


def test_its_figures_are_read_and_missing_ones_are_reported(tmp_path: Path) -> None:
    text = "main: x\n" + LINE.format(rows=1, seconds=0.32) + LINE.format(rows=4, seconds=0.64)
    assert steps.parse(text + LINE.format(rows=1, seconds=9)) == {1: pytest.approx(10), 4: pytest.approx(20)}
    output = tmp_path / "told"
    output.write_text(text)
    assert steps.bare_ms(["cat", str(output)], (1, 4)) == steps.parse(text)
    with pytest.raises(steps.BareError, match="no figures for some rows"):
        steps.bare_ms(["cat", str(output)], (1, 8))
    with pytest.raises(steps.BareError, match=r"exit code 1.*No such file"):
        steps.bare_ms(["cat", str(tmp_path / "none")], (1,))


def test_medians_are_set_against_each_other() -> None:
    found = steps.entry(4, [8.0, 2.0, 4.0], [5.0, 2.0, 1.0])
    assert found == {"rows": 4, "engine_ms": 4.0, "row_ms": 1.0, "tok_s": 1000.0, "bare_ms": 2.0, "ratio": 2.0}
    assert "ratio" not in steps.entry(1, [1.0], [])


@pytest.mark.bench
def test_a_quick_run_leaves_its_results(tmp_path: Path) -> None:
    command = ["-m", "benches.gpu", "--quick", "--installed", "--out", str(tmp_path)]
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    assert [each["rows"] for each in json.loads((tmp_path / "gpu-steps.json").read_text())["steps"]] == [1, 4]
    assert json.loads((tmp_path / "gpu-streams.json").read_text())["points"]
    assert (tmp_path / "gpu-streams.png").exists()
