"""Which layout of KV cells a stage chooses, and for whose setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayline.coordinator.joining.config import JoinConfig, JoiningStage
from relayline.deploy.certify.run import CertifyConfig
from relayline.deploy.manifest import parse_manifest
from relayline.deploy.planning.inputs import load_of
from relayline.stage.config import StageConfig
from relayline.wire.common.kv_layout import LONG_LANE_TOKENS, SCORE_BYTES_MAX, choose_layout, has_scores
from relayline.wire.settings.table import EngineSettings

LONG, SHORT = LONG_LANE_TOKENS, LONG_LANE_TOKENS - 1


@pytest.mark.parametrize(
    ("asked", "ctx_tokens", "gpu_layers", "expected"),
    [
        ("auto", LONG, 0, "per-lane"),
        ("auto", SHORT, 0, "unified"),
        ("auto", LONG, 5, "unified"),
        ("auto", LONG, -1, "unified"),
        ("unified", LONG, 0, "unified"),
        ("per-lane", SHORT, -1, "per-lane"),
    ],
)
def test_long_lanes_on_a_cpu_have_separate_cells(asked: str, ctx_tokens: int, gpu_layers: int, expected: str) -> None:
    assert choose_layout(asked, ctx_tokens=ctx_tokens, gpu_layers=gpu_layers) == expected
    values = {"kv_layout": asked, "ctx_tokens": ctx_tokens, "gpu_layers": gpu_layers}
    assert EngineSettings(**values).layout_used == expected
    assert EngineSettings(**values).resolved().kv_layout == expected
    assert CertifyConfig(Path("model.gguf"), engine=EngineSettings(**values)).stage_engine.kv_layout == expected


def test_by_default_a_stage_a_plan_and_a_certificate_mean_the_same() -> None:
    manifest = parse_manifest(
        b"apiVersion: relayline.dev/v1alpha1\nkind: Pipeline\nmetadata: {name: m}\nspec:\n  model: {path: m.gguf}\n",
        "m.yaml",
    )
    stage, certified = StageConfig(Path("s")).engine, CertifyConfig(Path("m")).stage_engine
    layouts = {load_of(manifest, "llama").kv_layout, stage.layout_used, certified.kv_layout}
    assert layouts == {"per-lane"}


def test_a_plan_knows_the_default_layout_of_stages_on_gpus() -> None:
    text = """apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {name: m}
spec:
  model: {path: m.gguf}
  stages: [{name: a, device: gpu}, {name: b, device: %s}]
"""
    layouts = [
        load_of(parse_manifest((text % device).encode(), "m.yaml"), "llama").kv_layout for device in ("gpu", "cpu")
    ]
    assert layouts == ["unified", "per-lane"]


@pytest.mark.parametrize(
    ("layout", "kv_type", "gpu_layers", "score_bytes", "reads_own_cells", "expected"),
    [
        ("per-lane", "f16", 0, SCORE_BYTES_MAX, False, True),
        ("per-lane", "f32", 0, 1, False, True),
        ("per-lane", "f16", 0, SCORE_BYTES_MAX + 1, False, False),
        ("per-lane", "q8_0", 0, 1, False, False),
        ("per-lane", "f16", -1, 1, False, False),
        ("unified", "f16", 0, 1, False, False),
        ("per-lane", "f16", 0, 1, True, False),
        ("per-lane", "f32", 0, 1, True, True),
    ],
)
def test_scores_are_computed_where_they_fit_and_flash_attention_is_slow(
    layout: str, kv_type: str, gpu_layers: int, score_bytes: int, reads_own_cells: bool, expected: bool
) -> None:
    found = has_scores(
        layout, kv_type=kv_type, gpu_layers=gpu_layers, score_bytes=score_bytes, reads_own_cells=reads_own_cells
    )
    assert found == expected


@pytest.mark.parametrize(
    ("architecture", "asked", "expected"),
    [("kimi-linear", "auto", "unified"), ("kimi-linear", "per-lane", "per-lane"), ("qwen35", "auto", "auto"),
     ("deepseek4", "auto", "per-lane"), ("minimax-m3", "auto", "per-lane"), ("minimax-m3", "unified", "unified")],
)  # fmt: skip
def test_auto_means_the_only_possible_layout(architecture: str, asked: str, expected: str) -> None:
    """An explicit request for another one is refused where the model is loaded."""
    assert EngineSettings(kv_layout=asked).of_architecture(architecture).kv_layout == expected


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [("kimi-linear", "unified"), ("deepseek4", "per-lane"), ("minimax-m3", "per-lane")],
)
@pytest.mark.parametrize(("ctx_tokens", "gpu_layers"), [(256, 0), (8_192, 0), (8_192, -1)])
def test_stages_that_join_and_plans_have_the_layout_that_the_model_needs(
    architecture: str, expected: str, ctx_tokens: int, gpu_layers: int
) -> None:
    engine = EngineSettings(ctx_tokens=ctx_tokens, gpu_layers=gpu_layers)
    join = JoinConfig((JoiningStage("a", engine), JoiningStage("b", engine))).with_one_layout(architecture)
    assert {place.engine.kv_layout for place in join.stages} == {expected}
    text = """apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {name: m}
spec:
  model: {path: m.gguf}
  context: {tokens: %d}
  stages: [{name: a, device: %s}]
"""
    manifest = parse_manifest((text % (ctx_tokens, "gpu" if gpu_layers else "cpu")).encode(), "m.yaml")
    assert load_of(manifest, architecture).kv_layout == expected
