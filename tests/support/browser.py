"""Chromium by its DevTools protocol: opens, queries and photographs pages as a person's browser shows them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

WAIT_S = 60.0
LOADS_MAX = 20
# Other tests make networks meanwhile, and a browser drops what it loads when an interface comes or goes.
_NETWORK_CHANGED = "net::ERR_NETWORK_CHANGED"
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", "--remote-debugging-port=0",
)  # fmt: skip

_LISTENING = re.compile(r"DevTools listening on ws://[^:]+:(\d+)/")


def chromium() -> str | None:
    """Return the path of a Chromium, None if there is none."""
    return next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )


class Tab:
    """One page. `problems` holds its logged errors and its failed loads."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())
        self._loaded = asyncio.Event()
        self._is_disturbed = False
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.choosers: asyncio.Queue[int] = asyncio.Queue()  # inputs whose file chooser should open

    async def _read(self) -> None:
        async for message in self._socket:
            message_read = json.loads(message.data)
            if "id" in message_read:
                self._answers.pop(message_read["id"]).set_result(message_read)
                continue
            given = message_read.get("params", {})
            match message_read["method"]:
                case "Page.loadEventFired":
                    self._loaded.set()
                case "Runtime.exceptionThrown":
                    thrown = given["exceptionDetails"]
                    self.problems.append(thrown.get("exception", {}).get("description") or thrown["text"])
                case "Runtime.consoleAPICalled" if given["type"] in ("error", "warning", "assert"):
                    self.problems.append(" ".join(str(each.get("value")) for each in given["args"]))
                case "Log.entryAdded" if _NETWORK_CHANGED in given["entry"]["text"]:
                    self._is_disturbed = True
                case "Log.entryAdded" if given["entry"]["level"] in ("error", "warning"):
                    self.problems.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")
                case "Page.fileChooserOpened":
                    self.choosers.put_nowait(given["backendNodeId"])
                case "Network.requestWillBeSent":
                    self.requests.append(given["request"]["url"])

    async def ask(self, method: str, **given: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": given})
        async with asyncio.timeout(2 * WAIT_S):
            answer_read = await answer
        if "error" in answer_read:
            raise AssertionError(f"{method}: {answer_read['error']}")
        return answer_read["result"]

    async def value(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer_read = await self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer_read, answer_read["exceptionDetails"]
        return answer_read["result"].get("value")

    async def until(self, script: str, wait_s: float = WAIT_S) -> Any:
        """Wait until an expression is true, and return its value."""
        waiting = (
            "new Promise((done) => { const look = async () => { const found = await (" + script + "); "
            f"if (found || performance.now() > end) done(found); else setTimeout(look, 50); }}; "
            f"const end = performance.now() + {wait_s * 1000}; look(); }})"
        )
        if not (found := await self.value(waiting)):
            text = await self.value("document.body.innerText")
            raise AssertionError(f"never true: {script}\n{text[:1500]}\n{self.problems}")
        return found

    async def look(self, *, width: int = 1440, height: int = 900, is_dark: bool = False) -> None:
        """Set the size of the page and the user's preferred colours."""
        await self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                       mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.ask("Emulation.setEmulatedMedia", features=[scheme])

    async def go(self, url: str) -> None:
        """Load a page."""
        await self._load("Page.navigate", url=url)

    async def reload(self) -> None:
        """Load the page anew."""
        await self._load("Page.reload")

    async def _load(self, method: str, **given: Any) -> None:
        """Load a page until no part of it fails because the network changed."""
        for _ in range(LOADS_MAX):
            self._loaded.clear()
            self._is_disturbed = False
            answer = await self.ask(method, **given)
            if method == "Page.navigate" and "loaderId" not in answer:  # only the fragment changes
                return
            async with asyncio.timeout(WAIT_S):
                await self._loaded.wait()
            if not self._is_disturbed and _NETWORK_CHANGED not in answer.get("errorText", ""):
                return
            method, given = "Page.reload", {}
        raise AssertionError(f"the network changed within each of {LOADS_MAX} loads")

    async def press(self, key: str) -> None:
        """Press a key as a person does; "Enter" and "Tab" among others."""
        code = {"Enter": 13, "Tab": 9}[key]
        given = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.ask("Input.dispatchKeyEvent", type="keyDown", text="\r" if key == "Enter" else "", **given)
        await self.ask("Input.dispatchKeyEvent", type="keyUp", **given)

    async def choose(self, paths: list[str]) -> None:
        """Give files to the next file chooser that opens. Enable `Page.setInterceptFileChooserDialog` before."""
        async with asyncio.timeout(WAIT_S):
            node = await self.choosers.get()
        await self.ask("DOM.setFileInputFiles", files=paths, backendNodeId=node)

    async def picture(self, *, whole: bool = False) -> bytes:
        """Return a picture of the visible part as PNG; `whole`: of the whole page."""
        return base64.b64decode((await self.ask("Page.captureScreenshot", captureBeyondViewport=whole))["data"])

    async def close(self) -> None:
        """End the connection to the page."""
        await self._socket.close()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


@contextlib.asynccontextmanager
async def browsing() -> AsyncIterator[Tab]:
    """Run a browser with one empty tab."""
    program = chromium()
    assert program is not None
    with tempfile.TemporaryDirectory(prefix="relayline-browser-", ignore_cleanup_errors=True) as directory:
        process = await asyncio.create_subprocess_exec(
            program, *FLAGS, f"--user-data-dir={directory}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            port = await _port_of(process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as reply:
                    pages = [each for each in await reply.json() if each["type"] == "page"]
                socket = await session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)
                tab = Tab(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await tab.ask(f"{domain}.enable")
                await tab.ask("Emulation.setFocusEmulationEnabled", enabled=True)  # like a window with focus
                try:
                    yield tab
                finally:
                    await tab.close()
        finally:
            process.terminate()
            try:
                async with asyncio.timeout(10):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


async def _port_of(process: asyncio.subprocess.Process) -> int:
    """Return the port that the browser says it listens on."""
    assert process.stderr is not None
    async with asyncio.timeout(WAIT_S):
        while line := (await process.stderr.readline()).decode():
            if found := _LISTENING.search(line):
                return int(found[1])
    raise AssertionError("the browser ended at once")
