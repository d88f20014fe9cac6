"""EAGLE-3 files that llama.cpp would abort on, or refuse late, are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayline.wire.common.errors import ModelFileError
from relayline.wire.model_files.eagle3 import InnerRows, is_eagle3, read_eagle3, widened
from tests.support.tiny_eagle import make_eagle
from tests.support.tiny_models import make_tiny
from tests.support.tiny_shapes import N_EMBD

LAYERS = (1, 2, 4)
DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "two layers": ({"layers": (1, 2)}, "does not name 3 layers"),
    "a layer twice": ({"layers": (1, 1, 2)}, r"target_layers is \[1, 1, 2\]"),
    "a shape": ({"replaced": {"fc.weight": np.zeros((N_EMBD, N_EMBD), np.float32)}}, "tensor fc.weight has shape"),
    "a type": ({"replaced": {"output_norm.weight": np.zeros(N_EMBD, np.float16)}}, "output_norm.weight is F16"),
    "no token": ({"maps_tokens": True, "first_mapped": 100}, "d2t names tokens that its vocabulary does not have"),
    "no head for a map": ({"maps_tokens": True, "own_head": False}, "d2t is not a list of the tokens that its head"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    changes, says = DAMAGED[kind]
    path = make_eagle(tmp_path / "eagle.gguf", **{"layers": LAYERS, **changes})
    with pytest.raises(ModelFileError, match=says) as refused:
        read_eagle3(path)
    assert "\n" not in refused.value.message


def test_a_file_is_read(tmp_path: Path) -> None:
    path = make_eagle(tmp_path / "eagle.gguf", LAYERS, maps_tokens=True, own_table=False, norm_before_fc=True)
    assert is_eagle3(path)
    found = read_eagle3(path)
    assert (found.layers, found.n_embd, found.target_width, found.n_vocab) == (LAYERS, N_EMBD, N_EMBD, 128)
    assert not found.has_table
    found.check_target(5, N_EMBD, 128)


def test_another_model_is_none(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "model.gguf")
    assert not is_eagle3(path)
    with pytest.raises(ModelFileError, match="is of the architecture 'llama', not eagle3"):
        read_eagle3(path)


def test_rows_grow_behind_each_layer_that_is_read() -> None:
    assert [InnerRows(LAYERS).n_before(layer) for layer in range(6)] == [0, 0, 1, 2, 2, 3]
    assert widened((8,) * 6, 8, (4, 1, 2)) == (8, 8, 16, 24, 24, 32)
