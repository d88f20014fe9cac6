"""What API keys use, in `relayline top`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from relayline.wire.common.texts import counted

SHOWN_MAX = 12  # keys
NAME_CELLS = 12
COLUMNS = ("running", "waiting", "requests", "prompt", "cached", "answers")
ALL_CELLS = 60  # below this width some columns are left out; the rest fits 40
UNSEEN_IF_NARROW = ("waiting", "requests", "cached")


def keys_of(described: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the counts of keys since the start, those with most streams first, then those with most tokens."""

    def busy(key: dict[str, Any]) -> tuple[int, int, int]:
        return -key["running"], -key["waiting"], -key["prompt_tokens"] - key["completion_tokens"]

    return sorted(described.get("keys") or (), key=busy)


def keys_table(keys: Sequence[dict[str, Any]], width: int) -> list[Table | Text]:
    """Return a table of keys for a terminal of this width, from 40 columns on; nothing where no key was used."""
    if not keys:
        return []
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("API key", no_wrap=True, max_width=NAME_CELLS, overflow="ellipsis")
    unseen = UNSEEN_IF_NARROW if width < ALL_CELLS else ()
    shown = [at for at, name in enumerate(COLUMNS) if name not in unseen]
    for name in (COLUMNS[at] for at in shown):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    for key in keys[:SHOWN_MAX]:
        counts = (key["running"], key["waiting"], key["requests"])
        tokens = (key["prompt_tokens"], key["cached_tokens"], key["completion_tokens"])
        cells = (*map(str, counts), *map(_short, tokens))
        table.add_row(escape(key["name"]), *(cells[at] for at in shown))
    n_more = len(keys) - SHOWN_MAX
    more = [Text(f"and {counted(n_more, 'more key')}: GET /v1/usage", style="dim")] if n_more > 0 else []
    return [Text(), table, *more]


def _short(n_tokens: int) -> str:
    """Return a number in at most 6 characters."""
    for unit in ("", "k", "M"):
        if n_tokens < 10_000:
            return f"{n_tokens:.0f}{unit}"
        n_tokens //= 1_000
    return f"{n_tokens:.0f}G"
