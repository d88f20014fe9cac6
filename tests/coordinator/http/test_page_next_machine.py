"""The page's advice for one more machine, in a real browser: as the coordinator lets stages join."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import write_tokenizer
from tests.support.browser import browsing, chromium
from tests.support.page_support import served

pytestmark = [
    pytest.mark.chromium,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed; `apt install chromium` on Debian"),
]


async def test_the_page_says_how_one_more_machine_joins(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "tokenizer.gguf"))
    async with served(tokenizer) as world, browsing() as tab:
        await tab.go(f"{world.url}/#/plan")
        for facts, says in (
            ({}, "started with the addresses of its stages"),
            ({"join": "127.0.0.1:5", "enrol": ""}, "Stages join on this machine alone"),
            ({"join": "10.0.0.1:5", "enrol": "10.0.0.1:4"}, "relayline invite NAME --host ADDRESS"),
            ({"join": "10.0.0.1:5", "enrol": ""}, "relayline certs issue CA-DIRECTORY HOST --stage NAME"),
        ):
            world.facts.update(facts)
            await tab.until(f"document.querySelector('main').innerText.includes({says!r})")
        assert tab.problems == []
