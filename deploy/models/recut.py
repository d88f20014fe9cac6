"""Splits the model again for a serving coordinator: in a separate process, next to earlier splits."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from relayline.deploy.models.split_apart import split_apart
from relayline.wire.common.errors import ArtifactError

if TYPE_CHECKING:
    from relayline.coordinator.joining.hosts import ReadShape
    from relayline.coordinator.planner.instance import ModelShape
    from relayline.deploy.manifest import Manifest

Cut = Callable[[tuple[int, ...]], Awaitable[Path]]


def model_of(manifest: Manifest | None) -> Path | None:
    """Return the model's file if the manifest names one here, or one of the hub by its layers.

    Raises UsageError, ModelFileError.
    """
    if manifest is None:
        return None
    if manifest.spec.model.hf is not None and manifest.spec.model.download == "layers":
        from relayline.deploy.models.hollow import hollow_model  # here, because most models are files

        return hollow_model(manifest.spec.model.hf, manifest.spec.model.sha256 or "")
    return manifest.model_path


def cutter(model: Path | None) -> Cut | None:
    """Return what splits a model at given layers and says where, None without a model.

    It raises ArtifactError with what `relayline split` said; when it is cancelled, that is ended.
    """
    if model is None:
        return None
    full = str(model.absolute())

    async def cut(cuts: tuple[int, ...]) -> Path:
        from relayline.deploy.models.splits import note_for_move, remove_replaced, split_place

        place = await asyncio.to_thread(split_place, model, None if cuts else 1, cuts or None)
        await asyncio.to_thread(note_for_move, place)
        await asyncio.to_thread(remove_replaced, place)
        parts = ("--cuts", ",".join(map(str, cuts))) if cuts else ("--stages", "1")
        where = (*parts, "--output", str(place))
        if error := await split_apart(full, *where):
            raise ArtifactError(error)
        await asyncio.to_thread(note_for_move, place)  # splitting may have taken long
        return place

    return cut


def shape_reader(model: Path | None, lora: str = "", draft_model: str = "") -> ReadShape | None:
    """Return what reads the sizes of a model by which its layers are given to hosts, None without a model.

    `lora`: the setting of its adapters, which count as parts of its layers. `draft_model`: that of its draft model; an
    EAGLE-3 model counts as a part of the head.
    """
    if model is None:
        return None

    def read() -> ModelShape:
        from relayline.coordinator.model.inspection import inspect_model
        from relayline.deploy.planning.drafting import drafted_shape, eagle3_of
        from relayline.wire.model_files.adapters import layer_bytes_of
        from relayline.wire.settings.table import ServingSettings

        serving = ServingSettings(draft_model=draft_model)
        shape, more = drafted_shape(inspect_model(model), serving), layer_bytes_of(lora)
        layer_bytes = itertools.zip_longest(shape.layer_bytes, more, fillvalue=0)
        head_bytes = shape.head_bytes + (shape.prediction_bytes if eagle3_of(serving) is not None else 0)
        return dataclasses.replace(shape, layer_bytes=tuple(map(sum, layer_bytes)), head_bytes=head_bytes)

    return read
