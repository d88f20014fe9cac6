"""Goal: a user drains a stage, takes it back, moves layers and cancels a request from the page, in a real browser.

Method: the stages a and b and the spare s, as real processes; a coordinator with an API key; Chromium.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relayline.deploy.testing.processes import relayline
from tests.end_to_end.test_end_to_end import DEMO
from tests.end_to_end.test_hosts_come_and_go import WAIT_S, Pipeline, PrivatePipeline
from tests.support.browser import Tab, browsing, chromium
from tests.support.polling import pause

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chromium,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed; `apt install chromium` on Debian"),
]

KEY = "a-key-for-the-browser"
MANY: dict[str, Any] = {"prompt": ["def f("] * 8, "n": 16}  # longer than a busy browser takes to cancel it
SURE = "document.querySelector('#sure').open"
BUTTON = "[...document.querySelectorAll('td.act button')].find((b) => b.getAttribute('aria-label') === {!r})"
ROWS = """[...document.querySelectorAll('main .change tbody tr')].map((row) =>
  [...row.children].map((cell) => cell.textContent))"""
CHANGE = "document.querySelector('main .change').textContent"


def _keys(disks: Path) -> Path:
    keys = disks / "keys"
    keys.write_text(KEY)
    keys.chmod(0o600)
    return keys


class KeyedPipeline(Pipeline):
    """With an API key."""

    def _more_flags(self) -> tuple[str | Path, ...]:
        return ("--api-keys", _keys(self._disks))


class InvitingPipeline(PrivatePipeline):
    """Over mutual TLS, with an API key whose holders may invite machines."""

    def _more_flags(self) -> tuple[str | Path, ...]:
        return (*super()._more_flags(), "--api-keys", _keys(self._disks), "--allow-invites")


@pytest.fixture
def pipeline(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pipeline]:
    kind: type[Pipeline] = getattr(request, "param", KeyedPipeline)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        split, disks = tmp_path / "split", tmp_path / "disks"
        disks.mkdir()
        done = relayline("split", DEMO, "--stages", "2", "--out", split)
        assert done.returncode == 0, done.stderr
        started = kind(split, disks)
        try:
            yield started
        finally:
            started.stop()


@contextlib.asynccontextmanager
async def _stream(session: aiohttp.ClientSession, **more: object) -> AsyncIterator[asyncio.Task[list[dict[str, Any]]]]:
    """Let a long stream run; the task returns its events."""
    has_begun = asyncio.Event()

    async def read() -> list[dict[str, Any]]:
        events = []
        body = {"prompt": "def f(", "max_tokens": 480, "ignore_eos": True, "stream": True, **more}
        async with session.post("/v1/completions", json=body, headers={"x-request-id": "the-stream"}) as reply:
            with contextlib.suppress(aiohttp.ClientPayloadError):  # a stream breaks off behind an error
                async for line in reply.content:
                    if line.startswith(b"data: {"):
                        events.append(json.loads(line[6:]))
                        has_begun.set()
        return events

    reading = asyncio.create_task(read())
    try:
        await has_begun.wait()
        yield reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_layers_and_requests_are_steered_from_the_page(pipeline: Pipeline) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(pipeline.url, headers=headers) as session, browsing() as tab:
        await _opened(tab, pipeline)
        await _reads_logs(tab)
        await _drains(tab, session)
        await _moves(tab, session)
        await _cancels(tab, session)
        await _does_the_same_in_a_terminal(pipeline, session)
        assert tab.problems == []


@pytest.mark.parametrize("pipeline", [InvitingPipeline], indirect=True)
async def test_a_machine_joins_with_a_line_from_the_page(pipeline: InvitingPipeline) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(pipeline.url, headers=headers) as session, browsing() as tab:
        await _opened(tab, pipeline)
        await tab.value("location.hash = '#/plan'")
        await tab.until("document.querySelector('form.invite')")
        for name, text in (("name", "attic"), ("host", "127.0.0.9")):
            await tab.value(f"document.querySelector('#invite-{name}').value = {text!r}")
        await tab.value("document.querySelector('form.invite').requestSubmit()")
        line = str(await tab.until("document.querySelector('.invite pre')?.textContent"))
        assert line.startswith(f"relayline join {pipeline.coordinator.event['enrol']} attic.")
        short = str(await tab.value("document.querySelectorAll('.invite pre')[1].textContent"))
        assert short.startswith(f"relayline join {pipeline.coordinator.event['enrol']} "), (
            "on loopback with its address"
        )
        assert re.fullmatch(r"\d{3}-\d{3}-\d{3}", short.split()[-1])
        assert tab.problems == []
        pipeline.more = await asyncio.to_thread(pipeline.joined_by, short.split()[2:], "127.0.0.9")
        async with asyncio.timeout(WAIT_S):
            while "attic" not in (await _layers(session))["stages"]:
                await pause()


async def _opened(tab: Tab, pipeline: Pipeline) -> None:
    """Open the page and give it the key."""
    await tab.look()
    await tab.go(f"{pipeline.url}/")
    await tab.until("document.querySelector('dialog#key')?.open")
    await tab.value(
        f"document.querySelector('#key-text').value = {KEY!r}, document.querySelector('#key-form').requestSubmit()"
    )
    await tab.until(f"{BUTTON.format('Drain b')}?.hidden === false")
    tab.problems.clear()  # without the key it was refused


async def _layers(session: aiohttp.ClientSession) -> dict[str, Any]:
    async with session.get("/v1/pipeline/layers") as reply:
        return dict(await reply.json())


async def _reads_logs(tab: Tab) -> None:
    for button, words in (('[aria-label="Log of b"]', "stage"), (".tools > button:only-child", "pipeline ready")):
        await tab.value(f"document.querySelector('section[aria-label=\"Machines and links\"] {button}').click()")
        await tab.until(f"document.querySelector('#log .loglines').textContent.includes({words!r})")
        await tab.value("document.querySelector('#log .first').click()")


async def _drains(tab: Tab, session: aiohttp.ClientSession) -> None:
    await tab.value(f"{BUTTON.format('Drain b')}.click()")
    assert await tab.value(SURE)
    assert await tab.value("document.activeElement.textContent") == "Leave it", "Enter a second time changes nothing"
    await tab.press("Enter")
    await tab.until(f"!{SURE}")
    assert (await _layers(session))["move"] is None
    async with _stream(session) as reading:
        await tab.value(f"{BUTTON.format('Drain b')}.click()")
        await tab.value("document.querySelector('#sure .danger').click()")
        await tab.until(f"{CHANGE}.includes('Layers have moved')")
        await tab.until(
            "[...document.querySelectorAll('.idle-row')].some((row) => row.textContent.includes('drained'))"
        )
        # Not one event a token: some tokens are parts of a character.
        assert (await reading)[-1]["choices"][0]["finish_reason"] == "length", "requests go on"
    found = await _layers(session)
    assert (found["stages"], found["hosts"]["b"]["drained"]) == (["a", "s"], True)
    first, second = (f"{start}–{end - 1}" for start, end in found["move"]["before"]["layers"])
    assert sorted(await tab.value(ROWS)) == [
        ["a", first, first, "keeps its layers"],
        ["b", second, "–", "is free"],
        ["s", "–", second, "holds them"],
    ]
    await tab.value(f"{BUTTON.format('Uncordon b')}.click()")
    await tab.until(f"{BUTTON.format('Drain b')}?.hidden === false")
    assert not (await _layers(session))["hosts"]["b"]["drained"]


async def _moves(tab: Tab, session: aiohttp.ClientSession) -> None:
    ((start, _),) = (await _layers(session))["layers"][1:]
    await tab.value("location.hash = '#/plan'")
    await tab.until(f"document.querySelector('.trial input')?.value === '{start}'")
    typed = f"((i) => {{ i.value = {start + 1}; i.dispatchEvent(new Event('input')); }})"
    await tab.value(f"{typed}(document.querySelector('.trial input'))")
    await tab.until("!document.querySelector('.trial .first').disabled")
    await tab.value("document.querySelector('.trial .first').click()")
    assert await tab.value(SURE)
    await tab.value("document.querySelector('#sure .danger').click()")
    await tab.until(f"{CHANGE}.includes('Layers have moved') && {ROWS}[0][2] === '0–{start}'")
    assert (await _layers(session))["cuts"] == [start + 1]


async def _cancels(tab: Tab, session: aiohttp.ClientSession) -> None:
    await tab.value("location.hash = '#/requests'")
    async with _stream(session, **MANY) as reading:
        running = "document.querySelector('td.act button[aria-label^=Cancel]:not([hidden])')"
        await tab.until(f"Boolean({running})")
        await tab.value(f"{running}.click()")
        assert await tab.value(SURE)
        await tab.value("document.querySelector('#sure .danger').click()")
        assert (await reading)[-1]["error"]["code"] == "request_cancelled"
    await tab.until(
        "[...document.querySelectorAll('tr.pick')].some((row) => row.innerText.includes('request cancelled'))"
    )


async def _does_the_same_in_a_terminal(pipeline: Pipeline, session: aiohttp.ClientSession) -> None:
    async def cli(*arguments: str) -> tuple[int, str]:
        done = await asyncio.to_thread(relayline, *arguments, "--url", pipeline.url, "--api-key", KEY)
        return done.returncode, (done.stdout + done.stderr).strip()

    assert await cli("trace-level") == (0, "level summary; 100% of requests")
    status, text = await cli("trace-level", "frames", "--for", "600", "--sample", "0.5")
    assert (status, text.partition(" for ")[0], text.partition("then ")[2]) == (
        0, "level frames", "summary; 50% of requests",
    )  # fmt: skip
    status, text = await cli("trace-level", "--for", "5")
    assert (status, "give a LEVEL" in text) == (2, True)
    async with _stream(session, **MANY) as reading:
        status, text = await cli("cancel", "the-stream")
        assert (status, text.endswith(" is cancelled")) == (0, True)
        assert (await reading)[-1]["error"]["code"] == "request_cancelled"
    status, text = await cli("cancel", "the-stream")
    assert (status, len(text.splitlines()), "has ended" in text) == (1, 1, True)
