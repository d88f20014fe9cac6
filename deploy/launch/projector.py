"""Finds the projector to serve: a file, or `auto` for the one in the model's repository or directory."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.inspection import facts_of
from relayline.coordinator.model.projectors import check_belongs, has_axes
from relayline.deploy.launch.prepare import find_model, override
from relayline.deploy.manifest import Manifest
from relayline.deploy.manifest.model import AUTO_PROJECTOR
from relayline.deploy.models.hub_choice import projector_among
from relayline.deploy.models.model_source import projector_of, resolve_model, resolve_projector
from relayline.wire.common.errors import UsageError
from relayline.wire.common.places import expanded
from relayline.wire.settings.setting import entry_of
from relayline.wire.settings.table import ServingSettings

log = logging.getLogger("relayline.up")


def with_projector(manifest: Manifest, reference: str) -> Manifest:
    """Return the manifest with its projector as an absolute path: with `auto` the one that this means, loaded from the
    hub if it is there.

    `reference`: the model as the user named it, where the manifest has only its path; a projector of its repository
    that is not asked for is named in a line of the log. Raises ModelFileError where there is none.
    """
    if named := manifest.serving.mmproj:
        path = _of_manifest(manifest, reference) if named == AUTO_PROJECTOR else expanded(named).absolute()
        if named == AUTO_PROJECTOR:
            log.info("projector: %s", path)
        return override(manifest, {entry_of(ServingSettings, "mmproj").place: str(path)})
    if reference and (name := projector_of(reference)):
        log.info("images and audio are not served; the repository has a projector, %s; --mmproj auto uses it", name)
    return manifest


def check_images(manifest: Manifest, model: Path) -> None:
    """Raise UsageError for a projector of another model, before the model is split."""
    if manifest.serving.mmproj:
        check_projector_of(Path(manifest.serving.mmproj), model)


def check_projector_of(path: Path, model: Path) -> None:
    """Raise UsageError for a projector that belongs to another model."""
    opened = open_model(model)
    facts = facts_of(opened)
    width, n_layers = facts.n_embd, facts.sidebands.deepstack_layers
    axes = has_axes(opened.files[0])
    check_belongs(path, facts.architecture, width, n_layers, axes=axes)


def served_projector(serving: ServingSettings, given: Mapping[str, Any]) -> ServingSettings:
    """Return the settings of `serve`. `auto` means the manifest's projector, the one next to `--model`, or the one in
    `--pipeline`.

    Raises UsageError or ModelFileError if there is none.
    """
    if serving.mmproj != AUTO_PROJECTOR:
        return serving
    if given["manifest"] is not None:
        path = _of_manifest(given["manifest"])
    elif given["model"] is not None:
        path = resolve_projector(str(given["model"]), resolve_model(str(given["model"]))).absolute()
    elif given["directory"] is not None:
        path = _of_split(given["directory"])
    else:
        return serving  # there is nothing to serve either, which is said next
    log.info("projector: %s", path)
    return dataclasses.replace(serving, mmproj=str(path))


def _of_manifest(manifest: Manifest, reference: str = "") -> Path:
    named = reference or str(manifest.model_path or manifest.spec.model.hf)
    return resolve_projector(named, find_model(manifest)).absolute()


def _of_split(directory: Path) -> Path:
    if name := projector_among(path.name for path in directory.glob("*.gguf")):
        return (directory / name).absolute()
    flag = entry_of(ServingSettings, "mmproj").flag
    text = f"{directory} holds no projector (mmproj*.gguf); name it, or give --model FILE with a projector next to it"
    raise UsageError(f"{flag} {AUTO_PROJECTOR}: {text}")
