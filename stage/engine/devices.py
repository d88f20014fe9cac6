"""On which devices llama.cpp computes one stage, and what of its weights goes where: settings to llama_model_params.

Names of devices are llama.cpp's own, which differ from host to host, so they are checked here, where the stage runs.
Settings that llama.cpp would only mention in its log, or silently accept, are refused: shares for absent devices.

Patterns are matched with the names of tensors in the whole model. A stage's file numbers its layers from 0, so a
pattern would mean other layers after a move. llama.cpp gets the names themselves.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llama_cpp import llama_cpp as llama

from relayline.stage.engine import ggml
from relayline.stage.engine.artifact import StageArtifact
from relayline.stage.engine.device_choice import check_devices, chosen
from relayline.stage.engine.ggml import Device
from relayline.wire.model_files.gguf_header import read_header
from relayline.wire.settings.device_texts import (
    DEVICES_MAX,
    EXPERTS,
    HOST_MEMORY,
    read_overrides,
    read_shares,
)
from relayline.wire.settings.table import EngineSettings

SPLIT_MODES: dict[str, int] = {
    "none": llama.LLAMA_SPLIT_MODE_NONE,
    "layer": llama.LLAMA_SPLIT_MODE_LAYER,
    "row": llama.LLAMA_SPLIT_MODE_ROW,
    "tensor": llama.LLAMA_SPLIT_MODE_TENSOR,
}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


class _Override(ctypes.Structure):
    """llama_model_tensor_buft_override."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """What llama_model_params point into: hold it until the model is loaded."""

    held: tuple[Any, ...] = ()
    elsewhere: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By names in the stage's file, the device of each tensor with an explicit place."""


def place(params: Any, settings: EngineSettings, artifact: StageArtifact, found: Sequence[Device]) -> Placed:
    """Set in llama_model_params on which of the `found` devices the stage is computed.

    Raises UsageError for a device that is not among them, and for shares or a main GPU beyond their number.
    """
    params.n_gpu_layers = gpu_layers(settings, artifact)
    params.split_mode = SPLIT_MODES[settings.split_mode]
    params.main_gpu = settings.main_gpu
    check_devices(settings, found)
    used, held = chosen(settings, found), []
    if not (settings.gpu_layers or settings.devices or settings.override_tensor):
        ggml.leave_gpus(params)
    # With split mode tensor llama.cpp would take a card twice that two of its backends list.
    if settings.devices or (settings.split_mode == "tensor" and settings.gpu_layers and used):
        handles = (ctypes.c_void_p * (len(used) + 1))(*(device.handle for device in used))  # NULL ends it
        params.devices = ctypes.addressof(handles)
        held.append(handles)
    if settings.tensor_split:
        shares = read_shares(settings.tensor_split)
        array = (ctypes.c_float * max(DEVICES_MAX, llama.llama_max_devices()))(*shares)
        params.tensor_split = array
        held.append(array)
    elsewhere = _elsewhere(settings, artifact)
    if elsewhere:
        overrides = _overrides(elsewhere, {device.name: device for device in found})
        params.tensor_buft_overrides = ctypes.addressof(overrides)
        held.append(overrides)
    return Placed(tuple(held), elsewhere)


def gpu_layers(settings: EngineSettings, artifact: StageArtifact) -> int:
    """Return how many of a file's last layers go to GPUs, the head counted as one; -1 for all.

    Placeholders are not computed and stay in the host's memory. Several GPUs would else share them out, too.
    """
    asked = settings.gpu_layers
    most = artifact.own_layers + 1
    return asked if not artifact.n_placeholders else most if asked < 0 else min(asked, most)


def _elsewhere(settings: EngineSettings, artifact: StageArtifact) -> dict[str, str]:
    """Return the device of each tensor with an explicit place: the first matching pattern counts, then the experts'
    rule.
    """
    rules = read_overrides(settings.override_tensor) if settings.override_tensor else ()
    if not rules and not settings.n_cpu_moe:
        return {}
    elsewhere: dict[str, str] = {}
    patterns = [(re.compile(pattern), device) for pattern, device in rules]
    for tensor in read_header(artifact.path).tensors:
        in_layer = _LAYER.fullmatch(tensor.name)
        name, layer = tensor.name, 0
        if in_layer:
            layer = int(in_layer[1]) - artifact.n_placeholders
            name = f"blk.{layer + artifact.layer_start}.{in_layer[2]}"
        if layer < 0:
            continue
        where = next((device for pattern, device in patterns if pattern.search(name)), "")
        if not where and in_layer and layer < settings.n_cpu_moe and EXPERTS.search(name):
            where = HOST_MEMORY
        if where:
            elsewhere[tensor.name] = where
    return elsewhere


def _overrides(elsewhere: Mapping[str, str], by_name: Mapping[str, Device]) -> Any:
    """Return llama.cpp's list. It tries every pattern on every tensor, so tensors of many layers share one."""
    patterns = grouped(elsewhere)
    list_of = (_Override * (len(patterns) + 1))()  # the last, empty, ends it
    for entry, (pattern, device) in zip(list_of, patterns, strict=False):
        entry.pattern, entry.buffer_type = pattern.encode(), ggml.buffer_type(by_name[device])
    return list_of


def grouped(elsewhere: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return pairs of a regular expression and a device that say the same of exactly these tensors."""
    layers: dict[tuple[str, str], list[str]] = {}
    alone: list[tuple[str, str]] = []
    for name, device in elsewhere.items():
        if in_layer := _LAYER.fullmatch(name):
            layers.setdefault((in_layer[2], device), []).append(in_layer[1])
        else:
            alone.append((f"^{_escaped(name)}$", device))
    return alone + [
        (rf"^blk\.({'|'.join(numbers)})\.{_escaped(rest)}$", device) for (rest, device), numbers in layers.items()
    ]


def _escaped(name: str) -> str:
    """Return a name as a regular expression of C++ (ECMAScript), which knows fewer escapes than Python's."""
    return re.sub(r"[^\w]", lambda found: "\\" + found[0], name)


def count_elsewhere(placed: Placed, artifact: StageArtifact) -> dict[str, int]:
    """Return the bytes of weights with an explicit place, by device."""
    counts: dict[str, int] = {}
    if placed.elsewhere:
        for tensor in read_header(artifact.path).tensors:
            if device := placed.elsewhere.get(tensor.name):
                counts[device] = counts.get(device, 0) + tensor.size_bytes
    return counts
