"""Layers move to and fro, and the disks hold no more slices after six moves than after two."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from relayline.deploy.models.splits import FOR_MOVE
from relayline.deploy.testing.processes import relayline
from relayline.wire.common.use import ASKED_FOR_S
from tests.end_to_end.test_end_to_end import DEMO
from tests.end_to_end.test_join import NAMES, LongClient
from tests.end_to_end.test_moves import Pipeline, layers, move
from tests.support.http_client import tokens_of

pytestmark = pytest.mark.slow  # real processes


class Disks:
    """The cache of the coordinator's host, and those of the stages' hosts."""

    def __init__(self, root: Path) -> None:
        self.coordinator, self.hosts = root / "coordinator", root / "hosts"

    def age(self) -> None:
        """Let everything have been asked for long ago."""
        marks = self.coordinator.rglob(FOR_MOVE)
        for path in (*(mark.parent for mark in marks), *self.hosts.rglob("pipeline.json")):
            long_ago_s = path.stat().st_mtime - 2 * ASKED_FOR_S
            os.utime(path, (long_ago_s, long_ago_s))

    def n_splits(self) -> int:
        return len(list((self.coordinator / "relayline" / "splits").iterdir()))

    def n_slices(self) -> list[int]:
        return [len(list((self.hosts / name).glob("*/stage-*.gguf"))) for name in NAMES]


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    return Disks(tmp_path)


@pytest.fixture
def pipeline(tmp_path: Path, disks: Disks, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(disks.coordinator))
    done = relayline("split", DEMO, "--cuts", "3,6", "--out", tmp_path / "split")
    assert done.returncode == 0, done.stderr
    started = Pipeline(tmp_path / "split", disks.hosts)
    try:
        yield started
    finally:
        started.stop()


async def test_moves_do_not_fill_the_disks(pipeline: Pipeline, disks: Disks) -> None:
    async with aiohttp.ClientSession() as session:
        client = LongClient(session, {"url": pipeline.url, "model": "relayline-demo"})
        for cuts in ("2,5", "1,4", "2,6", "3,5", "4,6", "2,4"):
            disks.age()
            await move(pipeline, cuts)
            assert len(tokens_of(await client.stream("Once upon a time"))) > 0
        assert (await layers(session, pipeline.url))["cuts"] == [2, 4]
    # The first slice, which the user asked for, the present one and the one before; splits of moves are in the cache.
    assert disks.n_splits() <= 3, "also that of a kept slice"
    assert max(disks.n_slices()) <= 3, disks.n_slices()
    listed = await asyncio.to_thread(relayline, "cache", "--clear", "--cache", disks.hosts / NAMES[0])
    assert "kept" in listed.stdout, "a slice that is served stays"
    assert len(list((disks.hosts / NAMES[0]).glob("*/stage-*.gguf"))) == 1
