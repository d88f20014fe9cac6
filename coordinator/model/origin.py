"""The origin of a hollow model: a file with a header, a hole in place of its weights, and a note where these are.

The note lies beside the file, as `FILE.gguf.origin.json`. Headers are enough to plan, to split and to measure. Stages
get the bytes of their layers from the origin, so that no machine needs a disk for the whole model.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from relayline.coordinator.model.gguf_file import GgufModel
from relayline.wire.common.errors import ModelFileError
from relayline.wire.common.files import write_again
from relayline.wire.model_files.gguf_header import Tensor

SUFFIX = ".origin.json"
SAMPLE_BYTES, SAMPLES = 4_096, 16  # of a tensor: its end, its start and places between them
EMPTY_PARTS_MIN = 8


class Origin(msgspec.Struct, frozen=True):
    """One file of a repository on the hub."""

    repo: str  # ORG/NAME
    file: str  # path inside the repository
    commit: str
    etag: str  # names the content: of a large file its sha256, in hex
    size_bytes: int


def origin_of(path: Path) -> Origin | None:
    """Return where the weights of a file are; None for a file that has them. Raises ModelFileError."""
    note = path.with_name(path.name + SUFFIX)
    try:
        return msgspec.json.decode(note.read_bytes(), type=Origin)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # of a model whose own name leaves no room for the ending: it has no note
            return None
        raise _unread(note, path, error) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unread(note, path, error) from error


def _unread(note: Path, path: Path, error: Exception) -> ModelFileError:
    return ModelFileError(f"{note}: says not where the weights are: {error}; remove it and {path.name}")


def store_origin(path: Path, origin: Origin) -> None:
    """Note where the weights of a file are. Raises OSError."""
    write_again(path.with_name(path.name + SUFFIX), msgspec.json.encode(origin))


def origins_of(model: GgufModel) -> tuple[Origin, ...]:
    """Return the origin of each file of a hollow model; empty for one that is here. Raises ModelFileError."""
    found = [origin_of(file.path) for file in model.files]
    noted = tuple(origin for origin in found if origin is not None)
    if noted and len(noted) < len(found):
        raise ModelFileError(f"{model.path}: only some of its shards have their weights here; download all of them")
    return noted


def check_has_bytes(model: GgufModel) -> None:
    """Raise ModelFileError for a hollow model, noted as one or not, where its weights are needed."""
    if origins := origins_of(model):
        named = f"{origins[0].repo}/{origins[0].file}"
        raise ModelFileError(
            f"{model.path}: has no weights, these are on the hub; `relayline pull hf://{named}` downloads them"
        )
    check_not_empty(model)


def check_not_empty(model: GgufModel) -> None:
    """Raise ModelFileError where a file has zeros in place of its last weights: its note of origin was lost, or a
    download made the file in full length and never filled it.

    Copies lose holes, and some file systems make holes of zeros. So the bytes tell, and not where the holes are. Real
    weights may end with rows of zeros, but not with an eighth of them. Whole vectors of zeros are usual, such as
    biases, and a shard may have nothing else; so vectors tell nothing. Reads a few KiB of a file with weights.
    """
    for file in model.files:
        matrices = (tensor for tensor in file.tensors if len(tensor.dims) > 1)
        tensors = sorted(matrices, key=lambda tensor: tensor.offset)
        if not tensors:
            continue
        start, end = tensors[0].offset, tensors[-1].offset + tensors[-1].size_bytes
        try:
            known = _known_until(file.path, tensors)
        except OSError as error:
            raise ModelFileError(f"{file.path}: cannot be read: {error.strerror or error}") from error
        if (end - known) * EMPTY_PARTS_MIN > end - start:
            raise ModelFileError(
                f"{file.path}: has zeros in place of its weights; download it again, and a model of `download: layers` "
                "by its name on the hub"
            )


def _known_until(path: Path, tensors: Sequence[Tensor]) -> int:
    """Return up to where a file has weights, as far as samples tell, looking from its end."""
    with path.open("rb", buffering=0) as file:
        for tensor in reversed(tensors):
            n_bytes = min(SAMPLE_BYTES, tensor.size_bytes)
            for part in range(SAMPLES, -1, -1):
                offset = tensor.offset + (tensor.size_bytes - n_bytes) * part // SAMPLES
                if any(os.pread(file.fileno(), n_bytes, offset)):
                    return offset + n_bytes
    return tensors[0].offset
