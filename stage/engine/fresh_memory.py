"""Fresh memory in small pages.

numpy asks for huge pages. A fresh one took up to 7 ms where the host had to make it first, and 116 MiB of them between
17 and 277 ms. Small ones take as long each time: 72 ms, and 56 where the system maps all at once.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

_OWN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_AT_ONCE: int = getattr(mmap, "MAP_POPULATE", 0)  # Linux alone has it


def small_pages(n_bytes: int, *, is_filled_at_once: bool = False) -> npt.NDArray[np.uint8]:
    """Return fresh memory, u8 [n_bytes].

    is_filled_at_once: the caller writes all of it now; otherwise it costs nothing until it is written to. Raises
    OSError where the system has none.
    """
    flags = _OWN | (_AT_ONCE if is_filled_at_once else 0)
    return np.frombuffer(mmap.mmap(-1, max(1, n_bytes), flags=flags), np.uint8)[:n_bytes]
