"""Values that llama.cpp takes from the first layer of a file: slices state them, or the model is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import split_model
from relayline.wire.common.errors import CutError, UnsupportedArchitectureError
from tests.support.family_check import check
from tests.support.tiny_families import RECIPES
from tests.support.tiny_models import make_tiny
from tests.support.tiny_shapes import HEAD, Value


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        (
            "mimo2",
            {"rope.dimension_count_swa": HEAD},
            rf"another rope.dimension_count than others \({HEAD}, {HEAD // 2}\)",
        ),
        ("gemma3", {"rope.dimension_count_swa": 8}, rf"another rope.dimension_count than others \(8, {HEAD}\)"),
        ("gemma3", {"attention.key_length_swa": 8}, rf"another attention.key_length than others \(8, {HEAD}\)"),
        ("step35", {"attention.value_length_swa": 8}, rf"another attention.value_length than others \(8, {HEAD}\)"),
        ("qwen3moe", {"expert_used_count": [1, 2, 1, 2, 2]}, "different numbers of experts"),
    ],
)
def test_layers_that_would_be_taken_for_the_first_are_refused(
    name: str, values: dict[str, Value], reason: str, tmp_path: Path
) -> None:
    model = make_tiny(name, tmp_path / "model.gguf", extra_values=values)
    with pytest.raises(UnsupportedArchitectureError, match=reason) as caught:
        split_model(model, tmp_path / "out", cuts=(2,), experimental=True)
    assert "\n" not in caught.value.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("mimo2", {"rope.dimension_count_swa": HEAD // 2}),  # as in other families
        ("gemma3", {"rope.dimension_count_swa": 8, "attention.sliding_window_pattern": 0}),  # all have a window
        ("step35", {"rope.dimension_count": HEAD // 2, "rope.dimension_count_swa": HEAD}),  # asked for each layer
        ("qwen3moe", {"expert_used_count": [2, 2, 2, 2, 2]}),
    ],
)
def test_layers_that_do_not_differ_in_it_are_cut_anywhere(name: str, values: dict[str, Value], tmp_path: Path) -> None:
    model = make_tiny(name, tmp_path / "model.gguf", extra_values=values)
    check(model, [(cut,) for cut in inspect_model(model).legal_cuts], tmp_path)


def test_no_slice_begins_with_a_layer_that_needs_another_layers_choice(tmp_path: Path) -> None:
    """Each slice also states which of its layers choose, since llama.cpp judges a silent file by its length."""
    model = make_tiny("glm-dsa:5.2", tmp_path / "model.gguf")
    assert inspect_model(model).legal_cuts == (1, 2, 6)
    with pytest.raises(CutError, match=r"cut 3 .* tokens that the previous layer has chosen; legal cuts: 1,2,6"):
        split_model(model, tmp_path / "out", cuts=(3,))
    split_model(model, tmp_path / "out", cuts=(1, 2))
    stages = [open_model(tmp_path / "out" / f"stage-{index}.gguf") for index in range(3)]
    assert [stage.value("glm-dsa.attention.indexer.types") for stage in stages] == [(1,), (1,), (1, 0, 0, 0, 1)]


def test_heads_are_as_wide_as_the_whole_files_first_layer_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a stated width it is the row's over the first layer's number of heads, which layers differ in here."""
    recipe = RECIPES["step35"]
    unstated = {key: value for key, value in recipe.values.items() if not key.endswith(("key_length", "value_length"))}
    monkeypatch.setitem(RECIPES, "step35", dataclasses.replace(recipe, values=unstated))
    model = make_tiny("step35", tmp_path / "model.gguf")
    check(model, [(cut,) for cut in inspect_model(model).legal_cuts], tmp_path / "cuts")
    split_model(model, tmp_path / "out", cuts=(2,))
    second = open_model(tmp_path / "out" / "stage-1.gguf")
    assert [second.value(f"step35.attention.{name}_length") for name in ("key", "value")] == [HEAD, HEAD]
