"""Bytes in binary units, for arithmetic and for people."""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30


def bytes_text(n_bytes: int) -> str:
    """Return bytes for a person, in the largest unit of which there is one: "980 B", "1.5 KiB", "3.2 GiB"."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
