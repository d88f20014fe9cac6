"""`relayline serve --mmproj auto`: the file that it takes, and one line if there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relayline.deploy.launch.projector import served_projector
from relayline.deploy.manifest import load_manifest
from relayline.wire.common.errors import ModelFileError, UsageError
from relayline.wire.settings.table import ServingSettings

AUTO = ServingSettings(mmproj="auto")


@pytest.fixture(name="files")
def files_fixture(tmp_path: Path) -> Path:
    """A folder with a model and its projector, and the folder of a split with another one."""
    for folder, name in (("model", "m.gguf"), ("model", "mmproj-f16.gguf"), ("split", "stage-0.gguf"),
                         ("split", "mmproj.gguf"), ("bare", "stage-0.gguf")):  # fmt: skip
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_bytes(b"GGUF")
    return tmp_path


def chosen(files: Path, *, model: str = "", directory: str = "", manifest: Any = None) -> str:
    given = {
        "model": files / model if model else None,
        "directory": files / directory if directory else None,
        "manifest": manifest,
    }
    return served_projector(AUTO, given).mmproj


def test_it_is_the_one_in_the_models_directory_or_in_the_split(files: Path) -> None:
    assert chosen(files, model="model/m.gguf", directory="split") == str(files / "model" / "mmproj-f16.gguf")
    assert chosen(files, directory="split") == str(files / "split" / "mmproj.gguf")


def test_a_manifest_names_the_model(files: Path) -> None:
    path = files / "manifest.yaml"
    path.write_text(
        "apiVersion: relayline.dev/v1alpha1\nkind: Pipeline\nmetadata: {name: one}\n"
        f"spec:\n  model: {{path: {files}/model/m.gguf}}\n  stages: [{{name: a}}]\n"
    )
    assert chosen(files, directory="split", manifest=load_manifest(path)) == str(files / "model" / "mmproj-f16.gguf")


def test_without_one_a_line_says_what_to_do(files: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--mmproj auto: .*bare holds no projector .* name it, or give --model FILE"
    ) as caught:
        chosen(files, directory="bare")
    assert "\n" not in str(caught.value)
    (files / "bare" / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match="no projector"):
        chosen(files, model="bare/m.gguf")


def test_a_named_file_stays(files: Path) -> None:
    named = ServingSettings(mmproj="p.gguf")
    assert served_projector(named, {}) is named
    assert chosen(files) == "auto"  # others report what is missing
