"""Moved layers survive the coordinator's restart, for the same split only."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from relayline.coordinator.joining.config import PoolState
from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.deploy.models.kept_layers import keeper, kept_split, kept_state
from relayline.deploy.models.splits import split_for
from tests.end_to_end.test_end_to_end import DEMO


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return split_for(DEMO, None, (4,), tmp_path / "base")


def test_moved_layers_are_served_again(base: Path, tmp_path: Path) -> None:
    kept = tmp_path / "state" / "layers.json"
    assert kept_split(kept, base, DEMO) == (base, None), "nothing has moved"
    keep = keeper(kept, base)
    assert keep is not None
    keep(PoolState((3,), ("a", "b")))
    state = PoolState((5,), ("a", "d"), ("b",), ("d", "s"), ("s",))
    keep(state)
    assert kept_state(kept, base) == state
    directory, known = kept_split(kept, base, DEMO, ("a", "b"))
    assert (load_pipeline(directory).cuts, known) == ((5,), state), "made again: nothing was in the cache"
    assert kept_split(kept, base, None) == (base, None), "the model is not known"
    other = split_for(DEMO, None, (2,), tmp_path / "other")
    assert kept_split(kept, other, DEMO) == (other, None), "started to serve something else"
    assert [path.name for path in kept.parent.iterdir()] == ["layers.json"]


def test_a_file_that_makes_no_sense_is_none(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = tmp_path / "layers.json"
    kept.write_bytes(b'{"cuts": "many"}')
    assert kept_split(kept, base, DEMO) == (base, None)
    assert "holds no moved layers" in caplog.text
    assert keeper(None, base) is None
    assert kept_split(None, base, DEMO) == (base, None)


def kept_by(directory: Path, base: Path, state: PoolState) -> Path:
    """The file in which a coordinator of that split keeps moved layers."""
    kept = directory / "layers.json"
    keep = keeper(kept, base)
    assert keep is not None
    keep(state)
    return kept


def test_kept_layers_that_the_model_lacks_are_reported_and_ignored(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = kept_by(tmp_path, base, PoolState((99,), ("a", "b")))
    with caplog.at_level(logging.WARNING):
        assert kept_split(kept, base, DEMO) == (base, None)
    assert "the moved layers 99 cannot be served again" in caplog.text


def test_kept_layers_of_a_removed_stage_are_reported_and_ignored(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = kept_by(tmp_path, base, PoolState((3,), ("a", "gone")))
    with caplog.at_level(logging.WARNING):
        assert kept_split(kept, base, DEMO, ("a", "b")) == (base, None)
    assert "gone is not a stage any more" in caplog.text


def test_one_stage_may_hold_all_that_two_were_to(base: Path, tmp_path: Path) -> None:
    kept = tmp_path / "layers.json"
    keep = keeper(kept, base)
    assert keep is not None
    state = PoolState((), ("b",), ("a",))
    keep(state)
    directory, known = kept_split(kept, base, DEMO, ("a", "b"))
    assert (load_pipeline(directory).cuts, known) == ((), state)


def test_a_full_disk_is_reported(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    keep = keeper(tmp_path / "file" / "layers.json", base)
    assert keep is not None
    keep(PoolState((3,), ("a", "b")))
    assert "the moved layers cannot be saved" in caplog.text
