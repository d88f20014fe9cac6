"""Runs a split without wire or processes: engines in a row, with hidden rows passed on as f32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.deploy.testing.engines import engine_config
from relayline.stage.engine.embedding import EmbeddingTable
from relayline.stage.engine.native import NativeEngine
from relayline.wire.model_files.adapters import Adapter


class Chain:
    """All stages of a split in one process, whose lanes all hold the same tokens."""

    def __init__(
        self, directory: Path, pipeline: PipelineFile, *, ctx_tokens: int = 64, max_rows: int = 32,
        lanes: Sequence[int] = (0,), kv_layout: str = "unified", adapters: Sequence[Adapter] = (),
        mtp_drafts: int = 0, inner_layers: Sequence[int] = (), drafter: Path | None = None,
    ) -> None:  # fmt: skip
        """Use these lanes, in this order."""
        self.lanes = tuple(lanes)
        self.engines: list[NativeEngine] = []
        for stage in pipeline.stages:
            config = engine_config(
                directory / stage.file,
                max(lanes) + 1,
                ctx_tokens,
                max_rows * len(lanes),
                kv_layout=kv_layout,
                adapters=tuple(adapters),
                mtp_drafts=mtp_drafts,
                inner_layers=tuple(inner_layers),
                drafter=drafter,
            )
            self.engines.append(NativeEngine(config))
        self.table = EmbeddingTable(self.engines[0].artifact)
        self.position = 0

    @property
    def flash_attn(self) -> str:
        """How a whole model must attend for the same arithmetic: stages may have chosen to compute scores."""
        return "off" if self.engines[0].attention.has_scores else "auto"

    def step(self, tokens: Sequence[int], adapter: int = 0) -> np.ndarray:
        """Feed tokens at the next positions to every lane; return the logits of all: f32 [n_lanes * n, n_vocab]."""
        n_lanes, n_rows = len(self.lanes), len(self.lanes) * len(tokens)
        rows = np.empty((n_rows, self.table.width), np.float32)
        self.table.lookup(np.tile(np.asarray(tokens, np.int32), n_lanes), rows)
        for engine in self.engines:
            engine.input_rows[:n_rows] = rows
            engine.positions[:n_rows] = np.tile(np.arange(self.position, self.position + len(tokens)), n_lanes)
            engine.seq_ids[:n_rows] = np.repeat(self.lanes, len(tokens))
            engine.wants[:n_rows] = 1
            engine.decode(n_rows, adapter=adapter)
            if not engine.is_last:
                rows = engine.output_rows[:n_rows].copy()
        self.position += len(tokens)
        return np.stack([self.engines[-1].logits(row).copy() for row in range(n_rows)])

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def __enter__(self) -> Chain:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
