"""Stored prefixes in the page, in a real browser: how many, where they are, and what they take of a stage's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import write_tokenizer
from relayline.wire.common.units import MIB
from tests.support.browser import browsing, chromium
from tests.support.page_support import Described, FakeStage, served

pytestmark = [
    pytest.mark.chromium,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed; `apt install chromium` on Debian"),
]


async def test_stored_prefixes_are_counted_with_their_bytes_in_memory_and_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = Described.describe

    async def describe(self: Described, *args: Any, **named: Any) -> dict[str, Any]:
        found: dict[str, Any] = await described(self, *args, **named)
        tier = {"memory_bytes": 3 * MIB, "disk_bytes": 8 * MIB}
        found["stages"] = [stage | {"tier": tier, "resident_bytes": 100 * MIB} for stage in found["stages"]]
        return found | {"stored_prefixes": {"prefixes": 12, "tokens": 2_793, "stored": 14, "restored": 6}}

    monkeypatch.setattr(Described, "describe", describe)
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "tokenizer.gguf"))
    async with served(tokenizer, stage=FakeStage()) as world, browsing() as tab:
        await tab.look()
        await tab.go(f"{world.url}/")
        line = "12 stored prefixes of 2,793 tokens: 3.00 MiB in memory, 8.00 MiB on disk · 6 restored so far"
        await tab.until(f"document.body.textContent.includes('{line}')")
        await tab.until("document.body.textContent.includes('100 MiB (3.00 MiB of it stored prefixes)')")
        assert tab.problems == []
