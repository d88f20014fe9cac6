"""Goal: splits that were made to move layers go once layers move again, and no split that anybody may need."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayline.deploy.models import splits
from relayline.deploy.models.recut import cutter
from relayline.deploy.models.splits import note_for_move, remove_replaced, split_for, split_place, splits_dir
from relayline.wire.common.use import Use
from tests.support.tiny_models import make_tiny

N_LAYERS = 6


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(splits, "ASKED_FOR_S", 0.0)


def tiny(directory: Path, seed: int = 0) -> Path:
    return make_tiny("llama", directory / f"{seed}.gguf", n_layers=N_LAYERS, tokenizer=True, seed=seed)


def cuts_here() -> list[str]:
    return sorted(path.name.partition("-")[2] for path in splits_dir().iterdir())


async def test_of_the_splits_made_for_moves_the_last_two_stay(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    split_for(model, None, (3,), None)  # as `up` does
    cut = cutter(model)
    assert cut is not None
    present = Use()
    for first in (1, 2, 4, 5):
        place = await cut((first,))
        present.become([place / "tokenizer.gguf"])  # the coordinator switched to it
    assert cuts_here() == ["cuts-3", "cuts-4", "cuts-5"]
    assert await cut((4,)) == split_place(model, None, (4,)), "back to the one before"
    assert cuts_here() == ["cuts-3", "cuts-4", "cuts-5"]
    present.close()


async def test_what_others_made_or_use_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = tiny(tmp_path), tiny(tmp_path, seed=1)
    cut, cut_other = cutter(model), cutter(other)
    assert cut is not None
    assert cut_other is not None
    await cut_other((1,))
    used = Use([await cut((1,)) / "stage-1.gguf"])  # by a stage on this host
    await cut((2,))
    monkeypatch.setattr(splits, "ASKED_FOR_S", 60.0)
    await cut((4,))
    assert len(cuts_here()) == 4, "2 was asked for a moment ago"
    monkeypatch.setattr(splits, "ASKED_FOR_S", 0.0)
    await cut((5,))
    assert cuts_here() == ["cuts-1", "cuts-1", "cuts-5"], "one of the other model, one in use"
    used.close()


async def test_a_split_that_was_not_finished_goes_too(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    note_for_move(cut_off := split_place(model, None, (2,)))
    (cut_off / ".stage-0.gguf.partial").write_bytes(b"x")
    note_for_move(wanted := split_place(model, None, (4,)))
    writing = Use([cut_off])  # as splitting does: another coordinator's, of a large model, takes long
    remove_replaced(wanted)
    assert cut_off.exists()
    writing.close()
    remove_replaced(wanted)
    assert not cut_off.exists()


async def test_one_that_cannot_be_removed_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(tmp_path)
    note_for_move(place := split_place(model, None, (2,)))

    def refuse(path: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(splits.shutil, "rmtree", refuse)
    note_for_move(wanted := split_place(model, None, (4,)))
    remove_replaced(wanted)
    (line,) = (record.message for record in caplog.records if record.name == splits.log.name)
    assert line == f"{place}: a split that is no longer used cannot be removed: Read-only file system"
