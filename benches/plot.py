"""The plots next to the tables, as PNG. matplotlib is a development extra: without it a note is printed instead."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FIGURES = (
    ("tok_s", "tokens / s", "log"),
    ("ttft_p50_ms", "TTFT ms (p50; thin: p95)", "log"),
    ("itl_p50_ms", "ITL ms (p50; thin: p95, dotted: p99)", "log"),
    ("rows_mean", "rows per step (of the average row)", "log"),
    ("overlap", "share of busy time with 2+ stages computing", "linear"),
    ("computing_mean", "stages computing at once (mean)", "linear"),
)
COMPANIONS = {"ttft_p50_ms": (("ttft_p95_ms", "-"),), "itl_p50_ms": (("itl_p95_ms", "-"), ("itl_p99_ms", ":"))}

Panel = tuple[str, str, dict[str, tuple[Sequence[float], Sequence[float]]]]  # title, y scale, label -> (x, y)


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError:
        print("note: matplotlib is not installed, no plot was drawn (pip install 'relayline[dev]')", file=sys.stderr)
        return None
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _of(points: Sequence[dict[str, Any]], system: str, name: str) -> list[dict[str, Any]]:
    return sorted((p for p in points if p["system"] == system and name in p["median"]), key=lambda p: p["streams"])


def _series(points: Sequence[dict[str, Any]], system: str, name: str) -> tuple[list[int], list[float]]:
    mine = _of(points, system, name)
    return [point["streams"] for point in mine], [point["median"][name] for point in mine]


def compare(results: dict[str, Any], labels: dict[str, str], path: Path) -> bool:
    """Draw every figure of the comparison over the number of streams. Returns whether there was something to draw."""
    points = [point for point in results["points"] if point["part"] == "streams"]
    pyplot = _pyplot()
    if pyplot is None or not points:
        return False
    figure, axes = pyplot.subplots(2, 3, figsize=(17, 9))
    for axis, (name, title, scale) in zip(axes.flat, FIGURES, strict=True):
        for index, (system, label) in enumerate(labels.items()):
            streams, values = _series(points, system, name)
            if not streams:
                continue
            axis.plot(streams, values, marker="o", color=f"C{index}", label=label)
            low, high = zip(*(point["spread"][name] for point in _of(points, system, name)), strict=True)
            axis.fill_between(streams, low, high, color=f"C{index}", alpha=0.15, linewidth=0)
            for companion, style in COMPANIONS.get(name, ()):
                axis.plot(*_series(points, system, companion), style, color=f"C{index}", linewidth=0.8)
        axis.set_title(title)
        axis.set_xscale("log", base=2)
        axis.set_yscale(scale)
        axis.set_xticks(results["plan"]["streams"], list(map(str, results["plan"]["streams"])))
        axis.set_xlabel("streams")
        axis.grid(visible=True, which="both", alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    plan = results["plan"]
    figure.suptitle(f"{plan['shape']['name']} {plan['mix']}, {len(plan['cores'])} cores, {results['machine']['cpu']}")
    _save(pyplot, figure, path)
    return True


def lines(path: Path, title: str, panels: Sequence[Panel]) -> bool:
    """Draw panels side by side, x in powers of two. Returns whether they were drawn."""
    pyplot = _pyplot()
    if pyplot is None:
        return False
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 5), squeeze=False)
    for axis, (heading, scale, series) in zip(axes.flat, panels, strict=True):
        for label, (x, y) in series.items():
            axis.plot(x, y, marker="o", label=label)
        axis.set_title(heading)
        axis.set_xscale("log", base=2)
        axis.set_yscale(scale)
        axis.set_xlabel("rows")
        axis.grid(visible=True, which="both", alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(title)
    _save(pyplot, figure, path)
    return True


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
