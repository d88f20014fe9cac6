"""`relayline demo`: three stages from the bundled model, six prompts at once through the HTTP API, and a summary of the
batches. It works as a user's requests do: real processes, real gRPC, real HTTP. It uses no internals.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from relayline.deploy.launch.local import running
from relayline.deploy.launch.state import StateDir
from relayline.deploy.launch.tell import line_of
from relayline.deploy.manifest.smallest import StageFlags, smallest_manifest, with_stages
from relayline.wire.common.texts import named_layers

MODEL = Path(__file__).parents[1] / "demo" / "relayline-demo.gguf"
N_STAGES = 3
MAX_TOKENS = 96
LIVE_INTERVAL_S = 0.1  # of the terminal picture; tokens are never held for it
PROMPTS = (
    "def wrap(text, width=70, **kwargs):\n",
    "def dedent(text):\n",
    "def bisect_right(a, x, lo=0, hi=None, *, key=None):\n",
    "def fnmatch(name, pat):\n",
    "def heappush(heap, item):\n",
    "class ExitStack(_BaseExitStack, AbstractContextManager):\n",
)


async def stream(session: aiohttp.ClientSession, url: str, model: str, prompt: str, state: dict[str, Any]) -> None:
    """Run one streamed completion; state gets text, token count and times as they arrive."""
    body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True}  # fmt: skip
    started_s = time.monotonic()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for raw in response.content:
            line = raw.decode().strip()
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                state["tokens"] = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                state.setdefault("first_s", time.monotonic() - started_s)
                state["text"] += choice["text"]
    state["done_s"] = time.monotonic() - started_s


def picture(states: list[dict[str, Any]], width: int) -> Table:
    """Draw the six streams side by side."""
    table = Table.grid(expand=True, padding=(0, 1))
    for _ in range(2):
        table.add_column(ratio=1)
    for left, right in zip(states[::2], states[1::2], strict=True):
        table.add_row(*(_panel(state, width // 2 - 6) for state in (left, right)))
    return table


def _panel(state: dict[str, Any], width: int) -> Panel:
    lines = (state["prompt"] + state["text"]).splitlines()[-6:]
    text = Text("\n".join(line[:width] for line in lines + [""] * (6 - len(lines))), no_wrap=True)
    return Panel(text, title=f"stream {state['index']}", border_style="green" if "done_s" in state else "dim")


async def watch(states: list[dict[str, Any]], work: asyncio.Future[Any], console: Console) -> None:
    """Show the streams live on a terminal, or once at the end elsewhere."""
    if console.is_terminal:
        with Live(picture(states, console.width), console=console, auto_refresh=False) as live:
            while not work.done():
                await asyncio.wait({work}, timeout=LIVE_INTERVAL_S)
                live.update(picture(states, console.width), refresh=True)
    else:
        await asyncio.wait({work})
        console.print(picture(states, console.width))
    work.result()


def report(pipeline: dict[str, Any], states: list[dict[str, Any]], elapsed_s: float, console: Console) -> None:
    """Print, per stage, the histogram of batch sizes and the waits; then the throughput."""
    console.print("\nHow many streams shared a step:")
    for stage in pipeline["stages"]:
        first, end = stage["layers"]
        waits = f"wait p50 {stage['wait_p50_ns'] / 1e6:.2f} ms, p95 {stage['wait_p95_ns'] / 1e6:.2f} ms"
        console.print(f"\n[bold]stage {stage['index']}[/] {named_layers(first, end)}: {stage['steps']} steps, {waits}")
        counts = {int(size): n for size, n in stage["steps_by_sessions"].items()}
        most = max(counts.values(), default=1)
        for size in sorted(counts):
            bar = "█" * max(1, round(40 * counts[size] / most))
            console.print(f"  {size:>2} {'stream ' if size == 1 else 'streams'} {bar} {counts[size]}")
    tokens = sum(state["tokens"] for state in states)
    firsts = sorted(state["first_s"] for state in states)
    console.print(
        f"\n{tokens} tokens in {elapsed_s:.2f} s: [bold]{tokens / elapsed_s:.0f} tokens/s[/] over {len(states)} "
        f"streams; first token after {firsts[0] * 1e3:.0f}-{firsts[-1] * 1e3:.0f} ms"
    )


def _keep_in_logs(_name: str, _line: str) -> None:
    """Show no line of a process: `relayline logs demo` does."""


async def demo(*, keep: bool, directory: StateDir) -> None:
    """Run the whole demonstration; `directory` keeps its state."""
    console = Console()
    console.print(f"splitting {MODEL.name} into {N_STAGES} stages and starting them ...")
    manifest = with_stages(smallest_manifest(MODEL, "demo", ctx_tokens=512), StageFlags(N_STAGES), 0)
    async with running(manifest, _keep_in_logs, directory=directory) as (_, ready), aiohttp.ClientSession() as session:
        url, model = ready["url"], ready["model"]
        states: list[dict[str, Any]] = [
            {"index": i, "prompt": p, "text": "", "tokens": 0} for i, p in enumerate(PROMPTS)
        ]
        began_s = time.monotonic()
        work = asyncio.gather(*(stream(session, url, model, state["prompt"], state) for state in states))
        try:
            await watch(states, work, console)
        finally:  # Ctrl-C ends the streams before the pipeline
            work.cancel()
            await asyncio.wait({work})
        elapsed_s = time.monotonic() - began_s
        async with session.get(f"{url}/v1/pipeline") as response:
            report(await response.json(), states, elapsed_s, console)
        if not keep:
            console.print("\n`relayline demo --keep` (`make demo KEEP=1`) serves on: the API, and a page with a chat.")
            return
        console.print(f"\n{line_of(ready, as_json=False)}\nCtrl-C ends it.", soft_wrap=True, markup=False)
        await asyncio.Event().wait()
