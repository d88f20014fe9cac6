"""Applies the flags of `relayline up` about stages: their number, cuts, threads and devices."""

from __future__ import annotations

from typing import Any

from relayline.coordinator.model.cuts import check_cuts
from relayline.coordinator.model.inspection import inspect_model
from relayline.deploy.launch.gpus import with_usual_gpu
from relayline.deploy.launch.prepare import find_model
from relayline.deploy.manifest import Manifest
from relayline.deploy.manifest.smallest import StageFlags, with_stages
from relayline.wire.common.errors import UsageError
from relayline.wire.settings.setting import entry_of
from relayline.wire.settings.table import DEVICE_SETTINGS, EngineSettings


def stage_flags_of(given: dict[str, Any], changed: dict[str, Any]) -> StageFlags:
    """Return the stage flags of `relayline up`. Arguments as of `with_stage_flags`. Raises UsageError."""
    flags = StageFlags(
        n_stages=given["n_stages"],
        cuts=given["cuts"],
        n_threads=given["threads"] if "threads" in changed else None,
        gpu_layers=given["gpu_layers"] if "gpu_layers" in changed else None,
        devices={
            name: given[parameter]
            for name in DEVICE_SETTINGS
            if (parameter := entry_of(EngineSettings, name).parameter) in changed
        },
        pin=not given["no_pin"],
    )
    if flags.cuts is not None and flags.n_stages is not None:
        raise UsageError("give either --stages or --cuts, not both")
    return flags


def with_stage_flags(manifest: Manifest, given: dict[str, Any], changed: dict[str, Any]) -> Manifest:
    """Return the manifest with the stage flags of `relayline up` applied.

    `given` holds every flag by name, `changed` those that the user gave. If nothing is said about stages, this
    machine's GPU is used. Raises UsageError, and the errors of finding and reading the model.
    """
    flags = with_usual_gpu(manifest, stage_flags_of(given, changed))
    n_layers = 0
    if flags.cuts is not None:
        facts = inspect_model(find_model(manifest))
        check_cuts(facts, flags.cuts)
        n_layers = facts.n_layers
    return with_stages(manifest, flags, n_layers) if flags.is_set else manifest


def with_usual_stages(manifest: Manifest) -> Manifest:
    """Return the manifest as `relayline up` starts it without stage flags."""
    flags = with_usual_gpu(manifest, StageFlags())
    return with_stages(manifest, flags, 0) if flags.is_set else manifest
