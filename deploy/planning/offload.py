"""The part of each stage of a manifest that goes to a GPU's memory. Pure: devices are given as facts.

The rules are llama.cpp's: the last layers of a stage go to the GPU, with the KV cells and states of these layers, and
the head if all do. The embedding table stays in the host's memory, as does what --override-tensor and --n-cpu-moe keep
there. A GPU of this machine without its own memory does not count here: its stages use the host's memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from relayline.coordinator.model.inspection import BLOCK_NAME
from relayline.coordinator.planner.instance import Gpu, Offload
from relayline.deploy.planning.shared import gpu_numbers, place_name, used_gpus
from relayline.stage.engine.device_choice import each_once
from relayline.wire.settings.device_texts import EXPERTS, HOST_MEMORY, read_overrides

if TYPE_CHECKING:
    from relayline.deploy.manifest import Manifest, Stage


class Tensor(Protocol):
    """A tensor's entry in the model's header."""

    @property
    def name(self) -> str:
        """Its name in the whole model."""

    @property
    def size_bytes(self) -> int:
        """Its size."""


class GpuFact(Protocol):
    """A GPU of this machine."""

    @property
    def name(self) -> str:
        """As llama.cpp's flags have it, such as CUDA0."""

    @property
    def memory_bytes(self) -> int:
        """Its memory."""

    @property
    def bus_id(self) -> str:
        """Where it sits; empty where that is not known."""


def offloads_of(
    manifest: Manifest, tensors: Sequence[Tensor], n_layers: int, gpus: Sequence[GpuFact] = ()
) -> list[Offload | None]:
    """Return the offload of each stage. `gpus` are this machine's; what memory those of others have is not known."""
    found = []
    for stage in manifest.stages:
        gpu = _gpu_of(manifest, stage, gpus)
        found.append(None if gpu is None else _offload_of(stage, gpu, tensors, n_layers))
    return found


def expert_bytes_of(tensors: Iterable[Tensor], n_layers: int) -> tuple[int, ...]:
    """Return the bytes of experts in each layer; empty where no layer has any."""
    return _by_layer((tensor for tensor in tensors if EXPERTS.search(tensor.name)), n_layers)


def _offload_of(stage: Stage, gpu: Gpu, tensors: Sequence[Tensor], n_layers: int) -> Offload:
    kept, experts = [], []
    rules = read_overrides(stage.override_tensor) if stage.override_tensor else ()
    patterns = [(re.compile(pattern), device) for pattern, device in rules]
    for tensor in tensors:
        where = next((device for pattern, device in patterns if pattern.search(tensor.name)), "")
        if where == HOST_MEMORY:
            kept.append(tensor)
        elif not where and EXPERTS.search(tensor.name):
            experts.append(tensor)
    return Offload(
        gpu=gpu,
        gpu_layers=stage.gpu_layers_used,
        n_cpu_moe=stage.cpu_moe_layers,
        expert_bytes=_by_layer(experts, n_layers) if stage.cpu_moe_layers else (),
        kept_bytes=_by_layer(kept, n_layers),
        kept_head_bytes=sum(tensor.size_bytes for tensor in kept if tensor.name.startswith("output")),
    )


def _gpu_of(manifest: Manifest, stage: Stage, gpus: Sequence[GpuFact]) -> Gpu | None:
    """Return the memory that a stage takes part of: stages that share a GPU share it. None: the host's alone."""
    if not _is_on_gpu(stage):
        return None
    numbers = {other.name: number for other, number in zip(manifest.stages, gpu_numbers(manifest), strict=True)}
    mine = numbers[stage.name]
    mates = [stage] if mine < 0 else [other for other in manifest.stages if numbers[other.name] == mine]
    takes_all = any(not used_gpus(mate) for mate in mates)
    names = sorted({name for mate in mates for name in used_gpus(mate)})
    if not stage.is_local:
        return Gpu(f"{'GPU' if takes_all else '+'.join(names)} of {place_name(stage)}")
    all_of_them = each_once(gpus)
    sizes = {gpu.name: gpu.memory_bytes for gpu in gpus}
    sizes |= {f"GPU {at}": gpu.memory_bytes for at, gpu in enumerate(all_of_them)}
    names = [gpu.name for gpu in all_of_them] if takes_all else names
    if not names or any(name not in sizes for name in names):
        return None
    return Gpu(f"{'+'.join(names)} of {place_name(stage)}", sum(sizes[name] for name in names))


def _is_on_gpu(stage: Stage) -> bool:
    return bool(stage.gpu_layers_used) and bool(stage.n_gpus)


def _by_layer(tensors: Iterable[Tensor], n_layers: int) -> tuple[int, ...]:
    found = [0] * n_layers
    for tensor in tensors:
        in_layer = BLOCK_NAME.match(tensor.name)
        if in_layer and int(in_layer[1]) < n_layers:  # not of a prediction layer, which is left out
            found[int(in_layer[1])] += tensor.size_bytes
    return tuple(found) if any(found) else ()
