"""Recipes of families with layers that predict further tokens (MTP): see tiny_families, whose models have none."""

from __future__ import annotations

import dataclasses

from tests.support.tiny_families import RECIPES
from tests.support.tiny_shapes import Recipe, Shapes, Value, prediction


def _predicting(name: str, like: int, n_more: int = 1, **arrays: list[int] | list[float]) -> Recipe:
    """Return a recipe with further layers, which are shaped `like` a decoded one. arrays: values that they add."""
    base = RECIPES[name]
    values: dict[str, Value] = {**base.values, "nextn_predict_layers": n_more}
    for key, more in arrays.items():
        full = next(known for known in values if known.replace(".", "_") == key)
        values[full] = [*values[full], *more]  # type: ignore[misc]

    def block(layer: int) -> Shapes:
        return base.block(layer) if layer < base.n_layers else {**base.block(like), **prediction()}

    return dataclasses.replace(base, values=values, block=block, n_layers=base.n_layers + n_more)


PREDICTING: dict[str, Recipe] = {
    "qwen35moe:mtp": _predicting("qwen35moe", 3),
    "deepseek2:mtp": _predicting("deepseek2", 4),
    "deepseek32:mtp": _predicting("deepseek32", 4),
    "step35:mtp": _predicting(
        "step35", 5, 2, attention_sliding_window_pattern=[1, 1], attention_head_count=[6, 6],
        swiglu_clamp_exp=[0.0, 0.0], swiglu_clamp_shexp=[0.0, 0.0],
    ),
}  # fmt: skip
