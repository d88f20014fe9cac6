"""The picture of a gateway for `relayline top`: one line for each pipeline."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from relayline.wire.common.texts import counted

SHOWN = ("kind", "phase", "pipelines")  # of a gateway's GET /v1/pipeline
COLUMNS = ("pipeline", "state", "models", "running", "of others", "lanes", "to do", "sent/s", "where")
SEEN_FROM = {"where": 92, "of others": 80, "to do": 80, "sent/s": 60, "models": 60}  # cells of the terminal's width


def is_gateway(described: dict[str, Any]) -> bool:
    """Return whether an answer of GET /v1/pipeline is a gateway's."""
    return described.get("kind") == "gateway"


def figures_of(before: dict[str, Any], after: dict[str, Any], elapsed_s: float) -> dict[str, Any]:
    """Return the figures of a gateway between two of its answers. Pure."""
    sent = {each["name"]: each["sent"] for each in before["pipelines"]}
    pipelines = [
        {
            **each,
            # One that was replaced counts from zero again.
            "sent_per_s": round(max(0, each["sent"] - sent.get(each["name"], each["sent"])) / max(elapsed_s, 1e-9), 2),
        }
        for each in after["pipelines"]
    ]
    n_waiting = after.get("waiting", 0)
    return {"phase": after["phase"], "running": after["running"], "waiting": n_waiting, "pipelines": pipelines}


def gateway_frame(url: str, figures: dict[str, Any], width: int) -> Group:
    """Return one picture of a gateway for a terminal of this width."""
    phases = [each["phase"] for each in figures["pipelines"]]
    n_asleep, n_waiting = phases.count("sleeping"), figures["waiting"]
    asleep = f", {n_asleep} asleep" if n_asleep else ""
    waiting = f", {n_waiting} waiting" if n_waiting else ""
    head = Text.from_markup(
        f"[bold]gateway[/bold]  {escape(url)}  {escape(figures['phase'])}\n"
        f"[bold]{figures['running']} running{waiting}[/bold], "
        f"{phases.count('ready')} of {counted(len(phases), 'pipeline')} ready{asleep}\n"
    )
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    shown = [at for at, name in enumerate(COLUMNS) if width >= SEEN_FROM.get(name, 0)]
    for name in (COLUMNS[at] for at in shown):
        is_text = name in ("pipeline", "state", "models", "where")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for each in figures["pipelines"]:
        cells = _cells(each)
        table.add_row(*(escape(cells[at]) for at in shown))
    return Group(head, table)


def _cells(each: dict[str, Any]) -> list[str]:
    state = f"{each['phase']}: {each['problem']}" if each["problem"] else each["phase"]
    counts = (each["running"], each["others"], each["lanes"], each["work_tokens"], each["sent_per_s"])
    return [each["name"], state, ", ".join(each["models"]), *(f"{count:g}" for count in counts), each["url"]]
