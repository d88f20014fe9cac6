"""A bar on the terminal while a model is split."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from relayline.coordinator.model.split import Progress as ProgressCallback


@contextlib.contextmanager
def progress_bar() -> Iterator[tuple[ProgressCallback, list[bool]]]:
    """Yield a callback that draws a bar if stderr is a terminal, and a list that is empty until it is called."""
    was_used: list[bool] = []
    console = Console(stderr=True)
    columns = (
        TextColumn("splitting"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("split", total=None)

        def update(done_bytes: int, total_bytes: int) -> None:
            if not was_used:
                was_used.append(True)
            bar.update(task, completed=done_bytes, total=total_bytes)

        yield update, was_used
