"""Tables that fit the terminal: no figure in them is ever cut, columns that say least are left out."""

from __future__ import annotations

import dataclasses
import os
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

WIDTH_ELSEWHERE = 120  # of output that goes to no terminal
WIDE_GAP, NARROW_GAP = 2, 1  # cells between two columns


def width_of_terminal() -> int | None:
    """Return a width for output that goes to no terminal; None leaves it to rich."""
    if os.isatty(1):
        return None
    columns = os.environ.get("COLUMNS", "")
    return (int(columns) if columns.isdecimal() else 0) or WIDTH_ELSEWHERE


def console_of_stdout() -> Console:
    """Return what prints tables to stdout."""
    return Console(width=width_of_terminal())


@dataclasses.dataclass(frozen=True, slots=True)
class Trimmed:
    """Something to print, such as a table, without the blanks at the ends of its lines."""

    inner: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """Yield the lines."""
        for line in console.render_lines(self.inner, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                last = line.pop()
                yield from (*line, Segment(last.text.rstrip(), last.style, last.control))
            yield Segment.line()


def hung(text: str, width: int, indent: str) -> str:
    """Return a line of markup broken where a part of it ends: behind a comma or at two spaces.

    Further lines begin with `indent`. A part that is wider than the terminal is left to rich.
    """
    lines, before = [""], ""  # a tag may end in a later line than it began in: `before` has what the lines above had
    for part in re.findall(r".+?(?:, |  +|$)", text.lstrip()):
        line = lines[-1] or text[: len(text) - len(text.lstrip())]
        n_cells = _shown_cells((before + line + part).rstrip()) - _shown_cells(before)
        if lines[-1].strip() and n_cells > width:
            before += line
            lines.append(indent + part)
        else:
            lines[-1] = line + part
    return "\n".join(line.rstrip() for line in lines)


def _shown_cells(markup: str) -> int:
    return Text.from_markup(markup).cell_len


def fitted(
    width: int,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left_out: Sequence[str] = (),
    folds: Mapping[str, int] | None = None,
    left: Collection[str] = (),
    gap: int = WIDE_GAP,
) -> Trimmed:
    """Return a table for `width` cells, of unlike headings and of rows with markup.

    Where it is too wide, headings take a line for each word and columns come closer. Then the columns of `left_out` go,
    one by one. `folds` are columns of words and the cells that they need at least. Columns in `left` begin at the left,
    others end at the right.
    """
    folds = folds or {}
    cells = {name: _cells(row[at] for row in rows) for at, name in enumerate(columns)}
    broken = {name: name if name in folds else _broken(name, cells[name]) for name in columns}
    for shown, near, heads in _tries(columns, left_out, gap, broken):
        widths = {name: max(cells[name], _cells([heads[name]])) for _, name in shown}
        needed = [min(cells_of, folds.get(name, cells_of)) for name, cells_of in widths.items()]
        if sum(needed) + near * (len(shown) - 1) <= width:
            break
    table = Table(box=None, padding=(0, near, 0, 0), pad_edge=False)
    for _, name in shown:
        is_fixed = name not in folds
        table.add_column(
            heads[name],
            justify="left" if name in left else "right",
            overflow="fold",
            no_wrap=is_fixed,
            min_width=widths[name] if is_fixed else None,
        )
    for row in rows:
        table.add_row(*(row[at] for at, _ in shown))
    return Trimmed(table)


def _tries(
    columns: Sequence[str], left_out: Sequence[str], gap: int, broken: dict[str, str]
) -> Iterator[tuple[list[tuple[int, str]], int, dict[str, str]]]:
    """Yield ways to draw a table, the widest first: numbers and names of columns, their distance, their headings."""
    whole = {name: name for name in columns}
    for n_out in range(len(left_out) + 1):
        shown = [(at, name) for at, name in enumerate(columns) if name not in left_out[:n_out]]
        for near in (gap, NARROW_GAP):
            for heads in (whole, broken):
                yield shown, near, heads


def _broken(heading: str, cells: int) -> str:
    """Return a heading in lines no longer than a column's cells or its own longest word, behind its indent."""
    if not (words := heading.split()):
        return heading
    indent = heading[: len(heading) - len(heading.lstrip())]
    width = max(cells, *(len(indent) + len(word) for word in words))
    return textwrap.fill(heading.strip(), width, initial_indent=indent, subsequent_indent=indent)


def _cells(texts: Iterable[str]) -> int:
    return max((cell_len(line) for text in texts for line in Text.from_markup(text).plain.split("\n")), default=0)
