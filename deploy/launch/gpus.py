"""Stages of a model without a manifest, on a machine with GPUs: one stage that computes on them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.planner import instance
from relayline.coordinator.planner.instance import Load, ModelShape
from relayline.coordinator.planner.memory import gpu_usable_bytes, stage_memory
from relayline.deploy.launch.prepare import find_model
from relayline.deploy.machine.gpus import Gpu, known_gpus
from relayline.deploy.manifest import Manifest
from relayline.deploy.manifest.smallest import StageFlags
from relayline.deploy.planning.drafting import draft_memory, drafted_shape
from relayline.deploy.planning.inputs import load_of
from relayline.stage.engine.device_choice import each_once
from relayline.wire.common.errors import RelaylineError
from relayline.wire.settings.device_texts import NO_DEVICE, read_devices

log = logging.getLogger("relayline.up")


def with_usual_gpu(manifest: Manifest, flags: StageFlags, gpus: Callable[[], Sequence[Gpu]] = known_gpus) -> StageFlags:
    """Return the flags with their defaults for a machine with GPUs.

    Where the manifest lists its stages, or a flag says where layers are computed, that counts. A model that cannot be
    read changes nothing: its next reader reports the problem.
    """
    named = flags.devices.get("devices", "")
    if "stages" in manifest.spec.model_fields_set or flags.gpu_layers == 0 or named == NO_DEVICE:
        return flags
    try:
        names = read_devices(named) if named else ()
        found = [gpu for gpu in gpus() if gpu.name in names] if names else each_once(gpus())
        if not found:
            return flags
        facts = inspect_model(find_model(manifest))
    except RelaylineError:
        return flags
    draft = draft_memory(manifest.serving, gpus)
    draft_bytes = 0 if draft is None or draft.gpu is None else draft.gpu.total_bytes
    return offloaded(
        flags, found, drafted_shape(facts, manifest.serving), load_of(manifest, facts.architecture), draft_bytes
    )


def offloaded(
    flags: StageFlags, gpus: Sequence[Gpu], model: ModelShape, load: Load, draft_bytes: int = 0
) -> StageFlags:
    """Return the flags with as many layers on the GPUs as fit, in one stage unless they ask for more. Pure.

    Stages on one GPU take turns, so a second one there only costs. `draft_bytes`: what a draft model takes of them.
    """
    asked = flags.n_stages if flags.cuts is None else len(flags.cuts) + 1
    names = ", ".join(f"{gpu.name} ({gpu.description})" for gpu in gpus)
    is_placed = any(flags.devices.get(name) for name in ("n_cpu_moe", "override_tensor"))  # weights, by the user
    n_fit = model.n_layers if is_placed else layers_that_fit(gpus, model, load, draft_bytes)
    if flags.gpu_layers is None:
        if n_fit == 0 or (n_fit < model.n_layers and asked not in (None, 1)):
            log.warning("the model does not fit on %s, so the processor is used; --gpu-layers N puts N layers of each "
                        "stage there", names)  # fmt: skip
            return flags
        is_whole = n_fit == model.n_layers
        flags = dataclasses.replace(flags, gpu_layers=-1 if is_whole else n_fit)
        what = "all layers" if is_whole else f"{n_fit} of {model.n_layers} layers, as many as fit,"
        log.info("%s go to %s; --gpu-layers 0 leaves them to the processor", what, names)
    return dataclasses.replace(flags, n_stages=1) if asked is None else flags


def layers_that_fit(gpus: Sequence[Gpu], model: ModelShape, load: Load, draft_bytes: int = 0) -> int:
    """Return how many layers, counted from the last one as llama.cpp does, the GPUs have memory for.

    The head goes with all layers alone; the embedding table stays in the host's memory. `draft_bytes` as in
    `offloaded`.
    """
    usable = sum(gpu_usable_bytes(instance.Gpu(gpu.name, gpu.memory_bytes)) or 0 for gpu in gpus) - draft_bytes
    for n_layers in range(model.n_layers, 0, -1):
        offload = instance.Offload(instance.Gpu("all"), -1 if n_layers == model.n_layers else n_layers)
        memory = stage_memory(model, load, 0, model.n_layers, offload).gpu
        if memory is not None and memory.total_bytes <= usable:
            return n_layers
    return 0
