"""What a stage's engines before have left of stored lanes on the disk: it counts against the stage's bound."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from relayline.stage.engine import tier_left
from relayline.stage.engine.tier_disk import TierDisk
from relayline.stage.engine.tier_left import LOCK, UNUSED_S

STATE_BYTES, BYTES_MAX = 1_000, 4_500  # four states fit


@pytest.fixture(autouse=True)
def _looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_left, "LOOK_S", 0.0)


def opened(path: Path, layers: str, stage: str = "a") -> TierDisk:
    return TierDisk(path, f"model, {layers}", BYTES_MAX, f"model\n{stage}")


def write(disk: TierDisk, *keys: int) -> None:
    for key in keys:
        while not disk.write(key, 10, np.full(STATE_BYTES, key % 256, np.uint8)):
            pass  # some wait already


def filled(path: Path, layers: str, keys: range, stage: str = "a") -> None:
    disk = opened(path, layers, stage)
    write(disk, *keys)
    disk.close()


def kept(path: Path) -> tuple[int, int]:
    """Return how many directories have states, and how many states there are."""
    states = [*path.glob("*/*.state")]
    return len({each.parent for each in states}), len(states)


def test_layers_that_move_again_and_again_leave_no_more_than_the_bound(tmp_path: Path) -> None:
    for at in range(1, 9):
        filled(tmp_path, f"layers 0-{at}", range(3))
    assert kept(tmp_path) == (1, 3), "of every cut there was a directory of its own, as large as the bound"
    assert len([*tmp_path.iterdir()]) == 1


def test_what_was_left_goes_as_room_is_needed_and_not_before(tmp_path: Path) -> None:
    filled(tmp_path, "layers 0-3", range(2))
    disk = opened(tmp_path, "layers 0-4")
    write(disk, 11)
    disk.close()
    assert kept(tmp_path) == (2, 3), "layers may come back"
    filled(tmp_path, "layers 0-3", range(2))
    disk = opened(tmp_path, "layers 0-3")
    assert len(disk.stored()) == 2
    write(disk, 2, 3)
    disk.close()
    assert kept(tmp_path) == (1, 4)


def test_the_engine_before_still_serves_while_the_next_one_loads(tmp_path: Path) -> None:
    before = opened(tmp_path, "layers 0-3")
    write(before, 1, 2, 3)
    after = opened(tmp_path, "layers 0-4")
    write(after, 11, 12, 13, 14)
    while len(after.stored()) < 4:
        pass
    assert len(before.stored()) == 3
    assert kept(tmp_path) == (2, 7), "it has not been touched"
    before.close()
    write(after, 15)
    after.close()
    assert kept(tmp_path) == (1, 4)


def test_another_stage_that_does_not_run_now_keeps_its_own(tmp_path: Path) -> None:
    filled(tmp_path, "layers 4-7", range(4), stage="b")
    filled(tmp_path, "layers 0-3", range(4), stage="a")
    assert kept(tmp_path) == (2, 8)


def test_what_nobody_has_used_for_long_goes_whosever_it_was(tmp_path: Path) -> None:
    filled(tmp_path, "layers 4-7", range(2), stage="gone")
    held = opened(tmp_path, "layers 8-9", stage="b")
    write(held, 21)
    then_s = time.time() - UNUSED_S - 60
    for directory in tmp_path.iterdir():
        os.utime(directory / LOCK, (then_s, then_s))
        os.utime(directory, (then_s, then_s))
    filled(tmp_path, "layers 0-3", range(1), stage="a")
    held.close()
    assert kept(tmp_path) == (2, 2), "one that is in use stays"
    assert len([*tmp_path.iterdir()]) == 2


def test_files_of_others_stay(tmp_path: Path) -> None:
    filled(tmp_path, "layers 0-3", range(4))
    note = next(tmp_path.iterdir()) / "README"
    note.write_text("mine")
    filled(tmp_path, "layers 0-4", range(4))
    assert kept(tmp_path) == (1, 4)
    assert note.read_text() == "mine"
