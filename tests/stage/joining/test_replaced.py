"""Goal: a host keeps the slice it serves and the one before; those of earlier moves go, but for those others need."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.model.split import split_model
from relayline.stage.engine.loading import Load
from relayline.stage.joining import replaced
from relayline.stage.joining.artifact_fetch import obtain
from relayline.stage.joining.artifact_store import cached
from relayline.stage.joining.changes import NextSlice
from relayline.wire.common.errors import StartError
from relayline.wire.common.use import Use
from relayline.wire.pb.relayline.v1 import join_pb2 as pb
from tests.support.join_support import join_port
from tests.support.tiny_models import make_tiny

WAIT_S = 60
N_LAYERS = 6

Splits = dict[int, tuple[Path, PipelineFile]]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaced, "ASKED_FOR_S", 0.0)


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Splits:
    """Splits of one model at one cut; 0: of another model."""
    directory = tmp_path_factory.mktemp("splits")
    model = make_tiny("llama", directory / "m.gguf", n_layers=N_LAYERS, tokenizer=True)
    other = make_tiny("llama", directory / "o.gguf", n_layers=N_LAYERS, tokenizer=True, seed=2)
    made = {cut: (directory / f"{cut}", split_model(model, directory / f"{cut}", cuts=(cut,))) for cut in range(1, 6)}
    return made | {0: (directory / "0", split_model(other, directory / "0", cuts=(3,)))}


async def fetched(split: tuple[Path, PipelineFile], cache: Path, *, for_move: bool = True) -> Path:
    """Fetch the first slice of a split, as a host does whose layers move, or that joins."""
    async with asyncio.timeout(WAIT_S), join_port(split[0], made=split[1]) as port:
        member = await port.join()
        try:
            order = pb.JoinResponse()
            order.CopyFrom(member.order)
            order.change.step = pb.LAYER_CHANGE_STEP_PREPARE
            source: Any = NextSlice(member, order) if for_move else member
            return (await obtain(source, cache, Load(), always_fetch=True)).artifact
        finally:
            await member.close()


class Host(NamedTuple):
    """A host's cache, and the slice that it serves."""

    cache: Path
    serves: Use

    async def move(self, splits: Splits, cuts: Sequence[int]) -> None:
        for cut in cuts:
            self.serves.become([await fetched(splits[cut], self.cache)])

    def keeps(self, splits: Splits) -> list[int]:
        of = {made.stages[0].sha256: cut for cut, (_, made) in splits.items()}
        return sorted(of[entry.directory.name] for entry in cached(self.cache))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "cache", Use())


async def test_the_present_slice_and_the_one_before_stay(splits: Splits, host: Host) -> None:
    await fetched(splits[3], host.cache, for_move=False)
    await host.move(splits, [1, 2, 4, 5])
    assert host.keeps(splits) == [3, 4, 5]
    await host.move(splits, [4])
    assert host.keeps(splits) == [3, 4, 5], "it was not fetched anew"
    await host.move(splits, [3, 1])
    assert host.keeps(splits) == [1, 3]


async def test_slices_that_others_need_stay(splits: Splits, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    await host.move(splits, [0])
    other = Use([await fetched(splits[1], host.cache)])  # of another stage of this host
    host.serves.become([await fetched(splits[2], host.cache)])
    await host.move(splits, [4])
    assert host.keeps(splits) == [0, 1, 2, 4]
    other.close()
    monkeypatch.setattr(replaced, "ASKED_FOR_S", 60.0)
    await host.move(splits, [5])
    assert host.keeps(splits) == [0, 1, 2, 4, 5], "somebody asked for it a moment ago"
    monkeypatch.setattr(replaced, "ASKED_FOR_S", 0.0)
    await host.move(splits, [4])
    assert host.keeps(splits) == [0, 4, 5], "the other model's stays"


async def test_they_go_before_the_fetch_where_the_disk_is_full(
    splits: Splits, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    await host.move(splits, [1, 2])
    usage = shutil.disk_usage(host.cache)

    def disk_usage(path: Path) -> Any:
        return usage._replace(free=0 if 1 in host.keeps(splits) else usage.free)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    await host.move(splits, [4])
    assert host.keeps(splits) == [2, 4]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    with pytest.raises(StartError, match="has 0 B free"):
        await fetched(splits[5], host.cache)
    assert host.keeps(splits) == [4]


async def test_one_that_cannot_be_removed_is_said(
    splits: Splits, host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(30, "Read-only file system")

    await host.move(splits, [1, 2])
    monkeypatch.setattr(shutil, "rmtree", refuse)
    await host.move(splits, [4])
    warnings = [
        each.message for each in caplog.records if (each.name, each.levelname) == ("relayline.stage", "WARNING")
    ]
    assert len(warnings) == 1
    assert warnings[0].endswith(": a slice that is no longer used cannot be removed: Read-only file system")
    assert host.keeps(splits) == [1, 2, 4]
