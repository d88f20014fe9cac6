"""Finds stages of a manifest that share a GPU, as far as the manifest says. Pure.

Two stages on one GPU take turns on it, and each hands hidden rows to the next through the host. One stage with the
layers of both costs less. The stages themselves know their devices better, once they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relayline.coordinator.schedule.shared_devices import Place, device_numbers, sharing
from relayline.wire.settings.device_texts import NO_DEVICE, read_devices

if TYPE_CHECKING:
    from relayline.deploy.manifest import Manifest, Stage


def gpu_numbers(manifest: Manifest) -> list[int]:
    """Return a number for each stage, the same for stages that share a GPU; -1 for stages that share none."""
    numbers = device_numbers(_places(manifest.stages))
    return [number if numbers.count(number) > 1 else -1 for number in numbers]


def gpu_sharing(manifest: Manifest) -> tuple[str, ...]:
    """Return a line for each GPU that several stages share."""
    return tuple(sharing(_places(manifest.stages), [stage.name for stage in manifest.stages]))


def _places(stages: Sequence[Stage]) -> list[Place]:
    found = []
    for stage in stages:
        host = place_name(stage)
        named = {name for each in stages if place_name(each) == host for name in used_gpus(each)}
        gpus = used_gpus(stage) or (named | {"all GPUs"} if stage.n_gpus else set())
        found.append(Place(host if gpus else "", {gpu: f"{gpu} of {host}" for gpu in gpus}))
    return found


def place_name(stage: Stage) -> str:
    """Return the host of a stage as a plan names it."""
    return "localhost" if stage.is_local else stage.host


def used_gpus(stage: Stage) -> set[str]:
    """Return the GPUs that a stage names; none where it takes all that its host has, or computes on the processor."""
    if stage.device == "cpu" or stage.devices == NO_DEVICE:
        return set()
    names = read_devices(stage.devices) if stage.devices else ()
    if stage.split_mode != "none":
        return set(names)
    main = stage.main_gpu
    return set(names[main : main + 1]) if names else {f"GPU {main}"}
