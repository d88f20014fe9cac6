"""What lanes held, in memory and on disk: bounds, restarts, damage."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from relayline.stage.engine.tier import Tier
from relayline.stage.engine.tier_disk import TierDisk


def state(value: int, n_bytes: int = 1_000) -> np.ndarray:
    return np.full(n_bytes, value, np.uint8)


def brought_back(tier: Tier, key: int) -> tuple[int, int] | None:
    """Read a state as a stage does: from the disk beforehand. Returns its tokens and what it was filled with."""
    if (reading := tier.begin(key)) is not None:
        reading.result(10)
    found = tier.fetch(key)
    return None if found is None else (found[0], int(found[1][0]))


def disk(path: Path, bytes_max: int = 100_000, identity: str = "model, layers 0-3") -> TierDisk:
    return TierDisk(path, identity, bytes_max)


def test_the_least_recently_used_goes_first() -> None:
    tier = Tier(2_500)
    tier.store(1, 10, state(1))
    tier.store(2, 20, state(2))
    assert brought_back(tier, 1) == (10, 1)
    tier.store(3, 30, state(3))
    assert tier.stored() == {1: 10, 3: 30}
    assert brought_back(tier, 2) is None
    told = tier.figures()
    assert (told.memory_bytes, told.n_states, told.n_hits, told.n_misses) == (2_000, 2, 1, 1)
    tier.store(4, 40, state(4, 3_000))
    assert tier.stored() == {1: 10, 3: 30}, "what is larger than the bound takes nobody's place"
    tier.forget(1)
    assert tier.figures().memory_bytes == 1_000


def test_a_restart_finds_what_was_on_disk(tmp_path: Path) -> None:
    first = Tier(1_500, disk(tmp_path))
    first.store(1, 10, state(1))
    first.store(2, 20, state(2))  # 1 is on the disk alone now, or on its way there
    first.close()
    second = Tier(1_500, disk(tmp_path))
    assert second.stored() == {1: 10, 2: 20}
    assert second.fetch(1) is None, "nobody reads a disk in the decode thread"
    assert brought_back(second, 1) == (10, 1)
    assert second.figures().disk_bytes > 2_000
    second.close()
    other = Tier(0, disk(tmp_path, identity="model, layers 4-7"))
    assert other.stored() == {}, "of other layers"
    other.close()


def test_the_disk_has_its_own_bound(tmp_path: Path) -> None:
    tier = Tier(0, disk(tmp_path, 2_500))
    for key in (1, 2, 3):
        tier.store(key, 10 * key, state(key))
    tier.close()
    tier = Tier(0, disk(tmp_path, 2_500))
    assert tier.stored() == {2: 20, 3: 30}
    assert len(list(tmp_path.rglob("*.state"))) == 2
    tier.close()
    tier = Tier(0, disk(tmp_path, 1_500))
    assert tier.stored() == {3: 30}, "the bound is smaller after the restart"
    tier.close()


@pytest.mark.parametrize("damage", ["cut", "changed", "another's head"])
def test_a_damaged_file_is_told_in_one_line_and_removed(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = Tier(0, disk(tmp_path))
    tier.store(1, 10, state(1))
    tier.store(2, 20, state(2))
    tier.close()
    path = next(tmp_path.rglob(f"{1:016x}.state"))
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-100:]
    elif damage == "changed":
        data[-1] ^= 1
    else:
        data[:8] = b"GGUFGGUF"
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        tier = Tier(0, disk(tmp_path))
        assert brought_back(tier, 1) is None
        assert brought_back(tier, 2) == (20, 2)
    assert [record.message.count("is damaged") for record in caplog.records] == [1]
    assert not path.exists()
    assert tier.stored() == {2: 20}
    tier.close()


def test_one_process_has_a_directory_at_a_time(tmp_path: Path) -> None:
    first = disk(tmp_path)
    with pytest.raises(BlockingIOError):
        disk(tmp_path)
    first.close()
    disk(tmp_path).close()


def test_a_disk_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = Tier(10_000, disk(tmp_path))
    folder = next(path for path in tmp_path.iterdir() if path.is_dir())
    for key in (1, 2):
        (folder / f".{key:016x}.part").mkdir()  # where the file would be written
        tier.store(key, 10, state(key))
    tier.close()
    assert len([record for record in caplog.records if "cannot be kept" in record.message]) == 1
