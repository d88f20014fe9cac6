"""How much of a partly fetched file is on the disk for certain.

A power cut may leave a file at its full length with zeros in place of the bytes that were written last. Where a hash is
known beforehand it tells. Where none is, only bytes count that the disk had confirmed, unless this host has been up
ever since they were written.
"""

from __future__ import annotations

from pathlib import Path

from relayline.stage.engine import place
from relayline.wire.common.files import write_again

SYNC_BYTES = 1 << 30  # fetched between two times of waiting for the disk; a power cut costs no more


class Survivors:
    """The note beside a partial file. Blocks; call it in a thread."""

    def __init__(self, partial: Path) -> None:
        self._note = partial.with_name(f"{partial.name}.synced")

    def good_bytes(self, size_bytes: int) -> int:
        """Return how many first bytes of a file of this size are as they were written."""
        try:
            boot, n_bytes = self._note.read_text().split()
            return size_bytes if boot == _boot() else min(size_bytes, int(n_bytes))
        except (OSError, ValueError):
            return 0

    def note(self, n_bytes: int) -> None:
        """Write down that the disk has confirmed so many bytes. Raises OSError."""
        write_again(self._note, f"{_boot() or 'unknown'} {n_bytes}\n".encode())

    def remove(self) -> None:
        """Forget the file, which is whole now. Raises OSError."""
        self._note.unlink(missing_ok=True)


def _boot() -> str:
    """Return what names the time since this host was started; empty where the system does not tell."""
    try:
        return place.BOOT_ID.read_text().strip()
    except OSError:
        return ""
