"""The page of a gateway, in a real browser: its pipelines as they are, their own pages, a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayline.coordinator.text.tokenizer import Tokenizer
from tests.support.browser import browsing, chromium
from tests.support.gateway_world import gateway, pipelines, until

pytestmark = [
    pytest.mark.chromium,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed; `apt install chromium` on Debian"),
]

KEY = "a-key-of-sixteen-chars"
TEXTS = "(row) => [...row.cells].slice(0, 4).map((cell) => cell.innerText.trim())"
CELLS = f"[...document.querySelectorAll('tbody tr')].map({TEXTS})"
PICK = "(name) => [...document.querySelectorAll('a')].find((link) => link.textContent.includes(name))"


async def test_a_person_finds_a_pipeline_and_comes_back(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "code") as served, gateway(served) as session, browsing() as tab:
        await until(session, a="ready", b="ready")
        await tab.go(str(session._base_url))
        await tab.until(f"document.querySelectorAll('th').length > 2 && ({CELLS})[0][2] === 'chat'")
        assert await tab.value(CELLS) == [
            ["a", "ready", "chat", "0 of 4 lanes"],
            ["b", "ready", "code", "0 of 4 lanes"],
        ]
        assert "awake" not in await tab.value("document.querySelector('#sum').textContent")
        await served[0].kill()
        await tab.until("document.querySelector('tr.bad-row')?.cells[1].innerText.includes('dead')")
        assert (await tab.value(CELLS))[0][3] == "–", "nobody knows how many streams it has"
        await tab.go(await tab.value(f"({PICK})('b').href"))
        await tab.until("document.querySelector('#model')?.textContent === 'code'")
        await tab.go(await tab.value(f"({PICK})('All pipelines').href"))
        await tab.until("location.pathname === '/' && document.querySelectorAll('th').length > 2")
        assert await tab.value(f"({PICK})('Chat').href.endsWith('/pipelines/a/#/chat')")


async def test_the_page_says_how_many_may_be_awake(tokenizer: Tokenizer) -> None:
    async with (
        pipelines(tokenizer, "chat", "code", sleep=True) as served,
        gateway(served, awake_max=1) as session,
        browsing() as tab,
    ):
        await tab.go(str(session._base_url))
        await tab.until("document.querySelector('#sum').textContent.includes('At most 1 pipeline awake at once')")


async def test_the_page_asks_for_a_key_and_shows_the_rest_with_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    keys.chmod(0o600)
    async with (
        pipelines(tokenizer, "chat") as served,
        gateway(served, api_keys_file=keys) as session,
        browsing() as tab,
    ):
        await until(session, a="ready")
        await tab.go(str(session._base_url))
        await tab.until("document.querySelector('#key')?.open")
        assert await tab.value("document.querySelectorAll('th').length") == 2
        await tab.value(f"document.querySelector('#key-text').value = {KEY!r}")
        await tab.value("document.querySelector('#key-form').requestSubmit()")
        await tab.until(f"document.querySelectorAll('th').length > 2 && ({CELLS})[0][2] === 'chat'")
        assert not await tab.value("document.querySelector('#key').open")
