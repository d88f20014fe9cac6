"""A load reports its progress, and stops at once in every phase: hashing, reading weights, measuring."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from relayline.deploy.testing.engines import engine_config, stage_config
from relayline.deploy.testing.tiny_slices import TinyShape, write_pipeline
from relayline.stage.assembly import load_stage
from relayline.stage.config import StageConfig
from relayline.stage.engine.loading import (
    CHECKING,
    LOG_EVERY_S,
    MEASURING,
    TELL_EVERY_S,
    WEIGHTS,
    Load,
    LoadStoppedError,
)
from relayline.stage.engine.native import NativeEngine
from relayline.stage.joining.artifact_store import Slot, Writer, has_content
from relayline.stage.process import serve
from relayline.stage.speed.curves import Curves
from relayline.wire.common.places import cache_dir
from relayline.wire.common.units import MIB
from relayline.wire.pb.relayline.v1 import join_pb2 as pb


class StoppedAt(Load):
    """A load that is stopped at one point of its work."""

    def __init__(self, is_there: Callable[[str, float], bool], *, after: bool = False) -> None:
        super().__init__()
        self.seen: list[tuple[str, float]] = []
        self._is_there, self._after = is_there, after

    def at(self, work: str, share: float) -> None:
        """Stop here, or right after this, if this is the point."""
        self.seen.append((work, share))
        if self._is_there(work, share) and not self._after:
            self.stop()
        super().at(work, share)
        if self._is_there(work, share):
            self.stop()


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    return write_pipeline(tmp_path, TinyShape(), [2])[0]


def test_a_slow_load_logs_its_progress_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now_s, reports = [0.0], list[tuple[str, float]]()
    load = Load(lambda work, share: reports.append((work, share)), clock_s=lambda: now_s[0])
    with caplog.at_level(logging.INFO, "relayline.stage"):
        for now_s[0], share in ((0.1, 0.1), (TELL_EVERY_S, 0.2), (0.9, 0.3), (LOG_EVERY_S + 0.1, 0.4)):
            load.at(WEIGHTS, share)
        assert [record.message for record in caplog.records] == [WEIGHTS]
        assert caplog.records[0].fields == {"done": "40%"}  # type: ignore[attr-defined]
        now_s[0] += LOG_EVERY_S
        load.at(MEASURING, 0.0)
        assert len(caplog.records) == 1, "another piece of work, which may be over at once"
    assert reports == [(WEIGHTS, 0.2), (WEIGHTS, 0.4), (MEASURING, 0.0)]


def test_a_load_that_is_stopped_goes_no_further() -> None:
    load = Load()
    assert load.goes_on(WEIGHTS, 0.5)
    load.stop()
    assert not load.goes_on(WEIGHTS, 0.6)
    with pytest.raises(LoadStoppedError):
        load.at(WEIGHTS, 0.7)


def test_weights_are_read_no_further(artifact: Path) -> None:
    load = StoppedAt(lambda work, share: work == WEIGHTS)
    with pytest.raises(LoadStoppedError):
        NativeEngine(engine_config(artifact, n_lanes=1, ctx_tokens=32), load)
    assert len(load.seen) == 1


def test_weights_that_are_first_touched_by_a_step_are_read_no_further(artifact: Path) -> None:
    load = StoppedAt(lambda work, share: share >= 1.0, after=True)
    with pytest.raises(LoadStoppedError):
        NativeEngine(engine_config(artifact, n_lanes=1, ctx_tokens=32), load)
    assert load.seen[-1] == (WEIGHTS, 1.0)


def test_a_running_load_can_be_stopped_without_harm(artifact: Path) -> None:
    load = Load()
    with NativeEngine(engine_config(artifact, n_lanes=1, ctx_tokens=32), load) as engine:
        load.stop()
        engine.decode(1)  # no call of ours is left in llama.cpp


def test_steps_are_measured_no_further_and_nothing_is_remembered(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[NativeEngine] = []
    close = NativeEngine.close
    monkeypatch.setattr(NativeEngine, "close", lambda engine: (closed.append(engine), close(engine))[1])
    load = StoppedAt(lambda work, share: work == MEASURING)
    config = stage_config(artifact, n_lanes=4, ctx_tokens=32, n_threads=1, verify=False)
    with pytest.raises(LoadStoppedError):
        load_stage(config, load)
    assert load.seen[-1][0] == MEASURING
    assert len(closed) == 1
    assert not (cache_dir() / "curves").exists()


def test_a_file_is_hashed_no_further_and_not_taken_for_an_altered_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    artifact = pb.ArtifactFile(file="stage-0.gguf", sha256="0" * 64, size_bytes=3 * MIB)
    slot = Slot(tmp_path, artifact)
    slot.prepare(b"{}")
    slot.path.write_bytes(bytes(3 * MIB))
    load = StoppedAt(lambda work, share: share > 0.5)
    with pytest.raises(LoadStoppedError):
        slot.is_complete(load)
    assert slot.path.exists(), "it is not known that it is another file"
    assert [work for work, _ in load.seen] == [CHECKING] * 2
    slot.path.rename(slot.partial)
    with pytest.raises(LoadStoppedError):
        Writer(slot, StoppedAt(lambda work, share: share > 0.5))
    assert slot.partial_bytes() == 3 * MIB, "the hash so far is kept for the next attempt"
    assert not has_content(slot.partial, artifact, Load())


async def test_whoever_waits_no_longer_for_a_stage_ends_its_load(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, entered, ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def endless(config: StageConfig, load: Load, like: Curves | None) -> None:
        loop.call_soon_threadsafe(entered.set)
        try:
            while True:
                load.at(WEIGHTS, 0.5)
        finally:
            loop.call_soon_threadsafe(ended.set)

    monkeypatch.setattr("relayline.stage.process.load_stage", endless)
    entering = asyncio.create_task(serve(StageConfig(artifact)).__aenter__())
    async with asyncio.timeout(20):
        await entered.wait()
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        await ended.wait()


ENDLESS_STAGE = """
    import sys
    from pathlib import Path
    from relayline.stage import process
    from relayline.stage.config import StageConfig

    def endless(config, load, like):
        print("loading", flush=True)
        while True:
            load.at("loading weights", 0.5)

    process.load_stage = endless
    process.run_stage(StageConfig(Path(sys.argv[1])), lambda address, facts: print("ready"))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_stage_that_loads_as_one_that_serves(artifact: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", textwrap.dedent(ENDLESS_STAGE), str(artifact)]
    stage = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert stage.stdout is not None
    assert stage.stdout.readline() == "loading\n"
    stage.send_signal(number)
    out, error = stage.communicate(timeout=20)
    assert (stage.returncode, out, error) == (0, "", "")
