from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
from llama_cpp import llama_cpp as llama

from relayline.coordinator.model.content_key import content_key
from relayline.coordinator.model.families import FAMILIES
from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.pipeline_file import PIPELINE_NAME, PipelineFile, check_artifact, load_pipeline
from relayline.coordinator.model.slices import PLACEHOLDER_TYPES
from relayline.coordinator.model.split import split_model
from relayline.deploy.models.trial import probe_artifact
from relayline.deploy.testing.paths import ROOT
from relayline.wire.common.errors import (
    ArtifactError,
    CutError,
    ModelFileError,
    UnsupportedArchitectureError,
    UsageError,
)
from relayline.wire.common.places import cache_dir
from relayline.wire.model_files.gguf_header import TENSOR_TYPES
from relayline.wire.model_files.gguf_write import STRING_TYPE, U32, TensorSlot, encode_entry, encode_header
from relayline.wire.model_files.model_check import PRODUCT_TYPES
from tests.support.shards import shard
from tests.support.tiny_models import TOKENS, make_tiny

BLOCK_FIELDS = ("token_embd.weight", "output_norm.weight", "output.weight")


def bytes_of(path: Path) -> dict[str, bytes]:
    model = open_model(path)
    content = [file.path.read_bytes() for file in model.files]
    return {
        tensor.name: content[tensor.file_index][tensor.offset : tensor.offset + tensor.size_bytes]
        for tensor in model.tensors.values()
    }


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def write_typed(path: Path, kinds: list[str], n_embd: int = 256, n_vocab: int = 64) -> Path:
    """A llama-shaped file of random bytes: one block per tensor type. It is split here, never run."""
    random = np.random.default_rng(5)
    ids = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}
    slots, content = [], b""

    def add(name: str, kind: str, dims: tuple[int, ...]) -> None:
        nonlocal content
        _, block, block_bytes = TENSOR_TYPES[ids[kind]]
        size_bytes = int(np.prod(dims)) // block * block_bytes
        slots.append(TensorSlot(name, dims, ids[kind], size_bytes))
        content += random.bytes(size_bytes)
        content += bytes(-len(content) % 32)

    add("token_embd.weight", kinds[0], (n_embd, n_vocab))
    add("output.weight", kinds[-1], (n_embd, n_vocab))
    add("output_norm.weight", "F32", (n_embd,))
    for layer, kind in enumerate(kinds):
        add(f"blk.{layer}.attn_norm.weight", "F32", (n_embd,))
        add(f"blk.{layer}.ffn_up.weight", kind, (n_embd, 3 * 7))
    values = {"block_count": len(kinds), "embedding_length": n_embd, "context_length": 64, "attention.head_count": 4}
    entries = [encode_entry("general.architecture", STRING_TYPE, "llama")]
    entries += [encode_entry(f"llama.{key}", U32, value) for key, value in values.items()]
    path.write_bytes(encode_header(entries, slots) + content)
    return path


def test_tensors_are_copied_byte_for_byte_whatever_their_type(tmp_path: Path) -> None:
    kinds = [name for name, _, _ in TENSOR_TYPES.values() if name in PRODUCT_TYPES]
    assert {"IQ2_XXS", "MXFP4", "NVFP4", "Q4_K", "TQ1_0", "Q1_0", "Q2_0", "BF16"} <= set(kinds)
    model = write_typed(tmp_path / "m.gguf", kinds)
    source = bytes_of(model)
    cuts = (7, 19)
    pipeline = split_model(model, tmp_path / "out", cuts=cuts)
    for stage in pipeline.stages:
        part = bytes_of(tmp_path / "out" / stage.file)
        for layer in range(stage.layer_start, stage.layer_end):
            for rest in ("attn_norm.weight", "ffn_up.weight"):
                assert part.pop(f"blk.{layer - stage.layer_start}.{rest}") == source[f"blk.{layer}.{rest}"]
        is_last = stage.layer_end == len(kinds)
        assert set(part) == set(BLOCK_FIELDS) - ({"output.weight"} if is_last else set())
        assert part["output_norm.weight"] == source["output_norm.weight"]
        if is_last:
            assert part["token_embd.weight"] == source["output.weight"]
    first = open_model(tmp_path / "out" / "stage-0.gguf")
    offset = first.integer("relayline.embedding.offset_bytes")
    raw = (tmp_path / "out" / "stage-0.gguf").read_bytes()
    assert offset % 32 == 0
    assert raw[offset:] == source["token_embd.weight"]
    assert first.value("relayline.embedding.rows") == 64
    assert TENSOR_TYPES[first.integer("relayline.embedding.type")][0] == kinds[0]


def test_artifacts_describe_themselves(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "m.gguf", tokenizer=True)
    pipeline = split_model(model, tmp_path / "out", cuts=(1, 4))
    assert pipeline == load_pipeline(tmp_path / "out")
    assert [(stage.layer_start, stage.layer_end) for stage in pipeline.stages] == [(0, 1), (1, 4), (4, 6)]
    assert pipeline.source.sha256 == content_key(model)
    assert pipeline.source.files[0].mtime_ns == model.stat().st_mtime_ns
    for stage in pipeline.stages:
        check_artifact(tmp_path / "out" / stage.file, stage)
        part = open_model(tmp_path / "out" / stage.file)
        assert {key: part.value(f"relayline.{key}") for key in ("version", "pipeline_id", "stage_index", "stage_count",
                "layer_start", "layer_end", "source_layers", "n_embd", "n_vocab", "source_sha256")} == {
            "version": 1, "pipeline_id": pipeline.pipeline_id, "stage_index": stage.index, "stage_count": 3,
            "layer_start": stage.layer_start, "layer_end": stage.layer_end, "source_layers": 6, "n_embd": 64,
            "n_vocab": len(TOKENS), "source_sha256": pipeline.source.sha256,
        }  # fmt: skip
        assert part.value("llama.block_count") == stage.layer_end - stage.layer_start
        is_last = stage.index == 2
        assert (part.value("tokenizer.ggml.model") == "none") is not is_last
        assert ("tokenizer.ggml.tokens" in part.entries) is is_last
        assert ("rope_freqs.weight" in part.tensors) is True
    check_artifact(tmp_path / "out" / pipeline.tokenizer.file, pipeline.tokenizer)


def test_tokenizer_file_loads_without_tensors(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "m.gguf", tokenizer=True)
    split_model(model, tmp_path / "out", n_stages=2)
    params = llama.llama_model_default_params()
    params.vocab_only = True
    loaded = llama.llama_model_load_from_file(str(tmp_path / "out" / "tokenizer.gguf").encode(), params)
    assert loaded
    assert llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(loaded)) == len(TOKENS)
    llama.llama_model_free(loaded)


def test_sharded_input_equals_single_file(tmp_path: Path) -> None:
    model = make_tiny("qwen3moe", tmp_path / "m.gguf")
    first = shard(model, tmp_path / "shards", 4)
    whole = split_model(model, tmp_path / "whole", cuts=(2,))
    parts = split_model(first, tmp_path / "parts", cuts=(2,))
    assert whole.pipeline_id == parts.pipeline_id
    assert [stage.sha256 for stage in whole.stages] == [stage.sha256 for stage in parts.stages]
    assert len(parts.source.files) == 4
    assert not any(key.startswith("split.") for key in open_model(tmp_path / "parts" / "stage-1.gguf").entries)


def test_broken_shard_sets(tmp_path: Path) -> None:
    first = shard(make_tiny("llama", tmp_path / "m.gguf"), tmp_path, 3)
    second, third = (first.with_name(f"big-0000{number}-of-00003.gguf") for number in (2, 3))
    with pytest.raises(ModelFileError, match=r"not the first shard; give big-00001-of-00003\.gguf"):
        open_model(second)
    alone = first.with_name("renamed.gguf")
    alone.write_bytes(first.read_bytes())
    with pytest.raises(ModelFileError, match="1 of 3 shards, so its name"):
        open_model(alone)
    kept = second.read_bytes(), third.read_bytes()
    second.write_bytes(kept[1])
    third.write_bytes(kept[0])
    with pytest.raises(ModelFileError, match="says it is shard 3 of 3, but its name says 2 of 3"):
        open_model(first)
    second.write_bytes(kept[0])
    third.unlink()
    with pytest.raises(ModelFileError, match="shard 3 of 3 is missing"):
        open_model(first)


def test_second_run_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny("llama", tmp_path / "m.gguf")
    out = tmp_path / "out"
    before = split_model(model, out, n_stages=3)
    states = {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.iterdir()}

    read = os.pread

    def unexpected(*_: object) -> int:
        raise AssertionError("the second run reads tensor data")

    def only_a_head(file: int, n_bytes: int, offset: int) -> bytes:
        return read(file, n_bytes, offset) if offset == 0 else bytes(unexpected())

    monkeypatch.setattr(os, "pread", only_a_head)
    monkeypatch.setattr(os, "preadv", unexpected)
    calls: list[tuple[int, int]] = []
    assert split_model(model, out, n_stages=3, progress=lambda *at: calls.append(at)) == before
    assert not calls
    assert {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.iterdir()} == states


def test_changed_source_or_cuts_or_lost_artifact_split_again(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "m.gguf")
    out = tmp_path / "out"
    first = split_model(model, out, n_stages=4)
    (out / "stage-1.gguf").write_bytes(b"short")
    assert split_model(model, out, n_stages=4) == first
    load_pipeline(out)
    other = split_model(model, out, n_stages=2)
    assert other.pipeline_id != first.pipeline_id
    assert names_in(out) == {"stage-0.gguf", "stage-1.gguf", "tokenizer.gguf", PIPELINE_NAME}
    make_tiny("llama", model, seed=2)
    assert split_model(model, out, n_stages=2).pipeline_id != other.pipeline_id


class Stop(Exception):
    """The exception of the interrupted tests."""


@pytest.mark.parametrize("moment", [1, 5, 40])
def test_interrupted_split_leaves_nothing_that_looks_finished(moment: int, tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "m.gguf")
    out = tmp_path / "out"
    calls = 0

    def stop(_: int, __: int) -> None:
        nonlocal calls
        calls += 1
        if calls == moment:
            raise Stop

    with pytest.raises(Stop):
        split_model(model, out, n_stages=2, progress=stop)
    assert not out.exists()
    split_model(model, out, n_stages=2)
    load_pipeline(out)


def test_interrupted_split_keeps_the_earlier_one(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "m.gguf")
    out = tmp_path / "out"
    earlier = split_model(model, out, n_stages=2)

    def stop(done: int, total: int) -> None:
        if done == total:
            raise Stop

    with pytest.raises(Stop):
        split_model(model, out, n_stages=3, progress=stop)
    assert load_pipeline(out) == earlier
    assert names_in(out) == {"stage-0.gguf", "stage-1.gguf", "tokenizer.gguf", PIPELINE_NAME}


def test_killed_split_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    """SIGKILL in the middle: no cleanup can run, and the next split sweeps up."""
    model = make_tiny("llama", tmp_path / "m.gguf")
    out = tmp_path / "out"
    script = (
        "import os, signal, sys; from pathlib import Path; from relayline.coordinator.model.split import split_model\n"
        "def kill(done, total):\n    if done > total // 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "split_model(Path(sys.argv[1]), Path(sys.argv[2]), n_stages=2, progress=kill)"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(model), str(out)], cwd=ROOT, check=False)
    assert ended.returncode == -9
    assert any(name.endswith(".partial") for name in names_in(out))
    assert not any(name.endswith(".gguf") or name == PIPELINE_NAME for name in names_in(out))
    with pytest.raises(ArtifactError, match="split a model into it first"):
        load_pipeline(out)
    split_model(model, out, n_stages=2)
    assert names_in(out) == {"stage-0.gguf", "stage-1.gguf", "tokenizer.gguf", PIPELINE_NAME}
    with pytest.raises(ArtifactError, match=r"is a file; give the directory that holds pipeline\.json"):
        load_pipeline(out / PIPELINE_NAME)


def test_two_splits_at_once_do_the_work_once(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "m.gguf")
    entered, release = threading.Event(), threading.Event()
    results: dict[str, PipelineFile] = {}
    second_worked: list[int] = []

    def hold(done: int, total: int) -> None:
        entered.set()
        assert release.wait(30)

    def run(name: str, progress: object) -> None:
        results[name] = split_model(model, tmp_path / "out", n_stages=2, progress=progress)  # type: ignore[arg-type]

    first = threading.Thread(target=run, args=("first", hold))
    first.start()
    assert entered.wait(30)
    second = threading.Thread(target=run, args=("second", lambda done, total: second_worked.append(done)))
    second.start()
    release.set()
    first.join(30)
    second.join(30)
    assert results["first"] == results["second"]
    assert not second_worked


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    pipeline = split_model(make_tiny("llama", tmp_path / "m.gguf"), tmp_path / "out", n_stages=2,
                           progress=lambda *at: calls.append(at))  # fmt: skip
    total = pipeline.tokenizer.size_bytes + sum(stage.size_bytes for stage in pipeline.stages)
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)


def test_a_cache_that_cannot_hold_a_split_names_the_variable_that_moves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny("llama", tmp_path / "m.gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ArtifactError, match=r"Not a directory; XDG_CACHE_HOME=DIRECTORY keeps the cache elsewhere$"):
        split_model(model, cache_dir() / "splits" / "m", n_stages=2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(ArtifactError, match=r"are free there; XDG_CACHE_HOME=DIRECTORY keeps the cache elsewhere$"):
        split_model(model, cache_dir() / "splits" / "m", n_stages=2)


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(ArtifactError, match=r"and 16,777,216 to spare, but only 1,000 are free"):
        split_model(make_tiny("llama", tmp_path / "m.gguf"), tmp_path / "out", n_stages=2)
    assert not (tmp_path / "out").exists()


def test_refusals(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "m.gguf")
    with pytest.raises(CutError, match="cut 6 is outside"):
        split_model(model, tmp_path / "out", cuts=(6,))
    with pytest.raises(UsageError):
        split_model(model, tmp_path / "out")
    with pytest.raises(UsageError):
        split_model(model, tmp_path / "out", n_stages=2, cuts=(1,))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ArtifactError, match="cannot be used as output directory"):
        split_model(model, tmp_path / "file", n_stages=2)
    split_model(model, tmp_path / "out", n_stages=2)
    with pytest.raises(ModelFileError, match="is already one stage of a split"):
        split_model(tmp_path / "out" / "stage-0.gguf", tmp_path / "again", cuts=(1,))
    odd = make_tiny("llama", tmp_path / "odd.gguf", extra_tensors={"cls.weight": np.ones(4, np.float32)})
    with pytest.raises(UnsupportedArchitectureError, match=r"it has the tensor cls\.weight, which belongs to no stage"):
        split_model(odd, tmp_path / "odd", n_stages=2)


def test_a_split_replaces_and_removes_only_files_of_a_split(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    model = make_tiny("llama", out / "stage-0.gguf")
    before = model.read_bytes()
    with pytest.raises(UsageError, match=r"stage-0\.gguf: does not come from a split and would be lost"):
        split_model(model, out, n_stages=2)
    assert (names_in(out), model.read_bytes()) == ({"stage-0.gguf"}, before)
    elsewhere = make_tiny("llama", tmp_path / "model.gguf")
    model.unlink()
    (out / "stage-7.gguf").write_text("mine")
    with pytest.raises(UsageError, match=r"stage-7\.gguf: does not come from a split"):
        split_model(elsewhere, out, n_stages=2)
    (out / "stage-7.gguf").unlink()
    split_model(elsewhere, out, n_stages=2)
    (out / PIPELINE_NAME).unlink()  # as after an interruption at the last moment
    assert len(split_model(elsewhere, out, cuts=(1,)).stages) == 2
    (out / "stage-1.gguf").write_bytes(b"damaged")
    assert len(split_model(elsewhere, out, n_stages=1).stages) == 1
    assert "stage-1.gguf" not in names_in(out)


def test_a_name_that_is_no_text_is_split_and_known_again(tmp_path: Path) -> None:
    # Renamed: the library that writes models logs their names, and a log with such a name cannot leave a test worker.
    model = make_tiny("llama", tmp_path / "m.gguf").rename(tmp_path / os.fsdecode(b"caf\xe9.gguf"))
    first = split_model(model, tmp_path / "out", n_stages=2)
    assert first.source.files[0].name == "caf\\xe9.gguf"
    assert split_model(model, tmp_path / "out", n_stages=2) == first


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match=r"pipe\.gguf: is not a file"):
        open_model(tmp_path / "pipe.gguf")


def test_source_that_changes_meanwhile(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "m.gguf")

    def touch(done: int, total: int) -> None:
        if done == total:
            os.utime(model, ns=(1, 1))

    with pytest.raises(ModelFileError, match="changed while it was being split"):
        split_model(model, tmp_path / "out", n_stages=2, progress=touch)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def untried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose family has no row, and which does not state where its windows are."""
    monkeypatch.delitem(FAMILIES, "cohere2moe")
    return make_tiny("cohere2moe", tmp_path / "m.gguf", n_layers=4)


def test_experimental_reports_an_abort_of_llama_cpp(untried: Path, tmp_path: Path) -> None:
    """The slice with no sliding-window layer makes llama.cpp abort: in the probe, not here."""
    with pytest.raises(
        UnsupportedArchitectureError, match=r"no stage can run layer 3: .*GGML_ASSERT\(.*is_swa_any"
    ) as caught:
        split_model(untried, tmp_path / "out", cuts=(3,), experimental=True, probe=probe_artifact)
    assert "\n" not in caught.value.message
    assert not (tmp_path / "out").exists()


def test_experimental_keeps_to_windows_that_a_file_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No slice is planned that llama.cpp would abort on; each states its own windows."""
    monkeypatch.delitem(FAMILIES, "granite_swa")
    model = make_tiny("granite_swa", tmp_path / "m.gguf")
    with pytest.raises(CutError, match="only together with one that has a window; legal cuts: 1-6"):
        split_model(model, tmp_path / "out", cuts=(7,), experimental=True)
    split_model(model, tmp_path / "out", cuts=(3,), experimental=True, probe=probe_artifact)
    pattern = open_model(tmp_path / "out" / "stage-1.gguf").value("granite_swa.attention.sliding_window_pattern")
    assert pattern == (False, True, True, True, False)


def test_experimental_probes_a_certified_family_with_a_tensor_of_no_stage(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "m.gguf", extra_tensors={"cls.weight": np.zeros((4, 64), np.float32)})
    with pytest.raises(UnsupportedArchitectureError, match="wrong number of tensors") as caught:
        split_model(model, tmp_path / "out", cuts=(2,), experimental=True, probe=probe_artifact)
    assert "\n" not in caught.value.message
    assert not (tmp_path / "out").exists()


def test_experimental_split_that_runs(untried: Path, tmp_path: Path) -> None:
    asked: list[str] = []

    def probe(path: Path) -> str | None:
        asked.append(path.name)
        assert not (tmp_path / "out" / PIPELINE_NAME).exists()
        return probe_artifact(path)

    pipeline = split_model(untried, tmp_path / "out", n_stages=2, experimental=True, probe=probe)
    assert len(asked) == 2
    assert load_pipeline(tmp_path / "out") == pipeline


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    split_model(make_tiny("llama", tmp_path / "m.gguf"), tmp_path / "out", n_stages=2)
    return tmp_path / "out"


def test_altered_artifact_is_noticed(finished: Path) -> None:
    pipeline = load_pipeline(finished)
    path = finished / "stage-1.gguf"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    load_pipeline(finished)  # sizes are right, so the quick check passes
    with pytest.raises(ArtifactError, match="sha256 differs"):
        check_artifact(path, pipeline.stages[1])
    path.unlink()
    with pytest.raises(ArtifactError, match="missing; split the model again"):
        load_pipeline(finished)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2 is unknown"),
        ({"cuts": [9]}, "cuts do not ascend"),
        ({"cuts": []}, "2 stages for 0 cuts"),
        ({"cuts": [1]}, "stage 0 does not hold"),
        ({"stages": 5}, "not a pipeline description"),
        ({"tokenizer": {"file": "../x", "size_bytes": 1, "sha256": ""}}, "leaves the directory"),
    ],
)
def test_bad_descriptions(change: dict[str, object], words: str, finished: Path) -> None:
    path = finished / PIPELINE_NAME
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | change))
    with pytest.raises(ArtifactError, match=words):
        load_pipeline(finished)
    path.write_bytes(b"{nonsense")
    with pytest.raises(ArtifactError, match="not a pipeline description"):
        load_pipeline(finished)


def test_placeholder_types_are_ordered_by_size() -> None:
    sizes = [TENSOR_TYPES[kind][2] / TENSOR_TYPES[kind][1] for kind in PLACEHOLDER_TYPES]
    assert sizes == sorted(sizes)
    assert TENSOR_TYPES[PLACEHOLDER_TYPES[-1]][1] == 1, "the last one fits any width"


def sparse_model(path: Path, tensor_bytes: int, n_layers: int) -> Path:
    """A file of many GiB that takes no room: its tensors are holes, but for the last byte."""
    n_rows = tensor_bytes // (4096 * 4)
    slots = [TensorSlot("token_embd.weight", (4096, 32), 0, 4096 * 32 * 4)]
    slots += [TensorSlot(f"blk.{layer}.ffn_up.weight", (4096, n_rows), 0, tensor_bytes) for layer in range(n_layers)]
    values = {"block_count": n_layers, "embedding_length": 4096, "context_length": 64, "attention.head_count": 32}
    entries = [encode_entry("general.architecture", STRING_TYPE, "llama")]
    entries += [encode_entry(f"llama.{key}", U32, value) for key, value in values.items()]
    header = encode_header(entries, slots)
    with path.open("wb") as file:
        file.write(header)
        file.seek(len(header) + sum(slot.size_bytes for slot in slots) - 1)
        file.write(b"\x01")  # what ends with zeros is not split
    return path


@pytest.mark.slow
def test_memory_does_not_depend_on_the_model(tmp_path: Path) -> None:
    """640 MiB in two tensors, split in a child process that reports its peak memory."""
    model = sparse_model(tmp_path / "m.gguf", 320 << 20, 2)
    script = (
        "import re, sys; from pathlib import Path; from relayline.coordinator.model.split import split_model\n"
        "split_model(Path(sys.argv[1]), Path(sys.argv[2]), n_stages=2)\n"
        # Not getrusage: a child's ru_maxrss begins with what its parent had.
        "print(1024 * int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(model), str(tmp_path / "out")], cwd=ROOT, check=True, capture_output=True
    )
    assert 0 < int(ended.stdout) < 160 * 1024 * 1024


def test_content_key_tells_fine_tunes_apart(tmp_path: Path) -> None:
    keys = {content_key(make_tiny("llama", tmp_path / f"{seed}.gguf", seed=seed)) for seed in (1, 2, 1)}
    assert len(keys) == 2


def test_hash_in_description_is_of_the_file(finished: Path) -> None:
    for stage in load_pipeline(finished).stages:
        assert hashlib.sha256((finished / stage.file).read_bytes()).hexdigest() == stage.sha256


def test_stages_load_with_the_gguf_package_too(finished: Path) -> None:
    reader = gguf.GGUFReader(finished / "stage-0.gguf")
    assert {tensor.name.split(".")[1] for tensor in reader.tensors if tensor.name.startswith("blk.")} == {"0", "1", "2"}
