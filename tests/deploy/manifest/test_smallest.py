"""Goal: a model without a manifest becomes the smallest one, and flags say about stages all that a manifest can."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relayline.deploy.launch.target import manifest_of
from relayline.deploy.manifest.dump import dump_manifest
from relayline.deploy.manifest.load import parse_manifest
from relayline.deploy.manifest.smallest import StageFlags, smallest_manifest, with_stages
from relayline.wire.common.errors import UsageError
from relayline.wire.model_files.file_kind import foreign_kind
from relayline.wire.settings.table import DEVICE_SETTINGS

MANIFEST = b"apiVersion: relayline.dev/v1alpha1\nkind: Pipeline\nmetadata: {name: p}\nspec: {model: {path: m.gguf}}\n"


def test_it_names_the_model_and_the_requested_options_and_nothing_else() -> None:
    manifest = smallest_manifest(Path("/models/Qwen3-8B-Q4_K_M.gguf"), ctx_tokens=512, share=False, draft=0)
    assert manifest.name == "qwen3-8b-q4-k-m"
    assert (manifest.engine.ctx_tokens, manifest.serving.share, manifest.serving.draft) == (512, False, 0)
    assert [stage.name for stage in manifest.stages] == ["stage-0", "stage-1"]
    text = dump_manifest(manifest)
    assert parse_manifest(text.encode(), "text") == manifest
    assert len(text.splitlines()) == 15


def test_a_model_in_a_directory_without_a_name_in_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own name is text, so only the whole path shows it: it ended in a traceback."""
    directory = tmp_path / os.fsdecode(b"models\xff")
    directory.mkdir()
    monkeypatch.chdir(directory)
    with pytest.raises(UsageError, match=r"models.*m\.gguf: the name is not UTF-8; rename it$"):
        smallest_manifest(Path("m.gguf"))


def test_flags_set_the_same_for_stages_as_a_manifest() -> None:
    manifest = smallest_manifest(Path("m.gguf"))
    flags = StageFlags(cuts=(2, 5), n_threads=3, gpu_layers=-1, pin=False)
    stages = with_stages(manifest, flags, 8).stages
    assert [stage.layer_range for stage in stages] == [(0, 2), (2, 5), (5, 8)]
    assert {(stage.threads, stage.gpu_layers_used, stage.cores) for stage in stages} == {(3, -1, "any")}
    assert len(with_stages(manifest, StageFlags(n_stages=4), 0).stages) == 4
    assert not StageFlags().is_set


def test_flags_name_the_devices_of_stages_here() -> None:
    given = {"devices": "CUDA0,CUDA1", "split_mode": "row", "tensor_split": "3,1", "main_gpu": 1, "n_cpu_moe": 2}
    given["override_tensor"] = "exps=CPU"
    text = MANIFEST.replace(b"m.gguf}", b"m.gguf}, stages: [{name: a}, {name: b, host: box, splitMode: none}]")
    stages = with_stages(parse_manifest(text, "text"), StageFlags(gpu_layers=-1, devices=given), 0).stages
    engine = stages[0].engine_settings
    assert {name: engine[name] for name in given} == given
    assert set(given) == set(DEVICE_SETTINGS)
    assert (stages[1].engine_settings["split_mode"], stages[1].engine_settings["devices"]) == ("none", "")
    assert (stages[0].n_gpus, stages[1].n_gpus) == (2, 0)
    assert stages[0].named_devices == ("CUDA0", "CUDA1", "CPU")


def test_a_manifest_says_where_a_text_of_devices_is_wrong() -> None:
    text = MANIFEST.replace(b"m.gguf}", b"m.gguf}, stages: [{name: a, tensorSplit: '1,x'}]")
    with pytest.raises(UsageError, match=r"spec\.stages\[0\]\.tensorSplit: give a number for each device"):
        parse_manifest(text, "text")


def test_flags_leave_stages_of_other_hosts_alone() -> None:
    text = MANIFEST.replace(b"m.gguf}", b"m.gguf}, stages: [{name: a}, {name: b, host: box, threads: 7}]")
    manifest = parse_manifest(text, "text")
    assert [stage.threads for stage in with_stages(manifest, StageFlags(n_threads=2), 0).stages] == [2, 7]
    with pytest.raises(UsageError, match="the manifest lists 2 stages, but the flags ask for 3"):
        with_stages(manifest, StageFlags(n_stages=3), 0)


# --- what `up` is given -----------------------------------------------------------------------------------------------


def test_a_manifest_is_distinguished_from_a_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="this folder has no manifest"):
        manifest_of(None, tmp_path)
    (tmp_path / "compose.yaml").write_text("services: {}\n")
    (tmp_path / "one.yaml").write_bytes(MANIFEST)
    assert manifest_of(None, tmp_path) == Path("one.yaml"), "the only one of the folder"
    assert manifest_of(str(tmp_path), Path()) == tmp_path / "one.yaml"
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for model in (str(tmp_path / "m.gguf"), str(tmp_path), f"{tmp_path}/*.gguf", "hf://o/n/m.gguf", "org/name:Q4_K_M"):
        assert manifest_of(model, tmp_path) is None
    assert manifest_of("elsewhere.yml", tmp_path) == Path("elsewhere.yml")
    (tmp_path / "two.json").write_bytes(b'{"apiVersion": "relayline.dev/v1alpha1", "kind": "Pipeline"}')
    with pytest.raises(UsageError, match=r"several manifests; name one of one\.yaml, two\.json"):
        manifest_of(None, tmp_path)
    with pytest.raises(UsageError, match="nowhere: no such file"):
        manifest_of("nowhere", tmp_path)


@pytest.mark.parametrize(
    ("name", "head", "says"),
    [
        ("m.gguf", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
        ("m.safetensors", b"\x10\x00\x00\x00\x00\x00\x00\x00{}", "a safetensors file; take a GGUF"),
        ("m.gguf", b"\x10\x00\x00\x00\x00\x00\x00\x00" + b'{"a": 1}', "a safetensors file"),
        ("m.gguf", b"\n<!doctype html><html>", "a web page"),
        ("pytorch_model.bin", b"PK\x03\x04rest", "a PyTorch or zip archive"),
        ("i.dat", b"\x01\x00\x00\x00\x0c\x00\x00\x00blk.0.attn_q", "an importance matrix"),
        ("m.gguf", b"something else", ""),
    ],
)
def test_a_file_of_another_format_is_named_by_its_format(name: str, head: bytes, says: str) -> None:
    assert says in foreign_kind(name, head)
    assert bool(says) == bool(foreign_kind(name, head))
