"""Goal: a model without its weights is split as the whole one, but for the bytes, and nothing takes it for whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from relayline.coordinator.model.content_key import content_key
from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.origin import SUFFIX, check_has_bytes, origin_of, origins_of
from relayline.coordinator.model.pipeline_file import check_artifact, load_pipeline
from relayline.coordinator.model.same_slice import same_slices
from relayline.coordinator.model.split import hollow_slices, split_model, write_stages
from relayline.deploy.certify.run import check_model
from relayline.deploy.cli.calibrate import calibrate_command
from relayline.deploy.models.trial import probe_artifact, try_artifacts
from relayline.stage.engine.artifact import open_unverified, verify_artifact
from relayline.wire.common.errors import ArtifactError, ModelFileError
from relayline.wire.common.file_hash import note_sha256, sha256_of
from tests.support.hollow_models import hollowed
from tests.support.shards import shard
from tests.support.tiny_models import make_tiny


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=4, tokenizer=True)


@pytest.fixture(scope="module")
def hollow(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hollowed(whole, tmp_path_factory.mktemp("hollow"))


def header_of(path: Path) -> bytes:
    return path.read_bytes()[: min(tensor.offset for tensor in open_model(path).tensors.values())]


def test_a_split_has_the_right_headers_and_sizes(whole: Path, hollow: Path, tmp_path: Path) -> None:
    made, known = (split_model(path, tmp_path / name, n_stages=2, trial=try_artifacts) for path, name in
                   ((hollow, "hollow"), (whole, "whole")))  # fmt: skip
    assert (made.cuts, made.n_layers, made.model_name) == (known.cuts, known.n_layers, known.model_name)
    assert [stage.size_bytes for stage in made.stages] == [stage.size_bytes for stage in known.stages]
    assert [stage.unread for stage in (*made.stages, *known.stages)] == [True, True, False, False]
    assert made.source.sha256 != known.source.sha256, "two models are never mixed up"
    assert load_pipeline(tmp_path / "hollow") == made
    for stage in made.stages:
        path = tmp_path / "hollow" / stage.file
        assert path.stat().st_blocks * 512 < path.stat().st_size // 2
        ours = open_model(path).tensors
        theirs = open_model(tmp_path / "whole" / stage.file).tensors
        assert [(each.name, each.dims, each.type_id, each.offset) for each in ours.values()] == [
            (each.name, each.dims, each.type_id, each.offset) for each in theirs.values()
        ]
        check_artifact(path, stage)


def test_a_split_is_made_once_and_again_for_other_content(hollow: Path, whole: Path, tmp_path: Path) -> None:
    made = split_model(hollow, tmp_path / "split", n_stages=2)
    before = (tmp_path / "split" / "stage-0.gguf").stat().st_mtime_ns
    assert split_model(hollow, tmp_path / "split", n_stages=2) == made
    assert (tmp_path / "split" / "stage-0.gguf").stat().st_mtime_ns == before
    changed = whole.read_bytes()[:-1] + b"\x01"
    other = tmp_path / "other" / "tiny.gguf"
    other.parent.mkdir()
    other.write_bytes(changed)
    of_other = split_model(hollowed(other, tmp_path / "far"), tmp_path / "second", n_stages=2)
    assert of_other.source.sha256 != made.source.sha256
    assert {stage.sha256 for stage in of_other.stages}.isdisjoint(stage.sha256 for stage in made.stages)


def test_a_stage_that_keeps_its_layers_is_seen(hollow: Path, tmp_path: Path) -> None:
    for name, cuts in (("one", (1, 2)), ("other", (1, 3))):
        split_model(hollow, tmp_path / name, cuts=cuts)
    one, other = ((tmp_path / name, load_pipeline(tmp_path / name)) for name in ("one", "other"))
    assert same_slices(one, other) == (True, False, False)


def test_its_content_is_what_the_hub_promises(hollow: Path, whole: Path, tmp_path: Path) -> None:
    copy = hollowed(whole, tmp_path / "copy")
    assert content_key(copy) == content_key(hollow) != content_key(whole)
    assert inspect_model(hollow).file_bytes == inspect_model(whole).file_bytes


def test_what_needs_weights_says_where_they_are(hollow: Path, tmp_path: Path) -> None:
    says = r"tiny.gguf: has no weights, these are on the hub; `relayline pull hf://org/repo/tiny.gguf` downloads them"
    with pytest.raises(ModelFileError, match=says):
        write_stages(hollow, tmp_path, (2,), [0])
    with pytest.raises(ModelFileError, match=says):
        check_has_bytes(open_model(hollow))
    with pytest.raises(ModelFileError, match=says):
        check_model(hollow, experimental=False)
    assert [each.size_bytes for each in hollow_slices(hollow, [((2,), 0)])], "measuring needs none"


def test_an_experimental_split_needs_weights(hollow: Path, whole: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd.gguf"
    odd.write_bytes(whole.read_bytes().replace(b"llama", b"lemma"))
    far = hollowed(odd, tmp_path / "far")
    with pytest.raises(ModelFileError, match="has no weights"):
        split_model(far, tmp_path / "split", n_stages=2, experimental=True, probe=probe_artifact)
    assert not (tmp_path / "split").exists()


def test_a_stage_takes_no_hollow_file_for_its_own(hollow: Path, tmp_path: Path) -> None:
    made = split_model(hollow, tmp_path / "split", n_stages=2)
    path = tmp_path / "split" / made.stages[0].file
    said = "has a header and no weights; `relayline join` fetches these"
    for opened in (verify_artifact, open_unverified):  # of `stage --artifact`, and with --no-verify
        with pytest.raises(ArtifactError, match=said):
            opened(path)
    done = CliRunner().invoke(calibrate_command, [str(path)])
    assert isinstance(done.exception, ArtifactError)
    assert said in str(done.exception)
    note_sha256(path, sha256_of(path))  # as a stage does that has fetched it
    assert verify_artifact(path).layer_end == open_unverified(path).layer_end == made.cuts[0]
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ArtifactError, match="it was altered"):
        verify_artifact(path)


@pytest.mark.parametrize("is_copied", [False, True], ids=["hole", "zeros"])
@pytest.mark.parametrize("share", [0.0, 0.8], ids=["nothing", "most"])
def test_a_file_whose_note_is_gone_is_not_taken_for_whole(
    whole: Path, tmp_path: Path, share: float, *, is_copied: bool
) -> None:
    """The headers that a start reads are followed by the first weights, and a copy of a file may have no holes."""
    path = hollowed(whole, tmp_path / "far")
    path.with_name(path.name + SUFFIX).unlink()
    content = whole.read_bytes()
    start = min(tensor.offset for tensor in open_model(whole).tensors.values())
    with path.open("r+b") as file:
        file.write(content[: start + round((len(content) - start) * share)])
    if is_copied:
        path.write_bytes(path.read_bytes())
    says = r"tiny\.gguf: has zeros in place of its weights; download it again, and a model of `download: layers` by its"
    with pytest.raises(ModelFileError, match=says):
        split_model(path, tmp_path / "split", n_stages=2)
    with pytest.raises(ModelFileError, match=says):
        write_stages(path, tmp_path, (2,), [0])
    with pytest.raises(ModelFileError, match=says):
        check_model(path, experimental=False)
    assert not list(tmp_path.rglob("stage-*.gguf*"))


def test_a_shard_whose_note_is_gone_is_found_among_whole_ones(whole: Path, tmp_path: Path) -> None:
    first = shard(whole, tmp_path / "shards", 3)
    check_has_bytes(open_model(first))
    second = sorted(first.parent.glob("*.gguf"))[1]
    header = min(tensor.offset for tensor in open_model(first).files[1].tensors)
    second.write_bytes(second.read_bytes()[:header] + bytes(second.stat().st_size - header))
    with pytest.raises(ModelFileError, match=rf"{second.name}: has zeros in place of its weights"):
        check_has_bytes(open_model(first))


def test_a_model_may_end_with_zeros(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    last = max(open_model(whole).tensors.values(), key=lambda tensor: tensor.offset)
    n_bytes = min(last.size_bytes, whole.stat().st_size // 10)
    path.write_bytes(whole.read_bytes()[: last.offset + last.size_bytes - n_bytes] + bytes(n_bytes))
    check_has_bytes(open_model(path))
    assert split_model(path, tmp_path / "split", n_stages=2).stages


def test_a_shard_may_have_vectors_of_zeros_alone(whole: Path, tmp_path: Path) -> None:
    """As the last one has, where a model's biases are all 0."""
    first = shard(whole, tmp_path / "shards", len(open_model(whole).tensors))
    file = next(file for file in open_model(first).files if len(file.tensors[0].dims) == 1)
    start = file.tensors[0].offset
    file.path.write_bytes(file.path.read_bytes()[:start] + bytes(file.size_bytes - start))
    check_has_bytes(open_model(first))


def test_a_disk_that_fails_is_one_line(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    model = open_model(whole)
    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(ModelFileError, match=r"tiny\.gguf: cannot be read: "):
        check_has_bytes(model)


def test_a_model_whose_name_is_as_long_as_names_may_be_has_no_note(whole: Path, tmp_path: Path) -> None:
    model = tmp_path / f"{'m' * 250}.gguf"
    model.write_bytes(whole.read_bytes())
    assert origin_of(model) is None


def test_notes_of_origin(whole: Path, hollow: Path, tmp_path: Path) -> None:
    assert origin_of(whole) is None
    assert origins_of(open_model(whole)) == ()
    damaged = hollowed(whole, tmp_path)
    damaged.with_name(damaged.name + SUFFIX).write_bytes(b"{")
    with pytest.raises(ModelFileError, match=r"tiny.gguf.origin.json: says not where the weights are: .*; remove it"):
        content_key(damaged)
    shards = hollowed(shard(whole, tmp_path / "shards", 2), tmp_path / "far")
    second = sorted(shards.parent.glob("*.gguf"))[1]
    second.with_name(second.name + SUFFIX).unlink()
    with pytest.raises(ModelFileError, match="only some of its shards have their weights here"):
        content_key(shards)
