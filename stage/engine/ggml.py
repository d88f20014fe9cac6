"""The few functions of ggml that llama_cpp does not wrap, bound in the libraries that llama_cpp has already loaded.

Symbols are looked up through libllama's own handle, which searches its dependencies: opening libggml-base by path could
load a second copy. This module also owns llama.cpp's log: it is kept in a bounded ring, out of stderr, so that an error
can quote the line with the cause.

It knows nothing of stages, sessions or decoding.
"""

from __future__ import annotations

import collections
import ctypes
import re
from typing import Any, NamedTuple

import numpy.typing as npt
from llama_cpp import llama_cpp as llama

LOG_LINES_MAX = 64  # newest warnings and errors kept; enough for the cascade of one failed load
_LEVEL_WARN, _LEVEL_ERROR, _LEVEL_CONT = 3, 4, 5  # enum ggml_log_level

_lib: Any = llama._lib


class _TypeTraits(ctypes.Structure):
    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("block_elements", ctypes.c_int64),
        ("block_interleave", ctypes.c_int64),
        ("block_bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
        ("from_float_ref", ctypes.c_void_p),
    ]


class TypeTraits(NamedTuple):
    """How ggml stores one tensor type: `block_elements` values in `block_bytes` bytes.

    `to_float(source, destination, n)` is ggml's own conversion of n values (addresses; n a multiple of
    `block_elements`), or None for f32, which needs none.
    """

    name: str
    block_elements: int
    block_bytes: int
    to_float: Any | None


_lib.ggml_get_type_traits.argtypes = [ctypes.c_int]
_lib.ggml_get_type_traits.restype = ctypes.POINTER(_TypeTraits)


def type_traits(type_id: int) -> TypeTraits | None:
    """Return the traits of a ggml type id, or None if this ggml has no such type."""
    if not 0 <= type_id < llama.GGML_TYPE_COUNT:
        return None
    traits = _lib.ggml_get_type_traits(type_id).contents
    if traits.block_bytes == 0:  # the id of a type that ggml has removed
        return None
    to_float = traits.to_float if traits.to_float else None
    return TypeTraits(traits.type_name.decode(), traits.block_elements, traits.block_bytes, to_float)


def address_of(symbol: str) -> int:
    """Return the address of a C function of llama.cpp or ggml. AttributeError if this build lacks it."""
    address = ctypes.cast(getattr(_lib, symbol), ctypes.c_void_p).value
    assert address is not None
    return address


def pointer(array: npt.NDArray[Any], c_type: Any = ctypes.c_uint8) -> Any:
    """Return a C pointer to an array's memory, which has to outlive every use of it."""
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(c_type))


def attends_own_cells(*, n_rows: int, n_heads: int, n_kv_heads: int) -> bool:
    """Return whether flash attention on the processor computes this many rows one by one in an f16 cache.

    A row then costs as much as its own lane's cells, whatever other lanes hold (deploy/kernels/attend_own_cells.cpp).
    Otherwise, and in builds without that file, llama.cpp computes all cells of the cache, and from 64 rows on
    multiplies tiles.
    """
    return _kernel_says("relayline_attends_own_cells", n_rows, n_heads, n_kv_heads)


def attends_lanes_apart() -> bool:
    """Return whether any number of such rows is taken one by one, if most are of different lanes.

    False in builds without deploy/kernels/attend_own_cells.cpp, or with one that looked at the number of rows alone.
    """
    return _kernel_says("relayline_attends_lanes_apart")


def attends_in_order() -> bool:
    """Return whether attention sums over the cells of a lane in the order of its tokens where lanes share cells.

    Only in an f16 cache, and for the rows of attends_own_cells. In other builds it follows the places of the cells, and
    a row's last bits depend on where they lie (deploy/kernels/cell_order.cpp).
    """
    return _kernel_says("relayline_attends_in_order")


def _kernel_says(function: str, *numbers: int) -> bool:
    """Return what a function of relayline's kernels answers; False in builds without it."""
    found = getattr(_lib, function, None)
    if found is None:
        return False
    found.restype = ctypes.c_bool
    return bool(found(*numbers))


def kernels() -> str:
    """Return relayline's kernels that this process uses, one space between their names; empty if it uses none.

    None are used where llama.cpp was built without them, or where the environment says RELAYLINE_KERNELS=off.
    """
    found = getattr(_lib, "relayline_kernels", None)
    if found is None:
        return ""
    found.restype = ctypes.c_char_p
    return str(found().decode())


class _Properties(ctypes.Structure):
    """ggml_backend_dev_props."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("capabilities", ctypes.c_bool * 5),
    ]


for _symbol, _arguments, _result in (
    ("ggml_backend_dev_count", [], ctypes.c_size_t),
    ("ggml_backend_dev_get", [ctypes.c_size_t], ctypes.c_void_p),
    ("ggml_backend_dev_name", [ctypes.c_void_p], ctypes.c_char_p),
    ("ggml_backend_dev_description", [ctypes.c_void_p], ctypes.c_char_p),
    ("ggml_backend_dev_type", [ctypes.c_void_p], ctypes.c_int),
    ("ggml_backend_dev_buffer_type", [ctypes.c_void_p], ctypes.c_void_p),
    ("ggml_backend_dev_memory", [ctypes.c_void_p, *[ctypes.POINTER(ctypes.c_size_t)] * 2], None),
    ("ggml_backend_dev_get_props", [ctypes.c_void_p, ctypes.POINTER(_Properties)], None),
):
    _function = getattr(_lib, _symbol)
    _function.argtypes, _function.restype = _arguments, _result


_GPU, _GPU_OF_HOST = 1, 2  # enum ggml_backend_dev_type


class Device(NamedTuple):
    """One device that this process can compute on."""

    name: str
    """As llama.cpp's flags have it: CPU, CUDA0."""
    description: str
    kind: int
    """enum ggml_backend_dev_type."""
    handle: int
    """ggml_backend_dev_t."""

    @property
    def is_gpu(self) -> bool:
        """Whether weights may go there: it is neither a processor nor a helper of one."""
        return self.kind in (_GPU, _GPU_OF_HOST)

    @property
    def shares_memory(self) -> bool:
        """Whether it is a GPU with no memory but the host's."""
        return self.kind == _GPU_OF_HOST

    @property
    def has_own_memory(self) -> bool:
        """Whether it is a GPU with its own memory."""
        return self.kind == _GPU

    @property
    def bus_id(self) -> str:
        """Where it sits in its host, see `bus_id`."""
        return bus_id(self)

    @property
    def text(self) -> str:
        """Name and model."""
        return f"{self.name}: {self.description}"


def list_devices() -> tuple[Device, ...]:
    """Return every device that this process can compute on, processors included, in ggml's order.

    Devices that a variable such as CUDA_VISIBLE_DEVICES hides are missing.
    """
    handles = map(_lib.ggml_backend_dev_get, range(_lib.ggml_backend_dev_count()))
    return tuple(
        Device(
            _lib.ggml_backend_dev_name(handle).decode(),
            _lib.ggml_backend_dev_description(handle).decode(),
            _lib.ggml_backend_dev_type(handle),
            handle,
        )
        for handle in handles
    )


_NO_DEVICES = (ctypes.c_void_p * 1)()  # a list that ends at once


def leave_gpus(params: Any) -> None:
    """Set in llama_model_params that no GPU has a part in the model.

    Without layers on a GPU, llama.cpp would still keep memory there, compute steps of 32 rows and more there with
    weights that it copies for each, and not repack the host's weights for the processor's kernels.
    """
    params.n_gpu_layers, params.devices = 0, ctypes.addressof(_NO_DEVICES)


def buffer_type(device: Device) -> int:
    """Return the kind of memory in which weights lie on a device: a ggml_backend_buffer_type_t."""
    return int(_lib.ggml_backend_dev_buffer_type(device.handle))


def memory_bytes(device: Device) -> tuple[int, int]:
    """Return a device's free memory and all of it. A backend may open the device for that, which takes some."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _lib.ggml_backend_dev_memory(device.handle, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def bus_id(device: Device) -> str:
    """Return where a device sits in its host, as 0000:c1:00.0; empty where its backend does not know.

    A backend may open the device for that, which takes memory there.
    """
    found = _Properties()
    _lib.ggml_backend_dev_get_props(device.handle, ctypes.byref(found))
    return (found.device_id or b"").decode()


def devices() -> tuple[str, ...]:
    """Return name and model of every device, in ggml's order."""
    return tuple(device.text for device in list_devices())


def gpus() -> tuple[str, ...]:
    """Return those of the devices that are no processor."""
    return tuple(device.text for device in list_devices() if device.is_gpu)


# --- log --------------------------------------------------------------------------------------------------------------


class LogRing:
    """The newest warnings and errors that llama.cpp and ggml logged in this process, oldest first."""

    def __init__(self) -> None:
        self._lines: collections.deque[tuple[int, str]] = collections.deque(maxlen=LOG_LINES_MAX)
        self._level = 0

    def append(self, level: int, text: str) -> None:
        """Take one message; a continuation belongs to the level of the message before it."""
        if level != _LEVEL_CONT:
            self._level = level
        if self._level in (_LEVEL_WARN, _LEVEL_ERROR) and text.strip():
            self._lines.append((self._level, text.strip()))

    def watch(self) -> None:
        """Forget everything and take llama.cpp's one log callback, so that `reason` speaks of what follows.

        Called before each thing that may fail: another module of the process may have set a callback since.
        """
        self._lines.clear()
        llama.llama_log_set(_on_log, ctypes.c_void_p(0))

    def reason(self, default: str) -> str:
        """Return the line that says most, as one line without the C function's name.

        llama.cpp logs the cause first and then one general line per caller on the way up, so the first error wins.
        """
        errors = [text for level, text in self._lines if level == _LEVEL_ERROR]
        lines = errors or [text for _, text in self._lines]
        if not lines:
            return default
        text = re.sub(r"^\w+: ", "", lines[0])
        return re.sub(r"\s+", " ", re.sub(r"^error loading model: ", "", text))


LOG = LogRing()


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _user: ctypes.c_void_p) -> None:
    LOG.append(level, text.decode("utf-8", "replace"))


LOG.watch()
