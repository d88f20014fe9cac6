"""The devices of this machine, as llama.cpp lists them."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from relayline.wire.common.child_command import code_command

log = logging.getLogger("relayline.up")

LIST_TIMEOUT_S = 60.0  # a driver that wakes up takes seconds
_NO_GPU = ("base", "cpu", "blas", "rpc")  # backends by the names of their libraries
_LIST = """
import json, os
from relayline.stage.engine import ggml
found = [(each.name, each.description, each.is_gpu, each.shares_memory,
          ggml.memory_bytes(each)[1] if each.has_own_memory else 0,
          each.bus_id if each.has_own_memory else "") for each in ggml.list_devices()]
print("\\n" + json.dumps(found), flush=True)
os._exit(0)  # some backends abort at exit if something was not freed
"""


class HostDevice(NamedTuple):
    """One device of this machine, processors included."""

    name: str
    """As llama.cpp's flags have it: CPU, CUDA0."""
    description: str
    is_gpu: bool
    shares_memory: bool
    """Whether it is a GPU with no memory but the host's."""
    memory_bytes: int
    """Of a GPU with its own memory; otherwise 0."""
    bus_id: str = ""
    """Where such a GPU sits in its host; empty where its backend does not know."""


class Gpu(NamedTuple):
    """One GPU with its own memory."""

    name: str
    """As llama.cpp's flags have it, such as CUDA0."""
    description: str
    memory_bytes: int
    bus_id: str = ""
    """As of HostDevice."""


def devices_here(program: str = _LIST) -> tuple[HostDevice, ...] | None:
    """Return this machine's devices that llama.cpp can use; None where a fault, such as one of a driver, forbids it.

    A separate process looks, because a backend opens the GPU for that and keeps some of its memory.
    """
    try:
        done = subprocess.run(code_command(program), capture_output=True, text=True, timeout=LIST_TIMEOUT_S, check=True)
        return tuple(HostDevice(*each) for each in json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, IndexError) as error:
        log.warning("GPUs of this machine cannot be listed, so the processor is used: %s; see `relayline doctor`",
                    type(error).__name__)  # fmt: skip
        return None


@functools.cache
def known_devices() -> tuple[HostDevice, ...] | None:
    """Return `devices_here()`, looked for once."""
    return devices_here()


def gpus_here(devices: Callable[[], tuple[HostDevice, ...] | None] = known_devices) -> tuple[Gpu, ...]:
    """Return this machine's GPUs with their own memory; none where `devices` are unknown.

    A build without a backend for GPUs has none, so then nothing is asked.
    """
    found = devices() if gpu_backends() else None
    return tuple(
        Gpu(each.name, each.description, each.memory_bytes, each.bus_id)
        for each in found or ()
        if each.is_gpu and not each.shares_memory
    )


def gpu_backends() -> tuple[str, ...]:
    """Return llama.cpp's backends for GPUs in this build, such as vulkan, from the names of its libraries alone.

    A backend is there also where it finds no GPU.
    """
    found = importlib.util.find_spec("llama_cpp")
    directory_named = os.environ.get("LLAMA_CPP_LIB_PATH")
    if found is None or found.origin is None:
        return ()
    directory = Path(directory_named) if directory_named else Path(found.origin).parent / "lib"
    names = {path.name.partition("ggml-")[2].partition(".")[0] for path in directory.glob("*ggml-*")}
    return tuple(sorted(name for name in names if not name.startswith(_NO_GPU)))


@functools.cache
def known_gpus() -> tuple[Gpu, ...]:
    """Return `gpus_here()`, looked for once."""
    return gpus_here()
