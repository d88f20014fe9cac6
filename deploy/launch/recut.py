"""Splits the model again for a serving coordinator: in a separate process, next to earlier splits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from relayline.deploy.launch.split_apart import split_apart
from relayline.wire.common.errors import ArtifactError

if TYPE_CHECKING:
    from relayline.deploy.manifest import Manifest

Cut = Callable[[tuple[int, ...]], Awaitable[Path]]


def model_of(manifest: Manifest | None) -> Path | None:
    """Return the model's file if the manifest names one here."""
    return manifest.model_path if manifest is not None else None


def cutter(model: Path | None) -> Cut | None:
    """Return what splits a model at given layers and says where, None without a model.

    It raises ArtifactError with what `relayline split` said; when it is cancelled, that is ended.
    """
    if model is None:
        return None

    full = str(model.absolute())

    async def cut(cuts: tuple[int, ...]) -> Path:
        from relayline.deploy.launch.splits import split_place

        place = await asyncio.to_thread(split_place, model, None, cuts)
        where = ("--cuts", ",".join(map(str, cuts)), "--out", str(place))
        if error := await split_apart(full, *where):
            raise ArtifactError(error)
        return place

    return cut
