"""The page in states that are seldom looked at, in a real browser: asleep, long names, half a screen, no scripts."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from PIL import Image

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
TABLE = "document.querySelector('[aria-label=\"Table of machines\"]')"
STAGE = {
    "address": "10.0.0.1:50051",
    "layers": [0, 4],
    "host": {"hostname": "a"},
    "up": True,
    "instance_id": "i",
    "steps": 3,
}
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


async def test_a_pipeline_that_loads_says_so_and_names_no_lanes_yet(page: tuple[World, Tab]) -> None:
    world, tab = page
    world.generator.more = {"phase": "loading", "missing": ["old", "laptop"], "ctx_tokens": 0, "lanes": 1}
    await tab.go(f"{world.url}/")
    await tab.until(f"{NOTICE}.innerText.includes('get 503 until all are ready. Not here yet: old, laptop.')")
    assert "1 lane" not in await tab.value("document.querySelector('.figures').innerText"), "a placeholder"
    await tab.go(f"{world.url}/#/plan")
    await tab.until("document.querySelector('.facts')?.innerText.includes('not known yet')")
    stages = [STAGE | {"name": "old", "state": "lost", "failure": "its disk is full"}]
    world.generator.more = {"phase": "loading", "missing": ["old"], "stages": stages}
    await tab.until(f"{NOTICE}.innerText.includes('Not here yet: old (it ended: its disk is full).')")
    world.generator.more = {"phase": "draining"}
    await tab.until(f"{NOTICE}.innerText.includes('running requests finish')")


async def test_layers_that_move_show_how_far_each_stage_is_and_what_keeps_one(page: tuple[World, Tab]) -> None:
    world, tab = page
    fetches = {"b": {"done_bytes": 1, "total_bytes": 4, "trouble": ""}}
    move = {"number": 1, "cuts": [3], "stages": ["a", "b"], "layers": [[0, 3], [3, 8]], "state": "preparing",
            "before": {"stages": ["a", "b"], "layers": [[0, 4], [4, 8]]}, "state_s": 2.0, "took_s": 2.0, "keep": [],
            "waiting_for": ["a", "b"], "fetches": fetches, "problem": ""}  # fmt: skip
    rows = "document.querySelector('[aria-label=\"Change of layers\"] tbody').innerText"
    world.generator.more = {"layers": {"move": move}}
    await tab.go(f"{world.url}/")
    await tab.until(f"{rows}.includes('loads') && {rows}.includes('fetches 25 %')")
    fetches["b"] = {"done_bytes": 2, "total_bytes": 4, "trouble": "the hub answers 429"}
    world.generator.more = {"layers": {"move": {**move, "took_s": 3.0}}}
    await tab.until(f"{rows}.includes('fetches 50 %, stalled: the hub answers 429')")
    assert tab.problems == []


async def test_a_lost_stage_is_told_in_whole_sentences(page: tuple[World, Tab]) -> None:
    world, tab = page
    await tab.go(f"{world.url}/")
    world.observer.loss = (0, "stage 0: 10.0.0.2:50051 has not answered for 9 s")
    await tab.until(f"{NOTICE}.innerText.includes('is lost: stage 0 reports that 10.0.0.2:50051 has not answered')")


async def test_a_stage_without_layers_that_is_lost_is_not_one_that_never_came(page: tuple[World, Tab]) -> None:
    world, tab = page
    away: dict[str, object] = {"here": False, "drained": False, "spare": False}
    lost = away | {"name": "old", "state": "lost", "state_s": 70.0}
    world.generator.more = {"idle": [lost, away | {"name": "next", "state": "waiting", "state_s": 70.0}]}
    await tab.go(f"{world.url}/")
    rows = "[...document.querySelectorAll('tr.idle-row')].map((row) => [0, 1, 11].map((at) => row.cells[at].innerText))"
    assert await tab.until(f"{rows}.length === 2 && {rows}") == [
        ["old lost", "gone", "70 s ago"],
        ["next waiting, not here", "not here yet", ""],
    ]
    assert tab.problems == []


@pytest.mark.parametrize("is_dark", [False, True])
async def test_a_table_that_goes_on_beyond_the_edge_of_a_phone_says_so(
    page: tuple[World, Tab], *, is_dark: bool
) -> None:
    world, tab = page
    await tab.look(width=390, height=844, is_dark=is_dark)
    world.generator.more = {"stages": [STAGE | {"index": index, "name": f"s{index}"} for index in range(2)]}
    await tab.go(f"{world.url}/")
    await tab.until(f"{TABLE}.scrollWidth > {TABLE}.clientWidth && {TABLE}.innerText.includes('1 s1')")
    assert await _shade(tab) > 12, "a shade at its right edge"
    await tab.value(f"{TABLE}.scrollLeft = {TABLE}.scrollWidth")
    assert await _shade(tab) <= 1, "nothing more is to come there"


async def _shade(tab: Tab) -> int:
    """Return how much the right edge of the table's head differs from its middle, in steps of 256."""
    await tab.value(f"{TABLE}.scrollIntoView({{block: 'center'}})")
    edge, top = await tab.value(
        f"(() => {{ const at = {TABLE}.getBoundingClientRect(); return [at.right, at.top].map(Math.round); }})()"
    )
    with Image.open(io.BytesIO(await tab.picture())) as picture:
        line = [picture.convert("L").getpixel((x, top + 4)) for x in (edge - 3, edge - 60)]
    return abs(line[0] - line[1])


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
