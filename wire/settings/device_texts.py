"""Parses the settings that choose a stage's devices. The texts have the form of llama.cpp's own flags. Pure.

This module does not know which devices a host has; see stage.engine.device_choice.
"""

from __future__ import annotations

import math
import re

SPLIT_MODES = ("layer", "none", "row", "tensor")
NO_DEVICE = "none"
DEVICES_MAX = 16  # llama_max_devices
OVERRIDES_MAX = 256
HOST_MEMORY = "CPU"  # the processor's name in ggml
EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")  # tensors of --n-cpu-moe, as llama.cpp names them


def read_devices(text: str) -> tuple[str, ...]:
    """Return the names of devices from a list with commas, or just "none". Raises ValueError."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError("give names separated by commas, such as CUDA0,CUDA1, or none")
    if len(set(names)) < len(names):
        raise ValueError("a device is named twice")
    if NO_DEVICE in names and len(names) > 1:
        raise ValueError(f"{NO_DEVICE} cannot be combined with devices")
    if len(names) > DEVICES_MAX:
        raise ValueError(f"{len(names)} devices; llama.cpp takes at most {DEVICES_MAX}")
    return names


def read_shares(text: str) -> tuple[float, ...]:
    """Return each device's share, in any unit. Raises ValueError."""
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError("give a number for each device, separated by commas, such as 3,1") from None
    if not all(math.isfinite(share) and share >= 0 for share in shares) or not sum(shares):
        raise ValueError("shares must be 0 or more, and not all 0")
    if len(shares) > DEVICES_MAX:
        raise ValueError(f"{len(shares)} shares; llama.cpp takes at most {DEVICES_MAX}")
    return shares


def read_overrides(text: str) -> tuple[tuple[str, str], ...]:
    """Return pairs of a pattern of tensor names and a device. Raises ValueError."""
    pairs = []
    for part in text.split(","):
        pattern, _, device = part.partition("=")
        if not pattern or not device.strip():
            raise ValueError("give PATTERN=DEVICE, separated by commas, such as ffn_.*_exps=CPU")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
        pairs.append((pattern, device.strip()))
    if len(pairs) > OVERRIDES_MAX:
        raise ValueError(f"{len(pairs)} patterns; the limit is {OVERRIDES_MAX}")
    return tuple(pairs)
