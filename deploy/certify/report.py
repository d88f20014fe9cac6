"""Shows what `certify` found: one JSON object, or a table with the noise that it was judged by."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console

from relayline.deploy.certify.compare import Comparison, Disagreement
from relayline.deploy.certify.run import CutResult, Report
from relayline.deploy.tables import console_of_stdout, fitted


def as_json(report: Report) -> str:
    """Return the report as one JSON object. Differences are in logits and in deviations, divergences in nats.

    A figure is null if it is not finite, or if a pipeline did not run.
    """
    config, noise = report.config, report.noise
    fields: dict[str, Any] = {
        "model": str(config.model),
        "architecture": report.facts.architecture,
        "layers": report.facts.n_layers,
        "wire": config.wire,
        "kv_layout": config.engine.layout_used,
        "verdict": _verdict(report.passed),
        "seeds": config.seeds,
        "decode_steps": config.n_steps,
        "noise": {
            "max_relative": noise.max_relative,
            "mean_kl": noise.mean_kl,
            "logit_deviation": noise.deviation,
            "again": _comparison(noise.again),
            "by_shape": {name: _comparison(shape) for name, shape in noise.by_shape.items()},
        },
        "tolerance": report.tolerance,
        "cuts": [_cut(result) for result in report.results],
    }
    return msgspec.json.format(msgspec.json.encode(fields), indent=2).decode()


def _verdict(passed: bool) -> str:
    return "pass" if passed else "fail"


def _cut(result: CutResult) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "cuts": result.cuts,
        "verdict": _verdict(result.problem is None),
        "problem": result.problem,
        "sessions_per_step_max": result.sessions_per_step_max,
    }
    for name, comparison in (("alone", result.alone), ("every", result.every)):
        compared = _comparison(comparison) if comparison else dict.fromkeys(_COMPARED)
        fields |= compared if name == "every" else {name: compared}
    return fields


def _comparison(comparison: Comparison) -> dict[str, Any]:
    values = (
        comparison.n_rows,
        comparison.max_abs,
        comparison.max_relative,
        comparison.mean_kl,
        comparison.agreement,
        comparison.n_agree,
        comparison.first,
        comparison.widest,
    )
    return dict(zip(_COMPARED, values, strict=True))


_COMPARED = (
    "rows",
    "max_abs",
    "max_relative",
    "mean_kl",
    "top1_agreement",
    "top1_agree",
    "first_disagreement",
    "widest_disagreement",
)


def print_report(report: Report) -> None:
    """Print a line about the model, one row per pipeline, the noise, and the verdict."""
    console = console_of_stdout()
    config, facts, noise = report.config, report.facts, report.noise
    held = f"{config.wire} wire, {config.engine.layout_used} KV cells, {noise.again.n_rows} rows per cut"
    what = f"{facts.architecture}, {facts.n_layers} layers, {held}"
    _say(console, f"{config.model}: {what}; differences in standard deviations of its logits ({noise.deviation:.3g})")
    rows = []
    for result in report.results:
        mark = "[green]pass[/]" if result.problem is None else "[bold red]FAIL[/]"
        rows.append([_listed(result), *_cells(result), mark])
    columns = ("cut", "alone", "largest difference", "in logits", "mean KL", "same top token", "")
    console.print(fitted(console.width, columns, rows, left_out=("in logits", "mean KL", "same top token")))
    for result in report.results:
        if result.every is not None and result.every.first is not None:
            _say(console, f"cut {_listed(result)}: first disagreement: {_text_of(result.every.first)}")
    shapes = ", ".join(f"{name} {shape.max_relative:.1e}" for name, shape in noise.by_shape.items())
    _say(
        console,
        f"float noise of the unsplit model: run again {noise.again.max_relative:.1e}; in other batch shapes "
        f"{noise.max_relative:.1e} ({shapes}), mean KL {noise.mean_kl:.1e}",
    )
    _say(console, f"allowed: {_granted(report)}")
    for result in report.results:
        if result.problem is not None:
            _say(console, f"cut {_listed(result)}: {result.problem}", "bold red")
    n_passed = sum(result.problem is None for result in report.results)
    style = "bold green" if report.passed else "bold red"
    _say(console, f"{_verdict(report.passed)}: {n_passed} of {len(report.results)} may be trusted", style)


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, soft_wrap=True, markup=False, highlight=False)


def _listed(result: CutResult) -> str:
    return ",".join(map(str, result.cuts))


def _granted(report: Report) -> str:
    tolerance = report.tolerance
    if report.config.wire != "f32":
        return f"another top token where the unsplit model's margin is at most {tolerance.margin:.2g}"
    alone = tolerance.max_relative if tolerance.alone_relative is None else tolerance.alone_relative
    return f"alone {alone:.1e}, otherwise {tolerance.max_relative:.1e}, mean KL {tolerance.mean_kl:.1e}"


def _cells(result: CutResult) -> tuple[str, str, str, str, str]:
    every, alone = result.every, result.alone
    if every is None or alone is None:
        return "", "did not run", "", "", ""
    return (
        f"{alone.max_relative:.1e}",
        f"{every.max_relative:.1e}",
        f"{every.max_abs:.2g}",
        f"{every.mean_kl:.1e}",
        f"{every.n_agree}/{every.n_rows}",
    )


def _text_of(disagreement: Disagreement) -> str:
    tokens = f"{disagreement.found_token} instead of {disagreement.reference_token}"
    margin = f"margin {disagreement.relative_margin:.1e} ({disagreement.margin:.2g} in logits)"
    return f"{disagreement.session}, position {disagreement.position}: {tokens}, {margin}"
