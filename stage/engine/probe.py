"""Loads an artifact and decodes a few rows, in a process of its own: `python -m relayline.stage.engine.probe FILE`.

llama.cpp ends the process when an assertion of its own fails, and nothing in that process can report it. So whoever
wants to know whether an artifact runs starts this and looks at how it ended: exit code 0 when it runs, 1 with one
line on stderr when it is refused, a signal when it aborted.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from relayline.stage.engine.native import EngineConfig, NativeEngine
from relayline.wire.common.errors import NativeError, RelaylineError

PREFILL_ROWS = 5  # a chunk, then single rows: the two shapes of graph that serving uses
DECODE_STEPS = 2


def probe(path: Path) -> None:
    """Decode one prefill chunk and a few single rows. Raises what the engine raises, or NativeError for NaN."""
    random = np.random.default_rng(0)
    with NativeEngine(EngineConfig(path, n_lanes=2, ctx_tokens=64, max_rows=PREFILL_ROWS)) as engine:
        position = 0
        for n_rows in (PREFILL_ROWS, *([1] * DECODE_STEPS)):
            engine.input_rows[:n_rows] = random.standard_normal((n_rows, engine.n_embd), np.float32)
            engine.positions[:n_rows] = np.arange(position, position + n_rows)
            engine.seq_ids[:n_rows] = 1
            engine.wants[:n_rows] = 1
            engine.decode(n_rows)
            rows = engine.logits(n_rows - 1) if engine.is_last else engine.output_rows[:n_rows]
            if not np.isfinite(rows).all():
                raise NativeError(f"{path}: gives values that are not finite")
            position += n_rows


def main() -> None:
    """Probe the artifact named on the command line."""
    try:
        probe(Path(sys.argv[1]))
    except RelaylineError as error:
        print(error.message, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
