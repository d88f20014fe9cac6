"""Runs a split without wire or processes: engines in a row, hidden rows handed on as f32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coordinator.pipeline_file import PipelineFile
from stage.embedding import EmbeddingTable
from stage.native import EngineConfig, NativeEngine


class Chain:
    """All stages of a split in one process. One lane."""

    def __init__(self, directory: Path, pipeline: PipelineFile, *, ctx_tokens: int = 64, max_rows: int = 32) -> None:
        self.engines: list[NativeEngine] = []
        for stage in pipeline.stages:
            config = EngineConfig(directory / stage.file, n_lanes=1, ctx_tokens=ctx_tokens, max_rows=max_rows)
            self.engines.append(NativeEngine(config))
        self.table = EmbeddingTable(self.engines[0].artifact)
        self.position = 0

    def step(self, tokens: Sequence[int]) -> np.ndarray:
        """Feed tokens at the next positions and return the logits of all of them: f32 [n, n_vocab]."""
        n_rows = len(tokens)
        rows = np.empty((n_rows, self.engines[0].n_embd), np.float32)
        self.table.lookup(np.asarray(tokens, np.int32), rows)
        for engine in self.engines:
            engine.input_rows[:n_rows] = rows
            engine.positions[:n_rows] = np.arange(self.position, self.position + n_rows)
            engine.seq_ids[:n_rows] = 0
            engine.wants[:n_rows] = 1
            engine.decode(n_rows)
            if not engine.is_last:
                rows = engine.output_rows[:n_rows].copy()
        self.position += n_rows
        return np.stack([self.engines[-1].logits(row).copy() for row in range(n_rows)])

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def __enter__(self) -> Chain:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
