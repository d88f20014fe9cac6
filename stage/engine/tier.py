"""States of lanes, kept in host memory and on disk after other streams have taken the lanes. Any thread; never waits.

The coordinator decides which lanes are stored and restored, by a key of their tokens; this module only keeps them. The
least recently used goes first, from each place by its own bound. A writer thread copies each stored state to the disk.
A reader thread loads a state that is only on the disk (`begin`), so the decode thread finds bytes in memory, or
nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from relayline.stage.engine.tier_disk import TierDisk
from relayline.stage.engine.tier_notes import TierNotes
from relayline.wire.common.bounds import STORED_READS_MAX, STORED_STATES_MAX

State = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, slots=True)
class TierFigures:
    """A tier's contents and counters."""

    memory_bytes: int = 0
    disk_bytes: int = 0
    n_states: int = 0
    n_hits: int = 0
    n_misses: int = 0


class Tier:
    """The tier of one stage."""

    def __init__(
        self,
        memory_bytes_max: int,
        disk: TierDisk | None = None,
        spare_bytes: Callable[[], int] | None = None,
        store_from_ns: int = 0,
    ) -> None:
        """`spare_bytes()` is the memory by which it may grow now, below 0 if it must shrink; None: its bound decides.

        store_from_ns: a prefix that is read in less time is not worth storing here.
        """
        self._memory_bytes_max, self._disk, self._spare_bytes = memory_bytes_max, disk, spare_bytes
        self.store_from_ns = store_from_ns
        self.on_dropped: Callable[[int], None] = lambda key: None
        """Called with the key of each state that is lost, of itself; in any thread, without a lock."""
        self._notes = TierNotes() if disk is None else disk.notes
        if disk is not None:
            disk.on_gone = self._gone_from_disk
        self._lock = threading.Lock()
        self._memory: collections.OrderedDict[int, tuple[int, State]] = (
            collections.OrderedDict()
        )  # key -> tokens, state
        self._read: collections.OrderedDict[int, tuple[int, State]] = (
            collections.OrderedDict()
        )  # from the disk, for now
        self._memory_bytes = self._n_hits = self._n_misses = 0

    @property
    def is_on_disk(self) -> bool:
        """Whether stored states survive a restart."""
        return self._disk is not None

    def has_room(self, n_bytes: int = 1) -> bool:
        """Return whether a state of this size could be kept now. If none could, what was kept in memory is freed.

        To take a state out of the engine costs time, and would be in vain.
        """
        if self._disk is not None and self._disk.fits(n_bytes):
            return True
        with self._lock:
            bytes_max = self._bytes_max(0)
            gone = self._free() if bytes_max <= 0 else []
        self._tell(gone)
        return n_bytes <= bytes_max

    def has(self, key: int) -> bool:
        """Return whether a state can be brought back; then it counts as used."""
        with self._lock:
            if key in self._memory:
                self._memory.move_to_end(key)
                return True
        return self._disk is not None and self._disk.has(key)

    def store(self, key: int, n_tokens: int, state: State) -> None:
        """Keep a state, as far as the bounds allow; it replaces what had this key."""
        is_on_disk = self._disk is not None and self._disk.write(key, n_tokens, state)
        gone = [] if is_on_disk else [key]
        with self._lock:
            self._forget_memory(key)
            bytes_max = self._bytes_max(state.nbytes)
            if state.nbytes <= bytes_max:
                self._memory[key] = (n_tokens, state)
                self._memory_bytes += state.nbytes
            while self._memory_bytes > bytes_max or len(self._memory) > STORED_STATES_MAX:
                gone.append(first := next(iter(self._memory)))
                self._forget_memory(first)
        self._tell(gone)

    def _tell(self, keys: Iterable[int]) -> None:
        """Report those of the states that are nowhere any more."""
        on_disk = self._disk.keys() if self._disk is not None else set()
        with self._lock:
            lost = [key for key in keys if key not in self._memory and key not in on_disk]
        for key in lost:
            self._notes.drop(key)
            self.on_dropped(key)

    def _gone_from_disk(self, key: int) -> None:
        self._tell([key])

    def _bytes_max(self, new_bytes: int) -> int:
        """Return how much memory may be used now. The new state's is in use already, though not counted here."""
        if self._spare_bytes is None:
            return self._memory_bytes_max
        return max(0, min(self._memory_bytes_max, self._memory_bytes + new_bytes + self._spare_bytes()))

    def give_back(self) -> None:
        """Free the memory of an automatic tier."""
        if self._spare_bytes is not None:
            with self._lock:
                gone = self._free()
            self._tell(gone)

    def _free(self) -> list[int]:
        gone = list(self._memory)
        self._memory.clear()
        self._memory_bytes = 0
        return gone

    def fetch(self, key: int) -> tuple[int, State] | None:
        """Return the tokens and the state of a key; None where it is not in memory: see `begin`."""
        with self._lock:
            read = self._read.pop(key, None)
            found = self._memory.get(key) or read
            if key in self._memory:
                self._memory.move_to_end(key)
            if found is None:
                self._n_misses += 1
            else:
                self._n_hits += 1
            return found

    def begin(self, key: int) -> Future[None] | None:
        """Begin to read a state that is on the disk alone; None where there is nothing to wait for."""
        with self._lock:
            if self._disk is None or key in self._memory or key in self._read:
                return None
        return self._disk.read(key, self._was_read)

    def _was_read(self, key: int, n_tokens: int, state: State) -> None:
        with self._lock:
            self._read[key] = (n_tokens, state)
            while len(self._read) > STORED_READS_MAX:
                self._read.popitem(last=False)

    def forget(self, key: int) -> None:
        """Give a state's place to others."""
        with self._lock:
            self._forget_memory(key)
            self._read.pop(key, None)
        self._notes.drop(key)
        if self._disk is not None:
            self._disk.forget(key)

    def _forget_memory(self, key: int) -> None:
        if (before := self._memory.pop(key, None)) is not None:
            self._memory_bytes -= before[1].nbytes

    def stored(self) -> dict[int, int]:
        """Return the tokens of each key that can be brought back: the latest used last, at most STORED_STATES_MAX."""
        on_disk = self._disk.stored() if self._disk is not None else {}
        with self._lock:
            in_memory = {key: n_tokens for key, (n_tokens, _) in self._memory.items()}
        found = {key: n_tokens for key, n_tokens in on_disk.items() if key not in in_memory} | in_memory
        return dict(list(found.items())[-STORED_STATES_MAX:])

    def note(self, key: int, note: bytes) -> None:
        """Keep a coordinator's note on a state for as long as the state, see `TierNotes`."""
        if self._disk is not None:
            self._disk.note(key, note, self.stored())
        else:
            self._notes.put(key, note, self.stored())

    def notes(self, coming: Iterable[int] = ()) -> dict[int, bytes]:
        """Return the notes on states that can be brought back, and on those that are on their way here."""
        return self._notes.on({*self.stored(), *coming})

    def figures(self) -> TierFigures:
        """Return its contents and counters."""
        n_states, disk_bytes = len(self.stored()), self._disk.n_bytes if self._disk is not None else 0
        with self._lock:
            return TierFigures(self._memory_bytes, disk_bytes, n_states, self._n_hits, self._n_misses)

    def close(self) -> None:
        """Free everything except the disk's files, whose last writes are awaited."""
        with self._lock:
            self._free()
            self._read.clear()
        if self._disk is not None:
            self._disk.close()
