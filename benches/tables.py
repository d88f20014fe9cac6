"""Writes the tables of docs/results/ and RESULTS.md and the figures of README.md from benches/results/, or checks them.

A page holds `<!-- table: NAME -->` and `<!-- end -->`. The lines between them are made from NAME.json: one table, and a
line with machine, date, commit and command. Everything else on a page is written by hand.

A row of a file has `values`, one for each of `columns` (null: not measured), or `divide`: the ids of two other rows.
`notes` names further columns, whose cells are texts of the rows.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benches" / "results"
PAGES = ROOT / "docs" / "results"
README, OVERVIEW = ROOT / "README.md", ROOT / "benches" / "RESULTS.md"
BLOCK = re.compile(r"(?s)<!-- (table|figures): ([a-z_]+) -->\n.*?<!-- end -->\n")

Numbers = Sequence[float | None]


def load(name: str) -> dict[str, Any]:
    """Return the measurement of benches/results/NAME.json."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def values_of(measurement: Mapping[str, Any]) -> list[Numbers]:
    """Return the numbers of each row, quotients computed."""
    known = {row["id"]: row["values"] for row in measurement["rows"] if "id" in row and "values" in row}
    return [
        row["values"] if "values" in row else _quotients(*(known[each] for each in row["divide"]))
        for row in measurement["rows"]
    ]


def row_of(measurement: Mapping[str, Any], row_id: str) -> Numbers:
    """Return the numbers of the row with this id."""
    index = [row.get("id") for row in measurement["rows"]].index(row_id)
    return values_of(measurement)[index]


def _quotients(above: Numbers, below: Numbers) -> Numbers:
    pairs = zip(above, below, strict=True)
    return [None if a is None or b is None else round(a / b, 2) for a, b in pairs]


def _cells(values: Numbers) -> list[str]:
    """Return a row's numbers as text, with as many decimals as the most exact of them."""
    exact = [str(value) for value in values if isinstance(value, float)]
    digits = max((len(text.partition(".")[2]) for text in exact), default=0)
    return ["" if value is None else f"{value:,.{digits}f}" for value in values]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def table(measurement: Mapping[str, Any]) -> str:
    """Return the Markdown of one measurement: its table, then where the figures come from."""
    rows, goals = measurement["rows"], [row.get("goal", "") for row in measurement["rows"]]
    last = [*(["goal"] if any(goals) else []), *measurement.get("notes", ())]
    text = _line([measurement["corner"], *measurement["columns"], *last])
    text += _line(["---", *["--:"] * len(measurement["columns"]), *["---"] * len(last)])
    for row, values in zip(rows, values_of(measurement), strict=True):
        text += _line([row["label"], *_cells(values), *(row.get(name, "") for name in last)])
    machine = load("machines")[measurement["machine"]]
    command = measurement["command"]
    command = command if command.startswith(("a script", "in each row")) else f"`{command}`"
    return f"{text}\nMachine: {machine}. {measurement['date']}, {measurement['commit']}. Command: {command}\n"


def figures(name: str) -> str:
    """Return what README.md says of NAME, the comparison with the peers."""
    measurement = load(name)
    at = {streams: index for index, streams in enumerate(measurement["columns"])}

    def listed(row: Numbers, *streams: str) -> str:
        picked = [f"{row[at[each]]:.1f}" for each in streams]
        return f"{', '.join(picked[:-1])} and {picked[-1]}"

    against_rpc, against_unsplit = row_of(measurement, "against_rpc"), row_of(measurement, "against_unsplit")
    same_kernels = row_of(load(f"{name}_elsewhere"), "with_our_kernels")
    return (
        "On two cores with AVX-512, two stages run a 1B shape in Q4_0. With 1, 4 and 32 streams they decode\n"
        f"{listed(against_rpc, '1', '4', '32')} times as fast as llama.cpp's RPC. "
        "With 1, 8, 16 and 32 streams they make\n"
        f"{listed(against_unsplit, '1', '8', '16', '32')} times the tokens of one unsplit llama-server. "
        "If that server has relayline's kernels\n"
        f"too, it is {listed(same_kernels, '8', '16', '32')} times with 8, 16 and 32 streams.\n"
    )


def filled(text: str) -> str:
    """Return a page with every marked block written again."""

    def made(found: re.Match[str]) -> str:
        kind, name = found.groups()
        body = figures(name) if kind == "figures" else table(load(name))
        return f"<!-- {kind}: {name} -->\n{body}<!-- end -->\n"

    return BLOCK.sub(made, text)


def main() -> None:
    """Fill the pages, or name those that differ from their figures."""
    parser = argparse.ArgumentParser(description="Make the tables of docs/results/ from benches/results/.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a page differs")
    check = parser.parse_args().check
    pages = [README, OVERVIEW, *sorted(PAGES.glob("*.md"))]
    stale = [path for path in pages if filled(path.read_text()) != path.read_text()]
    if check and stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"tables differ from benches/results: {names}; run `python -m benches.tables`")
    for path in stale:
        path.write_text(filled(path.read_text()))
    print(f"{len(pages)} pages have the figures of benches/results")


if __name__ == "__main__":
    main()
