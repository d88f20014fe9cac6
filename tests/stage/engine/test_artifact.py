from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from relayline.deploy.testing.tiny_slices import TinyShape, write_pipeline, write_whole
from relayline.stage.engine.artifact import open_artifact, verify_artifact
from relayline.wire.common import file_hash
from relayline.wire.common.errors import ArtifactError, ModelFileError

SHAPE = TinyShape(n_layers=3)


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "pipeline"
    directory.mkdir()
    return write_pipeline(directory, SHAPE, [1, 2])


def edit_pipeline(stages: list[Path], edit: Any) -> None:
    path = stages[0].parent / "pipeline.json"
    pipeline = json.loads(path.read_text())
    edit(pipeline)
    path.write_text(json.dumps(pipeline))


def test_an_artifact_describes_itself(stages: list[Path]) -> None:
    first, middle, last = [open_artifact(path) for path in stages]
    assert [each.stage_index for each in (first, middle, last)] == [0, 1, 2]
    assert [(each.layer_start, each.layer_end) for each in (first, middle, last)] == [(0, 1), (1, 2), (2, 3)]
    assert [(each.is_first, each.is_last) for each in (first, middle, last)] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    assert {each.n_vocab for each in (first, middle, last)} == {SHAPE.n_vocab}  # the source's, on every stage
    assert (last.architecture, last.n_embd, last.stage_count, last.source_layers) == ("llama", SHAPE.n_embd, 3, 3)
    assert first.embedding is not None
    assert (first.embedding.offset_bytes % 32, first.embedding.rows, first.embedding.scale) == (0, SHAPE.n_vocab, 1.0)
    assert middle.embedding is None


def test_artifacts_of_the_splitter_verify(stages: list[Path]) -> None:
    assert [verify_artifact(path) for path in stages] == [open_artifact(path) for path in stages]


def test_a_verified_file_is_hashed_once(stages: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []
    real_hash = file_hash._hash

    def counting(path: Path, *more: Any) -> str:
        hashed.append(path)
        return real_hash(path, *more)

    monkeypatch.setattr(file_hash, "_hash", counting)
    for _ in range(3):
        verify_artifact(stages[1])
    assert hashed == [stages[1]]
    stages[1].touch()
    verify_artifact(stages[1])
    assert hashed == [stages[1]] * 2


@pytest.mark.parametrize("damage", [b"", b"{", b'{"size_bytes": 1}', b"not UTF-8"])
def test_a_damaged_stamp_only_costs_a_hash(damage: bytes, stages: list[Path], tmp_path: Path) -> None:
    verify_artifact(stages[1])
    (stamp,) = (tmp_path / "cache" / "relayline" / "verified").iterdir()
    stamp.write_bytes(stamp.read_bytes()[:-3] + b'\xff"}' if damage == b"not UTF-8" else damage)
    verify_artifact(stages[1])


def test_a_cache_that_cannot_be_written_is_no_error(stages: list[Path], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a directory should be")
    verify_artifact(stages[1])


def test_altered_bytes_are_found_even_after_a_verification(stages: list[Path]) -> None:
    verify_artifact(stages[1])
    content = bytearray(stages[1].read_bytes())
    content[-1] ^= 1
    stages[1].write_bytes(content)
    status = stages[1].stat()
    os.utime(stages[1], ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(ArtifactError, match=r"stage-1\.gguf: its sha256 is not the one"):
        verify_artifact(stages[1])


def remove_file(stages: list[Path]) -> None:
    stages[1].unlink()


def shorten_file(stages: list[Path]) -> None:
    stages[1].write_bytes(stages[1].read_bytes()[:-1])


def remove_pipeline(stages: list[Path]) -> None:
    (stages[0].parent / "pipeline.json").unlink()


def break_pipeline(stages: list[Path]) -> None:
    (stages[0].parent / "pipeline.json").write_text('{"version": 1, "stages": 3}')


def blur_pipeline(stages: list[Path]) -> None:
    path = stages[0].parent / "pipeline.json"
    path.write_bytes(path.read_bytes().replace(b"stage-", b"stage\xff"))


def newer_pipeline(stages: list[Path]) -> None:
    edit_pipeline(stages, lambda pipeline: pipeline.update(version=2))


def unlist(stages: list[Path]) -> None:
    edit_pipeline(stages, lambda pipeline: pipeline["stages"].pop(1))


def of_another_split(stages: list[Path]) -> None:
    edit_pipeline(stages, lambda pipeline: pipeline.update(pipeline_id="other"))


def swapped(stages: list[Path]) -> None:
    def edit(pipeline: dict[str, Any]) -> None:
        entries = pipeline["stages"]
        entries[1]["index"], entries[2]["index"] = 2, 1

    edit_pipeline(stages, edit)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_file, "stage-1.gguf: no such file"),
        (shorten_file, r"stage-1.gguf: \d+ bytes, but pipeline.json lists \d+"),
        (remove_pipeline, "pipeline.json: no such file"),
        (break_pipeline, "pipeline.json: cannot be read"),
        (blur_pipeline, "pipeline.json: cannot be read"),
        (newer_pipeline, "pipeline.json: version 2, this build reads 1"),
        (unlist, "stage-1.gguf: pipeline.json in its directory does not list this file"),
        (of_another_split, "stage-1.gguf: is stage 1 of another split"),
        (swapped, "stage-1.gguf: is stage 1 of another split"),
    ],
)
def test_each_damage_is_one_clear_line(damage: Any, message: str, stages: list[Path]) -> None:
    damage(stages)
    with pytest.raises(ArtifactError, match=message) as caught:
        verify_artifact(stages[1])
    assert "\n" not in caught.value.message


def test_files_that_are_no_artifacts(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such file"):
        open_artifact(tmp_path)  # a directory
    (tmp_path / "text").write_text("GGUX, almost")
    with pytest.raises(ModelFileError, match="text: not a GGUF file"):
        open_artifact(tmp_path / "text")
    with pytest.raises(ArtifactError, match="not a relayline stage artifact"):
        open_artifact(write_whole(tmp_path / "whole.gguf", SHAPE))


def minimal(path: Path, **keys: Any) -> Path:
    """An artifact of metadata only; a key given as None is left out."""
    facts: dict[str, Any] = {
        "version": 1,
        "source_sha256": "0",
        "pipeline_id": "p",
        "stage_index": 1,
        "stage_count": 2,
        "layer_start": 1,
        "layer_end": 2,
        "source_layers": 2,
        "n_embd": 4,
        "n_vocab": 5,
    } | keys
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in facts.items():
        if isinstance(value, str):
            writer.add_string(f"relayline.{key}", value)
        elif value is not None:
            writer.add_uint32(f"relayline.{key}", value)
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"version": 7},
            "artifact version 7, this build reads 1 and 2 and 3 and 4 and 5 and 6; split again, or update this build",
        ),
        ({"n_embd": None}, "relayline.n_embd is missing or not an integer"),
        ({"n_embd": "4"}, "relayline.n_embd is missing or not an integer"),
        ({"pipeline_id": None}, "relayline.pipeline_id is missing or not a string"),
        ({"pipeline_id": 7}, "relayline.pipeline_id is missing or not a string"),
        ({"stage_index": 2}, "contradicts itself: stage 2 of 2"),
        ({"layer_start": 2}, "contradicts itself: .* layers 2 to 2 of 2"),
        ({"layer_end": 3}, "contradicts itself: .* layers 1 to 3 of 2"),
        ({"stage_index": 0}, "relayline.embedding.offset_bytes is missing"),
    ],
)
def test_metadata_that_cannot_be_used(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    open_artifact(minimal(tmp_path / "good.gguf"))
    with pytest.raises(ArtifactError, match=message):
        open_artifact(minimal(tmp_path / "bad.gguf", **keys))
