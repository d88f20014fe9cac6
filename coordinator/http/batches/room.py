"""How much each key may keep of files and batches, so that none can shut the others out. Pure.

A key may have half of what the other keys leave, of the number of files, of their bytes and of the number of batches.
So there is always some room for one more key. Where no keys are demanded, all may be taken.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from relayline.coordinator.batches.store import BatchStore, StoredBatch, StoredFile
from relayline.coordinator.http.edge.errors import HttpRefusal
from relayline.wire.common.errors import InvalidRequestError
from relayline.wire.common.texts import counted
from relayline.wire.settings.table import ServingSettings

UPLOADS_MAX = 8  # at the same time


class Room:
    """Kept files and uploads under way, against the bounds of one coordinator. Owner "": no keys are demanded."""

    def __init__(self) -> None:
        self._n_under_way: Counter[str] = Counter()  # uploads by owner
        self._bytes_under_way: Counter[str] = Counter()  # the most that these may become

    @contextlib.contextmanager
    def taking(self, store: BatchStore, limits: ServingSettings, owner: str, n_said: int | None) -> Iterator[int]:
        """Hold room for one upload within; yields how many bytes it may have.

        `n_said`: bytes of the request's body, None where it does not say. Raises HttpRefusal, InvalidRequestError.
        """
        n_uploads = self._n_under_way.total()
        if n_uploads >= UPLOADS_MAX:
            text = f"{n_uploads} files are being received already; try again shortly"
            raise HttpRefusal(503, text, "overloaded", {"Retry-After": "5"})
        n_own = len(store.files_of.get(owner, ())) + self._n_under_way[owner]
        n_files = len(store.files) + n_uploads
        if n_own >= share_of(limits.batch_files, n_files - n_own, owner) or n_files >= limits.batch_files:
            raise InvalidRequestError(
                f"{counted(n_own, 'file is', 'files are')} kept, as many as may{_of_key(owner)}; delete some"
            )
        own_bytes = store.bytes_of.get(owner, 0) + self._bytes_under_way[owner]
        all_bytes = store.n_bytes + self._bytes_under_way.total()
        n_share = share_of(limits.batch_disk_bytes, all_bytes - own_bytes, owner)
        n_free = min(n_share - own_bytes, limits.batch_disk_bytes - all_bytes)
        if n_free <= 0:
            text = f"the files here and those on their way have {own_bytes} bytes, as many as may{_of_key(owner)}"
            raise InvalidRequestError(f"{text}; delete some")
        n_max = min(limits.batch_file_bytes, n_free)
        n_held = n_max if n_said is None else min(n_max, n_said)
        self._n_under_way[owner] += 1
        self._bytes_under_way[owner] += n_held
        try:
            yield n_max
        finally:
            self._n_under_way -= Counter({owner: 1})  # which forgets an owner who has none
            self._bytes_under_way -= Counter({owner: n_held})


def keep_new(store: BatchStore, limits: ServingSettings, batch: StoredBatch, file: StoredFile | None = None) -> None:
    """Keep a new batch, in the place of one that has ended where there is no other: one at most, and none if it fails.

    `file`: of its requests, where that is not kept yet; it is kept or not as the batch is. Blocks, as the store does.
    Raises InvalidRequestError where there is no place, and OSError.
    """
    oldest = to_forget(store, limits, batch.owner)
    if file is not None:
        store.keep_file(file)
    try:
        store.keep_new_batch(batch)
    except OSError:
        if file is not None:
            with contextlib.suppress(OSError):
                store.delete_file(file.id)
        raise
    if oldest is None:
        return
    try:
        store.delete_batch(oldest)
    except OSError:
        with contextlib.suppress(OSError):
            store.delete_batch(batch.id)
        raise


def to_forget(store: BatchStore, limits: ServingSettings, owner: str) -> str | None:
    """Return the ended batch that a new one of `owner` takes the place of; None: there is room.

    It is the owner's oldest, or, if all places are taken by others, the oldest of whoever has most. An owner who has
    more than the share that others left gets one place for one. Raises InvalidRequestError where none has ended.
    """
    own = list(store.batches_of.get(owner, {}).values())
    n_all = len(store.batches)
    is_full = n_all >= limits.batch_files
    if len(own) < share_of(limits.batch_files, n_all - len(own), owner) and not is_full:
        return None
    found = next((batch.id for batch in own if batch.id not in store.unended), None)
    if found is None and is_full and not own:
        most = max(store.batches_of.values(), key=len)
        found = next((batch.id for batch in most.values() if batch.id not in store.unended), None)
    if found is None:
        wait = counted(len(own), "batch waits or runs", "batches wait or run")
        raise InvalidRequestError(f"{wait}, as many as may{_of_key(owner)}; cancel some")
    return found


def share_of(n_max: int, n_others: int, owner: str) -> int:
    """Return how much one owner may have while others have `n_others`."""
    return max(1, (n_max - n_others) // 2) if owner else n_max - n_others


def _of_key(owner: str) -> str:
    return " of one key" if owner else ""
