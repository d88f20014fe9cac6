"""Held-out loss of both demo models, unsplit and through two and four stages, with f16 and f32 between them.

The stages run in one process and pass their rows through the production codec (wire.envelopes). So the loss shows the
cost in quality of the split and of the number format. `relayline certify` does the same comparison over real processes.

    python -m benches.heldout [--model FILE ...] [--text FILE] [--stages 2,4] [--threads N] [--quick]
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benches.arguments import number, numbers
from relayline.coordinator.model.split import split_model
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.paths import DEMO, DEMO_MODEL, HYBRID_DEMO_MODEL
from relayline.stage.engine.embedding import EmbeddingTable
from relayline.stage.engine.native import NativeEngine
from relayline.wire.envelopes.buffers import Buffer
from relayline.wire.envelopes.dtypes import DTYPE_F16, DTYPE_F32
from relayline.wire.envelopes.rows import RowEncoder, decode_f16

ROW_TOKENS = 511  # scored per row; each row begins with the model's begin-of-text token


class Stages:
    """A split model in one process; `score` returns the log-probability of each following token."""

    def __init__(self, directory: Path, files: Sequence[str], dtype: int, n_threads: int) -> None:
        self.engines = [
            NativeEngine(engine_config(directory / file, n_lanes=1, ctx_tokens=ROW_TOKENS + 1, n_threads=n_threads))
            for file in files
        ]
        self.table = EmbeddingTable(self.engines[0].artifact)
        self._dtype = dtype

    def _over_the_wire(self, rows: np.ndarray, out: np.ndarray) -> None:
        n_rows, width = rows.shape
        buffer = Buffer(self._dtype, width, 1, n_rows)
        encoded = RowEncoder(n_rows, width).encode(rows, buffer.payload)
        if self._dtype == DTYPE_F16:
            decode_f16(buffer.payload, encoded.exponents, out)
        else:
            np.copyto(out, buffer.payload)

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Return natural-log probabilities of tokens[1:], each given all tokens before it."""
        n_rows = len(tokens) - 1
        first = self.engines[0]
        self.table.lookup(np.asarray(tokens[:-1], np.int32), first.input_rows[:n_rows])
        for engine, following in zip(self.engines, [*self.engines[1:], None], strict=True):
            engine.positions[:n_rows] = np.arange(n_rows)
            engine.seq_ids[:n_rows] = 0
            engine.wants[:n_rows] = 1
            engine.decode(n_rows)
            if following is not None:
                self._over_the_wire(engine.output_rows[:n_rows], following.input_rows[:n_rows])
        logits = np.stack([self.engines[-1].logits(row) for row in range(n_rows)]).astype(np.float64)
        for engine in self.engines:
            engine.clear(0)
        logits -= logits.max(axis=1, keepdims=True)
        chosen = logits[np.arange(n_rows), tokens[1:]]
        result: np.ndarray = chosen - np.log(np.exp(logits).sum(axis=1))
        return result

    def close(self) -> None:
        """Free the engines."""
        for engine in self.engines:
            engine.close()


def rows_of(tokens: Sequence[int], begin: int) -> Iterator[list[int]]:
    """Cut the text into rows that each begin with the begin-of-text token."""
    for at in range(0, len(tokens), ROW_TOKENS):
        yield [begin, *tokens[at : at + ROW_TOKENS]]


def score(
    model: Path, text: str, n_stages: int, dtype: int, max_rows: int | None, n_threads: int
) -> tuple[float, float]:
    """Return nats per token and bits per byte of a text, or of its first rows."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        pipeline = split_model(model, directory, n_stages=n_stages, cuts=None)
        tokenizer = Tokenizer.load(directory / pipeline.tokenizer.file)
        assert tokenizer.bos is not None
        tokens = tokenizer.encode(text, add_special=False, parse_special=False)
        rows = list(rows_of(tokens, tokenizer.bos))[:max_rows]
        stages = Stages(directory, [stage.file for stage in pipeline.stages], dtype, n_threads)
        nats = -float(sum(stages.score(row).sum() for row in rows))
        stages.close()
    n_tokens = sum(len(row) - 1 for row in rows)
    n_bytes = sum(len(tokenizer.piece(token)) for row in rows for token in row[1:])
    return nats / n_tokens, nats / n_bytes / math.log(2)


def main() -> None:
    """Print one line per model and way of running it."""
    parser = argparse.ArgumentParser(prog="python -m benches.heldout", description=__doc__)
    parser.add_argument("--model", type=Path, nargs="+", default=[DEMO_MODEL, HYBRID_DEMO_MODEL])
    parser.add_argument("--text", type=Path, default=DEMO / "heldout.txt")
    parser.add_argument("--stages", type=numbers, default=(2, 4))
    parser.add_argument("--threads", type=number, default=1)
    parser.add_argument("--quick", action="store_true", help="the first two rows only")
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    ways = [("unsplit", 1, DTYPE_F32)]
    for n_stages in options.stages:
        ways += [
            (f"{n_stages} stages, {name} wire", n_stages, d) for name, d in (("f16", DTYPE_F16), ("f32", DTYPE_F32))
        ]
    for model in options.model:
        print(model.stem)
        for label, n_stages, dtype in ways:
            per_token, per_byte = score(model, text, n_stages, dtype, 2 if options.quick else None, options.threads)
            print(f"  {label:24} {per_token:.4f} nats per token  {per_byte:.4f} bits per byte", flush=True)


if __name__ == "__main__":
    main()
