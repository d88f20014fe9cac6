"""`relayline trace`: the life of one request, stage by stage, from the memory of the coordinator and the stages."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from relayline.deploy.cli.console_http import fetch, key_option, url_option
from relayline.deploy.cli.options import IntRange, Name
from relayline.deploy.cli.trace_times import in_ms, show_time, show_token
from relayline.deploy.tables import NARROW_GAP, fitted, hung, width_of_terminal
from relayline.wire.common.errors import UsageError
from relayline.wire.common.texts import counted, plural
from relayline.wire.common.units import bytes_text
from relayline.wire.telemetry.names import EVENT_RESUMED

ROWS_MAX = 24  # batches shown per stage unless --all: the first and the last of them
MATES_SHOWN = 8
INDENT = "    "  # of the batches below their stage
COLUMNS = ("at", "phase", "pos", "rows", "pad", "frames", "wait", "step", "predicted", "closed by", "with")
LEFT_OUT = ("phase", "frames", "pad", "closed by", "predicted", "rows", "pos")  # on narrow terminals, in this order
LEFT = ("phase", "closed by", "with")
MATES_CELLS = 9  # of the column "with" at least; more names take more lines
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@click.command("trace", short_help="Show one request's life, stage by stage.")
@click.argument("request_id", type=Name(), required=False)
@click.option("--last", is_flag=True, help="The request that ended last.")
@click.option("--all", "show_all", is_flag=True, help=f"Show every batch, not only the first and last {ROWS_MAX // 2}.")
@click.option("--token", type=IntRange(min=0), help="Show where this token's time went; 0 is the first.")
@click.option("--json", "as_json", is_flag=True, help="Print the coordinator's answer as JSON.")
@url_option
@key_option
def trace_command(
    request_id: str | None,
    last: bool,
    show_all: bool,
    token: int | None,
    as_json: bool,
    url: str,
    api_key: str,
    **_: Any,
) -> None:
    """Show the life of one request. REQUEST_ID is the answer's id, or its x-request-id header.

    First this shows what images and audio took, if there are any. Then it shows where the time of prefill and decode
    went: computing and queues of the stages, the ways between them, the coordinator. Then follow the request's batches
    at every stage: the other requests in them, how long frames waited, why the batch closed, and the step's time
    against the prediction. With --token it shows the way of one token alone. It needs no tracing backend; the processes
    remember recent requests themselves.
    """
    if (request_id is None) == (not last):
        raise UsageError("give either a REQUEST_ID or --last")
    wanted = "last" if request_id is None else urllib.parse.quote(request_id.encode(errors="surrogateescape"), safe="")
    found = fetch(url, f"/v1/traces/{wanted}", api_key, ("request_id", "streams"))
    if as_json:
        click.echo(json.dumps(found))
        return
    console = Console(width=width_of_terminal(), highlight=False)
    if token is None:
        show(console, found, rows_max=None if show_all else ROWS_MAX)
        return
    show_token(console, found["streams"], token)


def show(console: Console, found: dict[str, Any], rows_max: int | None) -> None:
    """Print a trace as GET /v1/traces/{id} gives it; at most `rows_max` batches per stage."""
    state = "running" if found["is_running"] else str(found["status"] or "no answer")
    error = f"  [red]{escape(found['error'])}[/red]" if found["error"] else ""
    trace = f"  trace {found['trace_id']}" if found["trace_id"] else ""
    _say(
        console, f"[bold]{escape(found['id'] or found['request_id'])}[/bold]  {escape(found['route'])}  {state}{error}"
    )
    _say(
        console,
        f"x-request-id {escape(found['request_id'])}  model {escape(found['model'])}  "
        f"{counted(found['prompt_tokens'], 'prompt token')}  took {in_ms(found['duration_ms'])}{trace}",
    )
    for line in _files_of(found.get("media", []), rows_max):
        _say(console, line)
    for stream in found["streams"]:
        _show_stream(console, stream, found, rows_max)


def _files_of(files: list[dict[str, Any]], rows_max: int | None) -> Iterator[str]:
    """Yield a line for each image or audio file: its size, and the work on it."""
    for file in _ends(files, rows_max):
        if file is None:
            yield "  ..."
            continue
        steps = [f"{step['step']} {in_ms(step['took_ms'])}" for step in file["steps"]]
        kept = ["its rows were there from an earlier request"] if file["kept"] else []
        wait = [f"waited {in_ms(file['wait_ms'])}"] if file["steps"] else []
        facts = [bytes_text(file["bytes"])] if file["bytes"] else []
        facts += [counted(file["rows"], "row")] if file["rows"] else []
        yield "  ".join([f"  {file['kind']}", ", ".join(facts), *steps, *wait, *kept])


def _say(console: Console, text: str) -> None:
    console.print(hung(text, console.width, INDENT))


def _show_stream(console: Console, stream: dict[str, Any], found: dict[str, Any], rows_max: int | None) -> None:
    console.print(f"\n[bold]{escape(stream['id'])}[/bold]  {_outcome(stream)}")
    if stream["shared_with"]:
        console.print(f"  shares the session of {escape(stream['shared_with'])}: the same request, computed once")
    phases = [
        ("tokenise", found["tokenize_ms"]),
        ("media", found.get("media_ms")),  # a server of before images in traces does not say
        ("grammar", found.get("grammar_ms") or None),
        ("queue", stream["queue_ms"]),
        ("prefill", stream["prefill_ms"]),
        ("decode", stream["decode_ms"]),
    ]
    _say(console, "  " + "  ".join(f"{name} {in_ms(value)}" for name, value in phases if value is not None))
    for line in _pace_of(stream):
        _say(console, f"  {line}")
    for event in stream["events"]:
        detail = f": {escape(event['detail'])}" if event["detail"] else ""
        console.print(f"  [yellow]{event['name']} at {in_ms(event['at_ms'])}{detail}[/yellow]")
    if any(event["name"] == EVENT_RESUMED for event in stream["events"]):
        console.print("  the sums begin at the last resumption; a restarted stage has forgotten earlier batches")
    passes = dict.fromkeys(
        batch["trace_id"] for stage in stream["stages"] for batch in stage.get("batches", ()) if batch.get("trace_id")
    )
    if passes:
        console.print(f"  passes in {counted(len(passes), 'trace')}, the last {list(passes)[-1]}")
    show_time(console, stream)
    names: dict[str, str] = {}
    for stage in stream["stages"]:
        _show_stage(console, stage, names, rows_max)
    if names:
        console.print("  [bold]batch mates[/bold]")
    for mate, name in names.items():
        console.print(f"    {name}  {escape(mate)}", no_wrap=True, overflow="ignore", crop=False)


def _outcome(stream: dict[str, Any]) -> str:
    how = stream["finish_reason"] or "running"
    if how == "length" and stream["ttft_ms"] is None:  # a vector or a score
        return "no tokens"
    error = f" ({escape(stream['error'])})" if stream["error"] else ""
    return f"{counted(stream['tokens'], 'token')}, {how}{error}"


def _pace_of(stream: dict[str, Any]) -> Iterator[str]:
    """Yield how fast its tokens came, how its prompt was sent, and what drafts brought."""
    if stream["ttft_ms"] is not None:
        gaps, between = stream["itl_ms"], ""
        if gaps:
            between = f"  between tokens mean {in_ms(gaps['mean'])}, p95 {in_ms(gaps['p95'])}, max {in_ms(gaps['max'])}"
        yield f"first token after {in_ms(stream['ttft_ms'])}{between}"
    if n_chunks := len(stream["chunks"]):
        n_rows = sum(chunk["rows"] for chunk in stream["chunks"])
        yield f"prompt sent in {counted(n_chunks, 'chunk')}, {counted(n_rows, 'row')}"
    if stream.get("drafted_tokens"):  # a server of before drafts does not say
        yield f"{counted(stream['drafted_tokens'], 'draft token')}, {stream['accepted_tokens']} of them accepted"


def _show_stage(console: Console, stage: dict[str, Any], names: dict[str, str], rows_max: int | None) -> None:
    if not stage["up"]:
        console.print(f"  [red]stage {stage['stage']} does not answer[/red]")
        return
    batches = stage["batches"]
    _say(console, f"  [bold]stage {stage['stage']}[/bold]  {_summary(stage, len(batches))}")
    if not batches:
        return
    columns = (f"{INDENT}batch", *COLUMNS)
    rows = [
        _row(batch, names) if batch is not None else [f"{INDENT}...", *[""] * len(COLUMNS)]
        for batch in _ends(batches, rows_max)
    ]
    console.print(
        fitted(
            console.width,
            columns,
            rows,
            left_out=LEFT_OUT,
            folds={"with": MATES_CELLS},
            left=(columns[0], *LEFT),
            gap=NARROW_GAP,
        )
    )


def _summary(stage: dict[str, Any], n_batches: int) -> str:
    total = stage.get("summary")
    if total is None:
        return f"{counted(n_batches, 'batch', 'batches')} remembered" + (", none of them" if not n_batches else "")
    n_steps = total["prefill_steps"] + total["decode_steps"]
    missing = f", {n_steps - n_batches} of its batches forgotten" if n_steps > n_batches else ""
    return (
        f"{total['prefill_steps']} prefill and {counted(total['decode_steps'], 'decode step')} of "
        f"{total['batch_rows_mean']:g} {plural(total['batch_rows_mean'], 'row')} (max {total['batch_rows_max']}), "
        f"waited {in_ms(total['prefill_wait_ms'] + total['decode_wait_ms'])} "
        f"(max {in_ms(total['wait_max_ms'])}), computed {in_ms(total['decode_ms'])}{missing}"
    )


def _ends(batches: list[dict[str, Any]], rows_max: int | None) -> list[dict[str, Any] | None]:
    if rows_max is None or len(batches) <= rows_max:
        return list(batches)
    return [*batches[: rows_max // 2], None, *batches[-rows_max // 2 :]]


def _row(batch: dict[str, Any], names: dict[str, str]) -> list[str]:
    mates = [names.setdefault(mate, _letters(len(names))) for mate in batch["mates"][:MATES_SHOWN]]
    more = len(batch["mates"]) - len(mates)
    return [
        f"{INDENT}{batch['id']}",
        in_ms(batch["at_ms"]),
        batch["phase"],
        str(batch["position"]),
        str(batch["rows"]),
        str(batch["padded_rows"] or ""),
        str(batch["frames"]),
        in_ms(batch["wait_ms"]),
        in_ms(batch["decode_ms"]),
        in_ms(batch["predicted_ms"]) if batch["predicted_ms"] is not None else "",
        batch["close_reason"],
        " ".join(mates) + (f" and {more} more" if more else ""),
    ]


def _letters(number: int) -> str:
    """Return a short name for the batch mate with this number: A to Z, then AA, AB and so on."""
    name = ""
    while number >= 0:
        number, letter = divmod(number, len(LETTERS))
        name = LETTERS[letter] + name
        number -= 1
    return name
