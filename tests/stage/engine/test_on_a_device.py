"""Stages on the GPU that RELAYLINE_TEST_DEVICE names compute what the processor does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.engines import TEST_DEVICE, engine_config, on_test_device
from relayline.stage.engine.native import NativeEngine, computes_apart
from relayline.stage.engine.place import place_of
from tests.support.chain import Chain
from tests.support.family_check import tokens, whole_logits
from tests.support.tiny_models import make_tiny

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not on_test_device(), reason=f"{TEST_DEVICE} names no GPU for tests"),
]
# Of the logits' deviations. GPUs round products to f16 and add in another order.
ERROR_MAX = 0.05
FAMILIES = ("llama", "qwen2moe", "gemma3:pattern", "gpt-oss", "qwen35", "mamba2")


@contextlib.contextmanager
def on_processor() -> Iterator[None]:
    """Engines made meanwhile compute on the processor."""
    name = os.environ.pop(TEST_DEVICE)
    try:
        yield
    finally:
        os.environ[TEST_DEVICE] = name


@pytest.mark.parametrize("family", FAMILIES)
def test_two_stages_there_and_one_beside_the_processor(family: str, tmp_path: Path) -> None:
    model = make_tiny(family, tmp_path / "model.gguf")
    facts = inspect_model(model)
    fed = tokens(facts.n_vocab)[:16]
    pipeline = split_model(model, tmp_path / "split", cuts=facts.legal_cuts[:1])
    expected = whole_logits(model, facts.n_vocab)[: len(fed)]
    with Chain(tmp_path / "split", pipeline) as chain:
        found = [np.concatenate([chain.step(fed[:12]), *(chain.step([token]) for token in fed[12:])])]
        other = chain.engines.pop()
        with on_processor():
            chain.engines.append(NativeEngine(engine_config(other.artifact.path, 1, 64, 32)))
        other.close()
        chain.engines[0].clear(0)
        chain.position = 0
        found.append(np.concatenate([chain.step(fed[:12]), *(chain.step([token]) for token in fed[12:])]))
    for logits in found:
        assert np.abs(logits - expected).max() / expected.std() < ERROR_MAX


def test_the_stage_says_that_it_computes_there(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf")
    split_model(model, tmp_path / "split", cuts=())
    with NativeEngine(engine_config(tmp_path / "split" / "stage-0.gguf", 2, 64, 8)) as engine:
        settings = engine.config.settings
        assert computes_apart(settings)
        assert [device.name for device in place_of(settings).devices] == [os.environ[TEST_DEVICE]]
        assert engine.device is not None, "logits stay there without being asked"
        engine.input_rows[:2] = np.random.default_rng(4).standard_normal((2, engine.n_embd), np.float32)
        engine.positions[:2], engine.seq_ids[:2], engine.wants[:2] = 0, [0, 1], 1
        engine.decode(2)
        assert [engine.device.token(row) for row in range(2)] == [int(engine.logits(row).argmax()) for row in range(2)]
