"""The description of a finished split, `pipeline.json`: its source and its files.

It is written last, so its presence means that every file it names is complete.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from relayline.wire.common.errors import ArtifactError
from relayline.wire.common.file_hash import sha256_of
from relayline.wire.common.texts import named_layers

PIPELINE_NAME = "pipeline.json"
PIPELINE_VERSION = 1


class SourceFile(msgspec.Struct, frozen=True):
    """One file of the model that was split. Name without directory; modification time in ns since 1970."""

    name: str
    size_bytes: int
    mtime_ns: int


class Source(msgspec.Struct, frozen=True):
    """The model that was split. `sha256` is its content key, not a hash of all its bytes."""

    files: tuple[SourceFile, ...]
    sha256: str


class ArtifactFile(msgspec.Struct, frozen=True):
    """One file of the split, relative to the directory of pipeline.json. `sha256` covers all its bytes, in hex."""

    file: str
    size_bytes: int
    sha256: str


class StageFile(msgspec.Struct, frozen=True):
    """One stage's artifact and the layers it holds: layer_start up to, not including, layer_end."""

    index: int
    file: str
    size_bytes: int
    sha256: str
    layer_start: int
    layer_end: int
    row_width: int = 0  # values of each row that enters, of stage 0 each looked-up one; 0: the model's n_embd
    sideband_values: int = 0  # how many of these are sidebands: inputs of later layers
    # Nobody has read all its bytes: `sha256` names its header and the places of the other bytes on the hub, and the
    # file beside pipeline.json has the header alone.
    unread: bool = False


class PipelineFile(msgspec.Struct, frozen=True):
    """The whole of pipeline.json."""

    version: int
    pipeline_id: str  # names source, cuts and format; equal on all artifacts
    source: Source
    architecture: str
    model_name: str
    n_layers: int
    n_embd: int
    n_vocab: int
    ctx_train: int  # tokens the model was trained for; 0 when the source does not say
    cuts: tuple[int, ...]
    tokenizer: ArtifactFile
    stages: tuple[StageFile, ...]
    deepstack_layers: int = 0  # at the beginning, which add features of an image to their rows

    @property
    def artifacts(self) -> tuple[ArtifactFile | StageFile, ...]:
        """All files of the split, the tokenizer first."""
        return self.tokenizer, *self.stages

    @property
    def media_width(self) -> int:
        """Values of a row of an image or of audio: its own, and features for each deepstack layer."""
        return self.n_embd * (1 + self.deepstack_layers)


class _Version(msgspec.Struct):
    version: int = 0


def load_pipeline(directory: Path, *, stages_here: bool = True) -> PipelineFile:
    """Read and check a split's description. A coordinator whose stages live elsewhere passes stages_here=False.

    Raises ArtifactError when it is missing, malformed, of an unknown version or contradicts itself, and when one of
    its files is missing or has another size. Contents are not read; see `check_artifact`.
    """
    path = directory / PIPELINE_NAME
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ArtifactError(f"{directory}: no {PIPELINE_NAME}; split a model into it first") from None
    except NotADirectoryError:
        raise ArtifactError(f"{directory}: is a file; give the directory that holds {PIPELINE_NAME}") from None
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        version = msgspec.json.decode(raw, type=_Version).version
        if version != PIPELINE_VERSION:
            raise ArtifactError(f"{path}: version {version} is unknown; split the model again")
        pipeline = msgspec.json.decode(raw, type=PipelineFile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: not a pipeline description: {error}; split the model again") from error
    problem = _contradiction(pipeline)
    if problem is not None:
        raise ArtifactError(f"{path}: {problem}; split the model again")
    for entry in pipeline.artifacts if stages_here else (pipeline.tokenizer,):
        _check_size(directory / entry.file, entry.size_bytes)
    return pipeline


def _contradiction(pipeline: PipelineFile) -> str | None:
    edges = (0, *pipeline.cuts, pipeline.n_layers)
    if list(edges) != sorted(set(edges)):
        return "cuts do not ascend within the layers"
    if len(pipeline.stages) != len(edges) - 1:
        return f"{len(pipeline.stages)} stages for {len(pipeline.cuts)} cuts"
    for index, stage in enumerate(pipeline.stages):
        if (stage.index, stage.layer_start, stage.layer_end) != (index, edges[index], edges[index + 1]):
            return f"stage {index} does not hold {named_layers(edges[index], edges[index + 1])}"
    for entry in pipeline.artifacts:
        if Path(entry.file).name != entry.file or entry.file in ("", ".", ".."):
            return f"file name {entry.file!r} leaves the directory"
    return None


def _check_size(path: Path, size_bytes: int) -> None:
    try:
        found = path.stat().st_size
    except OSError:
        raise ArtifactError(f"{path}: missing; split the model again") from None
    if found != size_bytes:
        raise ArtifactError(f"{path}: has {found} bytes instead of {size_bytes}; split the model again")


def check_artifact(path: Path, expected: StageFile | ArtifactFile, *, afresh: bool = True) -> None:
    """Raise ArtifactError unless an artifact's size and sha256 are the expected ones; of an unread one, the size.

    The whole file is read; if it need not be `afresh`, only where it looks otherwise than when it was last read.
    """
    _check_size(path, expected.size_bytes)
    if isinstance(expected, StageFile) and expected.unread:
        return
    if sha256_of(path, afresh=afresh) != expected.sha256:
        raise ArtifactError(f"{path}: its content has changed since the split (sha256 differs); split the model again")


def store_pipeline(directory: Path, pipeline: PipelineFile) -> None:
    """Write pipeline.json so that it is either there whole or not at all."""
    partial = directory / f".{PIPELINE_NAME}.partial"
    with partial.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(pipeline), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(directory / PIPELINE_NAME)
