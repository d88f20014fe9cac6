"""The files that are served with a model: checked before a split, and with absolute paths for every process."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayline.coordinator.model.split import split_model
from relayline.deploy.launch.checks import check_before_work
from relayline.deploy.launch.companions import check_companions, served_adapters, with_companions
from relayline.deploy.launch.prepare import override
from relayline.deploy.manifest import Manifest
from relayline.deploy.manifest.smallest import smallest_manifest
from relayline.deploy.planning.inputs import load_of
from relayline.deploy.testing.tiny_adapters import make_adapter
from relayline.wire.common.errors import ModelFileError, UsageError
from relayline.wire.model_files.adapters import read_adapter
from relayline.wire.settings.table import ServingSettings
from tests.support.tiny_models import make_tiny


def manifest_with(model: Path, lora: str) -> Manifest:
    return override(smallest_manifest(model), {"coordinator.lora": lora, "coordinator.http.port": 0})


def test_paths_become_absolute_and_names_and_scales_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    manifest = with_companions(manifest_with(tmp_path / "model.gguf", "a.gguf,sql=b.gguf:0.25"), "")
    assert manifest.serving.lora == f"{tmp_path}/a.gguf:1,sql={tmp_path}/b.gguf:0.25"


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
    assert load_of(manifest_with(model, f"{one},x={one}")).adapter_bytes == (0, 2 * sizes[1])
    assert load_of(smallest_manifest(model)).adapter_bytes == ()


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
