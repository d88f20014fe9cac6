"""A bar on the terminal while a model is loaded or split."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from relayline.coordinator.model.split import Progress as ProgressCallback


def error_console() -> Console:
    """Return the console on stderr, which may be a terminal."""
    return Console(stderr=True)


def shows_bars(console: Console) -> bool:
    """Return whether a console can draw bars: a terminal, and none that shows escape sequences as text."""
    return console.is_terminal and not console.is_dumb_terminal


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[tuple[ProgressCallback, list[bool]]]:
    """Yield a callback that draws a bar if stderr is a terminal for it, and a list that is empty until it is called.

    `what` is written before the bar. Nothing is drawn before the first call.
    """
    was_used: list[bool] = []
    console = error_console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not shows_bars(console)) as bar:
        task = bar.add_task(escape(what), total=None, visible=False)

        def update(done_bytes: int, total_bytes: int) -> None:
            if not was_used:
                was_used.append(True)
            bar.update(task, completed=done_bytes, total=total_bytes, visible=True)

        yield update, was_used
