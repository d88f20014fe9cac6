"""Lanes of a first stage that are fed with rows of random texts, and compared with lanes alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relayline.deploy.testing.engines import engine_config
from relayline.stage.engine import ggml
from relayline.stage.engine.native import NativeEngine
from tests.support.tiny_families import N_HEADS, N_KV_HEADS

N_LANES, CTX, MAX_ROWS = 4, 64, 64
# How far rows of a lane may differ in deviations, depending on other rows or cells in the step. llama.cpp's own flash
# attention adds up in half precision and in the order of the cells: a row that lies before its lane's others differs by
# up to 2.6e-3. With our kernels the order of sums over a state remains: 3.1e-4 at most, seen with AVX-512. One wrong
# row among twenty read ones moves the rows after it by 1e-2 and more.
CLOSE = 5e-4 if ggml.attends_own_cells(n_rows=1, n_heads=N_HEADS, n_kv_heads=N_KV_HEADS) else 5e-3


class LastStep(NamedTuple):
    """The rows of one lane in the last of several steps."""

    lane: int
    """It has the text of this number, too."""
    first: int
    """The position of the first row."""
    end: int
    found: np.ndarray
    expected: np.ndarray
    """The rows of a lane alone."""


class Lanes:
    """The first stage of a split, fed with rows that follow from a seed and a position."""

    def __init__(self, path: Path, kv_layout: str, rewind_rows: int = 0, ctx_tokens: int = CTX, **more: Any) -> None:
        """`more`: further settings of the engine."""
        self.engine = NativeEngine(
            engine_config(path, N_LANES, ctx_tokens, MAX_ROWS, kv_layout=kv_layout, rewind_rows=rewind_rows, **more)
        )
        self.texts = [
            np.random.default_rng(seed).standard_normal((ctx_tokens, self.engine.input_rows.shape[1]), np.float32)
            for seed in range(4)
        ]

    def decode(self, *parts: tuple[int, int, int, int]) -> list[np.ndarray]:
        """Decode parts (lane, text, first position, end) in one step; return each part's rows."""
        row = 0
        for lane, text, first, end in parts:
            count = end - first
            self.engine.input_rows[row : row + count] = self.texts[text][first:end]
            self.engine.positions[row : row + count] = range(first, end)
            self.engine.seq_ids[row : row + count] = lane
            row += count
        self.engine.decode(row)
        edges = np.cumsum([end - first for _, _, first, end in parts])[:-1]
        rows: Sequence[np.ndarray] = np.split(self.engine.output_rows[:row].copy(), edges)
        return list(rows)

    def expected(self, text: int, edges: Sequence[int]) -> np.ndarray:
        """The last step's rows of a fresh lane that reads a text in steps ending at these positions."""
        self.engine.clear(3)
        for first, end in zip((0, *edges), edges, strict=False):
            found = self.decode((3, text, first, end))[0]
        self.engine.clear(3)
        return found

    def mixed_steps(self) -> list[LastStep]:
        """Read three lanes at once, first prompts of several lengths, then single rows, then several rows of each: in
        orders in which llama.cpp would not run them.
        """
        lengths, n_more, order = (17, 3, 9), 3, (2, 0, 1)
        expected = [
            self.expected(text, (length, length + 1, length + 1 + n_more)) for text, length in enumerate(lengths)
        ]
        self.decode(*((lane, lane, 0, lengths[lane]) for lane in order))
        self.decode(*((lane, lane, lengths[lane], lengths[lane] + 1) for lane in (1, 2, 0)))
        last = [(lane, lane, lengths[lane] + 1, lengths[lane] + 1 + n_more) for lane in order]
        found = self.decode(*last)
        return [
            LastStep(lane, first, end, rows, expected[lane])
            for (lane, _, first, end), rows in zip(last, found, strict=True)
        ]


def far(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, in deviations of the expected values."""
    return float(np.abs(found - expected).max() / expected.std())
