"""Finds the quantisation of a model that would fit where its own does not, or where there is room for more. Pure."""

from __future__ import annotations

import dataclasses

from relayline.coordinator.planner.instance import Instance, ModelShape
from relayline.coordinator.planner.search import Room

# Bits of a weight in typical files, including their tensors of higher precision.
QUANTISATIONS = (("F16", 16.0), ("Q8_0", 8.5), ("Q6_K", 6.6), ("Q5_K_M", 5.7), ("Q4_K_M", 4.85), ("Q3_K_M", 3.9),
                 ("Q2_K", 3.0))  # fmt: skip
QUANT_STEP = 1.08  # a file is named as larger or smaller only if it clearly is


def larger_quantisation(instance: Instance) -> str:
    """Return the usual quantisation with the most bits that fits and is larger than the model's own; empty for none."""
    bits = instance.model.bits_per_weight
    larger = [each for each in QUANTISATIONS if bits and each[1] > QUANT_STEP * bits]
    return next((name for name, size in larger if _fits_scaled(instance, size / bits)), "")


def smaller_quantisation(instance: Instance) -> str:
    """Return the usual quantisation with the most bits that fits, where the model's own does not; empty for none."""
    bits = instance.model.bits_per_weight
    smaller = [each for each in QUANTISATIONS if each[1] * QUANT_STEP < bits]
    return next((name for name, size in smaller if _fits_scaled(instance, size / bits)), "")


def _fits_scaled(instance: Instance, by: float) -> bool:
    return Room(dataclasses.replace(instance, model=_scaled(instance.model, by))).some_cuts() is not None


def _scaled(model: ModelShape, by: float) -> ModelShape:
    return dataclasses.replace(
        model,
        layer_bytes=tuple(round(size * by) for size in model.layer_bytes),
        head_bytes=round(model.head_bytes * by),
        embedding_bytes=round(model.embedding_bytes * by),
    )
