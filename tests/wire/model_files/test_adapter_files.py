"""LoRA files: what is read of them, what is refused, and the part that a stage gets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from relayline.deploy.testing.tiny_adapters import RANK, make_adapter
from relayline.wire.common.errors import ModelFileError
from relayline.wire.model_files.adapters import (
    Adapter,
    choice_keys,
    choices,
    load_adapters,
    names,
    read_adapter,
    write_part,
)
from relayline.wire.model_files.gguf_header import read_header
from tests.support.tiny_models import make_tiny


@pytest.fixture(scope="module", name="model")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "model.gguf")


ONE = np.ones((4, 4), np.float32)


@pytest.mark.parametrize(
    ("values", "tensors", "problem"),
    [
        ({"general.type": "model"}, {}, "is of the type 'model', not 'adapter'"),
        ({"general.type": None}, {}, "states no type, not 'adapter'"),
        ({"adapter.type": "control_vector"}, {}, "of the type 'control_vector'; only LoRA"),
        ({"adapter.alora.invocation_tokens": [1, 2]}, {}, "certain tokens alone"),
        ({}, {"token_embd.weight.lora_a": ONE, "token_embd.weight.lora_b": ONE}, "changes token_embd.weight, which"),
        ({}, {"output.weight.lora_a": ONE, "output.weight.lora_b": ONE}, "changes output.weight, which belongs to no"),
        ({}, {"blk.0.attn_q.weight.lora_a": ONE}, "blk.0.attn_q.weight lacks one of its two matrices"),
        ({}, {"blk.0.attn_q.weight": ONE}, "blk.0.attn_q.weight is no part of a LoRA"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    model: Path, tmp_path: Path, values: dict[str, object], tensors: dict[str, np.ndarray], problem: str
) -> None:
    path = make_adapter(model, tmp_path / "lora.gguf", changes=(), extra=values, tensors=tensors)
    with pytest.raises(ModelFileError, match=problem) as found:
        read_adapter(path)
    assert str(path) in found.value.message
    assert "\n" not in found.value.message


def test_norms_are_left_out_as_llama_cpp_does(model: Path, tmp_path: Path) -> None:
    norm = {"blk.0.attn_norm.weight": np.ones(64, np.float32)}
    path = make_adapter(model, tmp_path / "lora.gguf", changes=("blk.1.attn_q.weight",), tensors=norm)
    assert [(pair.layer, pair.rest) for pair in read_adapter(path).pairs] == [(1, "attn_q.weight")]


def test_a_part_has_the_matrices_of_its_layers_under_the_names_of_its_slice(model: Path, tmp_path: Path) -> None:
    path = make_adapter(model, tmp_path / "lora.gguf", changes=("blk.*.attn_q.weight",))
    whole = read_adapter(path)
    with (tmp_path / "part.gguf").open("wb") as out:
        assert write_part(whole, range(1, 2), out) == 1
    part = read_header(tmp_path / "part.gguf")
    assert {tensor.name for tensor in part.tensors} == {"blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"}
    assert part.value("adapter.lora.alpha") == RANK
    data, source = (tmp_path / "part.gguf").read_bytes(), path.read_bytes()
    for tensor in part.tensors:
        of_whole = next(each for each in whole.file.tensors if each.name == tensor.name.replace("blk.0", "blk.1"))
        there = source[of_whole.offset : of_whole.offset + of_whole.size_bytes]
        assert data[tensor.offset : tensor.offset + tensor.size_bytes] == there


def test_bytes_are_counted_by_layer(model: Path, tmp_path: Path) -> None:
    path = make_adapter(model, tmp_path / "lora.gguf", changes=("blk.1.attn_q.weight",))
    sizes = read_adapter(path).layer_bytes(3)
    assert sizes == [0, (64 + 64) * RANK * 4, 0]


def test_choices_are_what_every_request_has_and_then_each_name() -> None:
    def adapter(name: str, sha256: str, scale: float = 1.0) -> Adapter:
        return Adapter(name, Path("x"), scale, sha256, 1)

    served = [adapter("sql", "1"), adapter("", "2"), adapter("chat", "3")]
    assert choices(served) == ((1,), (1, 0), (1, 2))
    assert names(served) == ("sql", "chat")
    keys = choice_keys(served)
    assert len(set(keys)) == 3
    assert choice_keys([adapter("sql", "1"), adapter("", "2", 0.5), adapter("chat", "3")])[0] != keys[0]
    assert choice_keys([]) == choice_keys([adapter("sql", "1")])[:1] == ("",)


def test_the_files_of_a_setting_are_hashed(model: Path, tmp_path: Path) -> None:
    path = make_adapter(model, tmp_path / "lora.gguf")
    (plain, named) = load_adapters(f"{path},sql={path}:0.25")
    assert (plain.name, plain.scale, named.name, named.scale) == ("", 1.0, "sql", 0.25)
    assert plain.sha256 == named.sha256
    assert plain.size_bytes == path.stat().st_size
    with pytest.raises(ModelFileError, match=r"absent.gguf: no such file"):
        load_adapters(str(tmp_path / "absent.gguf"))


def test_an_alpha_of_another_type_is_refused_because_llama_cpp_would_abort(model: Path, tmp_path: Path) -> None:
    path = make_adapter(model, tmp_path / "lora.gguf", extra={"adapter.lora.alpha": 4})
    with pytest.raises(ModelFileError, match=r"its adapter.lora.alpha is no 32-bit float"):
        read_adapter(path)
