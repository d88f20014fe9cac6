"""Makes the manifest of a model without one, and applies stage flags to a manifest. Pure: values in and out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relayline.deploy.manifest.model import API_VERSION, KIND, Manifest
from relayline.deploy.manifest.starter import pipeline_name
from relayline.wire.common.errors import UsageError
from relayline.wire.common.texts import counted, not_text
from relayline.wire.settings.setting import entries, entry_of
from relayline.wire.settings.table import TABLES, EngineSettings

_LABEL = re.compile(r"[a-z][a-z0-9-]{0,61}[a-z0-9]")  # no address, which begins with a digit


@dataclasses.dataclass(frozen=True, slots=True)
class StageFlags:
    """The values of flags for all stages of this machine."""

    n_stages: int | None = None
    cuts: tuple[int, ...] | None = None
    """First layer of every stage but the first."""
    n_threads: int | None = None
    gpu_layers: int | None = None
    devices: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The given DEVICE_SETTINGS, by their names."""
    pin: bool = True
    """Whether stages keep to their share of the cores."""

    @property
    def is_set(self) -> bool:
        """Whether any flag was given."""
        return self != StageFlags()


def smallest_manifest(model: Path, name: str = "", **settings: Any) -> Manifest:
    """Return a manifest that names the model and nothing else, but for settings by their names in the tables.

    `name`: of the pipeline; empty: made from the model's file name. The API listens on a port that the system chooses.
    Raises UsageError for a model in a directory whose name no manifest can hold.
    """
    if problem := not_text(model.absolute()):
        raise UsageError(f"{model.absolute()}: {problem}")
    data: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name or pipeline_name(model.name)},
        "spec": {"model": {"path": str(model.absolute())}, "coordinator": {"http": {"port": 0}}},
    }
    places = {entry.name: entry for table in TABLES for entry in entries(table) if entry.place}
    for key, value in settings.items():
        *parents, last = places[key].place.split(".")
        part = data["spec"]
        for parent in parents:
            part = part.setdefault(parent, {})
        part[last] = places[key].manifest_value(value)
    return Manifest.model_validate(data)


def with_stages(manifest: Manifest, flags: StageFlags, n_layers: int) -> Manifest:
    """Return the manifest with what flags say of its stages. `n_layers`: of the model.

    Raises UsageError where the manifest lists its stages and a flag asks for another number of them.
    """
    listed = not isinstance(manifest.spec.stages, int)
    asked = len(flags.cuts) + 1 if flags.cuts is not None else flags.n_stages
    if listed and asked not in (None, len(manifest.stages)):
        lists = f"the manifest lists {counted(len(manifest.stages), 'stage')}"
        raise UsageError(f"{lists}, but the flags ask for {asked}; change the manifest")
    data = manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
    if listed or asked is None:
        stages = [stage.model_dump(mode="json", by_alias=True, exclude_none=True) for stage in manifest.stages]
    else:
        stages = [{"name": f"stage-{index}"} for index in range(asked)]
    edges = (0, *flags.cuts, n_layers) if flags.cuts is not None else ()
    places = manifest.stages if listed else [None] * len(stages)
    for index, (entry, stage) in enumerate(zip(stages, places, strict=False)):
        if edges:
            entry["layers"] = [edges[index], edges[index + 1]]
        if stage is None or stage.is_local:
            entry |= _of_local(flags)
    data["spec"]["stages"] = stages
    return Manifest.model_validate(data).with_directory(manifest.directory)


def with_hosts(manifest: Manifest, hosts: Sequence[str]) -> Manifest:
    """Return the manifest with one stage on each of these hosts, in this order.

    Raises UsageError for an invalid host. A stage is named after its host, without the domain, or stage-N if that is
    not a valid name or already used.
    """
    data = manifest.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
    names: list[str] = []
    for index, host in enumerate(hosts):
        label = host.partition(".")[0].lower()
        is_name = _LABEL.fullmatch(label) is not None and label not in names
        names.append(label if is_name else f"stage-{index}")
    data["spec"]["stages"] = [{"name": name, "host": host} for name, host in zip(names, hosts, strict=True)]
    try:
        return Manifest.model_validate(data).with_directory(manifest.directory)
    except ValueError as error:
        raise UsageError(
            f"--hosts {','.join(hosts)}: give names or addresses without ports, separated by commas"
        ) from error


def _of_local(flags: StageFlags) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    if flags.n_threads is not None:
        entry["threads"] = flags.n_threads
    if flags.gpu_layers is not None:
        entry |= {"device": "gpu", "gpuLayers": flags.gpu_layers} if flags.gpu_layers else {"device": "cpu"}
    entry |= {entry_of(EngineSettings, name).key: value for name, value in flags.devices.items()}
    if not flags.pin:
        entry["cores"] = "any"
    return entry
