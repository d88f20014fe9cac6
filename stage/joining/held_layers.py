"""Finds the bytes of a new artifact that this host has in artifacts which it fetched before.

When layers move, most layers of a stage's next artifact are often those of its last one. Their tensors have the same
bytes in both, under names that count from another first layer.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from relayline.stage.joining.artifact_store import Slot, Writer, cached
from relayline.wire.common.errors import ModelFileError
from relayline.wire.common.file_hash import noted_sha256, sha256_of
from relayline.wire.common.units import bytes_text
from relayline.wire.model_files.gguf_header import HEADER_BYTES_MAX, GgufFile, Tensor, read_header
from relayline.wire.model_files.gguf_write import ALIGNMENT

log = logging.getLogger("relayline.stage")

LOOK_FIRST_BYTES = 1 << 18  # of a new artifact; then a header is looked for, and again at each doubling
HELD_BYTES_MIN = 1 << 20  # in one stretch; a request for less costs as much as the bytes
COPY_BYTES = 32 << 20  # in one call, between which a fetch may be ended
_TABLES = "relayline.embedding.offset_bytes"  # where those of a first stage begin
_BLOCKS = "relayline.blocks.layers"  # a key of slices that begin with placeholders
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """A stretch of the new artifact, from `start` to `end`, that an earlier one has at `offset`."""

    start: int
    end: int
    path: Path
    offset: int


class HeldLayers:
    """The stretches of one artifact that need not be fetched. Everything here may block; call it in a thread."""

    def __init__(self, cache: Path, slot: Slot) -> None:
        """Look which earlier artifacts there are; those of other models are told apart once the header is here."""
        self._slot = slot
        try:
            entries = cached(cache)
        except OSError:  # somebody clears it just now
            entries = []
        whole = [entry for entry in entries if entry.is_whole and entry.directory != slot.directory]
        self._earlier = [entry.directory / entry.file for entry in whole]
        self._found: tuple[Held, ...] = ()
        self._look_at = LOOK_FIRST_BYTES if self._earlier else HEADER_BYTES_MAX + 1

    def fetch_until(self, n_bytes: int) -> int:
        """Return up to which byte to fetch, where `n_bytes` are here."""
        size_bytes = self._slot.artifact.size_bytes
        if n_bytes < self._look_at <= min(size_bytes, HEADER_BYTES_MAX):
            return self._look_at
        return min((held.start for held in self._found if held.start > n_bytes), default=size_bytes)

    def take(self, writer: Writer) -> bool:
        """Copy some of the bytes that the writer needs next and that are held; returns whether there were any.

        Raises OSError where an earlier artifact cannot be read, and StartError for a full disk.
        """
        self._look(writer)
        held = next((each for each in self._found if each.start <= writer.n_bytes < each.end), None)
        if held is None:
            return False
        with held.path.open("rb", buffering=0) as file:
            file.seek(held.offset + writer.n_bytes - held.start)
            data = file.read(min(COPY_BYTES, held.end - writer.n_bytes))
        if not data:
            raise OSError(f"{held.path} ended early")
        writer.append(writer.n_bytes, data)
        return True

    def forget(self) -> None:
        """Fetch everything from now on."""
        self._found, self._look_at = (), HEADER_BYTES_MAX + 1

    def _look(self, writer: Writer) -> None:
        if writer.n_bytes < self._look_at or self._look_at > HEADER_BYTES_MAX:
            return
        writer.flush()
        try:
            header = read_header(self._slot.partial, size_bytes=self._slot.artifact.size_bytes)
        except ModelFileError:  # its end is not here yet
            self._look_at = max(2 * self._look_at, writer.n_bytes + 1)
            return
        self._look_at = HEADER_BYTES_MAX + 1
        self._found = tuple(_best(header, _opened(self._earlier)))
        if self._found:
            n_held = sum(each.end - each.start for each in self._found)
            size_text = bytes_text(self._slot.artifact.size_bytes)
            log.info("%s of %s were fetched before, and are copied", bytes_text(n_held), size_text)


def held_stretches(header: GgufFile, earlier: GgufFile) -> tuple[Held, ...]:
    """Return the stretches of a new artifact that an earlier one has as well, in order; none of another model.

    These are layers, the head of two last stages, and the tables of two first ones. Slices that hold a whole model are
    left out: some families' vectors differ there.
    """
    if _model(header) != _model(earlier) or _is_whole(header) or _is_whole(earlier):
        return ()
    known = {_place(earlier, tensor): tensor for tensor in earlier.tensors}
    has_head = _is_last(header) and _is_last(earlier)
    found: list[Held] = []
    for tensor in sorted(header.tensors, key=lambda each: each.offset):
        same = known.get(_place(header, tensor)) if has_head or _BLOCK.match(tensor.name) else None
        if same is None:
            continue
        end = tensor.offset + tensor.size_bytes
        last = found[-1] if found else None
        if last is not None and _follows(last, tensor, same):
            found[-1] = dataclasses.replace(last, end=end)
        else:
            found.append(Held(tensor.offset, end, earlier.path, same.offset))
    return (*found, *_tables(header, earlier))


def _tables(header: GgufFile, earlier: GgufFile) -> Iterator[Held]:
    """Yield what follows the data of both, if they are first stages: the table of embeddings, and others like it."""
    start, offset = (each.value(_TABLES) for each in (header, earlier))
    if isinstance(start, int) and isinstance(offset, int):
        size_bytes = header.size_bytes - start
        if 0 < size_bytes == earlier.size_bytes - offset:
            yield Held(start, header.size_bytes, earlier.path, offset)


def _best(header: GgufFile, earlier: Iterable[GgufFile]) -> Iterator[Held]:
    """Yield stretches that do not overlap, from unaltered files, longest first where several have the same bytes."""
    taken: list[Held] = []
    every = [held for each in earlier for held in held_stretches(header, each)]
    is_good: dict[Path, bool] = {}
    for held in sorted(every, key=lambda each: each.start - each.end):
        if held.end - held.start < HELD_BYTES_MIN or any(held.start < o.end and o.start < held.end for o in taken):
            continue
        if held.path not in is_good:
            is_good[held.path] = _is_unaltered(held.path)
        if is_good[held.path]:
            taken.append(held)
            yield held


def _opened(paths: Iterable[Path]) -> Iterator[GgufFile]:
    for path in paths:
        try:
            yield read_header(path)
        except ModelFileError:
            continue


def _is_unaltered(path: Path) -> bool:
    try:
        return sha256_of(path) == (noted_sha256(path) or path.parent.name)
    except OSError:
        return False


def _model(header: GgufFile) -> tuple[object, ...]:
    source = header.value("relayline.source_sha256")
    return (source, header.value("relayline.version")) if source else (header.path,)


def _is_whole(header: GgufFile) -> bool:
    return (header.value("relayline.layer_start"), header.value("relayline.layer_end")) == (
        0,
        header.value("relayline.source_layers"),
    )


def _is_last(header: GgufFile) -> bool:
    return header.value("relayline.layer_end") == header.value("relayline.source_layers")


def _place(header: GgufFile, tensor: Tensor) -> tuple[object, ...]:
    """Return what names a tensor in the whole model, and its shape."""
    block, first = _BLOCK.match(tensor.name), header.value("relayline.layer_start")
    if block is None:
        return tensor.name, tensor.dims, tensor.type_id
    layer = int(block[1]) + first if isinstance(first, int) else -1
    if isinstance(first, int) and header.value(_BLOCKS) is not None:  # layers keep their numbers, behind zeros
        layer -= first
        return layer >= first, layer, block[2], tensor.dims, tensor.type_id
    return layer, block[2], tensor.dims, tensor.type_id


def _follows(last: Held, tensor: Tensor, same: Tensor) -> bool:
    """Tell whether a tensor comes next in both files, with no more than padding between."""
    gap = tensor.offset - last.end
    return 0 <= gap < ALIGNMENT and same.offset - last.offset == tensor.offset - last.start
