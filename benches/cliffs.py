"""Finds where one more row makes every row dearer: `python -m benches.cliffs [--quick]`.

Steps of 1 to 512 rows of small slices on one thread: decode rows, one of each lane, and rows of one prompt. They vary
by the heads that share a key, by the layout of the KV cache, and by the context that all lanes hold. A cliff is a step
whose rows cost more than 1.3 times as much each as in the next smaller step. The bench counts processor time, since
other programs disturb it less.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benches import machine
from benches.arguments import numbers
from benches.contexts import COPIED_TOKENS, fill, step_ms
from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.tiny_slices import TinyShape, write_pipeline
from relayline.stage.engine import ggml
from relayline.stage.engine.native import NativeEngine

CLIFF = 1.3
REPEATS = 5
HEADS = ((4, 4), (4, 2), (4, 1))  # heads, and those of keys
LAYOUTS: dict[str, dict[str, Any]] = {
    "unified": {"kv_layout": "unified", "spare_lanes": 1},
    "per-lane": {"kv_layout": "per-lane"},
}
DECODE_ROWS = (1, 2, 4, 8, 16, 32, 48, 60, 63, 64, 65, 68, 80, 96, 127, 128, 129, 192, 254)
PROMPT_ROWS = (*DECODE_ROWS, 255, 256, 257, 384, 512)


@dataclasses.dataclass(frozen=True, slots=True)
class Walk:
    """Steps of one kind, by rows."""

    heads: int
    kv_heads: int
    layout: str
    kind: str  # decode or prompt
    context: int  # tokens that each lane holds
    ms: dict[int, float]  # by rows, the fastest of the repeats

    def cliffs(self) -> list[tuple[int, int, float]]:
        """Return (few, many, ratio) where a row in a step of `many` costs at least CLIFF times as much as in the next
        smaller step.
        """
        found = []
        for (few, least), (many, most) in itertools.pairwise(sorted(self.ms.items())):
            ratio = most / many / (least / few)
            if ratio > CLIFF:
                found.append((few, many, round(ratio, 2)))
        return found


def walks(
    artifact: Path, heads: tuple[int, int], contexts: Sequence[int], lanes: int, rows: tuple[Sequence[int], ...]
) -> Iterator[Walk]:
    """Yield all walks of one slice."""
    decode, prompt = rows
    for (layout, more), context in itertools.product(LAYOUTS.items(), contexts):
        given: dict[str, Any] = {
            "n_lanes": lanes,
            "ctx_tokens": context + max(prompt),
            "max_rows": max(COPIED_TOKENS, *decode, *prompt),
        }
        with NativeEngine(engine_config(artifact, **given, **more)) as engine:
            fill(engine, lanes, context)
            for kind, counts in (("decode", decode), ("prompt", prompt)):
                ms: dict[int, float] = {}
                for _, n in itertools.product(range(REPEATS), counts):
                    own = list(range(n)) if kind == "decode" else [0] * n
                    positions = [COPIED_TOKENS] * n if kind == "decode" else [COPIED_TOKENS + at for at in range(n)]
                    took_ms = step_ms(engine, own, positions, time.process_time_ns)
                    ms[n] = min(took_ms, ms.get(n, took_ms))
                yield Walk(*heads, layout, kind, context, ms)


def show(found: Sequence[Walk]) -> None:
    """Print a line for each walk."""
    columns = ("heads", "KV cells", "rows of", "context", "63", "64", "65", "128", "cliffs")
    table = Table(*columns, title="us a row, by the rows of a step")
    for walk in found:
        us = (f"{1e3 * walk.ms[n] / n:.0f}" if n in walk.ms else "" for n in (63, 64, 65, 128))
        cliffs = "; ".join(f"{many} rows: {ratio:.2f}" for _, many, ratio in walk.cliffs())
        table.add_row(f"{walk.heads}/{walk.kv_heads}", walk.layout, walk.kind, str(walk.context), *us, cliffs or "none")
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benches.cliffs", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows and lanes: checks the bench itself")
    parser.add_argument("--contexts", type=numbers, default=(), help=f"multiples of {COPIED_TOKENS}, such as 64,512")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(argv)
    if any(n_tokens % COPIED_TOKENS for n_tokens in options.contexts):
        parser.error(f"--contexts: contexts are copies of {COPIED_TOKENS} tokens, so give multiples of that")
    contexts = options.contexts or ((32,) if options.quick else (64, 256))
    rows = ((1, 2, 4), (1, 4)) if options.quick else (DECODE_ROWS, PROMPT_ROWS)
    found: list[Walk] = []
    for heads in HEADS[-1:] if options.quick else HEADS:
        shape = TinyShape(n_layers=2, n_embd=256, n_heads=heads[0], n_kv_heads=heads[1], n_ff=512, n_vocab=32)
        with tempfile.TemporaryDirectory() as directory:
            artifact = write_pipeline(Path(directory), shape, [1])[0]
            found += walks(artifact, heads, contexts, max(rows[0]), rows)
    show(found)
    written = [dataclasses.asdict(walk) | {"cliffs": walk.cliffs()} for walk in found]
    machine.write_json(
        options.out / "cliffs.json", {"machine": machine.facts(), "kernels": ggml.kernels(), "walks": written}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
