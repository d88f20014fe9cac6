"""The files that are served with a model, before it is split: its projector, a draft model, and LoRA adapters."""

from __future__ import annotations

from pathlib import Path

from relayline.coordinator.model.adapters import check_of_model
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.projectors import read_projector
from relayline.deploy.launch.draft_model import (
    check_draft_memory,
    check_draft_model,
    with_draft_model,
)
from relayline.deploy.launch.eagle3 import check_one_drafter, warn_of_unused_eagle3
from relayline.deploy.launch.prepare import override
from relayline.deploy.launch.projector import check_images, with_projector
from relayline.deploy.machine.facts import available_memory_bytes
from relayline.deploy.manifest import Manifest
from relayline.deploy.manifest.model import AUTO_PROJECTOR
from relayline.deploy.models.model_source import check_here
from relayline.wire.common.errors import UsageError
from relayline.wire.common.places import expanded
from relayline.wire.model_files.adapter_texts import placed
from relayline.wire.model_files.adapters import read_named
from relayline.wire.settings.setting import entry_of
from relayline.wire.settings.table import KEPT_DIRECTORIES, ServingSettings


def with_companions(manifest: Manifest, reference: str) -> Manifest:
    """Return the manifest with its projector and draft model, see `with_projector` and `with_draft_model`, and absolute
    paths of adapters and of directories that are kept, which mean the same to every process of a launch. Raises as
    these do, and UsageError for a path that no setting can name.
    """
    manifest = with_draft_model(with_projector(manifest, reference))
    for name in KEPT_DIRECTORIES:
        if directory := getattr(manifest.serving, name):
            place = entry_of(ServingSettings, name).place
            manifest = override(manifest, {place: str(expanded(directory).absolute())})
    if not manifest.serving.lora:
        return manifest
    lora = entry_of(ServingSettings, "lora")
    try:
        text = placed(manifest.serving.lora, lambda path: expanded(path).absolute())
    except ValueError as error:
        raise UsageError(f"{lora.flag}: {error}") from None
    return override(manifest, {lora.place: text})


def check_companions_here(serving: ServingSettings) -> None:
    """Raise UsageError or ModelFileError for a file that is missing or unusable, before the model is known."""
    if serving.mmproj not in ("", AUTO_PROJECTOR):
        read_projector(expanded(serving.mmproj))
    read_named(serving.lora)
    if serving.draft_model:
        check_here(serving.draft_model)


def check_companions(manifest: Manifest, model: Path, *, may_run: bool = False) -> None:
    """Raise UsageError or ModelFileError for a file of another model, before the model is split; and as
    `check_draft_memory` for a draft model that this machine has no memory for, unless this pipeline may hold it.
    """
    check_images(manifest, model)
    check_draft_model(manifest.serving, model)
    check_one_drafter(manifest.serving, manifest.engine)
    warn_of_unused_eagle3(manifest, model)
    if not may_run:
        check_draft_memory(manifest.serving, available_memory_bytes())
    if manifest.serving.lora:
        facts = inspect_model(model)
        check_of_model(read_named(manifest.serving.lora), model, facts.architecture, facts.n_layers)
