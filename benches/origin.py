"""The origin of a stored measurement: its machine, day, commit and command."""

from __future__ import annotations

import datetime
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benches import machine

UNSAID = ("--out", "--machine")  # of a command: where its figures went, and what the page says by itself
PLACES = {"--beside": "CHECKOUT"}  # paths of one machine, and what to put there


def origin(module: str, machine_name: str, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the head of a file of benches/results. `argv`: the module's arguments; None: this process's."""
    arguments = _shown(sys.argv[1:] if argv is None else argv)
    return {
        "machine": machine_name,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "commit": str(machine.facts()["commit"]),
        "command": " ".join(["python", "-m", module, *map(shlex.quote, arguments)]),
    }


def _shown(argv: Sequence[str]) -> Iterator[str]:
    """Yield the arguments that another machine can repeat."""
    split = [part for each in argv for part in (each.split("=", 1) if each.startswith("--") else [each])]
    names = iter(split)
    for name in names:
        if name in UNSAID:
            next(names, None)
            continue
        yield name
        if name in PLACES:
            next(names, None)
            yield PLACES[name]
