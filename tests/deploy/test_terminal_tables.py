"""Tables for the terminal: every figure stays whole at every width, and what says least goes first."""

from __future__ import annotations

import io
import os

import pytest
from click.testing import CliRunner
from rich.console import Console

from relayline.deploy.cli.bench import LEFT_OUT, bench_table
from relayline.deploy.cli.load import Summary
from relayline.deploy.cli.main import relayline
from relayline.deploy.tables import fitted, width_of_terminal
from relayline.deploy.testing.paths import DEMO_MODEL

COLUMNS = ("name", "tokens per second", "share", "why")
ROWS = [["a", "12345.6", "25%", "a reason of several words"], ["bb", "1.0", "100%", ""]]


def drawn(width: int) -> list[str]:
    out = io.StringIO()
    table = fitted(width, COLUMNS, ROWS, left_out=("share",), folds={"why": 8}, left=("name", "why"))
    Console(file=out, width=width).print(table)
    return out.getvalue().splitlines()


def test_a_wide_terminal_shows_everything_on_one_line() -> None:
    assert drawn(60)[:2] == [
        "name  tokens per second  share  why",
        "a               12345.6    25%  a reason of several words",
    ]


def test_words_take_more_lines_then_headings_then_columns_go() -> None:
    assert drawn(46)[0].split() == ["name", "tokens", "per", "second", "share", "why"]
    assert [line.split() for line in drawn(36)[:3]] == [["tokens"], ["per"], ["name", "second", "share", "why"]]
    assert "share" not in " ".join(drawn(22))
    for width in (22, 30, 36, 46, 60):
        lines = drawn(width)
        assert any("12345.6" in line for line in lines), width
        assert all(len(line) <= width for line in lines)
        assert "".join("".join(lines).split()).count("reason") == 1


def test_a_heading_that_takes_lines_keeps_its_indent() -> None:
    """A first column of rows below a title begins where the rows begin."""
    out, columns = io.StringIO(), ("    batch of rows", "tokens per second")
    Console(file=out, width=24).print(fitted(24, columns, [["    0:1", "12345.6"]], left=columns[:1]))
    assert out.getvalue().splitlines() == [
        "    batch   tokens",
        "    of         per",
        "    rows    second",
        "    0:1    12345.6",
    ]


@pytest.mark.parametrize("width", [22, 60])
def test_lines_end_with_their_last_word(width: int) -> None:
    """Also where a terminal shows colours, which begin and end around the words."""
    assert all(line == line.rstrip() and line for line in drawn(width))
    out, columns = io.StringIO(), ("name", "a long heading")
    table = fitted(width, columns, [["[bold]a[/bold]", "[red]b[/red]"]], left=columns)
    Console(file=out, width=width, force_terminal=True, color_system="standard").print(table)
    assert out.getvalue().splitlines()[-1] == "\x1b[1ma\x1b[0m     \x1b[31mb\x1b[0m"


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_what_is_piped_has_no_blanks_at_its_ends(command: str) -> None:
    done = CliRunner().invoke(relayline, [command, str(DEMO_MODEL)])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [line.rstrip() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_figures_of_a_load_are_whole_at_every_width(width: int) -> None:
    figures = {"p50": 1234.5, "p95": 4321.9, "mean": 111.1, "p99": 765.4}
    summary = Summary(128, 127, 9_999, 3.0, 2468.1, 3579.2, figures, figures, "too short")
    out = io.StringIO()
    Console(file=out, width=width).print(bench_table([("1024", summary)], width))
    text = out.getvalue()
    assert "…" not in text
    row = text.splitlines()[-1].split()
    whole = ["1024", "2468.1", "3579.2", "1234.5", "4321.9", "111.1", "1234.5", "4321.9", "765.4", "127/128"]
    assert row == whole if width >= 80 else {row[0], row[-1]} == {"1024", "127/128"} and set(row) <= set(whole)
    assert len(row) >= len(whole) - len(LEFT_OUT)


@pytest.mark.parametrize(("columns", "width"), [("", 120), ("44", 44), ("0", 120), ("-3", 120), ("wide", 120)])
def test_the_width_of_a_pipe_is_what_columns_says(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(os, "isatty", lambda number: False)
    assert width_of_terminal() == width
