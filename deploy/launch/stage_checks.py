"""Checks of this machine's stages before anything is started: their names, devices, and directory of kept prefixes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from relayline.deploy.launch.log_files import SUPERVISOR
from relayline.deploy.launch.supervisor import COORDINATOR
from relayline.deploy.machine.gpus import HostDevice, known_devices
from relayline.deploy.manifest import Manifest, Stage
from relayline.deploy.planning.shared import gpu_sharing
from relayline.stage.engine.device_choice import check_devices, computing
from relayline.wire.common.errors import UsageError
from relayline.wire.common.places import expanded
from relayline.wire.settings.device_texts import HOST_MEMORY, NO_DEVICE
from relayline.wire.settings.table import EngineSettings

log = logging.getLogger("relayline.up")

Devices = Callable[[], Sequence[HostDevice] | None]


def check_names(manifest: Manifest) -> None:
    """Raise UsageError for a stage with the name that a process of every launch has."""
    taken = next((stage.name for stage in manifest.members if stage.name in (SUPERVISOR, COORDINATOR)), None)
    if taken is not None:
        raise UsageError(f"no stage can be named {taken!r}: relayline's own logs have that name; rename the stage")


def check_stage_devices(manifest: Manifest, devices: Devices = known_devices) -> None:
    """Raise UsageError for a device that a stage of this machine names and llama.cpp does not find here.

    `devices` looks for them, in a separate process, and is called only if a stage asks for a GPU. Layers that are to go
    to a GPU where there is none are computed on the processor: that is a warning.
    """
    asking = _asking(manifest)
    found = devices() if asking else None
    if found is None:
        return
    without = []
    for stage in asking:
        settings = EngineSettings(**stage.engine_settings)
        try:
            check_devices(settings, found)
        except UsageError as error:
            raise UsageError(f"stage {stage.name!r}: {error.message}") from None
        if _wants_gpu(stage) and not computing(settings, found):
            without.append(stage.name)
    if without:
        log.warning("llama.cpp finds no GPU on this host, so the processor computes all layers of %s; "
                    "see `relayline doctor`", ", ".join(without))  # fmt: skip


def warn_of_shared_gpus(manifest: Manifest, devices: Devices = known_devices) -> None:
    """Warn where several stages share a GPU, unless they all run on this machine, and it is known to have none."""
    lines = gpu_sharing(manifest)
    found = devices() if lines and manifest.all_local else None
    if found is None or any(device.is_gpu for device in found):
        for line in lines:
            log.warning("%s", line)


def _asking(manifest: Manifest) -> list[Stage]:
    return [stage for stage in manifest.members if stage.is_local and _asks_for_devices(stage)]


def _asks_for_devices(stage: Stage) -> bool:
    return bool(_wants_gpu(stage) or stage.tensor_split or stage.main_gpu or {*stage.named_devices} - {HOST_MEMORY})


def _wants_gpu(stage: Stage) -> bool:
    return bool(stage.gpu_layers_used) and stage.devices != NO_DEVICE


def warn_of_prefix_directory(manifest: Manifest) -> None:
    """Warn where stages of this machine are to keep prefixes in a directory that they cannot use.

    The directory is made, as the stages would make it. They serve without it.
    """
    named = manifest.engine.prefix_disk_dir
    if not (named and manifest.engine.prefix_disk_bytes and any(stage.is_local for stage in manifest.members)):
        return
    try:
        directory = expanded(named)
        directory.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(directory, os.W_OK | os.X_OK) else "no permission to write there"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        log.warning("%s cannot be used for the prefix cache: %s; prefixes stay in memory", named, reason)
