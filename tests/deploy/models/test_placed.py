"""`relayline pull --to DIR`: a model's files in a directory, complete or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from relayline.deploy.cli.pull import pull_command
from relayline.deploy.models import model_source, placed
from relayline.deploy.testing.paths import DEMO_MODEL
from relayline.wire.common.errors import ModelFileError, StartError, UsageError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "hub" / "tiny.gguf"
    path.parent.mkdir()
    shutil.copy(DEMO_MODEL, path)
    return path


def test_a_model_is_linked_and_found_again_without_the_hub(model: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    reference = "hf://org/repo/gguf/tiny.gguf@main"
    assert placed.placed_before(reference, models) is None
    path = placed.place(model, models)
    assert (path, path.samefile(model)) == (models / "tiny.gguf", True)
    assert placed.placed_before(reference, models) == path
    assert placed.place(model, models) == path, "again changes nothing"
    assert [entry.name for entry in models.iterdir()] == ["tiny.gguf"], "and leaves nothing else behind"


def test_the_target_of_a_link_in_the_hubs_cache_is_placed(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot.gguf"
    snapshot.symlink_to(model)
    path = placed.place(snapshot, tmp_path / "models")
    assert not path.is_symlink()
    assert path.read_bytes() == model.read_bytes()


def test_a_file_is_copied_where_links_are_not_to_be_had(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(placed.errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refused)
    path = placed.place(model, tmp_path / "models")
    assert not path.samefile(model)
    assert path.read_bytes() == model.read_bytes()


def test_a_file_that_was_cut_short_is_loaded_again(model: Path, tmp_path: Path) -> None:
    cut = tmp_path / "models" / "tiny.gguf"
    cut.parent.mkdir()
    cut.write_bytes(model.read_bytes()[:4_000])
    assert placed.placed_before("hf://org/repo/tiny.gguf", cut.parent) is None
    with pytest.raises(ModelFileError):
        placed.place(cut, tmp_path / "elsewhere")
    assert placed.place(model, cut.parent).samefile(model)


def test_a_disk_that_cannot_take_it_is_one_line(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(placed.errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(StartError, match=r"cannot hold the model: No space left on device; free space there"):
        placed.place(model, tmp_path / "models")
    assert not list((tmp_path / "models").iterdir())


def test_a_directory_that_cannot_be_is_refused_before_the_download(model: Path, tmp_path: Path) -> None:
    below = model / "x"
    with pytest.raises(UsageError, match=r"--to .*/x: Not a directory; give another directory"):
        placed.check_directory(below)
    with pytest.raises(StartError, match=r"cannot hold the model: Not a directory; give another --to"):
        placed.place(model, below)
    placed.check_directory(tmp_path / "new" / "one")
    assert (tmp_path / "new" / "one").is_dir()


def test_pull_asks_the_directory_first(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "resolve_model", lambda _: pytest.fail("the download began"))
    done = CliRunner().invoke(pull_command, ["org/repo:Q4_0", "--to", str(model / "x")])
    assert (done.exit_code, isinstance(done.exception, SystemExit)) == (2, True)
