"""A projector's file before it is served: the one that `auto` takes, its memory in a plan, what doctor says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.planner.memory import PROCESS_BYTES
from relayline.deploy.doctor.files import look_projector
from relayline.deploy.doctor.plan import needed_memory_bytes
from relayline.deploy.launch.prepare import override
from relayline.deploy.launch.projector import served_projector
from relayline.deploy.machine.gpus import Gpu
from relayline.deploy.manifest import Manifest, load_manifest
from relayline.deploy.manifest.smallest import smallest_manifest
from relayline.deploy.planning.drafting import encoder_bytes
from relayline.deploy.planning.inputs import instance_of
from relayline.wire.common.errors import ModelFileError, UsageError
from relayline.wire.common.units import GIB
from relayline.wire.settings.table import ServingSettings
from tests.support.tiny_audio import make_audio_projector
from tests.support.tiny_models import make_tiny
from tests.support.tiny_projectors import make_projector

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


def manifest_with(model: Path, projector: str) -> Manifest:
    return override(smallest_manifest(model), {"coordinator.mmproj": projector, "coordinator.http.port": 0})


@pytest.fixture(name="model")
def model_fixture(tmp_path: Path) -> Path:
    make_projector(tmp_path / "here" / "mmproj.gguf")
    return make_tiny("llama", tmp_path / "here" / "model.gguf", tokenizer=True)


def test_a_plan_leaves_room_for_its_process_and_doctor_adds_it(model: Path) -> None:
    projector = model.parent / "mmproj.gguf"
    without, beside = manifest_with(model, ""), manifest_with(model, str(projector))
    expected = PROCESS_BYTES + projector.stat().st_size
    reserved = [instance_of(each, inspect_model(model)).hosts[0].machine.reserved_bytes for each in (without, beside)]
    assert reserved[1] - reserved[0] == expected
    needed = [needed_memory_bytes(each) for each in (without, beside)]
    assert None not in needed
    assert needed[1] - needed[0] == expected  # type: ignore[operator]
    assert encoder_bytes(beside.serving, lambda: (Gpu("CUDA0", "", GIB),)) == 0, "its weights are on the GPU"
    missing = ServingSettings(mmproj=str(model.parent / "nope.gguf"))
    assert encoder_bytes(missing) == encoder_bytes(AUTO) == 0, "what reads it next says so"


def test_doctor_looks_at_it(model: Path, tmp_path: Path) -> None:
    assert look_projector(manifest_with(model, "")) == []
    auto = look_projector(manifest_with(model, "auto"))[0]
    assert auto.outcome.value == "ok"
    assert auto.found == f"{model.parent / 'mmproj.gguf'}: for images, 0.14 GiB"
    both = make_audio_projector(tmp_path / "both.gguf", "mlp+ultravox")
    assert ": for images and audio, " in look_projector(manifest_with(model, str(both)))[0].found
    alone = make_tiny("llama", tmp_path / "alone" / "model.gguf", tokenizer=True)
    for of, named, problem in (
        (model, str(tmp_path / "nope.gguf"), "nope.gguf: no such file"),
        (model, str(make_projector(tmp_path / "other.gguf", "gemma3")), "are not served with images by a projector"),
        (model, str(make_projector(tmp_path / "wide.gguf", n_embd=128)), "it belongs to another model"),
        (model, str(model), "not a projector"),
        (alone, "auto", f"none (mmproj*.gguf) is next to {alone}"),
    ):
        (found,) = look_projector(manifest_with(of, named))
        assert found.outcome.value == "failure"
        assert problem in found.found
        assert found.remedy == "correct coordinator.mmproj in the manifest"


def test_one_of_a_repository_is_not_downloaded_to_be_looked_at(model: Path) -> None:
    on_hub = override(manifest_with(model, "auto"), {"model": {"hf": "hf://a/b/c.gguf"}})
    assert "its memory is not counted" in look_projector(on_hub)[0].found
