"""The bundled model: its required properties, and that splitting it changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import split_model
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.paths import DEMO
from relayline.deploy.testing.processes import relayline
from relayline.deploy.testing.reference import ReferenceModel
from tests.support.chain import Chain

MODEL = DEMO / "relayline-demo.gguf"
CUTS = [(cut,) for cut in range(1, 8)] + [(3, 6), (2, 4, 6)]


def test_it_is_small_deep_enough_and_comes_with_its_licence() -> None:
    facts = inspect_model(MODEL)
    assert MODEL.stat().st_size <= 16 * 1024 * 1024
    assert facts.n_layers >= 8
    assert facts.legal_cuts == tuple(range(1, facts.n_layers))
    assert "PSF" in (DEMO / "README.md").read_text()
    assert (DEMO / "train.py").is_file()
    assert (DEMO / "LICENSE.PSF-2.0").is_file()


def test_its_tokenizer_reads_and_writes_any_text(tmp_path: Path) -> None:
    pipeline = split_model(MODEL, tmp_path, n_stages=2, cuts=None)
    tokenizer = Tokenizer.load(tmp_path / pipeline.tokenizer.file)
    text = (DEMO / "heldout.txt").read_text(encoding="utf-8")[:20_000] + " äöü \U0001f600\n"
    tokens = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(tokens) == text
    assert len(tokens) < len(text) / 2
    assert tokenizer.chat_template


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_every_cut_equals_the_whole_for_prefill_and_decode(cuts: tuple[int, ...], tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    prompt = rng.integers(10, 2_000, 24).tolist()
    whole = ReferenceModel(MODEL, 256, 1)
    with Chain(tmp_path, split_model(MODEL, tmp_path, n_stages=None, cuts=cuts), ctx_tokens=256) as chain:
        expected = whole.decode(prompt, range(len(prompt)), [0] * len(prompt), [True] * len(prompt))
        found = chain.step(prompt)
        deviation = float(expected.std())
        assert np.abs(found - expected).max() < 1e-3 * deviation
        for position in range(len(prompt), len(prompt) + 8):
            token = int(expected[-1].argmax())
            expected = whole.decode([token], [position], [0], [True])
            assert np.abs(chain.step([token]) - expected).max() < 1e-3 * deviation
    whole.close()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("n_stages", [2, 3, 4])
def test_certified_over_real_processes_with_mixed_batches(n_stages: int) -> None:
    done = relayline("certify", MODEL, "--stages", str(n_stages), "--wire", "f32", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["verdict"] == "pass"
