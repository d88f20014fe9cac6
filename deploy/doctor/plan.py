"""A manifest's needs on this machine, before it runs: memory, disk, the place of its split."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.pipeline_file import PIPELINE_NAME
from relayline.deploy.launch.prepare import choose_cuts
from relayline.deploy.manifest import Manifest
from relayline.deploy.models.splits import split_place
from relayline.deploy.planning.drafting import has_coordinator, reserved_for_coordinator
from relayline.deploy.planning.inputs import memory_of
from relayline.wire.common.errors import RelaylineError


def needed_memory_bytes(manifest: Manifest) -> int | None:
    """Return the memory of all processes of this machine, without that of GPUs.

    None where the model is not here to tell.
    """
    model = _model_here(manifest)
    if model is None:
        return None
    facts = inspect_model(model)
    total = reserved_for_coordinator(manifest).total_bytes if has_coordinator(manifest) else 0
    needs = memory_of(manifest, facts, choose_cuts(manifest, model))
    return total + sum(need.total_bytes for stage, need in zip(manifest.stages, needs, strict=True) if stage.is_local)


def split_of(manifest: Manifest) -> Path | None:
    """Return the directory of the split, which may not exist yet; None where the model is not here or cannot be cut
    so."""
    model = _model_here(manifest)
    if model is None:
        return None
    try:
        cuts = choose_cuts(manifest, model)
    except RelaylineError:
        return None  # another line says so
    return split_place(model, len(manifest.stages), cuts)


def writes_bytes(manifests: Iterable[Manifest]) -> int:
    """Return how many bytes the first start will still write: each model's size, 0 if it is split already."""
    sizes: dict[Path, int] = {}
    for manifest in manifests:
        directory, model = split_of(manifest), _model_here(manifest)
        if directory is not None and model is not None and not (directory / PIPELINE_NAME).exists():
            sizes[directory] = inspect_model(model).file_bytes
    return sum(sizes.values())


def _model_here(manifest: Manifest) -> Path | None:
    path = manifest.model_path
    return path if path is not None and path.exists() else None
