"""The place where a stage computes, for its handshake: its host, its GPUs or its cores."""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path

from relayline.stage.engine import ggml
from relayline.stage.engine.device_choice import check_devices, computing
from relayline.stage.engine.ggml import Device
from relayline.wire.common.usable_cores import usable_cores
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.settings.table import EngineSettings

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PART_OF_GPU = "MIG-"  # what CUDA_VISIBLE_DEVICES begins with where a process sees a part of a GPU, which is its own


def place_of(settings: EngineSettings) -> pb.Place:
    """Return where a stage with these settings computes. The settings' devices are there."""
    part = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    used = {device_id(device, part): device for device in reversed(computing(settings, ggml.list_devices()))}
    return pb.Place(
        host_id=host_id(),
        devices=[
            pb.Device(id=name, name=device.name, description=device.description)
            for name, device in reversed(used.items())
        ],
        cores=usable_cores(),
        n_threads=settings.threads_used,
    )


def check_place(settings: EngineSettings) -> None:
    """Raise UsageError for a device that the settings name and this host lacks."""
    check_devices(settings, ggml.list_devices())


def device_id(device: Device, part: str) -> str:
    """Return a name that no other device of the host has. `part`: CUDA_VISIBLE_DEVICES."""
    found = ggml.bus_id(device) or f"{device.name} {device.description}"
    return f"{found} {part}" if part.startswith(PART_OF_GPU) else found


def host_id() -> str:
    """Return what all processes of this host say, those in containers too, and those of no other host."""
    try:
        boot_id = BOOT_ID.read_text()
    except OSError:
        boot_id = hex(uuid.getnode())
    return hashlib.sha256(boot_id.encode()).hexdigest()[:16]


def idle_gpus() -> tuple[str, ...]:
    """Return name and model of the GPUs with their own memory, which a stage without layers on a GPU leaves idle."""
    return tuple(device.text for device in ggml.list_devices() if device.has_own_memory)
