"""`relayline top`: a live view of a pipeline in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import termios
import time
import tty
from collections.abc import Iterator
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from relayline.deploy.cli.batches import batches_line
from relayline.deploy.cli.console_http import Coordinator, key_option, name_argument, shown_url, url_option
from relayline.deploy.cli.options import FloatRange
from relayline.deploy.cli.terminal import can_move
from relayline.deploy.cli.top_gateway import SHOWN as GATEWAY_SHOWN
from relayline.deploy.cli.top_gateway import figures_of, gateway_frame, is_gateway
from relayline.deploy.cli.top_keys import keys_of, keys_table
from relayline.deploy.cli.unequal import idle_line, unequal_line
from relayline.deploy.tables import Trimmed, width_of_terminal
from relayline.wire.common.errors import RelaylineError
from relayline.wire.common.phase import HostState, Phase
from relayline.wire.common.tasks import set_within
from relayline.wire.common.texts import counted, layer_range

INTERVAL_MIN_S, INTERVAL_MAX_S = 0.2, 60.0
KEYS_BYTES_MAX = 64
BAR_CELLS = 16
NAME_CELLS = 24
WIDE_CELLS = 112  # below this width close reasons have separate lines, and names are shorter
NAME_CELLS_NARROW = 17
COLUMNS = ("layers", "steps/s", "rows/step", "pad", "busy", "wait p50", "p95", "queued", "lanes")
# Of GET /v1/pipeline: what else answers there has none of them.
SHOWN = ("model", "now_ns", "generated_tokens", "lanes", "plan", "stages")
SMALL_CELLS = 92  # below this width layers are left out too, and bars are shorter
TINY_CELLS = 68
NAME_CELLS_TINY = 12
LEAST_CELLS = 60  # below this width why a stage is silent has a line of its own
NAME_CELLS_LEAST = 10
# Columns that are left out below a width.
SEEN_FROM = {"layers": SMALL_CELLS, "pad": TINY_CELLS, "p95": TINY_CELLS, "wait p50": LEAST_CELLS, "lanes": LEAST_CELLS}


@click.command("top", short_help="Watch a pipeline live.")
@name_argument
@click.option(
    "--interval",
    type=FloatRange(INTERVAL_MIN_S, INTERVAL_MAX_S),
    default=1.0,
    show_default=True,
    help="Seconds between two updates.",
)
@click.option("--once", is_flag=True, help="Print the figures of one interval, and end.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print the figures as JSON.")
@url_option
@key_option
def top_command(interval: float, once: bool, as_json: bool, url: str, api_key: str, **_: Any) -> None:
    """Watch stages, rows per step, waits, overlap, tokens per second, lanes and KV use, or the pipelines of a gateway.

    Keys: q quits, p or space pauses, + and - change the interval.
    """
    if as_json and not once:
        raise click.UsageError("--json needs --once")
    if not once and not (os.isatty(1) and can_move()):
        raise click.UsageError("the live view needs a terminal; print one frame with --once")
    asyncio.run(_watch(url, api_key, interval, once=once, as_json=as_json))


async def _watch(url: str, api_key: str, interval_s: float, *, once: bool, as_json: bool) -> None:
    console = Console(width=width_of_terminal(), highlight=False)
    async with Coordinator(url, api_key) as coordinator:
        url = shown_url(coordinator.url)
        before = await coordinator.get("/v1/pipeline", ("phase", "stages"))
        shown = GATEWAY_SHOWN if is_gateway(before) else SHOWN
        before, looked_s = await coordinator.get("/v1/pipeline", shown), time.monotonic()
        stopping = _until_interrupted()
        keys = Keys(stopping, interval_s)
        if once:
            await set_within(stopping, interval_s)
            if stopping.is_set():
                raise KeyboardInterrupt  # figures of a shorter interval would pass for those that were asked for
            after = await coordinator.get("/v1/pipeline", shown)
            figures, picture = _looked(url, before, after, time.monotonic() - looked_s, console.width)
            click.echo(json.dumps(figures)) if as_json else console.print(Trimmed(picture))
            return
        _, first = _looked(url, before, before, 1.0, console.width)
        with reading_keys(keys), Live(first, console=console, screen=True) as live:
            while not stopping.is_set():
                await set_within(stopping, keys.interval_s)
                if keys.is_held:
                    continue
                try:
                    after = await coordinator.get("/v1/pipeline", shown)
                except RelaylineError as error:
                    live.update(Text(error.message, style="red"))
                    continue
                now_s = time.monotonic()
                _, picture = _looked(url, before, after, now_s - looked_s, console.width)
                live.update(Group(picture, Text(f"\n{keys.help_line}", style="dim")))
                before, looked_s = after, now_s


def _looked(
    url: str, before: dict[str, Any], after: dict[str, Any], elapsed_s: float, width: int
) -> tuple[dict[str, Any], Group]:
    """Return the figures and the picture of a pipeline, or of a gateway, from two readings."""
    if is_gateway(after):
        figures = figures_of(before, after, elapsed_s)
        return figures, gateway_frame(url, figures, width)
    figures = rates(before, after)
    return figures, frame(url, after, figures, width)


class Keys:
    """The state set by the keys of the live view. Pure except for the event that it sets."""

    def __init__(self, stopping: asyncio.Event, interval_s: float) -> None:
        self._stopping = stopping
        self.interval_s, self.is_held = interval_s, False

    def press(self, key: str) -> None:
        """Take one key."""
        match key:
            case "q" | "Q" | "\x1b":
                self._stopping.set()
            case "p" | " ":
                self.is_held = not self.is_held
            case "+":
                self.interval_s = max(INTERVAL_MIN_S, self.interval_s / 2)
            case "-":
                self.interval_s = min(INTERVAL_MAX_S, self.interval_s * 2)

    @property
    def help_line(self) -> str:
        """One line for the foot of the picture."""
        return f"q quit, p hold, + - faster, slower (every {self.interval_s:g} s)"


@contextlib.contextmanager
def reading_keys(keys: Keys) -> Iterator[None]:
    """Pass on typed keys, one by one, where stdin is a terminal; the terminal's mode is restored at the end."""
    if not os.isatty(0):
        yield
        return
    before = termios.tcgetattr(0)
    loop = asyncio.get_running_loop()

    def read() -> None:
        for key in os.read(0, KEYS_BYTES_MAX).decode(errors="replace"):
            keys.press(key)

    tty.setcbreak(0)
    loop.add_reader(0, read)
    try:
        yield
    finally:
        loop.remove_reader(0)
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def _until_interrupted() -> asyncio.Event:
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


def rates(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the changes between two answers of /v1/pipeline; figures of a restarted stage start again. Pure."""
    if after["now_ns"] < before["now_ns"]:  # another machine answers, or this one has restarted
        before = after
    elapsed_s = max(1e-9, (after["now_ns"] - before["now_ns"]) * 1e-9)
    stages = []
    for stage in after["stages"]:
        if not stage["up"]:
            stages.append({"stage": stage["index"], "up": False})
            continue
        # A stage that was not seen before counts from zero, unless it has computed for longer than from then to now.
        started: dict[str, Any] = {} if stage["busy_ns"] * 1e-9 <= elapsed_s else stage
        old = next((other for other in before["stages"] if _is_same(other, stage)), started)
        n_steps = stage["steps"] - old.get("steps", 0)
        n_rows = stage["rows"] - old.get("rows", 0)
        n_padded = stage["padded_rows"] - old.get("padded_rows", 0)
        stages.append(
            {
                "stage": stage["index"],
                "up": True,
                "steps_per_s": round(n_steps / elapsed_s, 1),
                "rows_per_step": round(n_rows / n_steps, 2) if n_steps else None,
                "padding_share": round(n_padded / (n_rows + n_padded), 3) if n_rows + n_padded else 0.0,
                "busy_share": round(min(1.0, (stage["busy_ns"] - old.get("busy_ns", 0)) * 1e-9 / elapsed_s), 3),
                "wait_p50_ms": round(stage["wait_p50_ns"] * 1e-6, 3),
                "wait_p95_ms": round(stage["wait_p95_ns"] * 1e-6, 3),
                "queued_rows": stage["queued_rows"],
                "close_reasons": _difference(stage["close_reasons"], old.get("close_reasons", {})),
            }
        )
    generated = after["generated_tokens"] - before["generated_tokens"]
    capacity = after["lanes"] * after["ctx_tokens"]
    return {
        "tokens_per_s": round(max(0, generated) / elapsed_s, 1),
        "running": after["running"],
        "waiting": after["waiting"],
        "lanes": after["lanes"],
        "kv_share": round(after["kv_tokens"] / capacity, 4) if capacity else 0.0,
        "overlap": after["overlap"],
        "grants": _grants(before, after),
        "keys": keys_of(after),
        "stages": stages,
    }


def _grants(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int] | None:
    """Return how the counts of grants have changed; None where none are given."""
    grants = after.get("grants", {})
    if not grants.get("steps"):
        return None
    old = before.get("grants", {}) if before.get("epoch", 0) <= after["epoch"] else {}
    names = ("given", "extended", "repeated", "rows", "vain_rows")
    return {name: max(0, grants[name] - old.get(name, 0)) for name in names}


def grants_line(figures: dict[str, Any]) -> str:
    """Return a line that says what grants did; empty where none are given. Pure."""
    grants = figures["grants"]
    if grants is None:
        return ""
    return (
        f"grants: {grants['given']} given, {grants['extended']} extended, {grants['repeated']} ended by other rows; "
        f"{counted(grants['rows'], 'row')}, and {grants['vain_rows']} in vain"
    )


def _is_same(old: dict[str, Any], new: dict[str, Any]) -> bool:
    return bool(old["up"]) and old["index"] == new["index"] and old["instance_id"] == new["instance_id"]


def _difference(new: dict[str, int], old: dict[str, int]) -> dict[str, int]:
    found = {name: count - old.get(name, 0) for name, count in new.items()}
    return {name: count for name, count in found.items() if count}


def frame(url: str, described: dict[str, Any], figures: dict[str, Any], width: int = WIDE_CELLS) -> Group:
    """Return one picture of the pipeline for a terminal of this width; from 40 columns on no figure is cut."""
    is_wide, is_small, is_least = width >= WIDE_CELLS, width < SMALL_CELLS, width < LEAST_CELLS
    plan = described["plan"]
    two = figures["overlap"].get("2+")
    overlap = f"{two:.0%} of busy time with two or more stages at work" if two is not None else "not yet known"
    cells = BAR_CELLS // 2 if is_small else BAR_CELLS
    head = Text.from_markup(
        f"[bold]{escape(described['model'])}[/bold]  {escape(url)}  {_phase(described)}\n"
        f"[bold]{figures['tokens_per_s']:g} tok/s[/bold]  {figures['running']} running, {figures['waiting']} waiting, "
        f"lanes {_bar(figures['running'], figures['lanes'], cells)} {figures['running']}/{figures['lanes']}  "
        f"KV {_bar(figures['kv_share'], 1, cells)} {figures['kv_share']:.1%}\n"
        f"overlap: {overlap}\n"
        f"plan: {counted(plan['n_groups'], 'decode group')} of {counted(plan['group_rows'], 'row')}\n"
    )
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("stage", no_wrap=True, max_width=_name_cells(width), overflow="ellipsis")
    shown = [at for at, name in enumerate(COLUMNS) if width >= SEEN_FROM.get(name, 0)]
    for at in shown:
        table.add_column(COLUMNS[at], justify="right", no_wrap=True)
    if is_wide:
        table.add_column("closed by", overflow="fold")
    batches = batches_line(described.get("batches") or {})
    lines = (grants_line(figures), batches, unequal_line(described), idle_line(described))
    below = Text("".join(f"\n{line}" for line in lines if line))
    for stage, row in zip(described["stages"], figures["stages"], strict=True):
        name, *middle, reasons = _row(stage, row, described["phase"])
        if is_least and not row["up"]:
            below.append(f"\nstage {stage['index']}: {_why_silent(stage, described['phase'])}")
            middle = ["-"] * len(middle)
        table.add_row(name, *(middle[at] for at in shown), *((reasons,) if is_wide else ()))
        if not is_wide and reasons:
            below.append(f"\nstage {stage['index']} closed by: {reasons}")
    keys = keys_table(figures["keys"], width)
    return Group(head, table, *keys, below) if below else Group(head, table, *keys)


def _name_cells(width: int) -> int:
    """Return how many cells the name of a stage has."""
    if width >= WIDE_CELLS:
        return NAME_CELLS
    return NAME_CELLS_NARROW if width >= TINY_CELLS else NAME_CELLS_TINY if width >= LEAST_CELLS else NAME_CELLS_LEAST


def _phase(described: dict[str, Any]) -> str:
    """Return the state for clients, and since when."""
    since_s = described.get("phase_s")
    return str(described["phase"]) + (f" for {since_s:.0f} s" if since_s is not None else "")


def _row(stage: dict[str, Any], row: dict[str, Any], phase: str) -> list[str]:
    """Return the cells of a stage: name and layers first, why its batches closed last."""
    name = escape(f"{stage['index']} {stage.get('name') or stage['address']}")
    layers = layer_range(*stage["layers"])
    if not row["up"]:
        return [name, layers, f"[red]{escape(_why_silent(stage, phase))}[/red]", *[""] * 7, ""]
    reasons = sorted(row["close_reasons"].items(), key=lambda item: -item[1])
    rows_per_step = row["rows_per_step"]
    return [
        name,
        layers,
        f"{row['steps_per_s']:.0f}",
        f"{rows_per_step:.1f}" if rows_per_step is not None else "",
        f"{row['padding_share']:.0%}",
        f"{row['busy_share']:.0%}",
        f"{row['wait_p50_ms']:.2f} ms",
        f"{row['wait_p95_ms']:.2f} ms",
        str(row["queued_rows"]),
        f"{stage['lanes_used']}/{stage['lanes_total']}",
        ", ".join(f"{reason} {count}" for reason, count in reasons[:3]),
    ]


def _why_silent(stage: dict[str, Any], phase: str) -> str:
    """Return why a stage has no figures. While the pipeline is not ready nobody asks stages that are."""
    heard_s = stage.get("last_heard_s")
    if stage.get("silent") and heard_s is not None:
        return f"no heartbeat for {heard_s:.0f} s"
    state = str(stage.get("state", HostState.READY))
    if state != HostState.READY:
        return state
    return "no answer" if phase == Phase.READY.value else "waits"


def _bar(value: float, total: float, cells: int) -> str:
    filled = round(cells * min(1.0, value / total)) if total else 0
    return "█" * filled + "░" * (cells - filled)
