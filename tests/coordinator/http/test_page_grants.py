"""Steps under grants in the page, in a real browser: the legend, and the description of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import write_tokenizer
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.browser import browsing, chromium
from tests.support.page_support import MS, FakeStage, served

pytestmark = [
    pytest.mark.chromium,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed; `apt install chromium` on Debian"),
]


class Granted(FakeStage):
    """Steps of two rows, of which the last stage sent back both, one, and none."""

    async def batches(
        self, session_ids: Sequence[int], *, after_step: int = 0, limit: int = 0
    ) -> pb.BatchesResponse | None:
        found = await super().batches(session_ids, after_step=after_step, limit=limit)
        assert found is not None
        for batch in found.batches:
            batch.taken_ns = batch.start_ns
            sent = (at < batch.step - 1 for at in range(2))
            batch.members.extend(
                pb.BatchMember(session_id=7 + at, n_rows=1, sent_ns=MS * by) for at, by in enumerate(sent)
            )
        return found


async def test_steps_under_grants_are_marked_and_described(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "tokenizer.gguf"))
    async with served(tokenizer, stage=Granted()) as world, browsing() as tab:
        await tab.look()
        await tab.go(f"{world.url}/")
        await tab.until("document.querySelector('.legend').textContent.includes('rows under grants')")
        press = "document.querySelector('.time canvas').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}))"
        seen = []
        for _ in range(3):
            await tab.value(press)
            seen.append(await tab.value("document.querySelector('.inspect').textContent"))
        assert "grants" not in seen[0]
        assert "under grants1 row, not from the coordinator" in seen[1]
        assert "under grants2 rows, not from the coordinator" in seen[2]
        assert tab.problems == []
