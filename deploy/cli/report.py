"""`relayline report`: the page in its present state, as one HTML file to keep or to attach to an issue."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import urllib.parse
from pathlib import Path
from typing import Any

import click

from relayline.deploy.cli.console_http import Coordinator, key_option, url_option
from relayline.deploy.cli.options import OUTPUT, FloatRange
from relayline.deploy.cli.paths import FileToWrite, write_text
from relayline.wire.common.errors import RelaylineError, StartError
from relayline.wire.common.texts import counted

LIVE = "/v1/pipeline/live?after=0"
PLAN = "/v1/pipeline/plan"
LOOK_WAIT_S = 1.0  # between two looks: rates are of the time between them
TRACES_BYTES_MAX = 16 * 1024 * 1024  # of all requests' lives together, the latest first
_IMPORT = re.compile(r'from "\./(\w+)\.js"')
_FILES = re.compile(r'<link rel="icon".*?<script type="module" src="[^"]*"></script>', re.DOTALL)  # that the page loads
_POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"


@click.command("report", short_help="Save the page as one HTML file.")
@click.option(
    *OUTPUT, "out", type=FileToWrite(), default=Path("relayline-report.html"), show_default=True,
    help="File to write.",
)  # fmt: skip
@click.option(
    "--minutes", type=FloatRange(0.1, 60), default=5.0, show_default=True,
    help="Include the requests of the last MINUTES with their batches, as far as stages remember them.",
)  # fmt: skip
@url_option
@key_option
def report_command(out: Path, minutes: float, url: str, api_key: str, **_: Any) -> None:
    """Save the page with its steps, machines, requests and plans as one HTML file that needs no server.

    The file holds figures, names, addresses and ids, but no prompts or answers.
    """
    answers, aliases = asyncio.run(collect(url, api_key, minutes * 60.0))
    write_text(out, document(answers, aliases))
    n_requests = sum(path.startswith("/v1/traces/") for path in answers)
    click.echo(f"{out}: {counted(n_requests, 'request')}, {out.stat().st_size / 1024:.0f} KiB")


async def collect(url: str, api_key: str, seconds: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a coordinator's answers by path, and other paths that map to some of them.

    Raises StartError where no coordinator with a page answers.
    """
    answers: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    async with Coordinator(url, api_key) as coordinator:
        await coordinator.get(LIVE, ("look", "state"))
        await asyncio.sleep(LOOK_WAIT_S)
        live = answers[LIVE] = await coordinator.get(LIVE, ("look", "state", "now_us", "zero_unix_ms"))
        state = live["state"]
        if not isinstance(state, dict) or not isinstance(state.get("requests"), list):
            raise StartError(f"{coordinator.url}{LIVE} is not served by a relayline coordinator")
        try:
            answers[PLAN] = await coordinator.get(PLAN, ("plans",))
        except RelaylineError:
            pass  # a stage does not answer; the rest of the report may say why
        since_ms = made_unix_ms(live) - seconds * 1000
        left = TRACES_BYTES_MAX
        for request in state["requests"]:
            if request["came_unix_ms"] + request["took_ms"] < since_ms:
                continue
            path = trace_path(request["id"])
            try:
                trace = await coordinator.get(path, ("request_id", "streams"))
            except RelaylineError:
                continue  # forgotten since
            left -= len(json.dumps(trace))
            if left < 0:
                break
            answers[path] = trace
            aliases |= {trace_path(stream["id"]): path for stream in trace["streams"]}
            aliases[trace_path(trace["request_id"])] = path
    return answers, aliases


def made_unix_ms(live: dict[str, Any]) -> int:
    """Return when the coordinator looked, by its own clock."""
    return int(live["zero_unix_ms"] + live["now_us"] // 1000)


def trace_path(request_id: str) -> str:
    """Return the path at which the page asks for a request's life."""
    return "/v1/traces/" + urllib.parse.quote(request_id, safe="!*'()~")  # as encodeURIComponent writes it


def document(answers: dict[str, Any], aliases: dict[str, str]) -> str:
    """Return the page as one HTML document that takes `answers` in place of a server's."""
    from relayline.coordinator.http.page import FILES_DIR

    def text_of(name: str) -> str:
        return (FILES_DIR / name).read_text(encoding="utf-8")

    modules = {
        f"page/{path.stem}": "data:text/javascript;base64," + base64.b64encode(_renamed(path).encode()).decode()
        for path in sorted(FILES_DIR.glob("*.js"))
    }
    made = made_unix_ms(answers[LIVE]) if LIVE in answers else 0
    kept = {"answers": answers, "aliases": aliases, "made_unix_ms": made}
    frozen = json.dumps(kept).replace("<", "\\u003c")  # no text in it may end its element
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n<style>{text_of("style.css")}</style>\n'
        f'<script type="application/json" id="frozen">{frozen}</script>\n'
        f'<script type="importmap">{json.dumps({"imports": modules})}</script>\n'
        '<script type="module">import "page/main";</script>'
    )
    return _FILES.sub(lambda _: head, text_of("index.html"))


def _renamed(path: Path) -> str:
    """Return a module with names for its imports: a module loaded as data has no URL for relative imports."""
    return _IMPORT.sub(r'from "page/\1"', path.read_text(encoding="utf-8"))
