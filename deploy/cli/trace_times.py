"""The table of the time of a request, or of one of its tokens, in `relayline trace`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from relayline.deploy.tables import NARROW_GAP, Trimmed, fitted
from relayline.wire.common.errors import UsageError

# What each part of a time is called, in the order of a token's way. See coordinator.observe.token_times.
WORDS = {
    "paused": "paused by a loss",
    "earlier": "until the prompt had left",
    "group": "waiting for its group",
    "deciding": "the coordinator deciding",
    "hop": "on the way to the stages",
    "queue": "in the stages' queues",
    "compute": "stages computing",
    "handle": "placing, encoding, sampling",
    "back": "on the way back",
    "taking": "the coordinator taking it",
    "rest": "not known",
}
OF_STAGES = ("hop", "queue", "compute", "handle")
INDENT = "  "
WORD_CELLS = len(INDENT) + max(map(len, WORDS.values()))  # the parts' names take two lines only on tiny terminals
PER_TOKEN = "a token"


def show_time(console: Console, stream: dict[str, Any]) -> None:
    """Print a table of a stream's time: its parts in both phases, of each token on average, and of each stage."""
    time = stream.get("time")  # a server of before did not say
    if time is None or not (time["prefill"] or time["decode"]):
        return
    decode = time["decode"]
    stages = [f"stage {stage}" for stage in range(len(decode["hop_ms"]))] if decode else []
    rows = []
    for part, words in WORDS.items():
        cells = [_whole(time[phase], part) for phase in ("prefill", "decode")]
        if any(cells):
            per_token = cells[1] / max(1, stream["tokens"] - 1)
            of_stages = decode[f"{part}_ms"] if part in OF_STAGES and decode else [0.0] * len(stages)
            rows.append([f"{INDENT}{words}", *map(_shown, (*cells, per_token, *of_stages))])
    took = [time[phase]["took_ms"] if time[phase] else 0.0 for phase in ("prefill", "decode")]
    per_token = took[1] / max(1, stream["tokens"] - 1)
    rows.append([f"{INDENT}in all", *map(_shown, (*took, per_token)), *[""] * len(stages)])
    head = "[bold]where the time went[/bold]"
    table = fitted(
        console.width - len(INDENT),
        (head, "prefill", "decode", PER_TOKEN, *stages),
        rows,
        left_out=(*reversed(stages), PER_TOKEN),
        folds={head: WORD_CELLS},
        left=(head,),
        gap=NARROW_GAP,
    )
    console.print(Trimmed(Padding(table, (0, 0, 0, len(INDENT)))))


def _shown(ms: float) -> str:
    return in_ms(ms) if ms else ""


def _whole(parts: dict[str, Any] | None, part: str) -> float:
    if parts is None:
        return 0.0
    found = parts[f"{part}_ms"]
    return float(sum(found)) if part in OF_STAGES else float(found)


def show_token(console: Console, streams: Sequence[dict[str, Any]], token: int) -> None:
    """Print the parts of one token's time in the order of its way, for each stream that has such a token.

    Raises UsageError if none has, or none is remembered.
    """
    of_streams = [(stream["id"], stream.get("token_times", [])) for stream in streams]
    found = [(name, each) for name, times in of_streams for each in times if each["token"] == token]
    if not found:
        known = [f"tokens {times[0]['token']} to {times[-1]['token']} of {name}" for name, times in of_streams if times]
        raise UsageError(f"token {token} is not remembered; known: {', '.join(known) or 'none'}")
    for name, time in found:
        console.print(
            f"[bold]{escape(name)}[/bold]  token {token}, from the row at position {time['position']}: "
            f"{in_ms(time['took_ms'])}"
        )
        at_ms = time["at_ms"]
        for words, ms in _way(time):
            if ms:
                times = f"{INDENT}at {in_ms(at_ms):>7}  {in_ms(ms):>7}  "
                lines = textwrap.wrap(words, max(1, console.width - len(times)))
                console.print(times + f"\n{' ' * len(times)}".join(lines))
                at_ms += ms


def _way(found: dict[str, Any]) -> list[tuple[str, float]]:
    way = [(WORDS[part], found[f"{part}_ms"]) for part in ("paused", "earlier", "group", "deciding")]
    last = len(found["hop_ms"]) - 1
    for stage, batch in enumerate(found["batches"]):
        handled = "placing rows and sampling" if stage == last else "placing rows and encoding"
        words = {
            "hop": f"on the way to stage {stage}",
            "queue": f"in the queue of stage {stage}",
            "compute": f"stage {stage} computing" + (f", batch {batch}" if batch else ""),
            "handle": f"stage {stage} {handled}",
        }
        way += [(words[part], found[f"{part}_ms"][stage]) for part in OF_STAGES]
    return [*way, *((WORDS[part], found[f"{part}_ms"]) for part in ("back", "taking", "rest"))]


def in_ms(value: float) -> str:
    """Return a duration for a person: three figures, seconds from 10,000 ms on."""
    if abs(value) >= 10_000:
        return f"{value / 1000:.1f} s"
    return f"{value:.0f} ms" if abs(value) >= 100 else f"{value:.1f} ms" if abs(value) >= 1 else f"{value:.2f} ms"
