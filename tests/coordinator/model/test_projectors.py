"""Which projectors fit which models, and one line for each that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest

from relayline.coordinator.model.projectors import AUDIO, PROJECTORS, check_projector, has_axes, read_projector
from relayline.wire.common.errors import ModelFileError, RelaylineError, UsageError
from relayline.wire.model_files.gguf_header import read_header
from tests.support.fakes import pipeline_file
from tests.support.tiny_audio import make_audio_projector
from tests.support.tiny_models import make_tiny
from tests.support.tiny_projectors import make_projector

FILE = msgspec.structs.replace(pipeline_file(1), architecture="llama", n_embd=48)


def header(path: Path, architecture: str = "clip", **values: Any) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_bool("clip.has_vision_encoder", values.pop("vision", True))
    writer.add_bool("clip.has_audio_encoder", values.pop("audio", False))
    for key, value in values.items():
        writer.add_string(f"clip.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", PROJECTORS)
def test_every_kind_is_known_by_its_file(kind: str, tmp_path: Path) -> None:
    file = msgspec.structs.replace(FILE, architecture=PROJECTORS[kind].architectures[0])
    assert check_projector(make_projector(tmp_path / "mmproj.gguf", kind, n_embd=48), file).images == kind


@pytest.mark.parametrize("kind", AUDIO)
def test_every_kind_of_audio_is_known_by_its_file(kind: str, tmp_path: Path) -> None:
    file = msgspec.structs.replace(FILE, architecture=AUDIO[kind].architectures[0])
    found = check_projector(make_audio_projector(tmp_path / "mmproj.gguf", kind, n_embd=48), file)
    assert (found.images, found.audio, found.what) == ("", kind, "audio")


def test_one_file_may_have_both_encoders(tmp_path: Path) -> None:
    file = msgspec.structs.replace(FILE, architecture="qwen2vl")
    found = check_projector(make_audio_projector(tmp_path / "mmproj.gguf", "qwen2.5o", n_embd=48), file)
    assert (found.images, found.audio, found.what) == ("qwen2.5vl_merger", "qwen2a", "images and audio")
    file = msgspec.structs.replace(FILE, architecture="gemma4")
    found = check_projector(make_audio_projector(tmp_path / "mmproj.gguf", "gemma4v+gemma4a", n_embd=48), file)
    assert (found.images, found.audio, found.what) == ("gemma4v", "gemma4a", "images and audio")
    with pytest.raises(UsageError, match="kind dots3note_a are not served: no stage was tried with its audio"):
        check_projector(header(tmp_path / "other.gguf", vision=False, audio=True, projector_type="dots3note_a"), FILE)


def test_images_of_a_file_are_served_where_its_audio_is_not(tmp_path: Path) -> None:
    kinds = {"vision.projector_type": "mlp", "audio.projector_type": "dots3note_a"}
    found = read_projector(header(tmp_path / "mmproj.gguf", audio=True, **kinds))
    assert (found.images, found.audio, found.what) == ("mlp", "", "images")
    assert found.left_out == "projectors of the kind dots3note_a are not served: no stage was tried with its audio"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"projector_type": "hunyuanvl"}, "depend on how many images come before"),
        ({"vision.projector_type": "granite4_vision"}, "deepstack"),
        ({"projector_type": "brand_new"}, "mlp, pixtral, idefics3, internvl, gemma3, gemma4v, gemma4uv, nemotron"),
        ({"architecture": "llama"}, "not a projector; give the file that the model's maker calls mmproj"),
        ({"vision": False}, "no encoder for images or audio"),
    ],
)
def test_others_are_refused_by_name(given: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=problem):
        check_projector(header(tmp_path / "mmproj.gguf", **given), FILE)


@pytest.mark.parametrize("architecture", ["glm4", "glm4moe"])
def test_models_for_text_alone_are_refused_where_their_kin_take_images(architecture: str, tmp_path: Path) -> None:
    path = make_projector(tmp_path / "mmproj.gguf", "glm4v", n_embd=48)
    file = msgspec.structs.replace(FILE, architecture=architecture)
    with pytest.raises(UsageError, match="positions have one axis: it is one for text alone, and projectors of the"):
        check_projector(path, file, axes=False)
    assert check_projector(path, file, axes=True).images == "glm4v"


@pytest.mark.parametrize(
    ("family", "values", "expected"),
    [("glm4moe", {}, False), ("glm4moe", {"rope.dimension_sections": [3, 3, 2, 0]}, True),
     ("glm4moe", {"rope.dimension_sections": [8, 0, 0, 0]}, False), ("qwen2", {}, False)],
)  # fmt: skip
def test_axes_are_what_the_file_says(family: str, values: Any, expected: bool, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path / "model.gguf", extra_values=values)
    assert has_axes(read_header(path)) is expected


@pytest.mark.parametrize(
    ("kind", "n_embd", "are_causal"),
    [("gemma4v", 1_536, True), ("gemma4v", 48, False), ("gemma3", 2_560, False), ("gemma4uv", 2_560, False)],
)
def test_rows_of_small_gemma_4_images_do_not_see_each_other(
    kind: str, n_embd: int, are_causal: bool, tmp_path: Path
) -> None:
    file = msgspec.structs.replace(FILE, architecture=PROJECTORS[kind].architectures[0], n_embd=n_embd)
    found = check_projector(make_projector(tmp_path / "mmproj.gguf", kind, n_embd=n_embd), file)
    assert found.are_causal is are_causal
    assert (found.max_tokens > 0) is (not are_causal and kind != "gemma3"), "no image has to be one step"


def test_features_of_images_are_for_as_many_layers_as_the_model_has_for_them(tmp_path: Path) -> None:
    path = make_projector(tmp_path / "mmproj.gguf", "qwen3vl_merger", n_embd=48, n_deepstack=2)
    stage = msgspec.structs.replace(FILE.stages[0], row_width=3 * 48)
    file = msgspec.structs.replace(FILE, architecture="qwen3vl", stages=(stage,), deepstack_layers=2)
    assert check_projector(path, file).deepstack_layers == 2
    without = make_projector(tmp_path / "without.gguf", "qwen3vl_merger", n_embd=48)
    with pytest.raises(UsageError, match=r"for 0 layers, but the model takes 2: it belongs to another model$"):
        check_projector(without, file)
    for_text = msgspec.structs.replace(FILE, architecture="qwen3vl")
    with pytest.raises(UsageError, match=r"for 2 layers, but the model takes 0: .* split it again") as caught:
        check_projector(path, for_text)
    assert "\n" not in str(caught.value)


def test_a_projector_of_another_model_or_of_none_is_refused(tmp_path: Path) -> None:
    path = make_projector(tmp_path / "mmproj.gguf", n_embd=40)
    with pytest.raises(UsageError, match="rows have 40 values, but the model's have 48"):
        check_projector(path, FILE)
    with pytest.raises(
        UsageError, match="architecture gemma3 are not served with images by a projector of the kind mlp"
    ):
        check_projector(path, msgspec.structs.replace(FILE, architecture="gemma3"))
    with pytest.raises(UsageError, match=r"architecture llama are not served .* gemma3; those of gemma3 are"):
        check_projector(make_projector(tmp_path / "gemma.gguf", "gemma3", n_embd=48), FILE)
    with pytest.raises(UsageError, match="no such file"):
        check_projector(tmp_path / "none.gguf", FILE)
    with pytest.raises(ModelFileError, match="it is a directory; name a file"):
        check_projector(tmp_path, FILE)
    path.write_bytes(b"no GGUF at all")
    with pytest.raises(RelaylineError, match=r"mmproj\.gguf"):
        check_projector(path, FILE)
