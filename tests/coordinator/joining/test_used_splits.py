"""Goal: nothing removes a split whose files stages may read: the present, the next, and those of kept slices."""

from __future__ import annotations

from pathlib import Path

from relayline.coordinator.joining.used_splits import UsedSplits
from relayline.coordinator.model.slices import TOKENIZER_NAME
from relayline.wire.common.use import is_used

SPLITS = ("first", "second", "third", "fourth")


def used(directory: Path) -> list[str]:
    return [name for name in SPLITS if is_used(directory / name)]


def test_splits_are_in_use_for_as_long_as_stages_may_read_them(tmp_path: Path) -> None:
    for name in SPLITS:
        (tmp_path / name).mkdir()
        (tmp_path / name / TOKENIZER_NAME).write_bytes(b"x")
    splits = UsedSplits(tmp_path / "first")
    assert used(tmp_path) == ["first"]
    splits.prepare(tmp_path / "second")
    assert used(tmp_path) == ["first", "second"]
    splits.drop()
    assert used(tmp_path) == ["first"]
    splits.prepare(tmp_path / "second", kept=[0])
    splits.switch()
    assert used(tmp_path) == ["first", "second"], "place 0 still reads its slice of the first"
    splits.prepare(tmp_path / "third", kept=[0, 1])
    splits.switch()
    assert used(tmp_path) == ["first", "second", "third"]
    splits.prepare(tmp_path / "fourth", kept=[1])
    splits.switch()
    assert used(tmp_path) == ["second", "fourth"]
    splits.close()
    assert used(tmp_path) == []
