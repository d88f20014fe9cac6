"""The files that are served with a model: checked before a split, and with absolute paths for every process."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayline.coordinator.model.split import split_model
from relayline.deploy.launch.checks import check_before_work
from relayline.deploy.launch.companions import check_companions, with_companions
from relayline.deploy.launch.prepare import override
from relayline.deploy.launch.served_companions import served_adapters
from relayline.deploy.manifest import Manifest
from relayline.deploy.manifest.dump import dump_manifest
from relayline.deploy.manifest.load import load_manifest
from relayline.deploy.manifest.smallest import smallest_manifest
from relayline.deploy.models.recut import shape_reader
from relayline.deploy.planning.inputs import load_of
from relayline.deploy.render.targets import render
from relayline.deploy.testing.tiny_adapters import make_adapter
from relayline.wire.common.errors import ModelFileError, UsageError
from relayline.wire.model_files.adapters import read_adapter
from relayline.wire.settings.table import ServingSettings
from tests.support.tiny_models import make_tiny
from tests.support.tiny_projectors import make_projector


def manifest_with(model: Path, lora: str) -> Manifest:
    return override(smallest_manifest(model), {"coordinator.lora": lora, "coordinator.http.port": 0})


def test_paths_become_absolute_and_names_and_scales_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    manifest = with_companions(manifest_with(tmp_path / "model.gguf", "a.gguf,sql=b.gguf:0.25"), "")
    assert manifest.serving.lora == f"{tmp_path}/a.gguf:1.0,sql={tmp_path}/b.gguf:0.25"


@pytest.mark.parametrize(
    ("named", "path"), [("deep/image.gguf", "{here}/deep/image.gguf"), ("~/a.gguf", "/home/me/a.gguf")]
)
def test_a_projector_that_is_named_by_a_flag_is_where_the_user_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    manifest = override(smallest_manifest(tmp_path / "model.gguf"), {"coordinator.mmproj": named})
    assert with_companions(manifest, "").serving.mmproj == path.format(here=tmp_path)


def test_a_projector_is_refused_before_the_split_for_a_model_without_axes(tmp_path: Path) -> None:
    projector = make_projector(tmp_path / "mmproj.gguf", "glm4v")
    text = make_tiny("glm4moe", tmp_path / "text.gguf")
    seeing = make_tiny("glm4moe", tmp_path / "seeing.gguf", extra_values={"rope.dimension_sections": [3, 3, 2, 0]})
    manifests = [override(smallest_manifest(each), {"coordinator.mmproj": str(projector)}) for each in (text, seeing)]
    with pytest.raises(UsageError, match="positions have one axis"):
        check_companions(manifests[0], text)
    check_companions(manifests[1], seeing)


def test_a_file_that_is_no_adapter_is_refused_before_anything_else(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match="not 'adapter'"):
        check_before_work(manifest_with(model, str(model)))


def test_an_adapter_of_another_model_is_refused_before_the_split(tmp_path: Path) -> None:
    model, other = make_tiny("llama", tmp_path / "model.gguf"), make_tiny("qwen2", tmp_path / "other.gguf")
    good, bad = make_adapter(model, tmp_path / "good.gguf"), make_adapter(other, tmp_path / "bad.gguf")
    check_companions(manifest_with(model, f"{good},sql={good}:0.5"), model)
    with pytest.raises(ModelFileError, match=r"bad.gguf: was made for a model of the architecture qwen2"):
        check_companions(manifest_with(model, f"{good},{bad}"), model)


def test_adapters_of_a_family_whose_slices_reorder_rows_are_refused(tmp_path: Path) -> None:
    model = make_tiny("glm4", tmp_path / "model.gguf")
    lora = make_adapter(model, tmp_path / "lora.gguf")
    with pytest.raises(ModelFileError, match="LoRA adapters of glm4 are not served"):
        check_companions(manifest_with(model, str(lora)), model)


def test_a_plan_counts_the_bytes_of_all_adapters(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf")
    one = make_adapter(model, tmp_path / "one.gguf", changes=("blk.1.attn_q.weight",))
    sizes = read_adapter(one).layer_bytes(2)
    assert load_of(manifest_with(model, f"{one},x={one}"), "llama").adapter_bytes == (0, 2 * sizes[1])
    assert load_of(smallest_manifest(model), "llama").adapter_bytes == ()


@pytest.mark.parametrize("taken", ["the-model", "alias"])
def test_an_adapter_has_no_name_of_the_model_itself(tmp_path: Path, taken: str) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf")
    split_model(model, tmp_path / "split", n_stages=2)
    lora = make_adapter(model, tmp_path / "lora.gguf")
    names = {"model_id": "the-model", "served_model_name": "other, alias"}
    (served,) = served_adapters(ServingSettings(lora=f"sql={lora}", **names), tmp_path / "split")
    assert (served.name, served.path) == ("sql", lora)
    with pytest.raises(UsageError, match=rf"^--lora {taken}=...: the model itself is served under"):
        served_adapters(ServingSettings(lora=f"{taken}={lora}", **names), tmp_path / "split")


def test_paths_in_a_manifest_start_from_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, directory = make_tiny("llama", tmp_path / "model.gguf"), tmp_path / "deep"
    directory.mkdir()
    stated = {"lora": "a.gguf,sql=~/b.gguf:0.5", "mmproj": "image.gguf"}
    (directory / "one.yaml").write_text(
        dump_manifest(override(smallest_manifest(model), {f"coordinator.{key}": text for key, text in stated.items()}))
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    manifest = load_manifest(directory / "one.yaml")
    assert manifest.serving.lora == f"{directory}/a.gguf:1.0,sql=/home/me/b.gguf:0.5"
    assert manifest.serving.mmproj == f"{directory}/image.gguf"
    assert load_manifest(directory / "one.yaml").directory == directory


def test_a_comma_in_a_path_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x,y").mkdir()
    monkeypatch.chdir(tmp_path / "x,y")
    with pytest.raises(UsageError, match=r"^--lora: .*a.gguf has a comma, which separates adapters"):
        with_companions(manifest_with(tmp_path / "model.gguf", "a.gguf"), "")


@pytest.mark.parametrize("target", ["compose", "kubernetes"])
def test_rendered_coordinators_read_them_beside_the_model(tmp_path: Path, target: str) -> None:
    changes = {"coordinator.lora": "/home/me/a.gguf,sql=b.gguf:0.5", "coordinator.mmproj": "/home/me/image.gguf"}
    manifest = override(smallest_manifest(tmp_path / "model.gguf"), changes)
    text = "".join(render(manifest, target).values())
    assert "/models/a.gguf:1.0,sql=/models/b.gguf:0.5" in text
    assert "/models/image.gguf" in text
    assert "/home/me" not in text


def test_layers_that_move_count_their_adapters(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf")
    lora = make_adapter(model, tmp_path / "lora.gguf", changes=("blk.1.attn_q.weight",))
    plain, more = shape_reader(model), shape_reader(model, f"sql={lora}")
    assert plain is not None
    assert more is not None
    grown = [after - before for before, after in zip(plain().layer_bytes, more().layer_bytes, strict=True)]
    assert grown == [0, read_adapter(lora).layer_bytes(2)[1], *[0] * (len(grown) - 2)]


def test_pairs_that_llama_cpp_would_ignore_are_refused(tmp_path: Path) -> None:
    model = make_tiny("deepseek2", tmp_path / "model.gguf")
    good = make_adapter(model, tmp_path / "good.gguf", changes=("blk.*.ffn_*.weight",))
    bad = make_adapter(model, tmp_path / "bad.gguf", changes=("blk.*.attn_kv_a_mqa.weight",))
    check_companions(manifest_with(model, str(good)), model)
    with pytest.raises(ModelFileError, match=r"attn_kv_a_mqa.weight, where llama.cpp applies no LoRA to deepseek2"):
        check_companions(manifest_with(model, str(bad)), model)
