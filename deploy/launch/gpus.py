"""Stages of a model for which nobody wrote a manifest, on a machine with GPUs: one stage that computes there."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.planner.instance import Load, ModelShape
from relayline.coordinator.planner.memory import MIB, stage_memory
from relayline.deploy.launch.prepare import find_model
from relayline.deploy.manifest import Manifest
from relayline.deploy.manifest.smallest import StageFlags
from relayline.deploy.planning.inputs import load_of, shape_of
from relayline.wire.common.child_command import code_command
from relayline.wire.common.errors import RelaylineError
from relayline.wire.settings.device_texts import NO_DEVICE, read_devices

log = logging.getLogger("relayline.up")

LIST_TIMEOUT_S = 60.0  # a driver that wakes up takes seconds
RESERVE_SHARE = 0.1  # of a GPU's memory, for its driver, a desktop and what the estimate misses
RESERVE_BYTES_MIN = 768 * MIB
_NO_GPU = ("base", "cpu", "blas", "rpc")  # backends by the names of their libraries
_LIST = """
import json, os
from relayline.stage.engine import ggml
found = [device for device in ggml.list_devices() if device.has_own_memory]
print("\\n" + json.dumps([(each.name, each.description, ggml.memory_bytes(each)[1]) for each in found]), flush=True)
os._exit(0)  # some backends take offence at exit, at what was not freed
"""


class Gpu(NamedTuple):
    """One GPU with memory of its own."""

    name: str
    """As llama.cpp's flags have it, such as CUDA0."""
    description: str
    memory_bytes: int


def gpus_here(program: str = _LIST) -> tuple[Gpu, ...]:
    """Return this machine's GPUs that llama.cpp can use; none where its build, or a fault of the driver, forbids it.

    A process of its own looks: a backend opens the GPU for that, and keeps some of its memory.
    """
    if not _has_backend():
        return ()
    try:
        done = subprocess.run(code_command(program), capture_output=True, text=True, timeout=LIST_TIMEOUT_S, check=True)
        return tuple(Gpu(*each) for each in json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, IndexError) as error:
        log.warning("GPUs of this machine cannot be listed, so the processor is used: %s; see `relayline doctor`",
                    type(error).__name__)  # fmt: skip
        return ()


def _has_backend() -> bool:
    """Return whether llama.cpp's build has a backend for GPUs, from the names of its libraries alone."""
    found = importlib.util.find_spec("llama_cpp")
    said = os.environ.get("LLAMA_CPP_LIB_PATH")
    if found is None or found.origin is None:
        return False
    directory = Path(said) if said else Path(found.origin).parent / "lib"
    names = [path.name.partition("ggml-")[2] for path in directory.glob("*ggml-*")]
    return any(not name.startswith(_NO_GPU) for name in names)


def with_usual_gpu(manifest: Manifest, flags: StageFlags, gpus: Callable[[], Sequence[Gpu]] = gpus_here) -> StageFlags:
    """Return the flags, with what nobody said of stages on a machine with GPUs.

    Where the manifest lists its stages, or a flag says where layers are computed, that counts. A model that cannot be
    read changes nothing: its next reader reports the problem.
    """
    named = flags.devices.get("devices", "")
    if "stages" in manifest.spec.model_fields_set or flags.gpu_layers == 0 or named == NO_DEVICE:
        return flags
    try:
        names = read_devices(named) if named else ()
        found = [gpu for gpu in gpus() if not names or gpu.name in names]
        if not found:
            return flags
        facts = inspect_model(find_model(manifest))
    except RelaylineError:
        return flags
    return offloaded(flags, found, shape_of(facts), load_of(manifest))


def offloaded(flags: StageFlags, gpus: Sequence[Gpu], model: ModelShape, load: Load) -> StageFlags:
    """Return the flags with as many layers on the GPUs as fit, in one stage unless they ask for more. Pure.

    Stages on one GPU take turns, so a second one there only costs.
    """
    asked = flags.n_stages if flags.cuts is None else len(flags.cuts) + 1
    names = ", ".join(f"{gpu.name} ({gpu.description})" for gpu in gpus)
    is_placed = any(flags.devices.get(name) for name in ("n_cpu_moe", "override_tensor"))  # weights, by the user
    n_fit = model.n_layers if is_placed else layers_that_fit(gpus, model, load)
    if flags.gpu_layers is None:
        if n_fit == 0 or (n_fit < model.n_layers and asked not in (None, 1)):
            log.warning("the model does not fit on %s, so the processor is used; --gpu-layers N puts N layers of each "
                        "stage there", names)  # fmt: skip
            return flags
        is_whole = n_fit == model.n_layers
        flags = dataclasses.replace(flags, gpu_layers=-1 if is_whole else n_fit)
        what = "all layers" if is_whole else f"{n_fit} of {model.n_layers} layers, which is what fits,"
        log.info("%s go to %s; --gpu-layers 0 leaves them to the processor", what, names)
    return dataclasses.replace(flags, n_stages=1) if asked is None else flags


def layers_that_fit(gpus: Sequence[Gpu], model: ModelShape, load: Load) -> int:
    """Return how many layers, counted from the last one as llama.cpp does, the GPUs have memory for.

    The head goes with all layers alone; the embedding table stays in the host's memory.
    """
    usable = sum(max(0, gpu.memory_bytes - _reserve(gpu)) for gpu in gpus)
    n_layers = model.n_layers
    for start in range(n_layers):
        memory = stage_memory(model, load, start, n_layers)
        head_bytes = 0 if start == 0 else model.head_bytes
        weights_bytes = memory.weights_bytes - head_bytes - (model.embedding_bytes if start == 0 else 0)
        if weights_bytes + memory.kv_bytes + memory.compute_bytes <= usable:
            return n_layers - start
    return 0


def _reserve(gpu: Gpu) -> int:
    return max(RESERVE_BYTES_MIN, int(RESERVE_SHARE * gpu.memory_bytes))
