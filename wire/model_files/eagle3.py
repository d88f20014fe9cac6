"""EAGLE-3 draft models: small models that guess tokens from the inner rows of the model that they were trained for.

They read the inputs of three of its layers for every token, and have one layer of their own. Many have no token table:
they look tokens up in the model's (coordinator/model/eagle3.py adds it to the file). A file that llama.cpp would abort
on, or refuse late, is refused here in one line.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025. The
files are those of llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from relayline.wire.common.errors import ModelFileError, UsageError
from relayline.wire.common.places import expanded
from relayline.wire.model_files.gguf_header import TOKENS_KEY, GgufFile, Tensor, read_header
from relayline.wire.model_files.model_check import LAYERS_MAX, WIDTH_MAX, check_model

ARCHITECTURE = "eagle3"
CACHED_NAME = "eagle3.gguf"  # of one that a stage has fetched
GUESSES = 4  # behind a token: of longer chains few are right
N_LAYERS_READ = 3  # llama_model_eagle3::load_arch_hparams
TABLE, HEAD, MAP = "token_embd.weight", "output.weight", "d2t"
_I64 = "I64"


@dataclasses.dataclass(frozen=True, slots=True)
class InnerRows:
    """The inner rows of a pipeline's model that its stages hand on to the last one."""

    layers: tuple[int, ...]
    """The layers whose inputs these are, in the order in which the draft model reads them."""
    drafter: Path | None = None
    """The draft model's file, for the last stage."""

    def n_before(self, layer: int) -> int:
        """Return how many of the rows come before a layer: so many parts, besides its input, enter there."""
        return sum(each < layer for each in set(self.layers))


class Drafter(NamedTuple):
    """The draft model of a pipeline, as it lies on the coordinator's disk."""

    path: Path
    layers: tuple[int, ...]
    size_bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True)
class Eagle3File:
    """What the header of such a file says."""

    file: GgufFile
    layers: tuple[int, ...]
    n_embd: int
    target_width: int
    """Values of a row of the model that it was made for."""
    n_vocab: int
    kv_values: int
    """Of one token's cell: its keys and values."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors by name."""
        return {tensor.name: tensor for tensor in self.file.tensors}

    @property
    def has_table(self) -> bool:
        """Whether it looks tokens up in a table of its own."""
        return TABLE in self.tensors

    @property
    def weights_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.size_bytes for tensor in self.file.tensors)

    def check_target(self, n_layers: int, n_embd: int, n_vocab: int) -> None:
        """Raise ModelFileError unless it was made for a model of these sizes."""
        path = self.file.path
        if self.target_width != n_embd:
            _refuse(path, f"reads rows of {self.target_width} values, and the model's have {n_embd}")
        if self.n_vocab != n_vocab:
            _refuse(path, f"its vocabulary has {self.n_vocab:,} tokens, that of the model {n_vocab:,}")
        if max(self.layers) >= n_layers:
            _refuse(path, f"reads the input of layer {max(self.layers)}, and the model has layers 0 to {n_layers - 1}")
        if not self.has_table and self.n_embd != n_embd:
            _refuse(path, f"its rows have {self.n_embd} values, too few or too many for the model's token table")


def _refuse(path: Path, why: str) -> NoReturn:
    raise ModelFileError(f"{path}: {why}; it was made for another model")


def is_eagle3(path: Path) -> bool:
    """Return whether a GGUF file holds an EAGLE-3 model. Raises ModelFileError for a file that is no GGUF."""
    return read_header(path).value("general.architecture") == ARCHITECTURE


def read_eagle3(path: Path) -> Eagle3File:
    """Read the header of an EAGLE-3 model. Raises ModelFileError for a file that llama.cpp cannot draft with."""
    file = read_header(path)
    if (found := file.value("general.architecture")) != ARCHITECTURE:
        raise ModelFileError(f"{path}: is of the architecture {str(found)[:40]!r}, not {ARCHITECTURE}")
    check_model(path, file.entries, [tensor for tensor in file.tensors if tensor.name != MAP])
    reader = _Reader(file)
    layers = reader.layers()
    n_embd, target_width = reader.integer("embedding_length"), reader.integer("target_hidden_size")
    n_heads = reader.integer("attention.head_count")
    n_kv = reader.integer("attention.head_count_kv", n_heads)
    head = reader.integer("attention.key_length", n_embd // n_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := reader.integer(key, head)) != head:
            reader.damaged(f"{key} is {other}, but its heads have {head} values")
    if reader.integer("block_count") != 1:
        reader.damaged("it has more layers than one")
    if n_heads % n_kv:
        reader.damaged(f"{n_heads} heads share {n_kv} of keys")
    tokens = file.entries.get(TOKENS_KEY)
    n_vocab = reader.integer("vocab_size", 0) if tokens is None else tokens.length
    reader.check_shapes(n_embd, target_width * len(layers), n_vocab, n_heads * head, n_kv * head)
    return Eagle3File(file, layers, n_embd, target_width, n_vocab, 2 * n_kv * head)


def load_inner(draft_model: str) -> InnerRows | None:
    """Return the inner rows that a setting's draft model reads; None without one.

    Raises ModelFileError, and UsageError for one of another kind.
    """
    if not draft_model:
        return None
    path = expanded(draft_model).absolute()
    if not is_eagle3(path):
        raise UsageError(f"{path}: drafts beside the coordinator; a stage takes an EAGLE-3 model alone")
    return InnerRows(read_eagle3(path).layers, path)


class _Reader:
    """Typed access to one file's header; every miss is the same kind of error."""

    def __init__(self, file: GgufFile) -> None:
        self._file, self._path = file, file.path

    def damaged(self, why: str) -> NoReturn:
        raise ModelFileError(f"{self._path}: {why}; the file is damaged, or llama.cpp cannot draft with it")

    def integer(self, key: str, default: int | None = None) -> int:
        found = self._file.value(f"{ARCHITECTURE}.{key}")
        if found is None and default is not None:
            return default
        if not isinstance(found, int) or isinstance(found, bool) or not 0 < found <= WIDTH_MAX:
            self.damaged(f"{ARCHITECTURE}.{key} is {found}")
        return found

    def layers(self) -> tuple[int, ...]:
        key = f"{ARCHITECTURE}.target_layers"
        found = self._file.value(key)
        if not isinstance(found, tuple) or len(found) != N_LAYERS_READ:
            self.damaged(f"{key} does not name {N_LAYERS_READ} layers")
        layers = tuple(each for each in found if isinstance(each, int) and 0 <= each < LAYERS_MAX)
        if len(set(layers)) < N_LAYERS_READ:
            self.damaged(f"{key} is {list(found)}")
        return layers

    def check_shapes(self, n_embd: int, n_read: int, n_vocab: int, n_attending: int, n_kept: int) -> None:
        tensors = {tensor.name: tensor for tensor in self._file.tensors}
        n_ff = self.integer("feed_forward_length")
        n_guessed = tensors[MAP].dims[0] if MAP in tensors else n_vocab
        vectors = ("output_norm", "blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm")
        wanted: dict[str, tuple[int, ...]] = {
            "fc.weight": (n_read, n_embd),
            **{f"{name}.weight": (n_embd,) for name in vectors},
            "blk.0.attn_q.weight": (2 * n_embd, n_attending),
            "blk.0.attn_k.weight": (2 * n_embd, n_kept),
            "blk.0.attn_v.weight": (2 * n_embd, n_kept),
            "blk.0.attn_output.weight": (n_attending, n_embd),
            "blk.0.ffn_gate.weight": (n_embd, n_ff),
            "blk.0.ffn_up.weight": (n_embd, n_ff),
            "blk.0.ffn_down.weight": (n_ff, n_embd),
        }
        optional = {HEAD: (n_embd, n_guessed), TABLE: (n_embd, n_vocab)}
        wanted |= {name: dims for name, dims in optional.items() if name in tensors}
        if self._file.value(f"{ARCHITECTURE}.norm_before_fc"):
            wanted["enc.output_norm.weight"] = (n_read,)
        for name, dims in wanted.items():
            if name not in tensors:
                self.damaged(f"tensor {name} is missing")
            if tensors[name].dims != dims:
                self.damaged(f"tensor {name} has shape {list(tensors[name].dims)}, not {list(dims)}")
        if MAP in tensors:
            self._check_map(tensors, n_vocab)

    def _check_map(self, tensors: Mapping[str, Tensor], n_vocab: int) -> None:
        """The head's tokens are the model's: llama.cpp would abort on one that the model does not have."""
        tensor = tensors[MAP]
        if tensor.type_name != _I64 or len(tensor.dims) != 1 or HEAD not in tensors:
            self.damaged(f"tensor {MAP} is not a list of the tokens that its head knows")
        with self._path.open("rb") as file:
            tokens = np.fromfile(file, "<i8", tensor.dims[0], offset=tensor.offset)
        if tokens.size != tensor.dims[0] or not _are_tokens(tokens, n_vocab):
            self.damaged(f"tensor {MAP} names tokens that its vocabulary does not have")


def _are_tokens(tokens: np.ndarray, n_vocab: int) -> bool:
    return bool(((tokens >= 0) & (tokens < n_vocab)).all())


def widened(widths: Sequence[int], n_embd: int, layers: Sequence[int]) -> tuple[int, ...]:
    """Return by layer how many values enter it where the inputs of some `layers` are handed on. `widths`: without."""
    inner = InnerRows(tuple(layers))
    return tuple(width + n_embd * inner.n_before(layer) for layer, width in enumerate(widths))
