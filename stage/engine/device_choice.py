"""Which of a host's devices the settings of a stage mean, and whether it has them. Pure: devices are given as facts.

The launcher asks the same before it starts a stage, so this module loads no llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from relayline.wire.common.errors import UsageError
from relayline.wire.common.texts import counted
from relayline.wire.settings.device_texts import NO_DEVICE, read_devices, read_overrides, read_shares
from relayline.wire.settings.table import EngineSettings


class Seated(Protocol):
    """What two backends of a build may list both."""

    @property
    def name(self) -> str:
        """As llama.cpp's flags have it: CPU, CUDA0."""

    @property
    def bus_id(self) -> str:
        """Where it sits in its host; empty where its backend does not know. A backend may open the device for that."""


class Known(Seated, Protocol):
    """One device of a host."""

    @property
    def is_gpu(self) -> bool:
        """Whether weights may go there: it is neither a processor nor a helper of one."""

    @property
    def shares_memory(self) -> bool:
        """Whether it is a GPU with no memory but the host's."""


D = TypeVar("D", bound=Known)
S = TypeVar("S", bound=Seated)


def chosen(settings: EngineSettings, found: Sequence[D]) -> list[D]:
    """Return the GPUs that are the stage's: those that it names, or all. Raises UsageError for one not there."""
    gpus = [device for device in found if device.is_gpu]
    if settings.devices:
        return _named(settings.devices, gpus)
    # As llama.cpp chooses: those of the host's own memory only where there are no others, and of one backend.
    own = each_once([device for device in gpus if not device.shares_memory])
    return own or [device for device in gpus if _backend(device) == _backend(gpus[0])]


def each_once(gpus: Sequence[S]) -> list[S]:
    """Return the GPUs without those that another backend has listed before, as llama.cpp leaves them out."""
    if len({_backend(device) for device in gpus}) < 2:
        return list(gpus)
    first = {device.bus_id: device for device in reversed(gpus)}
    return [device for device in gpus if not device.bus_id or first[device.bus_id] is device]


def _backend(device: Seated) -> str:
    """Return what the names of a backend's devices begin with, such as Vulkan."""
    return device.name.rstrip("0123456789")


def computing(settings: EngineSettings, found: Sequence[D]) -> list[D]:
    """Return the GPUs that the stage computes on; none on the processor. Raises UsageError as `chosen`."""
    if not settings.gpu_layers:
        return []
    used = chosen(settings, found)
    return used[settings.main_gpu :][:1] if settings.split_mode == "none" else used


def check_devices(settings: EngineSettings, found: Sequence[Known]) -> None:
    """Raise UsageError for a device that is not among them, and for shares or a main GPU beyond their number."""
    used = chosen(settings, found)
    if settings.main_gpu and settings.main_gpu >= len(used):
        counted = ", counted from 0" if used else ""
        raise UsageError(f"--main-gpu {settings.main_gpu}: the stage has {_listed(used)}{counted}")
    shares = read_shares(settings.tensor_split) if settings.tensor_split else ()
    if len(shares) > len(used):
        raise UsageError(
            f"--tensor-split {settings.tensor_split} has {len(shares)} shares; the stage has {_listed(used)}"
        )
    known = dict.fromkeys(device.name for device in found)
    for pattern, device in read_overrides(settings.override_tensor) if settings.override_tensor else ():
        if device not in known:
            raise UsageError(
                f"--override-tensor {pattern}={device}: no such device here; choose among {', '.join(known)}"
            )


def _named(text: str, gpus: Sequence[D]) -> list[D]:
    names = read_devices(text)
    if names == (NO_DEVICE,):
        return []
    by_name = {device.name: device for device in gpus}
    unknown = [name for name in names if name not in by_name]
    if unknown and not by_name:
        raise UsageError(
            f"--device {unknown[0]}: llama.cpp finds no GPU on this host; leave it out to compute on the processor, "
            "or see `relayline doctor`"
        )
    if unknown:
        raise UsageError(f"--device {unknown[0]} is unknown here; choose among {', '.join((*by_name, NO_DEVICE))}")
    return [by_name[name] for name in names]


def _listed(used: Sequence[Known]) -> str:
    names = ", ".join(device.name for device in used)
    return f"{counted(len(used), 'GPU')} ({names})" if used else "no GPU"
