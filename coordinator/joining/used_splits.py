"""Which splits on this machine's disk stages may read: nothing removes their files meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from relayline.coordinator.model.slices import TOKENIZER_NAME
from relayline.wire.common.use import Use


class UsedSplits:
    """The splits of one pipeline: the present one, the next one, and earlier ones of which stages kept their slices.

    A stage that keeps its slice goes on reading the file of an earlier split, perhaps over a network file system,
    where this machine does not see its lock.
    """

    def __init__(self, present: Path) -> None:
        self._present, self._next = present, present
        self._kept: dict[int, Path] = {}  # by place: the earlier split of its slice
        self._next_kept: tuple[int, ...] = ()  # the places that keep the slice that they have
        self._use = Use()
        self._lock()

    def prepare(self, split: Path, kept: Iterable[int] = ()) -> None:
        """Stages get their slices of another split ready; these places keep the slice that they have."""
        self._next, self._next_kept = split, tuple(kept)
        self._lock()

    def drop(self) -> None:
        """They do not after all."""
        self.prepare(self._present)

    def switch(self) -> None:
        """The next split is the present one."""
        self._kept = {place: self._kept.get(place, self._present) for place in self._next_kept}
        self._present = self._next
        self._lock()

    def close(self) -> None:
        """Stages read none of them any more."""
        self._use.close()

    def _lock(self) -> None:
        self._use.become([path / TOKENIZER_NAME for path in (self._present, self._next, *self._kept.values())])
