"""One stage artifact: its metadata, and the check that it is byte for byte the splitter's output.

An artifact is an ordinary GGUF with `relayline.*` metadata. Stage 0 carries the token embedding table behind the last
tensor, where llama.cpp does not look; `EmbeddingSection` gives the place. `pipeline.json` in the same directory lists
size and sha256 of each.

This module reads; it never writes into the artifact's directory. Verified hashes are remembered in the user's cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec

from relayline.stage.engine.loading import CHECKING, Load
from relayline.wire.common.bounds import N_EMBD_MAX
from relayline.wire.common.errors import ArtifactError, UsageError
from relayline.wire.common.file_hash import noted_sha256, sha256_of
from relayline.wire.common.rope_factors import CONTEXT, LONG_FACTORS, ORIGINAL_CONTEXT, LongRope
from relayline.wire.common.texts import layer_range
from relayline.wire.model_files.eagle3 import InnerRows
from relayline.wire.model_files.gguf_header import GgufFile, read_header
from relayline.wire.model_files.hollow_slice import ROUTER
from relayline.wire.model_files.model_check import check_header
from relayline.wire.model_files.rank_head import LABELS_MAX, RANK_HEAD
from relayline.wire.settings.table import EngineSettings

POSITIONS = "position_embd.weight"
_SCALES_TOKENS = ("gemma3", "gemma4")  # graphs that scale looked-up rows, and leave rows of images as they are
_SCALES_BOTH = ("granite",)  # graphs that scale both, as llm_graph_context::build_inp_embd does
# Of relayline.version; a split gives each slice the least one that runs it right.
ARTIFACT_VERSIONS = (1, 2, 3, 4, 5, 6)
PIPELINE_VERSION = 1  # of pipeline.json; raised on any incompatible change
PIPELINE_FILE = "pipeline.json"
HASHED_LAYERS_MAX = 64  # of stage 0 that look experts up by token id; models have three
_INTEGER_MAX, _FACTOR_MAX = 1 << 48, 1e9


@dataclasses.dataclass(frozen=True, slots=True)
class EmbeddingSection:
    """Place of stage 0's embedding table in the artifact: `rows` rows of `n_embd` values of a ggml type."""

    offset_bytes: int  # from the start of the file; 32-byte aligned
    type_id: int  # ggml type id
    rows: int  # tokens in the vocabulary
    scale: float  # factor that the family applies to looked-up rows; 1.0 for most


@dataclasses.dataclass(frozen=True, slots=True)
class TableSection:
    """Place of another table in stage 0's artifact, which is looked up by token or used for that."""

    offset_bytes: int  # from the start of the file; 32-byte aligned
    type_id: int  # ggml type id


@dataclasses.dataclass(frozen=True, slots=True)
class LayerInputs:
    """The inputs of each layer besides its row, in models that have such inputs."""

    width: int  # values for each layer and row
    epsilon: float = 0.0  # stage 0 only, like the next ones: epsilon of the norm over values computed from embeddings
    tokens: TableSection | None = None  # rows by token: of `width` values for every layer of the model
    product: TableSection | None = None  # what embeddings are multiplied with, as wide
    norm: TableSection | None = None  # f32 [width]


@dataclasses.dataclass(frozen=True, slots=True)
class HashedExperts:
    """Stage 0's first layers that look their experts up by token id."""

    n_experts: int
    n_used: int
    layers: tuple[TableSection, ...]  # of each such layer: i32 [tokens, n_used]

    @property
    def n_values(self) -> int:
        """Experts that are looked up for each row."""
        return len(self.layers) * self.n_used


@dataclasses.dataclass(frozen=True, slots=True)
class RankSection:
    """Place of the head that ranks, a tensor of a reranker's last stage: a row of `n_embd` values for each label."""

    offset_bytes: int  # from the start of the file
    type_id: int  # ggml type id
    labels: int


@dataclasses.dataclass(frozen=True, slots=True)
class StageArtifact:
    """The facts of one artifact, as its metadata states them."""

    path: Path
    architecture: str
    n_embd: int
    width_in: int  # values of each hidden row that enters, sidebands included; on stage 0, of a looked-up row
    width_out: int  # and that leaves
    n_vocab: int  # of the source model, whichever stage this is
    stage_index: int
    stage_count: int
    layer_start: int  # first source layer
    layer_end: int  # one past the last source layer
    source_layers: int  # layers of the whole source model
    source_sha256: str  # content key of the source model
    pipeline_id: str
    embedding: EmbeddingSection | None  # stage 0 only
    long_rope: LongRope | None = None  # of models with two sets of rope factors
    output_scale: float = 1.0  # factor on the last layer's output, which the next stage's graph takes back
    layer_inputs: LayerInputs | None = None  # for each row
    hashed: HashedExperts | None = None  # stage 0 only
    n_positions: int = 0  # in a table that the graph looks each row's position up in; 0: it has none
    prediction_layers: int = 0  # behind its own layers, to draft with
    rank_head: RankSection | None = None  # last stage of a reranker only
    has_experts: bool = False  # in a layer here, chosen by a router
    block_layers: int = 0  # of each block whose input all later layers read; 0: they read no such inputs
    deepstack_layers: int = 0  # stage 0 only: its first ones, which add features of an image to what leaves them
    inner_layers: tuple[int, ...] = ()  # of the model: those whose inputs are handed on, for a draft model

    @property
    def is_first(self) -> bool:
        """Whether token ids enter here."""
        return self.stage_index == 0

    @property
    def takes_rows(self) -> bool:
        """Whether rows of images or audio may enter in place of token ids: no layer needs the ids themselves."""
        if self.embedding is None or self.hashed is not None:
            return False
        return self.embedding.scale == 1.0 or self.architecture in _SCALES_TOKENS or self.scales_media

    @property
    def scales_media(self) -> bool:
        """Whether rows of images and audio are scaled as looked-up ones are."""
        return self.architecture in _SCALES_BOTH

    @property
    def media_width(self) -> int:
        """Values of a row of an image or of audio that enters: its own, and features for each deepstack layer.

        llama.cpp takes rows of this width.
        """
        return self.n_embd * (1 + self.deepstack_layers)

    def handing_on(self, layers: Sequence[int]) -> StageArtifact:
        """Return the same with rows that have the inputs of these layers behind them, see stage.engine.inner_rows.

        Raises UsageError where rows have further parts already.
        """
        if not layers:
            return self
        if self.has_sidebands or self.block_layers or self.width_out != self.n_embd or self.deepstack_layers:
            raise UsageError(f"{self.path}: rows of {self.architecture} have no place for the inputs of inner layers")
        more = [self.n_embd * InnerRows(tuple(layers)).n_before(layer) for layer in (self.layer_start, self.layer_end)]
        width_in, width_out = self.width_in + more[0], self.width_out + (0 if self.is_last else more[1])
        if max(width_in, width_out) > N_EMBD_MAX:
            raise UsageError(f"{self.path}: rows of {width_out} values, with those of inner layers, are too wide")
        return dataclasses.replace(self, width_in=width_in, width_out=width_out, inner_layers=tuple(layers))

    def predicts(self, settings: EngineSettings) -> bool:
        """Whether a stage with these settings drafts by its prediction layers."""
        return settings.mtp_drafts > 0 and self.prediction_layers > 0

    @property
    def is_last(self) -> bool:
        """Whether logits leave here."""
        return self.stage_index == self.stage_count - 1

    @property
    def layers_text(self) -> str:
        """Its source layers for a person, see `layer_range`."""
        return layer_range(self.layer_start, self.layer_end)

    @property
    def has_sidebands(self) -> bool:
        """Whether more enters than a row, or an embedding."""
        return self.layer_inputs is not None or self.hashed is not None

    @property
    def n_placeholders(self) -> int:
        """How many layers of zeros come before its own in the file: one for each earlier layer, in some models."""
        return self.layer_start if self.block_layers else 0

    @property
    def own_layers(self) -> int:
        """How many layers it computes."""
        return self.layer_end - self.layer_start

    @property
    def file_layers(self) -> int:
        """How many layers llama.cpp finds in the file."""
        return self.n_placeholders + self.own_layers


class _StageEntry(msgspec.Struct, frozen=True):
    index: int
    file: str
    size_bytes: int
    sha256: str
    unread: bool = False


class _Pipeline(msgspec.Struct, frozen=True):
    version: int
    pipeline_id: str
    stages: list[_StageEntry]


class _Reader:
    """Typed access to one artifact's metadata; every miss is the same kind of ArtifactError."""

    def __init__(self, file: GgufFile) -> None:
        self._path, self._file = file.path, file

    def integer(self, key: str) -> int:
        value = self._file.value(key)
        if isinstance(value, int) and not isinstance(value, bool):
            if 0 <= value <= _INTEGER_MAX:
                return value
            raise ArtifactError(f"{self._path}: metadata key {key} is {value}; split the model again")
        raise ArtifactError(f"{self._path}: metadata key {key} is missing or not an integer; split the model again")

    def text(self, key: str) -> str:
        value = self._file.value(key)
        if isinstance(value, str):
            return value
        raise ArtifactError(f"{self._path}: metadata key {key} is missing or not a string; split the model again")

    def width(self, key: str, usual: int) -> int:
        """Return how many values a row has."""
        found = usual if self._file.value(key) is None else self.integer(key)
        if not 0 < found <= N_EMBD_MAX:
            raise ArtifactError(f"{self._path}: metadata key {key} is {found}; split the model again")
        return found

    def embedding(self) -> EmbeddingSection:
        return EmbeddingSection(
            offset_bytes=self.integer("relayline.embedding.offset_bytes"),
            type_id=self.integer("relayline.embedding.type"),
            rows=self.integer("relayline.embedding.rows"),
            scale=self.factor("relayline.embedding.scale"),
        )

    def table(self, name: str) -> TableSection:
        key = f"relayline.{name}"
        return TableSection(self.integer(f"{key}.offset_bytes"), self.integer(f"{key}.type"))

    def layer_inputs(self, *, is_first: bool) -> LayerInputs | None:
        key = "relayline.layer_inputs"
        if self._file.value(f"{key}.width") is None:
            return None
        width = self.width(f"{key}.width", 0)
        if not is_first:
            return LayerInputs(width)
        tables = (self.table(f"layer_inputs.{name}") for name in ("tokens", "product", "norm"))
        return LayerInputs(width, self.factor(f"{key}.epsilon"), *tables)

    def prediction_layers(self) -> int:
        key = f"{self.text('general.architecture')}.nextn_predict_layers"
        return 0 if self._file.value(key) is None else self.integer(key)

    def deepstack_layers(self) -> int:
        key = f"{self.text('general.architecture')}.n_deepstack_layers"
        return 0 if self._file.value(key) is None else self.integer(key)

    def block_layers(self) -> int:
        key = "relayline.blocks.layers"
        return 0 if self._file.value(key) is None else self.integer(key)

    def rank_head(self, n_embd: int) -> RankSection | None:
        tensor = next((tensor for tensor in self._file.tensors if tensor.name == RANK_HEAD), None)
        if tensor is None:
            return None
        if len(tensor.dims) != 2 or tensor.dims[0] != n_embd or not 0 < tensor.dims[1] <= LABELS_MAX:
            text = f"{RANK_HEAD} has shape {list(tensor.dims)}, and rows have {n_embd} values"
            raise ArtifactError(f"{self._path}: {text}; split the model again")
        return RankSection(tensor.offset, tensor.type_id, tensor.dims[1])

    def hashed(self) -> HashedExperts | None:
        if self._file.value("relayline.hash.layers") is None:
            return None
        n_layers = self.integer("relayline.hash.layers")
        n_experts, n_used = self.integer("relayline.hash.experts"), self.integer("relayline.hash.experts_used")
        if not (0 < n_layers <= HASHED_LAYERS_MAX and 0 < n_used <= n_experts <= N_EMBD_MAX):
            text = f"{n_layers} layers use {n_used} of {n_experts} experts by token id"
            raise ArtifactError(f"{self._path}: metadata contradicts itself: {text}; split the model again")
        return HashedExperts(n_experts, n_used, tuple(self.table(f"hash.{layer}") for layer in range(n_layers)))

    def long_rope(self) -> LongRope | None:
        if not any(tensor.name == LONG_FACTORS for tensor in self._file.tensors):
            return None
        name = self.text("general.architecture")
        known = self._file.value(f"{name}.{ORIGINAL_CONTEXT}") is not None
        return LongRope(name, self.integer(f"{name}.{ORIGINAL_CONTEXT if known else CONTEXT}"))

    def factor(self, key: str) -> float:
        found = self._file.value(key)
        factor = float(found) if isinstance(found, int | float) else 1.0
        if not 0 < abs(factor) < _FACTOR_MAX:  # nor NaN
            raise ArtifactError(f"{self._path}: metadata key {key} is {factor}; split the model again")
        return factor


def open_artifact(path: Path) -> StageArtifact:
    """Read what an artifact says of itself. Content is not verified; `verify_artifact` does that.

    Raises ArtifactError (missing file, no artifact of ours, unknown version) or ModelFileError (not a GGUF, or none
    that llama.cpp computes with).
    """
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file")
    file = read_header(path)
    version = file.value("relayline.version")
    if version is None:
        raise ArtifactError(f"{path}: not a relayline stage artifact (a whole model?); make one with `relayline split`")
    if version not in ARTIFACT_VERSIONS:
        known = " and ".join(map(str, ARTIFACT_VERSIONS))
        text = f"artifact version {version}, this build reads {known}; split again, or update this build"
        raise ArtifactError(f"{path}: {text}")
    check_header(file)
    reader = _Reader(file)
    stage_index, stage_count = reader.integer("relayline.stage_index"), reader.integer("relayline.stage_count")
    layer_start, layer_end = reader.integer("relayline.layer_start"), reader.integer("relayline.layer_end")
    source_layers = reader.integer("relayline.source_layers")
    if not (0 <= stage_index < stage_count and 0 <= layer_start < layer_end <= source_layers):
        raise ArtifactError(
            f"{path}: metadata contradicts itself: stage {stage_index} of {stage_count}, "
            f"layers {layer_start} to {layer_end} of {source_layers}; split the model again"
        )
    artifact = StageArtifact(
        path=path,
        architecture=reader.text("general.architecture"),
        n_embd=(n_embd := reader.integer("relayline.n_embd")),
        width_in=reader.width("relayline.rows.width_in", n_embd),
        width_out=reader.width("relayline.rows.width_out", n_embd),
        n_vocab=reader.integer("relayline.n_vocab"),
        stage_index=stage_index,
        stage_count=stage_count,
        layer_start=layer_start,
        layer_end=layer_end,
        source_layers=source_layers,
        source_sha256=reader.text("relayline.source_sha256"),
        pipeline_id=reader.text("relayline.pipeline_id"),
        embedding=reader.embedding() if stage_index == 0 else None,
        long_rope=reader.long_rope(),
        output_scale=reader.factor("relayline.output.scale"),
        n_positions=next((tensor.dims[-1] for tensor in file.tensors if tensor.name == POSITIONS), 0),
        layer_inputs=reader.layer_inputs(is_first=stage_index == 0),
        hashed=reader.hashed() if stage_index == 0 else None,
        prediction_layers=reader.prediction_layers(),
        rank_head=reader.rank_head(n_embd) if stage_index == stage_count - 1 else None,
        has_experts=any(tensor.name.endswith(ROUTER) for tensor in file.tensors),
        block_layers=reader.block_layers(),
        deepstack_layers=reader.deepstack_layers(),
    )
    _check_widths(artifact)
    return artifact


def _check_widths(artifact: StageArtifact) -> None:
    """Raise ArtifactError unless a row has room for all stated sidebands."""
    has_any = artifact.has_sidebands or artifact.deepstack_layers or artifact.block_layers
    if not has_any:
        return
    width = artifact.layer_inputs.width if artifact.layer_inputs is not None else 0
    extra_in = width * (artifact.source_layers - artifact.layer_start) + _block_values(artifact, artifact.layer_start)
    extra_in += artifact.hashed.n_values if artifact.hashed is not None else 0
    extra_in += artifact.media_width - artifact.n_embd
    extra_out = width * (artifact.source_layers - artifact.layer_end)
    extra_out += 0 if artifact.is_last else _block_values(artifact, artifact.layer_end)
    extras = [
        ("in", artifact.width_in, extra_in),
        *([] if artifact.hashed else [("out", artifact.width_out, extra_out)]),
    ]
    for way, total, wanted in extras:
        if total != artifact.n_embd + wanted:
            text = f"rows {way} have {total} values, not {artifact.n_embd} and {wanted} more"
            raise ArtifactError(f"{artifact.path}: metadata contradicts itself: {text}; split the model again")


def _block_values(artifact: StageArtifact, layer: int) -> int:
    """Return the values of the inputs of blocks that begin before a layer."""
    return artifact.n_embd * -(-layer // artifact.block_layers) if artifact.block_layers else 0


def verify_artifact(path: Path, load: Load | None = None) -> StageArtifact:
    """Check an artifact's size and sha256 against the pipeline.json next to it, and return its metadata.

    A file once verified is not hashed again while its size, modification time and inode stay the same. Raises
    ArtifactError or ModelFileError, each one line, or LoadStoppedError.
    """
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file")
    if not (path.parent / PIPELINE_FILE).exists():
        open_artifact(path)  # a whole model has none next to it, which is then not what is wrong
    pipeline = _read_pipeline(path.parent / PIPELINE_FILE)
    entry = next((entry for entry in pipeline.stages if entry.file == path.name), None)
    if entry is None:
        raise ArtifactError(f"{path}: {PIPELINE_FILE} in its directory does not list this file; copy both again")
    size_bytes = path.stat().st_size
    if size_bytes != entry.size_bytes:
        raise ArtifactError(f"{path}: {size_bytes} bytes, but {PIPELINE_FILE} lists {entry.size_bytes}; copy it again")
    load = load or Load()
    _check_has_weights(path, entry)
    expected = noted_sha256(path) if entry.unread else entry.sha256
    if sha256_of(path, lambda share: load.at(CHECKING, share)) != expected:
        raise ArtifactError(f"{path}: its sha256 is not the one in {PIPELINE_FILE}; it was altered, copy it again")
    artifact = open_artifact(path)
    if artifact.pipeline_id != pipeline.pipeline_id or artifact.stage_index != entry.index:
        raise ArtifactError(
            f"{path}: is stage {artifact.stage_index} of another split than {PIPELINE_FILE} in its directory; "
            "copy both again"
        )
    return artifact


def open_unverified(path: Path) -> StageArtifact:
    """Return an artifact's metadata. Its content is not verified, but a file that never had any is refused.

    Raises as `open_artifact`.
    """
    artifact = open_artifact(path)
    try:
        entries = _read_pipeline(path.parent / PIPELINE_FILE).stages
    except ArtifactError:
        return artifact  # a file without its description is as good as its user says
    for entry in entries:
        if entry.file == path.name:
            _check_has_weights(path, entry)
    return artifact


def _check_has_weights(path: Path, entry: _StageEntry) -> None:
    if entry.unread and not noted_sha256(path):
        raise ArtifactError(f"{path}: has a header and no weights; `relayline join` fetches these for its stage")


def _read_pipeline(path: Path) -> _Pipeline:
    try:
        pipeline = msgspec.json.decode(path.read_bytes(), type=_Pipeline)
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; it belongs next to the stage artifacts") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: cannot be read: {error}") from None
    if pipeline.version != PIPELINE_VERSION:
        raise ArtifactError(f"{path}: version {pipeline.version}, this build reads {PIPELINE_VERSION}; split again")
    return pipeline
