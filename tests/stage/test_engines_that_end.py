"""Goal: of an engine that has ended nothing stays: neither its memory, nor an open file, nor a thread."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.engines import engine_config, stage_config
from relayline.deploy.testing.tiny_slices import TinyShape, write_pipeline
from relayline.stage import assembly
from relayline.stage import served as served_stage
from relayline.stage.config import StageConfig
from relayline.stage.engine.loading import MEASURING, Load, LoadStoppedError
from relayline.stage.engine.native import NativeEngine
from relayline.stage.process import serve, serve_changing
from relayline.wire.common.errors import NativeError, RelaylineError
from relayline.wire.common.memory import give_back
from relayline.wire.envelopes.frames import Flag
from tests.support.fakes import control, rows_frame, tokens_frame
from tests.support.served_stage import Coordinator, StageUnderTest
from tests.support.tiny_models import make_tiny

KINDS = {
    "llama": ("llama", {}),
    "a window": ("gemma3", {"kv_layout": "per-lane"}),
    "a hybrid": ("qwen35", {}),
    "prediction layers": ("qwen35:mtp", {"mtp_drafts": 2}),
    "inputs of layers": ("gemma4:e2b", {}),
    "captured embeddings": ("llama", {"embeddings": True}),
}
GIVE_BACKS_MAX = 20  # until a thread has let go of its latest work


class Engines:
    """The engines that were loaded, and the files of a directory that this process has open or mapped."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._made: list[weakref.ref[NativeEngine]] = []

    def note(self, engine: NativeEngine) -> None:
        self._made.append(weakref.ref(engine))

    @property
    def n_made(self) -> int:
        return len(self._made)

    @property
    def n_left(self) -> int:
        return sum(engine() is not None for engine in self._made)

    async def only(self, n_left: int) -> None:
        """See that no more are left, but for what a thread that has no turn on a busy host still holds."""
        for _ in range(GIVE_BACKS_MAX):
            if self.n_left <= n_left:
                break
            await give_back()
        assert self.n_left == n_left

    def open_files(self) -> list[str]:
        names = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
        maps = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
        return [name for name in (*names, *maps) if name.startswith(str(self.directory)) and ".gguf" in name]

    def assert_none_left(self) -> None:
        assert self.n_made > 0
        assert self.n_left == 0
        assert self.open_files() == []


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    """Without the collector of cycles: what ends has to see to it that it is looked for."""
    made, load = Engines(tmp_path), NativeEngine.__init__

    def noted(engine: NativeEngine, *given: Any) -> None:
        made.note(engine)
        load(engine, *given)

    monkeypatch.setattr(NativeEngine, "__init__", noted)
    gc.disable()
    yield made
    gc.enable()


def config(artifact: Path, **changes: object) -> StageConfig:
    defaults = {"n_lanes": 4, "ctx_tokens": 64, "max_rows": 64, "n_threads": 2, "calibrate": False, "verify": False}
    return stage_config(artifact, **(defaults | changes))


def last_stage(directory: Path, cut: int) -> Path:
    """The second of two artifacts of a model, alone in its directory."""
    directory.mkdir()
    return write_pipeline(directory, TinyShape(), [cut])[1]


def whole(name: str, directory: Path) -> Path:
    """The one artifact of a model that is not split."""
    split_model(make_tiny(name, directory / "model.gguf"), directory / "split", n_stages=1)
    return directory / "split" / "stage-0.gguf"


async def use(address: str, artifact: Any) -> None:
    """Run a step of one session, whose epoch ends with the coordinator."""
    stage = cast(StageUnderTest, SimpleNamespace(address=address, artifact=artifact))
    async with Coordinator(stage) as one:
        await one.start()
        given = [3, 5, 7] if artifact.is_first else np.ones((3, artifact.n_embd), np.float32)
        frame = tokens_frame if artifact.is_first else rows_frame
        await one.send(control(1, Flag.OPEN), frame(1, 0, given, Flag.WANTS_SAMPLE))
        while not (await one.reply()).samples:
            pass


async def serve_once(asked: StageConfig, load: Load | None = None) -> None:
    async with serve(asked, load):
        pass


async def refusal(work: Coroutine[Any, Any, None]) -> str:
    """The error of some work. `pytest.raises` keeps an error for longer, and its frames with it."""
    try:
        await work
    except (RelaylineError, LoadStoppedError) as error:
        return str(error)
    raise AssertionError("it did what it was to refuse")


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_that_served_leaves_nothing(kind: str, engines: Engines, tmp_path: Path) -> None:
    name, changes = KINDS[kind]
    artifact = whole(name, tmp_path)
    for _ in range(2):
        async with serve(config(artifact, **changes)) as (address, facts, _):
            await use(address, facts.artifact)
        await give_back()
        engines.assert_none_left()
    assert engines.n_made == 2
    assert not [thread for thread in threading.enumerate() if thread.name == "decode"]


def test_the_native_threads_of_an_engine_end_with_it(tmp_path: Path) -> None:
    artifact, n_threads = write_pipeline(tmp_path, TinyShape(), [2])[1], []
    for _ in range(3):
        with NativeEngine(engine_config(artifact, 2, 32, n_threads=3)) as engine:
            engine.decode(2)
        n_threads.append(len(os.listdir("/proc/self/task")))
    assert max(n_threads[1:]) <= n_threads[0], n_threads


async def test_a_load_that_fails_leaves_nothing(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(vocab: object, n_vocab: int) -> None:
        raise NativeError("no vocabulary")

    class StoppedWhileMeasuring(Load):
        def at(self, work: str, share: float) -> None:
            if work == MEASURING:
                self.stop()
            super().at(work, share)

    closed: list[int] = []
    close = NativeEngine.close
    monkeypatch.setattr(NativeEngine, "close", lambda engine: (closed.append(1), close(engine))[1])
    artifact = write_pipeline(tmp_path, TinyShape(), [])[0]
    assert await refusal(serve_once(config(artifact, calibrate=True), StoppedWhileMeasuring())) == MEASURING
    await give_back()
    engines.assert_none_left()
    monkeypatch.setattr(assembly, "read_vocabulary", unreadable)
    assert await refusal(serve_once(config(artifact))) == "no vocabulary"
    await give_back()
    engines.assert_none_left()
    assert len(closed) == engines.n_made == 2, "llama.cpp's part is freed too"


async def test_the_engine_before_a_switch_goes_as_soon_as_it_has_ended(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    async def counted() -> None:
        looked.append(1)
        await give_back()

    monkeypatch.setattr(served_stage, "give_back", counted)
    first, other = (last_stage(tmp_path / str(cut), cut) for cut in (1, 2))
    async with serve_changing(config(first)) as served:
        for artifact in (other, first, other):
            await use(served.address, served.facts.artifact)
            await served.prepare(config(artifact), Load())
            served.switch()
            n_looked = len(looked)
            await asyncio.gather(*served._endings)
            assert len(looked) == n_looked + 1, "the stage itself looks for what has ended"
            await engines.only(1)
            assert not [name for name in engines.open_files() if str(artifact.parent) not in name]
        await served.prepare(config(first), Load())
        await served.drop()
        await engines.only(1)  # an unused one goes too
    assert engines.n_made == 5


async def test_another_models_slice_is_not_kept(engines: Engines, tmp_path: Path) -> None:
    ours, other = last_stage(tmp_path / "ours", 2), whole("llama", tmp_path)
    async with serve_changing(config(ours)) as served:
        assert "another model" in await refusal(served.prepare(config(other), Load()))
        await give_back()
        assert engines.n_left == 1
        assert not [name for name in engines.open_files() if str(other.parent) in name]
