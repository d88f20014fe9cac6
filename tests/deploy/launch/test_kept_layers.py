"""Moved layers are kept over the coordinator's restart, for the split that it was told to serve and no other."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.deploy.launch.kept_layers import keeper, kept_cuts, kept_split
from relayline.deploy.launch.splits import split_for
from tests.end_to_end.test_end_to_end import DEMO


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return split_for(DEMO, None, (4,), tmp_path / "base")


def test_what_was_moved_is_served_again(base: Path, tmp_path: Path) -> None:
    kept = tmp_path / "state" / "layers.json"
    assert kept_split(kept, base, DEMO) == base, "nothing has moved"
    keep = keeper(kept, base)
    assert keep is not None
    keep((3,))
    keep((5,))
    assert kept_cuts(kept, base) == (5,)
    assert load_pipeline(kept_split(kept, base, DEMO)).cuts == (5,), "made again: nothing was in the cache"
    assert kept_split(kept, base, None) == base, "the model is not known"
    other = split_for(DEMO, None, (2,), tmp_path / "other")
    assert kept_split(kept, other, DEMO) == other, "told to serve something else"
    assert [path.name for path in kept.parent.iterdir()] == ["layers.json"]


def test_a_file_that_makes_no_sense_is_none(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = tmp_path / "layers.json"
    kept.write_bytes(b'{"cuts": "many"}')
    assert kept_split(kept, base, DEMO) == base
    assert "holds no moved layers" in caplog.text
    assert keeper(None, base) is None
    assert kept_split(None, base, DEMO) == base


def test_kept_layers_that_the_model_does_not_have_are_told_and_left(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = tmp_path / "layers.json"
    keep = keeper(kept, base)
    assert keep is not None
    keep((99,))
    with caplog.at_level(logging.WARNING):
        assert kept_split(kept, base, DEMO) == base
    assert "the moved layers 99 cannot be served again" in caplog.text


def test_a_full_disk_is_told(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    keep = keeper(tmp_path / "file" / "layers.json", base)
    assert keep is not None
    keep((3,))
    assert "the moved layers are not kept" in caplog.text
