"""The page in states that are seldom looked at, in a real browser: asleep, long names, half a screen, no scripts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import write_tokenizer
from tests.support.browser import Tab, browsing, chromium
from tests.support.page_support import World, served

pytestmark = [
    pytest.mark.chromium,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed; `apt install chromium` on Debian"),
]

NOTICE = "document.querySelector('#notice')"
LONG = "a-machine-with-a-name-that-says-where-it-stands-and-whose-it-is.second-floor.example.org"
FOLDED = "[...document.querySelectorAll('th.roomy')].filter((cell) => getComputedStyle(cell).display === 'none').length"


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[tuple[World, Tab]]:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "tokenizer.gguf"))
    async with served(tokenizer) as world, browsing() as tab:
        await tab.look()
        yield world, tab


async def test_a_pipeline_that_rests_says_so_and_what_ends_it(page: tuple[World, Tab]) -> None:
    world, tab = page
    await tab.go(f"{world.url}/")
    await tab.until("document.querySelector('#phase').innerText === 'ready'")
    assert await tab.value(f"{NOTICE}.hidden")
    for phase, says in (("sleeping", "The next request wakes it"), ("waking", "Requests wait until then")):
        world.generator.more = {"phase": phase}
        await tab.until(f"{NOTICE}.innerText.includes({says!r})")
        assert not await tab.value(f"{NOTICE}.classList.contains('err')"), "nothing is wrong"
    world.generator.more = {}
    await tab.until(f"{NOTICE}.hidden")
    assert tab.problems == []


async def test_long_names_leave_room_for_the_figures(page: tuple[World, Tab]) -> None:
    world, tab = page
    stage = {"index": 0, "name": LONG, "address": "[fd00:1234:5678:9abc:def0:1234:5678:9abc]:50051", "layers": [0, 4],
             "host": {"hostname": LONG}}  # fmt: skip
    world.generator.more = {"stages": [stage | {"up": True, "instance_id": "i", "steps": 3}]}
    world.facts["model_id"] = f"{LONG}/{LONG}"
    await tab.go(f"{world.url}/")
    await tab.until(f"document.querySelector('tbody tr')?.cells[1].innerText.startsWith({LONG!r})")
    right, left = (f"document.querySelector('tbody tr').cells[{at}].getBoundingClientRect()" for at in (6, 12))
    assert await tab.value(f"{right}.right <= {left}.left"), "rows per step is in view, not below the buttons"
    assert (await tab.value("document.querySelector('tbody tr').cells[1].firstChild.title")).startswith(LONG)
    lines = "document.querySelector('#theme').getClientRects()[0].height < 2 * 20"
    assert await tab.value(lines), "the button is one line high"


async def test_half_a_screen_folds_what_only_a_wide_page_has_room_for(page: tuple[World, Tab]) -> None:
    world, tab = page
    await tab.go(f"{world.url}/")
    await tab.until("document.querySelectorAll('th').length > 20")
    assert await tab.value(FOLDED) == 0
    await tab.look(width=720)
    assert await tab.value(FOLDED) == 3
    for width in (720, 360):
        await tab.look(width=width)
        wide = "document.documentElement.scrollWidth"
        assert await tab.value(wide) <= width, "tables scroll, the page does not"
    assert await tab.value("[...document.querySelectorAll('th')].every((cell) => cell.textContent)"), "each has a name"


async def test_without_scripts_the_page_says_why_it_is_empty(page: tuple[World, Tab]) -> None:
    world, tab = page
    await tab.ask("Emulation.setScriptExecutionDisabled", value=True)
    await tab.go(f"{world.url}/")
    text = await tab.value("document.body.innerText")
    assert "This page draws with JavaScript" in text
    assert "Looking at the pipeline" not in text, "it never will"
    assert "Requests" not in text, "views that cannot be shown"
    assert await tab.value("document.querySelector('main noscript p').getBoundingClientRect().top < 200")
