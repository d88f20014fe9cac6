"""Draws one request from its spans: its phases, its batches at every stage, and the other requests in them.

    python -m benches.waterfall --out FILE.png               # runs the demo model with a few streams and draws one
    python -m benches.waterfall --spans FILE --out FILE.png  # draws from OTLP JSON that a collector wrote

A trace viewer shows one batch at a time; this is one picture. FILE is OTLP JSON, one export request per line (the
collector's `file` exporter) or one object (Jaeger's answer at /api/v3/traces); --save writes such a file.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import collections
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benches import interrupt
from relayline.deploy.testing.otlp_receiver import SERVER, StoredSpan, receiving, spans_of
from relayline.deploy.testing.trace_rebuild import Batch, Rebuilt, Session, rebuild
from relayline.wire.telemetry import names

N_TOKENS = 48
ZOOM_TOKENS = 6  # of the lower picture, from the middle of the answer
_ID_KEYS = ("traceId", "spanId", "parentSpanId")


# --- spans in files ---------------------------------------------------------------------------------------------------


def _ids(value: Any, change: Any) -> Any:
    """Return JSON with every id changed: OTLP writes ids in hex, protobuf's own JSON wants base64."""
    if isinstance(value, list):
        return [_ids(item, change) for item in value]
    if isinstance(value, dict):
        return {key: change(item) if key in _ID_KEYS else _ids(item, change) for key, item in value.items()}
    return value


def to_line(request: ExportTraceServiceRequest) -> str:
    """Return one export request as a line of OTLP JSON."""
    found = json_format.MessageToDict(request, use_integers_for_enums=True)
    return json.dumps(_ids(found, lambda text: base64.b64decode(text).hex()), separators=(",", ":"))


def spans_in(text: str) -> list[StoredSpan]:
    """Return the spans of OTLP JSON: lines of export requests, or one reply of Jaeger's api_v3."""
    try:
        documents = [json.loads(text)]
    except ValueError:
        documents = [json.loads(line) for line in text.splitlines() if line.strip()]
    spans: list[StoredSpan] = []
    for document in documents:
        found = _ids(document.get("result", document), lambda text: base64.b64encode(bytes.fromhex(text)).decode())
        spans += spans_of(json_format.ParseDict(found, ExportTraceServiceRequest(), ignore_unknown_fields=True))
    return spans


# --- the batches to draw
# ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """One batch as it is drawn; times in ms since the request began."""

    stage: int
    start_ms: float
    end_ms: float
    wait_ms: float  # of the request's frame; 0 for a batch without it
    n_rows: int
    positions: tuple[int, ...]  # first positions of the request's frames; empty for a batch without it


def _taken_ns(span: StoredSpan) -> int:
    """Return when a batch stopped waiting; its span begins when its first row arrived."""
    return next((event.at_ns for event in span.events if event.name == names.EVENT_CLOSED), span.start_ns)


def bars_of(found: Rebuilt, session: Session, zero_ns: int) -> list[Bar]:
    """Return every batch of the run, in time order."""

    def bar(batch: Batch) -> Bar:
        mine = [member for member in batch.members if member.session == session.session]
        return Bar(
            batch.stage,
            (_taken_ns(batch.span) - zero_ns) / 1e6,
            (batch.span.end_ns - zero_ns) / 1e6,
            max((member.wait_ns for member in mine), default=0) / 1e6,
            batch.n_rows,
            tuple(member.position for member in mine),
        )

    return sorted(map(bar, found.batches.values()), key=lambda each: each.start_ms)


def hops(bars: Sequence[Bar]) -> Iterator[tuple[Bar, Bar]]:
    """Yield the pairs of batches that one frame of the request went through, from a stage to the next."""
    by_place = {(bar.stage, position): bar for bar in bars for position in bar.positions}
    for (stage, position), bar in by_place.items():
        after = by_place.get((stage + 1, position))
        if after is not None:
            yield bar, after


def chosen(found: Rebuilt, request_id: str) -> Session:
    """Return the request to draw: the one asked for, else the one with the most batches (the last of equals)."""
    if request_id:
        return next(session for session in found.sessions if session.request_id == request_id)
    n_batches = collections.Counter(
        name for batch in found.batches.values() for name in {member.session for member in batch.members}
    )
    return max(found.sessions, key=lambda each: (n_batches[each.session], each.decode_span.end_ns))


# --- drawing ----------------------------------------------------------------------------------------------------------


def _lane(
    axis: Any, bars: Sequence[Bar], n_stages: int, window: tuple[float, float], most: int, *, is_close: bool
) -> None:
    """Draw the batches of every stage; `most` rows have the darkest colour."""
    from matplotlib import colormaps

    colour = colormaps["viridis_r"]
    seen = [bar for bar in bars if bar.end_ms >= window[0] and bar.start_ms <= window[1]]
    for bar in seen:
        y, width = n_stages - bar.stage, bar.end_ms - bar.start_ms
        if not bar.positions:
            axis.barh(y, width, left=bar.start_ms, height=0.5, color="0.88", linewidth=0)
            continue
        shade = colour(min(1.0, 0.15 + 0.85 * bar.n_rows / most))
        axis.barh(y, width, left=bar.start_ms, height=0.5, color=shade, linewidth=0)
        if is_close:
            axis.plot([bar.start_ms - bar.wait_ms, bar.start_ms], [y, y], color="crimson", linewidth=1.6, zorder=3)
            ink = "white" if sum(shade[:3]) < 1.5 else "black"
            middle = (bar.start_ms + bar.end_ms) / 2
            axis.text(middle, y, str(bar.n_rows), ha="center", va="center", fontsize=7, color=ink, clip_on=True)
    if is_close:
        for left, right in hops(seen):
            ends = [left.end_ms, right.start_ms - right.wait_ms]
            axis.plot(ends, [n_stages - left.stage, n_stages - right.stage], color="0.35", linewidth=0.8, zorder=2)
    axis.set_xlim(*window)
    axis.set_xlabel("ms from the request's begin")
    axis.grid(visible=True, axis="x", alpha=0.25)


def _phases(axis: Any, spans: Sequence[StoredSpan], zero_ns: int, y: float) -> None:
    colours = {names.SPAN_QUEUE: "0.6", names.SPAN_PREFILL: "tab:orange", names.SPAN_DECODE: "tab:blue"}
    for span in spans:
        if span.name in colours:
            left, width = (span.start_ns - zero_ns) / 1e6, (span.end_ns - span.start_ns) / 1e6
            axis.barh(y, width, left=left, height=0.4, color=colours[span.name], label=span.name)
    axis.legend(loc="upper left", fontsize=7, ncols=3, bbox_to_anchor=(0, 1.12), frameon=False)


def _zoom(session: Session, bars: Sequence[Bar]) -> tuple[float, float]:
    """Return the times of ZOOM_TOKENS tokens from the middle of the answer."""
    rows = session.sampled_rows
    n_tokens = min(ZOOM_TOKENS, len(rows))
    middle = rows[(len(rows) - n_tokens) // 2 :][:n_tokens]
    mine = [bar for bar in bars if set(bar.positions) & set(middle)]
    return min(bar.start_ms - bar.wait_ms for bar in mine) - 0.2, max(bar.end_ms for bar in mine) + 0.2


def draw(spans: Sequence[StoredSpan], out: Path, request_id: str = "") -> str:
    """Draw one request into a PNG or SVG file; returns a line that describes it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    found = rebuild(spans)
    session = chosen(found, request_id)
    own = [span for span in spans if span.trace_id == session.trace_id]
    root = next(span for span in own if span.kind == SERVER)
    n_stages = 1 + max(stage for stage, _ in found.batches)
    bars = bars_of(found, session, root.start_ns)
    mine = [bar for bar in bars if bar.positions]
    # Prompts come in large batches: shades are for those of the answer.
    most = max(bar.n_rows for bar in mine if min(bar.positions) >= session.n_prompt)
    stages = [f"stage {index}" for index in range(n_stages)]
    figure, (whole, close) = pyplot.subplots(2, 1, figsize=(13, 6.6), height_ratios=(n_stages + 1, n_stages))
    _phases(whole, own, root.start_ns, n_stages + 1)
    _lane(whole, bars, n_stages, (0.0, (root.end_ns - root.start_ns) / 1e6), most, is_close=False)
    whole.set_yticks([n_stages + 1, *range(n_stages, 0, -1)], ["request", *stages])
    _lane(close, bars, n_stages, _zoom(session, bars), most, is_close=True)
    close.set_yticks([*range(n_stages, 0, -1)], stages)
    close.set_title(
        f"{ZOOM_TOKENS} tokens of it: each bar is one native decode with its rows, red what the frame waited, "
        "grey lines the hop, pale bars batches without it",
        fontsize=9, loc="left",
    )  # fmt: skip
    title = (
        f"{session.n_prompt} prompt and {session.n_generated} generated tokens in {len(mine)} batches "
        f"of {n_stages} stages, up to {max(bar.n_rows for bar in mine)} rows"
    )
    figure.suptitle(f"one request among {len(found.sessions)}: {title}", fontsize=10)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=100)
    pyplot.close(figure)
    return title


# --- the traced run -------------------------------------------------------------------------------------------------


async def record() -> list[ExportTraceServiceRequest]:
    """Run the demo model over three stages with a few streams, traced; returns the exported spans."""
    from relayline.deploy.testing.traced_pipeline import PROMPTS, ask_all, traced_pipeline

    with tempfile.TemporaryDirectory(prefix="relayline-waterfall-") as directory, receiving() as receiver:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.grpc_endpoint}
        with traced_pipeline(Path(directory) / "split", environment, level="frames") as traced:
            await ask_all(traced, PROMPTS[:2], 8)  # first steps build graphs and touch pages
            receiver.wait_for(lambda spans: sum(span.name == names.SPAN_DECODE for span in spans) == 2)
            receiver.clear()
            await ask_all(traced, PROMPTS[:6], N_TOKENS)
            receiver.wait_for(lambda spans: sum(span.name == names.SPAN_DECODE for span in spans) == 6)
        return receiver.requests  # the processes have ended and flushed their spans


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.waterfall", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spans", type=Path, default=None, help="OTLP JSON to draw from")
    parser.add_argument("--save", type=Path, default=None, help="file for the spans of the run")
    parser.add_argument("--request", default="", help="id of the request to draw [default: the one in most batches]")
    parser.add_argument("--out", type=Path, required=True, help="PNG or SVG file")
    return parser.parse_args()


async def main(options: argparse.Namespace) -> int:
    """Draw the pictures that the command line asks for."""

    def work(text: str) -> str:
        if options.save:
            options.save.write_text(text)
        return draw(spans_in(text), options.out, options.request)

    if options.spans:
        text = await asyncio.to_thread(options.spans.read_text)
    else:
        text = "".join(to_line(request) + "\n" for request in await record())
    print(f"{options.out}: {await asyncio.to_thread(work, text)}")
    return 0


if __name__ == "__main__":
    sys.exit(interrupt.run(main(parse())))
