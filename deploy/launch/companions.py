"""The files that are served with a model: its projector, and LoRA adapters."""

from __future__ import annotations

from pathlib import Path

from relayline.coordinator.http.edge.limits import limits_of
from relayline.coordinator.model.adapters import check_of_model, check_of_split
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.deploy.launch.prepare import override
from relayline.deploy.launch.projector import check_images, with_projector
from relayline.deploy.manifest import Manifest
from relayline.wire.common.errors import UsageError
from relayline.wire.common.places import expanded
from relayline.wire.model_files.adapter_texts import placed
from relayline.wire.model_files.adapters import Adapter, load_adapters, read_named
from relayline.wire.settings.setting import entry_of
from relayline.wire.settings.table import ServingSettings


def with_companions(manifest: Manifest, reference: str) -> Manifest:
    """Return the manifest with its projector, see `with_projector`, and absolute paths of adapters, which mean the same
    to every process of a launch. Raises as `with_projector`, and UsageError for a path that no setting can name.
    """
    manifest = with_projector(manifest, reference)
    if not manifest.serving.lora:
        return manifest
    lora = entry_of(ServingSettings, "lora")
    try:
        text = placed(manifest.serving.lora, lambda path: expanded(path).absolute())
    except ValueError as error:
        raise UsageError(f"{lora.flag}: {error}") from None
    return override(manifest, {lora.place: text})


def check_companions(manifest: Manifest, model: Path) -> None:
    """Raise UsageError or ModelFileError for a file of another model, before the model is split."""
    check_images(manifest, model)
    if manifest.serving.lora:
        facts = inspect_model(model)
        check_of_model(read_named(manifest.serving.lora), model, facts.architecture, facts.n_layers)


def served_adapters(serving: ServingSettings, split: Path) -> tuple[Adapter, ...]:
    """Return the adapters that are served with a split, each read whole. Blocks.

    Raises ModelFileError for one of another model, UsageError for one with a name of the model itself.
    """
    adapters = load_adapters(serving.lora)
    if adapters:
        file = load_pipeline(split, stages_here=False)
        aliases = limits_of(serving).model_aliases
        check_of_split(adapters, file, [serving.model_id or file.model_name, *aliases])
    return adapters
