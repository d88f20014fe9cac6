"""Goal: two slices count as equal only if nothing but the split's name differs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.model.same_slice import same_slices
from relayline.coordinator.model.split import split_model
from tests.support.tiny_models import make_tiny


def split(tmp_path: Path, cuts: tuple[int, ...], **changes: object) -> tuple[Path, PipelineFile]:
    model = tmp_path / "m.gguf"
    if not model.exists():
        make_tiny("llama", model, n_layers=6)
    directory = tmp_path / "-".join(map(str, cuts))
    return directory, msgspec.structs.replace(split_model(model, directory, cuts=cuts), **changes)


def test_slices_of_the_same_layers_are_the_same_and_others_are_not(tmp_path: Path) -> None:
    one, other = split(tmp_path, (2, 4)), split(tmp_path, (2, 5))
    assert one[1].pipeline_id != other[1].pipeline_id
    assert one[1].stages[0].sha256 != other[1].stages[0].sha256, "the artifacts name their split"
    assert same_slices(one, other) == (True, False, False)
    assert same_slices(one, split(tmp_path, (3, 4))) == (False, False, True)


def test_another_model_has_no_slice_in_common(tmp_path: Path) -> None:
    one = split(tmp_path, (2, 4))
    source = msgspec.structs.replace(one[1].source, sha256="f" * 64)
    assert same_slices(one, split(tmp_path, (2, 5), source=source)) == (False, False, False)


def test_a_slice_with_other_metadata_is_another(tmp_path: Path) -> None:
    one, other = split(tmp_path, (2, 4)), split(tmp_path, (2, 5))
    path = other[0] / "stage-0.gguf"
    data = path.read_bytes()
    key = b"relayline.embedding.rows"
    at = data.index(key) + len(key) + 4  # behind the type of its value
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert same_slices(one, other)[0] is False
