"""Memory of this process and its machine."""

from __future__ import annotations

import sys

import pytest

from relayline.wire.common import memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells by files under /proc")


def test_used_memory_fits_the_total() -> None:
    held, total, free = memory.resident_bytes(), memory.total_memory_bytes(), memory.available_memory_bytes()
    assert held is not None
    assert total is not None
    assert free is not None
    assert 1_000_000 < held < total
    assert 0 < free <= total
