"""Takes pictures of Jaeger's page with a headless Chromium: `python -m benches.jaeger_pictures --out DIRECTORY`.

Jaeger (2.20 or newer) runs with deploy/observability/jaeger/config.yaml and holds the spans of a pipeline at level
`batches` (docs/guide/traces.md says how to get both). Each picture answers a question of that page:

* search.png: did batches form? Seconds of passes, each with the size of its largest batch.
* passes.png: which stage is the slowest? The passes of one second, from stage to stage.
* request.png: why was this request slow? A request with its stages, and the batches of one of them.
* mates.png: which requests shared its batches? One batch, and the requests to which it links.
* padding.png: what did padding cost? The same batch's attributes: rows, padding, predicted and measured time.
* architecture.png: what the pipeline is.

Needs Debian's package `chromium`, and talks to it over its debugging protocol, so nothing else has to be installed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import collections
import contextlib
import datetime
import json
import os
import shutil
import sys
import tempfile
import urllib.parse
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from benches import interrupt
from relayline.wire.telemetry import names

WIDTH, SEARCH_WIDTH, HEIGHT = 1_600, 1_920, 1_000
LOAD_TIMEOUT_S, LOOK_EVERY_S = 180.0, 0.25
SETTLE_S = 1.0  # after the awaited text is there: fonts and animations
LOOKBACK_S = 3_600
COORDINATOR = f"{names.SERVICE_STEM}-{names.SERVICE_COORDINATOR}"


class Page:
    """One tab of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the debugging protocol and return its result."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            answer = await self._socket.receive_json(timeout=LOAD_TIMEOUT_S)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    async def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        return answer["result"].get("value")

    async def resize(self, width: int) -> None:
        """Give the tab a width in pixels."""
        size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def open(self, url: str, awaited: str) -> None:
        """Go to a page and wait until the JavaScript expression `awaited` is true."""
        await self.call("Page.navigate", url=url)
        await self.wait(awaited)

    async def wait(self, awaited: str) -> None:
        """Wait until a JavaScript expression is true."""
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            while not await self.run(f"Boolean({awaited})"):  # noqa: ASYNC110 - the page tells nobody
                await asyncio.sleep(LOOK_EVERY_S)
        await asyncio.sleep(SETTLE_S)

    async def click(self, element: str) -> None:
        """Click on the middle of the element that a JavaScript expression gives."""
        box = await self.run(
            f"(() => {{ const b = {element}.getBoundingClientRect(); return [b.left, b.top, b.height]; }})()"
        )
        left, top, height = box
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent", type=kind, x=left + 40, y=top + height / 2, button="left", clickCount=1
            )

    async def picture(self, out: Path) -> None:
        """Write a picture of the tab."""
        found = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(out.write_bytes, base64.b64decode(found["data"]))
        print(out, flush=True)


@contextlib.asynccontextmanager
async def browser(session: aiohttp.ClientSession) -> AsyncIterator[Page]:
    """Run a browser; yields its tab."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        raise RuntimeError("chromium is not installed (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory(prefix="relayline-pictures-") as profile:
        command = [
            program, "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}", "--disable-gpu",
            "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}", "about:blank",
        ]  # fmt: skip
        if os.geteuid() == 0:
            command.insert(1, "--no-sandbox")  # which Chromium requires for root
        child = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        try:
            port = await _port_of(child)
            async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                tab = next(each for each in await reply.json() if each["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                yield page
        finally:
            child.terminate()
            await child.wait()


async def _port_of(child: asyncio.subprocess.Process) -> int:
    assert child.stderr is not None
    async with asyncio.timeout(LOAD_TIMEOUT_S):
        while line := (await child.stderr.readline()).decode(errors="replace"):
            if "DevTools listening on ws://" in line:
                return urllib.parse.urlsplit(line.split()[-1]).port or 0
    raise RuntimeError("the browser ended before it answered")


async def traces_of(session: aiohttp.ClientSession, jaeger: str, operation: str) -> dict[str, list[str]]:
    """Return the newest traces of an operation of the coordinator: the names of their spans, by id."""
    traces: dict[str, list[str]] = collections.defaultdict(list)
    for span in await _spans_of(session, jaeger, COORDINATOR, operation):
        traces[span["traceId"]].append(span["name"])
    return traces


async def _spans_of(
    session: aiohttp.ClientSession, jaeger: str, service: str, operation: str = ""
) -> list[dict[str, Any]]:
    """Return the spans of the newest traces in which a service has an operation (any, if none is named)."""
    now = datetime.datetime.now(datetime.UTC)
    query = {
        "query.service_name": service,
        "query.start_time_min": (now - datetime.timedelta(seconds=LOOKBACK_S)).isoformat(),
        "query.start_time_max": now.isoformat(),
        "query.search_depth": "20",
    }
    if operation:
        query["query.operation_name"] = operation
    async with session.get(f"{jaeger}/api/v3/traces", params=query) as reply:
        if reply.status == 404:  # how Jaeger says that there is none
            return []
        if reply.status != 200:
            raise RuntimeError(f"{jaeger}: HTTP {reply.status}: {(await reply.text())[:200]}")
        found = json.loads(await reply.text())
    return [
        span for group in found["result"]["resourceSpans"] for scope in group["scopeSpans"] for span in scope["spans"]
    ]


async def best_passes(session: aiohttp.ClientSession, jaeger: str) -> str:
    """Return the second of passes in which most streams shared batches. Raises RuntimeError where there is none."""
    best: dict[str, int] = {}
    for operation in sorted(names.PASSES_NAMES):
        for trace_id, spans in (await traces_of(session, jaeger, operation)).items():
            best[trace_id] = sum(map(_sharing, spans))
    if not best:
        raise RuntimeError(
            f"{jaeger} holds no second of passes of {COORDINATOR}; run a pipeline at level batches first"
        )
    return max(best.items(), key=lambda each: each[1])[0]


def _sharing(name: str) -> int:
    """Return how many other streams share a batch of this name. Seconds in which prompts are read come last."""
    if name not in names.BATCH_NAMES:
        return 0
    phase, _, size = name.partition(" ×")
    return int(size.split("-")[0].rstrip("+")) - 1 if phase == names.PHASE_DECODE else -1_000


async def best_batch(session: aiohttp.ClientSession, jaeger: str) -> tuple[str, str]:
    """Return the trace and the span of the last stages' most telling batch: one with padding first, then the one with
    most streams.

    Raises RuntimeError if there is no batch.
    """
    found = await _spans_of(session, jaeger, f"{names.SERVICE_STEM}-{names.SERVICE_STAGE}-1")
    batches = [span for span in found if _sharing(span["name"]) > 0]
    if not batches:
        raise RuntimeError(f"{jaeger} holds no batch that streams shared; run several streams at level batches first")
    best = max(batches, key=lambda span: (_padding(span) > 0, _sharing(span["name"])))
    return best["traceId"], best["spanId"]


def _padding(span: dict[str, Any]) -> int:
    values = {each["key"]: each["value"] for each in span.get("attributes", [])}
    return int(values.get(names.ATTR_BATCH_PADDED_ROWS, {}).get("intValue", 0))


async def longest_request(session: aiohttp.ClientSession, jaeger: str, route: str) -> str:
    """Return the request with the most spans; empty where there is none."""
    found = await traces_of(session, jaeger, route)
    return max(found, key=lambda trace_id: len(found[trace_id]), default="")


async def main(options: argparse.Namespace) -> int:
    """Take every picture."""
    jaeger = options.jaeger.rstrip("/")
    await asyncio.to_thread(options.out.mkdir, parents=True, exist_ok=True)
    async with aiohttp.ClientSession() as session, browser(session) as page:
        passes, request = await best_passes(session, jaeger), await longest_request(session, jaeger, options.route)
        await page.resize(SEARCH_WIDTH)  # the table of results cuts names short
        await page.open(f"{jaeger}/search?service={COORDINATOR}&limit=20&lookback=1h", _has_text("passes ×"))
        await page.picture(options.out / "search.png")
        await page.resize(WIDTH)
        await page.open(f"{jaeger}/trace/{passes}", "document.querySelectorAll('.span-row').length > 8")
        await _zoom(page, options.zoom)
        await page.picture(options.out / "passes.png")
        if request:
            await page.open(f"{jaeger}/trace/{request}", "document.querySelectorAll('.span-row').length > 5")
            await _open_batches(page)
            await page.picture(options.out / "request.png")
        trace, span = await best_batch(session, jaeger)
        await page.open(f"{jaeger}/trace/{trace}?uiFind={span}", "document.querySelector('.span-row')")
        await _open_batch(page)
        for attribute, name in ((names.ATTR_MEMBER_SESSIONS, "mates"), (names.ATTR_BATCH_PADDED_ROWS, "padding")):
            await _show_attribute(page, attribute)
            await page.picture(options.out / f"{name}.png")
        await page.open(f"{jaeger}/dependencies", _has_text(f"{names.SERVICE_STEM}-"))
        await page.picture(options.out / "architecture.png")
    return 0


def _has_text(text: str) -> str:
    return f"document.body.innerText.includes({json.dumps(text)})"


async def _zoom(page: Page, share: float) -> None:
    """Look at the first part of a second, where single batches can be distinguished."""
    drag = (
        "(() => { const view = document.querySelector('.ViewingLayer--graph'); if (!view) return;"
        " const box = view.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; })()"
    )
    box = await page.run(drag)
    if not box:
        return
    left, top, width, height = box
    y = top + height / 2
    await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + 3, y=y)
    await page.call("Input.dispatchMouseEvent", type="mousePressed", x=left + 3, y=y, button="left", clickCount=1)
    for part in (0.5, 1.0):
        x = left + 3 + part * share * width
        await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, button="left", buttons=1)
    await page.call("Input.dispatchMouseEvent", type="mouseReleased", x=x, y=y, button="left", clickCount=1)
    await asyncio.sleep(SETTLE_S)


async def _open_batches(page: Page) -> None:
    """Click on `batches` of the last stage but one, and on its list of events."""
    click = (
        "(() => { const rows = [...document.querySelectorAll('.span-row')]"
        ".filter(row => row.innerText.trim().includes('batches')); const row = rows[rows.length - 2] || rows[0];"
        " if (!row) return false; (row.querySelector('.span-view') || row).click(); return true; })()"
    )
    if not await page.run(click):
        return
    header = "document.querySelector('.AccordionEvents--header')"
    await page.wait(header)
    if not await page.run(f"{header}.classList.contains('is-open')"):
        await page.click(header)
    await page.run("document.querySelector('.AccordionEvents--toggle')?.click()")  # it begins with three of them
    await asyncio.sleep(SETTLE_S)


async def _open_batch(page: Page) -> None:
    """Open the attributes of the span that the page was asked to find."""
    header = "document.querySelector('.AccordionAttributes--header')"
    if not await page.run(f"Boolean({header})"):
        await page.run("document.querySelector('.span-row.is-matching-filter .span-view')?.click()")
    await page.wait(header)
    await page.click(header)
    await asyncio.sleep(SETTLE_S)


async def _show_attribute(page: Page, name: str) -> None:
    """Move the page until an attribute of the open span is in its middle."""
    await page.run(
        "[...document.querySelectorAll('td')]"
        f".find(cell => cell.innerText.trim() === {json.dumps(name)})?.scrollIntoView({{block: 'center'}})"
    )
    await asyncio.sleep(SETTLE_S)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.jaeger_pictures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--jaeger", default="http://127.0.0.1:16686", help="Jaeger's page [default: %(default)s]")
    parser.add_argument("--route", default="POST /v1/completions", help="of the request [default: %(default)s]")
    parser.add_argument("--zoom", type=float, default=0.1, help="part of the second to show [default: %(default)s]")
    parser.add_argument("--out", type=Path, required=True, help="directory of the pictures")
    return parser.parse_args()


def _run() -> int:
    options = parse()
    try:
        return interrupt.run(main(options))
    except (RuntimeError, aiohttp.ClientError) as error:
        print(f"jaeger_pictures: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(_run())
