"""Repairs a split that was damaged under a running pipeline: it is made again from its model, in a separate process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from relayline.coordinator.model.content_key import content_key
from relayline.coordinator.model.pipeline_file import PipelineFile, load_pipeline
from relayline.deploy.models.split_apart import split_apart
from relayline.wire.common.errors import ArtifactError, RelaylineError

log = logging.getLogger("relayline.up")

Mend = Callable[[], Awaitable[bool]]


async def nothing_to_mend() -> bool:
    """Report the split as whole: without its model it cannot be made again."""
    return True


def mender(model: Path, directory: Path, file: PipelineFile) -> Mend:
    """Return a function that finds files of a split that are missing or have another size, and then makes the split
    again.

    It returns whether all files then exist with their sizes. If the model has changed since, the split is left alone:
    running stages hold the old one's layers.
    """

    async def mend() -> bool:
        fault = await asyncio.to_thread(_fault, directory, file)
        if not fault:
            return True
        log.warning("%s; splitting %s again", fault, model.name)
        problem = await asyncio.to_thread(_changed, model, file) or await _split(model, directory, file)
        problem = problem or await asyncio.to_thread(_fault, directory, file)
        if problem:
            log.warning("the split cannot be made again: %s", problem)
        return not problem

    return mend


def later_mender(settled: Path) -> Mend:
    """Return the same for a pipeline whose plan is made only once its hosts have joined; `settled`: its manifest."""

    def found() -> Mend:
        from relayline.deploy.manifest import load_manifest
        from relayline.deploy.models.splits import split_place

        manifest = load_manifest(settled)
        cuts = tuple(cut for cut in manifest.fixed_cuts() if cut is not None)
        if manifest.model_path is None or len(cuts) + 1 != len(manifest.stages):
            return nothing_to_mend  # nothing has been split yet
        directory = split_place(manifest.model_path, None, cuts)
        try:
            file = load_pipeline(directory, stages_here=False)
        except ArtifactError:
            return nothing_to_mend  # it is elsewhere, as its user wanted
        return mender(manifest.model_path, directory, file)

    async def mend() -> bool:
        return await (await asyncio.to_thread(found))()

    return mend


def _fault(directory: Path, file: PipelineFile) -> str:
    try:
        found = load_pipeline(directory)
    except ArtifactError as error:
        return error.message
    return "" if found.stages == file.stages else f"{directory} holds other slices than the stages have"


def _changed(model: Path, file: PipelineFile) -> str:
    try:
        found = [(model.parent / each.name).stat() for each in file.source.files]
        known = [(each.size_bytes, each.mtime_ns) for each in file.source.files]
        is_same = [(each.st_size, each.st_mtime_ns) for each in found] == known
        is_same = is_same and content_key(model) == file.source.sha256  # which covers a part of each tensor
    except (RelaylineError, OSError) as error:
        return str(error)
    return "" if is_same else f"{model} is another model than the one that was split"


async def _split(model: Path, directory: Path, file: PipelineFile) -> str:
    how = ("--cuts", ",".join(map(str, file.cuts))) if file.cuts else ("--stages", "1")
    return await split_apart(str(model), *how, "--output", str(directory))
