"""Configurations of engines and stages for tests and benches, with settings and other fields as keywords."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from relayline.stage.config import StageConfig
from relayline.stage.engine.native import EngineConfig
from relayline.wire.settings.setting import entries
from relayline.wire.settings.table import EngineSettings

TEST_DEVICE = "RELAYLINE_TEST_DEVICE"  # a GPU by llama.cpp's name, such as Vulkan0: tests' engines compute there


def on_test_device() -> dict[str, Any]:
    """Return the settings with which an engine computes where the environment has tests compute; none: here."""
    name = os.environ.get(TEST_DEVICE, "")
    return {"devices": name, "gpu_layers": -1} if name else {}


def engine_config(
    artifact_path: Path, n_lanes: int, ctx_tokens: int, max_rows: int = 512, n_threads: int = 1, **more: Any
) -> EngineConfig:
    """Return the engine's configuration for one artifact: one thread, lanes that share cells, on the tests' device,
    unless `more` says otherwise.
    """
    given = {"n_lanes": n_lanes, "ctx_tokens": ctx_tokens, "max_rows": max_rows, "n_threads": n_threads}
    settings, other = _parted({"kv_layout": "unified"} | on_test_device() | given | more)
    return EngineConfig(artifact_path, settings, **other)


def stage_config(artifact: Path, **more: Any) -> StageConfig:
    """Return the configuration of a stage process; `more`: fields of StageConfig and of its engine's settings."""
    settings, other = _parted(on_test_device() | more)
    return StageConfig(artifact, engine=settings, **other)


def _parted(given: dict[str, Any]) -> tuple[EngineSettings, dict[str, Any]]:
    names = {entry.name for entry in entries(EngineSettings)}
    settings = EngineSettings(**{name: value for name, value in given.items() if name in names})
    return settings, {name: value for name, value in given.items() if name not in names}
