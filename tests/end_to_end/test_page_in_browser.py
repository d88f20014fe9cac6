"""Goal: the page shows a real pipeline in a real browser: batches as they form, a lost stage, a request, a chat.

Method: two stage processes, a coordinator with two groups, four streams, and Chromium by its DevTools protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from relayline.coordinator.model.split import split_model
from relayline.deploy.cli import report
from relayline.deploy.machine.ports import free_port
from relayline.deploy.testing.paths import DEMO_MODEL
from relayline.deploy.testing.processes import Running
from tests.support.browser import Tab, browsing, chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chromium,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed; `apt install chromium` on Debian"),
]

N_STREAMS, N_GROUPS, N_CROWD = 4, 2, 200
KEY = "a-key-for-the-browser"
# The group colours of drawn blocks, lane by lane, read back from the canvas as a person sees them.
SEEN = """(() => {
  const canvas = document.querySelector(".time canvas"), lanes = document.querySelectorAll(".lanelabel").length;
  if (!canvas || !canvas.width || !lanes) return null;
  const style = getComputedStyle(document.documentElement), copy = document.createElement("canvas");
  Object.assign(copy, {width: canvas.width, height: canvas.height});
  const pen = copy.getContext("2d", {willReadFrequently: true});
  pen.drawImage(canvas, 0, 0);
  const names = [...Array(8).keys()].map((at) => style.getPropertyValue(`--g${at}`).trim());
  const hex = (r, g, b) => "#" + [r, g, b].map((part) => part.toString(16).padStart(2, "0")).join("");
  const tall = document.querySelector(".lanelabel").offsetHeight * devicePixelRatio;
  return [...Array(lanes).keys()].map((lane) => {
    const {data} = pen.getImageData(0, Math.round((lane + 0.8) * tall), canvas.width, 1);
    const found = new Set();
    for (let at = 0; at < data.length; at += 4) found.add(names.indexOf(hex(data[at], data[at + 1], data[at + 2])));
    return [...found].filter((group) => group >= 0).length;
  });
})()"""


class Pipeline:
    """Two stages, the second of which can be killed and restarted, and their coordinator."""

    def __init__(self, directory: Path) -> None:
        keys = directory / "keys"
        keys.write_text(KEY)
        keys.chmod(0o600)
        split = directory / "split"
        file = split_model(DEMO_MODEL, split, n_stages=2)
        self._artifacts = [split / stage.file for stage in file.stages]
        self.stages = [self._stage(index, f"127.0.0.1:{free_port()}") for index in range(2)]
        addresses = ",".join(str(stage.event["address"]) for stage in self.stages)
        self.coordinator = Running(
            ["serve", "--pipeline", split, "--stages", addresses, "--http", "127.0.0.1:0", "--json", "--draft", "off",
             "--groups", str(N_GROUPS), "--group-rows", str(N_STREAMS // N_GROUPS), "--api-keys", keys]
        )  # fmt: skip
        self.url, self.model = str(self.coordinator.event["url"]), str(self.coordinator.event["model"])

    def _stage(self, index: int, listen: str) -> Running:
        return Running(["stage", "--artifact", self._artifacts[index], "--listen", listen, "--ctx", "2048", "--lanes",
                        "8", "--threads", "1", "--no-calibrate", "--json"])  # fmt: skip

    def kill_second(self) -> None:
        self.stages[1].process.send_signal(signal.SIGKILL)
        self.stages[1].process.wait()

    def start_second(self) -> None:
        address = str(self.stages[1].event["address"])
        self.stages[1].stop(signal.SIGKILL)
        self.stages[1] = self._stage(1, address)

    def stop(self) -> None:
        for process in (self.coordinator, *self.stages):
            process.stop()


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    running = Pipeline(tmp_path)
    try:
        yield running
    finally:
        running.stop()


@contextlib.asynccontextmanager
async def streams(pipeline: Pipeline) -> AsyncIterator[aiohttp.ClientSession]:
    """Let streams run for the length of a with block."""

    async def stream(session: aiohttp.ClientSession, number: int) -> None:
        while True:
            body = {"prompt": f"def f{number}(", "max_tokens": 1500, "ignore_eos": True, "seed": number, "stream": True}
            async with session.post("/v1/completions", json=body) as reply:
                await reply.read()

    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(pipeline.url, headers=headers) as session:
        tasks = [asyncio.create_task(stream(session, number)) for number in range(N_STREAMS)]
        try:
            yield session
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def give_key(tab: Tab, key: str) -> None:
    await tab.until("document.querySelector('#key')?.open")
    await tab.value(
        f"document.querySelector('#key-text').value = {key!r}; document.querySelector('#key-form').requestSubmit()"
    )


async def test_a_person_watches_asks_and_chats(pipeline: Pipeline, tmp_path: Path) -> None:
    async with streams(pipeline) as session, browsing() as tab:
        await tab.look()
        await tab.go(f"{pipeline.url}/")
        await give_key(tab, "a-key-that-is-wrong")
        await tab.until("document.querySelector('#key-wrong').textContent")
        refused = len(tab.problems)
        assert all("401" in problem for problem in tab.problems), tab.problems
        await give_key(tab, KEY)
        await _sees_batches(tab)
        await _survives_a_loss(tab, pipeline)
        await _keeps_up_with_a_crowd(tab, session)
        await _looks_at_a_request(tab)
        await _chats(tab)
        for view, text in (("plan", "as it runs"), ("connect", "Open WebUI")):
            await tab.value(f"location.hash = '#/{view}'")
            await tab.until(f"document.querySelector('main').innerText.includes({text!r})")
        await _reads_a_report(tab, pipeline, tmp_path / "report.html")
        assert tab.problems[refused:] == []
        own = (pipeline.url, "file:///", "data:")
        assert all(url.startswith(own) for url in tab.requests), "no other server is asked for anything"


async def test_a_key_given_while_a_refusal_is_on_its_way_is_not_asked_for_again(pipeline: Pipeline) -> None:
    hold = (
        "(() => { const real = window.fetch; window.fetch = async (...given) => { const reply = await real(...given);"
        " if (reply.status === 401) { window.held = true; await new Promise((go) => { window.letGo = go; }); }"
        " return reply; }; })()"
    )
    async with browsing() as tab:
        await tab.look()
        await tab.go(f"{pipeline.url}/")
        await tab.until("document.querySelector('#key')?.open")
        await tab.value(hold)
        await tab.until("window.held")
        await give_key(tab, KEY)
        await tab.value("window.letGo()")
        await tab.until("document.querySelector('#phase').textContent === 'ready'")
        assert not await tab.value("document.querySelector('#key').open"), "the key that it has is good"


async def _sees_batches(tab: Tab) -> None:
    await tab.until("document.querySelector('#phase').textContent === 'ready'")
    await tab.until(f"document.querySelectorAll('tbody tr.pick').length >= {N_STREAMS}")
    both = f"({SEEN} || []).filter((groups) => groups >= {N_GROUPS}).length === 2"
    await tab.until(both)
    # By request each stream has its own colour.
    await tab.value("[...document.querySelectorAll('.seg button')].find((b) => b.textContent === 'Requests').click()")
    await tab.until("document.querySelector('.legend').textContent.includes('per request')")
    # By keyboard: a step is selected and described, and the time line stops.
    press = "document.querySelector('.time canvas').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}))"
    await tab.value(press)
    await tab.until("document.querySelector('.inspect').textContent.includes('closed by')")
    await tab.until("[...document.querySelectorAll('button')].some((b) => b.textContent === 'Resume')")
    await tab.value("[...document.querySelectorAll('button')].find((b) => b.textContent === 'Resume').click()")


async def _survives_a_loss(tab: Tab, pipeline: Pipeline) -> None:
    await asyncio.to_thread(pipeline.kill_second)
    await tab.until("document.querySelector('#notice.err')?.textContent.includes('Stage 1')")
    red = "[...document.querySelectorAll('tr.bad-row b')].map((name) => name.textContent).join()"
    assert await tab.until(red) == "1", "the stage that is lost, and no other"
    await tab.until("document.querySelectorAll('.lanelabel.bad').length === 1")
    await asyncio.to_thread(pipeline.start_second)
    await tab.until("document.querySelector('#phase').textContent === 'ready'")
    await tab.until("!document.querySelector('.bad-row') && document.querySelector('#notice').hidden")


async def _keeps_up_with_a_crowd(tab: Tab, session: aiohttp.ClientSession) -> None:
    async def short(number: int) -> int:
        async with session.post("/v1/completions", json={"prompt": f"x{number}", "max_tokens": 2}) as reply:
            await reply.read()
            return reply.status

    before = await tab.value("import('/page/feed.js').then((module) => module.feed.look)")
    assert {*await asyncio.gather(*map(short, range(N_CROWD)))} == {200}
    await tab.until(f"import('/page/feed.js').then((module) => module.feed.look > {before} + 1)")
    assert await tab.value("document.querySelectorAll('tbody tr.pick').length") <= 12


async def _looks_at_a_request(tab: Tab) -> None:
    await tab.value("document.querySelector('tbody tr.pick button').click()")
    await tab.until("location.hash.startsWith('#/requests/') && document.querySelectorAll('.tall tbody tr').length > 0")
    text_shown = await tab.value("document.querySelector('main').innerText")
    for text in ("First token", "Where the time of its tokens went", "Predicted", "Closed by", "Mates"):
        assert text in text_shown
    # On a phone the list is above: what is chosen in it comes into view.
    await tab.look(width=390, height=844)
    await tab.value("document.querySelectorAll('tbody tr.pick button.link')[1].click()")
    top = "document.querySelector('.split').lastElementChild.getBoundingClientRect().top"
    await tab.until(f"{top} > 0 && {top} < innerHeight / 2")
    assert await tab.value("document.documentElement.scrollWidth") <= 390
    await tab.look()


async def _chats(tab: Tab) -> None:
    await tab.value(
        """(() => {
          location.hash = '#/chat';
          return new Promise((done) => setTimeout(() => {
            document.querySelector('#chat-max_tokens').value = '24';
            document.querySelector('#chat-probs').checked = true;
            document.querySelector('.compose textarea').value = 'def dedent(text):';
            document.querySelector('.compose').requestSubmit();
            done();
          }));
        })()"""
    )
    await tab.until("document.querySelectorAll('.turn').length === 2 && document.querySelectorAll('.tok').length > 0")
    await tab.until("[...document.querySelectorAll('.turn a')].some((link) => link.textContent === 'its batches')")
    await tab.until("document.querySelector('.compose [type=submit]').disabled === false")
    await tab.value("document.querySelector('.tok').focus()")
    await tab.until("document.querySelector('.probs')?.textContent.includes('%')")
    words = "[...document.querySelectorAll('.turn')].length"
    await tab.value("[...document.querySelectorAll('button')].find((b) => b.textContent === 'Regenerate').click()")
    assert await tab.until(f"{words} === 2 && document.querySelector('.compose [type=submit]').disabled === false")


async def _reads_a_report(tab: Tab, pipeline: Pipeline, file: Path) -> None:
    answers, aliases = await report.collect(pipeline.url, KEY, 300.0)
    text = report.document(answers, aliases)
    await asyncio.to_thread(file.write_text, text)
    await tab.go(file.as_uri())
    await tab.until(f"({SEEN} || []).filter((groups) => groups > 0).length === 2")
    await tab.value("document.querySelector('tbody tr.pick button').click()")
    await tab.until("document.querySelectorAll('.tall tbody tr').length > 0")
