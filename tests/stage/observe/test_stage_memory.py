"""A stage reports its memory and its host's only on request, since it has to read some files."""

from __future__ import annotations

import sys

import pytest

from relayline.stage.observe.stats import StageStats


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells by files under /proc")
def test_a_stage_tells_it_when_asked() -> None:
    asked, unasked = StageStats().message(with_recent=False, with_memory=True), StageStats().message(with_recent=False)
    assert 0 < asked.resident_bytes < asked.memory_bytes
    assert asked.memory_free_bytes > 0
    assert (unasked.resident_bytes, unasked.memory_bytes, unasked.memory_free_bytes) == (0, 0, 0)
