"""LoRA adapters: files of small matrix pairs, whose products change a model's own products.

llama.cpp takes an adapter for a whole model. A stage gives it the pairs of its own layers, under the names that they
have in its slice. A file that llama.cpp would abort on, or refuse late, is refused here in one line.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. The files are those of llama.cpp's
convert_lora_to_gguf.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from relayline.wire.common.errors import ModelFileError
from relayline.wire.common.file_hash import sha256_of
from relayline.wire.common.places import expanded
from relayline.wire.model_files.adapter_texts import AdapterText, read_adapters
from relayline.wire.model_files.gguf_header import GgufFile, Tensor, read_header
from relayline.wire.model_files.gguf_write import ALIGNMENT, F32, TensorSlot, encode_header
from relayline.wire.model_files.model_check import PRODUCT_TYPES

CACHED_NAME = "lora.gguf"  # of an adapter that a stage has fetched
NO_ADAPTERS = ("",)  # the keys of the choices of a pipeline without any
_BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.(?P<rest>.+)")
_A, _B = ".lora_a", ".lora_b"
_NORM = "_norm.weight"  # llama.cpp reads no adapter's norm either
_CHUNK_BYTES = 1 << 20
_ALPHA = "adapter.lora.alpha"
_ALORA = "adapter.alora.invocation_tokens"
_NO_SUMS = "NVFP4"  # llama.cpp asserts that no adapter changes such a matrix


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter of a pipeline, as it lies on this machine's disk."""

    name: str
    """The model's name in requests that want it; empty: every request has it."""
    path: Path
    scale: float
    sha256: str
    """Of the whole file, in hex."""
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """The two matrices that change one of the model's."""

    layer: int
    rest: str
    """The changed tensor's name behind `blk.N.`."""
    a: Tensor
    b: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterFile:
    """What an adapter's header says."""

    file: GgufFile
    architecture: str
    pairs: tuple[Pair, ...]

    @property
    def path(self) -> Path:
        """The file."""
        return self.file.path

    def layer_bytes(self, n_layers: int) -> list[int]:
        """Return the bytes of each layer's matrices."""
        sizes = [0] * n_layers
        for pair in self.pairs:
            sizes[pair.layer] += pair.a.size_bytes + pair.b.size_bytes
        return sizes


def load_adapters(text: str) -> tuple[Adapter, ...]:
    """Return the adapters that a setting names, each read whole for its hash. Blocks.

    Raises ModelFileError as `read_adapter`.
    """
    return tuple(_load(each) for each in (read_adapters(text) if text else ()))


def _load(given: AdapterText) -> Adapter:
    path = expanded(given.path).absolute()
    file = read_adapter(path).file
    try:
        return Adapter(given.name, path, given.scale, sha256_of(path), file.size_bytes)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error}") from error


def read_named(text: str) -> list[AdapterFile]:
    """Return the headers of the adapters that a setting names. Raises ModelFileError as `read_adapter`."""
    return [read_adapter(expanded(each.path)) for each in (read_adapters(text) if text else ())]


def layer_bytes_of(text: str) -> tuple[int, ...]:
    """Return the bytes of all adapters that a setting names, by layer. Raises ModelFileError as `read_adapter`."""
    files = read_named(text)
    n_layers = max((pair.layer + 1 for file in files for pair in file.pairs), default=0)
    return tuple(map(sum, zip(*(file.layer_bytes(n_layers) for file in files), strict=True)))


def choices(adapters: Sequence[Adapter]) -> tuple[tuple[int, ...], ...]:
    """Return which adapters, by index, each choice of a request has. Choice 0 is that of requests that name none."""
    always = tuple(index for index, adapter in enumerate(adapters) if not adapter.name)
    return (always, *((*always, index) for index, adapter in enumerate(adapters) if adapter.name))


def names(adapters: Sequence[Adapter]) -> tuple[str, ...]:
    """Return the names of the choices behind choice 0, in their order."""
    return tuple(adapter.name for adapter in adapters if adapter.name)


def choice_keys(adapters: Sequence[Adapter]) -> tuple[str, ...]:
    """Return a key of each choice: equal if rows computed with it are equal. Empty for one without any adapter."""
    keys = [f"{adapter.sha256} {adapter.scale!r}" for adapter in adapters]
    return tuple(_key([keys[index] for index in choice]) for choice in choices(adapters))


def _key(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:32] if parts else ""


def read_adapter(path: Path) -> AdapterFile:
    """Read an adapter's header. Raises ModelFileError for a file that is none, or whose adapter cannot be served."""
    file = read_header(path)
    kind = file.value("general.type")
    if kind != "adapter":
        what = f"is of the type {str(kind)[:40]!r}" if kind else "states no type"
        raise ModelFileError(f"{path}: {what}, not 'adapter'; convert LoRA weights with convert_lora_to_gguf.py")
    if (made_as := file.value("adapter.type")) != "lora":
        raise ModelFileError(f"{path}: is an adapter of the type {str(made_as)[:40]!r}; only LoRA can be served")
    if _ALORA in file.entries:
        raise ModelFileError(
            f"{path}: acts behind certain tokens alone (aLoRA), which stages do not look for; use a plain LoRA"
        )
    alpha = file.entries.get(_ALPHA)
    if alpha is not None and alpha.type_id != F32:  # llama.cpp would abort
        raise ModelFileError(f"{path}: its {_ALPHA} is no 32-bit float; convert it again")
    architecture = file.value("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise ModelFileError(f"{path}: does not state its model's architecture; convert it again")
    return AdapterFile(file, architecture, tuple(_pairs(file)))


def _pairs(file: GgufFile) -> Iterator[Pair]:
    halves: dict[str, dict[str, Tensor]] = {}
    for tensor in file.tensors:
        if tensor.name.endswith(_NORM):
            continue
        base, suffix = tensor.name[: -len(_A)], tensor.name[-len(_A) :]
        if suffix not in (_A, _B):
            raise ModelFileError(f"{file.path}: tensor {tensor.name[:80]} is no part of a LoRA; convert it again")
        if tensor.type_name not in PRODUCT_TYPES:
            raise ModelFileError(f"{file.path}: {tensor.name[:80]} is {tensor.type_name}, which no product takes")
        halves.setdefault(base, {})[suffix] = tensor
    for base, half in halves.items():
        block = _BLOCK.fullmatch(base)
        if block is None:
            raise ModelFileError(
                f"{file.path}: changes {base[:80]}, which belongs to no layer; train an adapter without it"
            )
        if len(half) < 2:
            raise ModelFileError(f"{file.path}: {base[:80]} lacks one of its two matrices; convert it again")
        yield Pair(int(block["layer"]), block["rest"], half[_A], half[_B])


def check_architecture(adapter: AdapterFile, architecture: str, n_layers: int) -> None:
    """Raise ModelFileError if an adapter was made for a model of another family or with fewer layers."""
    if adapter.architecture != architecture:
        raise ModelFileError(
            f"{adapter.path}: was made for a model of the architecture {adapter.architecture[:40]}, "
            f"and this one is {architecture}"
        )
    beyond = [pair.layer for pair in adapter.pairs if pair.layer >= n_layers]
    if beyond:
        raise ModelFileError(
            f"{adapter.path}: changes layer {max(beyond)}, but the model has layers 0 to {n_layers - 1}; "
            "it was made for another model"
        )


def check_shapes(adapter: AdapterFile, tensors: Mapping[str, Tensor], layers: range, first: int = 0) -> None:
    """Raise ModelFileError if matrices of these layers do not fit the model's. `tensors`: of the model or a slice, by
    name, in which the first of `layers` is layer `first`.
    """
    for pair in adapter.pairs:
        if pair.layer not in layers:
            continue
        name = f"blk.{pair.layer - layers.start + first}.{pair.rest}"
        shown = f"blk.{pair.layer}.{pair.rest}"[:80]
        tensor = tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{adapter.path}: changes {shown}, which the model does not have")
        if tensor.type_name == _NO_SUMS:
            raise ModelFileError(f"{adapter.path}: changes {shown}, which is {_NO_SUMS}; llama.cpp has no LoRA for it")
        rank = pair.a.dims[1] if len(pair.a.dims) > 1 else 0
        inner, outer, *experts = tensor.dims if len(tensor.dims) > 1 else (0, 0)
        if pair.a.dims != (inner, rank, *experts) or pair.b.dims != (rank, outer, *experts):
            raise ModelFileError(
                f"{adapter.path}: the matrices of {shown}, {_shape(pair.a)} and {_shape(pair.b)}, do not fit the "
                f"model's {_shape(tensor)}; it was made for another model"
            )


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.dims))


def write_part(adapter: AdapterFile, layers: range, out: BinaryIO, first: int = 0) -> int:
    """Write the adapter of a slice with these layers, named as in the slice. Returns how many matrices it changes.

    `first`: the number of the first of `layers` in the slice, which may have placeholders before. `out` is at its
    beginning. Raises OSError.
    """
    tensors = []
    for pair in adapter.pairs:
        if pair.layer in layers:
            name = f"blk.{pair.layer - layers.start + first}.{pair.rest}"
            tensors += [(f"{name}{_A}", pair.a), (f"{name}{_B}", pair.b)]
    slots = [TensorSlot(name, tensor.dims, tensor.type_id, tensor.size_bytes) for name, tensor in tensors]
    with adapter.path.open("rb") as source:
        keys = [entry for key, entry in adapter.file.entries.items() if key.startswith(("general.", "adapter."))]
        entries = [
            os.pread(source.fileno(), entry.end - entry.start, entry.start)
            for entry in keys
            if entry.key != "general.alignment"
        ]
        out.write(encode_header(entries, slots))
        for _, tensor in tensors:
            _copy(source, tensor, out)
            out.write(bytes(-tensor.size_bytes % ALIGNMENT))
    out.flush()
    return len(tensors) // 2


def _copy(source: BinaryIO, tensor: Tensor, out: BinaryIO) -> None:
    at, end = tensor.offset, tensor.offset + tensor.size_bytes
    while at < end:
        data = os.pread(source.fileno(), min(_CHUNK_BYTES, end - at), at)
        if not data:
            raise OSError(f"ended early; {tensor.name} is cut off")
        out.write(data)
        at += len(data)
