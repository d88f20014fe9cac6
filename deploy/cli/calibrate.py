"""`relayline calibrate`: measure one stage artifact's cost curves and show them as a table with bars."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from relayline.deploy.cli.interrupts import EndAtOnce
from relayline.deploy.cli.options import slice_options, threads_option
from relayline.deploy.cli.paths import FileToRead
from relayline.deploy.tables import console_of_stdout, fitted
from relayline.wire.common.curve import ATTENTION_TILE_ROWS, PAD_SEARCH_ROWS
from relayline.wire.settings.setting import from_parameters
from relayline.wire.settings.table import EngineSettings

if TYPE_CHECKING:
    from relayline.wire.common.curve import CostCurve

BAR_COLUMNS = 24
CLIFF = 1.3  # a step is named if its rows cost this many times as much as in the next smaller measured one


@click.command("calibrate", short_help="Measure a stage's cost curve.")
@click.argument("artifact", type=FileToRead())
@threads_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@slice_options
def calibrate_command(artifact: Path, as_json: bool, **given: Any) -> None:
    """Measure how long ARTIFACT's native steps take, by rows and context.

    The output names each "cliff": a step whose rows cost more than 1.3 times as much as in the next smaller one. A
    stage that starts here with the same threads, lanes, context, rows and types reuses the measurement.
    """
    from relayline.stage.engine.artifact import open_unverified
    from relayline.stage.engine.native import EngineConfig, NativeEngine
    from relayline.stage.engine.place import place_of
    from relayline.stage.speed.calibrate import fresh_curves
    from relayline.stage.speed.device_turn import alone_on

    architecture = open_unverified(artifact).architecture
    settings = from_parameters(EngineSettings, given).of_architecture(architecture).resolved()
    layout, max_rows = settings.kv_layout, settings.max_rows
    config = EngineConfig(
        artifact_path=artifact,
        settings=settings,
        spare_lanes=1 if layout == "unified" else 0,
        max_wanted=min(settings.n_lanes + PAD_SEARCH_ROWS, max_rows),
    )
    device_ids = [device.id for device in place_of(settings).devices]
    # Native steps call back into Python, where an exception would be lost.
    with EndAtOnce(), NativeEngine(config) as engine, alone_on(device_ids):
        curves = fresh_curves(engine)
    if as_json:
        found = {"artifact": sizes_of(artifact), "threads": settings.n_threads, "kv_layout": layout}
        found |= {"decode": _rows(curves.decode, max_rows), "prefill": _rows(curves.prefill, max_rows)}
        found |= {"context_ns": curves.context_ns, "context_tiled_ns": curves.context_tiled_ns}
        found |= {
            "doubt": curves.doubt,
            "cliffs": {"decode": _cliffs(curves.decode), "prefill": _cliffs(curves.prefill)},
        }
        click.echo(json.dumps(found))
        return
    console = console_of_stdout()
    _show(console, "decode rows, each in a lane of its own", curves.decode, max_rows)
    _show(console, "prefill rows of one prompt", curves.prefill, max_rows)
    console.print(f"context: a row takes {curves.context_ns / 1e3:.3f} ms longer for every 1,000 tokens before it")
    if curves.context_tiled_ns:
        tiled_ms = curves.context_tiled_ns / 1e3
        together = f"in steps of {ATTENTION_TILE_ROWS} rows or more, which read the context together"
        console.print(f"  {tiled_ms:.3f} ms {'after the first row of a chunk' if curves.is_per_lane else together}")
    console.print(f"KV cells: {layout}")
    for title, curve in (("decode", curves.decode), ("prefill", curves.prefill)):
        for cliff in _cliffs(curve):
            console.print(f"cliff: {title} steps of {cliff}", soft_wrap=True)
    if curves.doubt:
        console.print(f"doubtful: {curves.doubt}", soft_wrap=True)


def _cliffs(curve: CostCurve) -> list[str]:
    """Name the measured steps whose rows cost CLIFF times as much as those of the measured step before, or more."""
    points = curve.points()
    ratios = [(few, many, ns / many / (least / few)) for (few, least), (many, ns) in itertools.pairwise(points)]
    return [
        f"{many} rows: a row costs {by:.2f} times as much as in a step of {few}"
        for few, many, by in ratios
        if by > CLIFF
    ]


def sizes_of(artifact: Path) -> dict[str, int]:
    """Return the bytes of an artifact's layers and of its head (0 where it has none), which its steps read."""
    from relayline.coordinator.model.gguf_file import open_model
    from relayline.coordinator.model.inspection import BLOCK_NAME, EMBEDDING, HEAD
    from relayline.stage.engine.artifact import open_artifact

    model, n_unread = open_model(artifact), open_artifact(artifact).n_placeholders
    blocks = [(BLOCK_NAME.match(tensor.name), tensor.size_bytes) for tensor in model.tensors.values()]
    layers = sum(size_bytes for block, size_bytes in blocks if block and int(block["layer"]) >= n_unread)
    is_last = model.integer("relayline.stage_index") == model.integer("relayline.stage_count") - 1
    head = model.tensors.get(HEAD) or model.tensors.get(EMBEDDING)
    return {"layer_bytes": layers, "head_bytes": head.size_bytes if is_last and head is not None else 0}


def _rows(curve: CostCurve, rows_max: int) -> list[dict[str, float]]:
    return [
        {"rows": rows, "step_ms": ns / 1e6, "row_ms": ns / 1e6 / rows, "runs_as": curve.padded_rows(rows, rows_max)}
        for rows, ns in curve.points()
    ]


def _show(console: Console, title: str, curve: CostCurve, rows_max: int) -> None:
    lines = _rows(curve, rows_max)
    most = max((line["row_ms"] for line in lines), default=1.0)
    rows = []
    for line in lines:
        n_rows, padded = int(line["rows"]), int(line["runs_as"])
        rows.append(
            [
                str(n_rows),
                f"{line['step_ms']:.2f}",
                f"{line['row_ms']:.3f}",
                f"{1e3 / line['row_ms']:.0f}",
                f"{padded} rows" if padded != n_rows else "",
                "█" * max(1, round(BAR_COLUMNS * line["row_ms"] / most)),
            ]
        )
    bar = "ms per row, as a bar"
    columns = ("rows", "ms per step", "ms per row", "rows/s", "runs as", bar)
    table = fitted(console.width, columns, rows, left_out=(bar, "rows/s"), left=(bar,))
    console.print(title, style="italic")
    console.print(table)
    console.print()
