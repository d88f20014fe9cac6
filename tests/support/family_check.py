"""Checks that a tiny model of a family computes the same when it is split, with f32 between the stages."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import numpy as np

from relayline.coordinator.model.cuts import check_cuts, is_allowed
from relayline.coordinator.model.inspection import ModelFacts, inspect_model
from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.reference import ReferenceModel
from relayline.wire.common.errors import CutError
from relayline.wire.common.kv_layout import PER_LANE_ARCHITECTURES
from tests.support.chain import Chain

PREFILL, DECODE = 20, 5
ERROR_MAX = 1e-3  # of the logits' standard deviation
ERROR_OTHER_ROWS_MAX = 3e-3  # if steps have other numbers of rows than the whole model's


@functools.cache
def tokens(n_vocab: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(7).integers(0, n_vocab, PREFILL + DECODE)]


def whole_logits(model: Path, n_vocab: int, flash_attn: str = "auto") -> np.ndarray:
    fed = tokens(n_vocab)
    with ReferenceModel(model, n_ctx=256, n_seq_max=1, flash_attn=flash_attn) as reference:
        logits = [reference.decode(fed[:PREFILL], range(PREFILL), [0] * PREFILL, [True] * PREFILL)]
        logits += [reference.decode([fed[at]], [at], [0], [True]) for at in range(PREFILL, PREFILL + DECODE)]
    return np.concatenate(logits)


def split_logits(model: Path, cuts: tuple[int, ...], out_dir: Path, n_vocab: int) -> tuple[np.ndarray, str]:
    """Return the logits, and how a whole model must attend for the same arithmetic."""
    fed = tokens(n_vocab)
    pipeline = split_model(model, out_dir, cuts=cuts)
    layout = "per-lane" if pipeline.architecture in PER_LANE_ARCHITECTURES else "unified"
    with Chain(out_dir, pipeline, kv_layout=layout) as chain:
        steps = [chain.step(fed[:PREFILL]), *(chain.step([token]) for token in fed[PREFILL:])]
        return np.concatenate(steps), chain.flash_attn


def is_legal(facts: ModelFacts, cuts: tuple[int, ...]) -> bool:
    with contextlib.suppress(CutError):
        check_cuts(facts, cuts)
        return True
    return False


def covering_cuts(facts: ModelFacts) -> list[tuple[int, ...]]:
    """Return few pipelines that together have every legal cut: each has as many missing cuts as possible."""
    missing, found = set(facts.legal_cuts), []
    while missing:
        best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
        for end in range(1, facts.n_layers + 1):
            options = [
                (n_new + (end in missing), (*cuts, end))
                for start, (n_new, cuts) in best.items()
                if is_allowed(facts, start, end)
            ]
            if options:
                best[end] = max(options)
        found.append(best[facts.n_layers][1][:-1])
        missing -= set(found[-1])
    return found


def check(model: Path, all_cuts: list[tuple[int, ...]], out_dir: Path, error_max: float = ERROR_MAX) -> float:
    """Fail where a split differs by more than `error_max` deviations of the logits; return the largest difference."""
    n_vocab = inspect_model(model).n_vocab
    whole: dict[str, np.ndarray] = {}
    worst = 0.0
    for cuts in all_cuts:
        found, flash_attn = split_logits(model, cuts, out_dir / "-".join(map(str, cuts)), n_vocab)
        if flash_attn not in whole:
            whole[flash_attn] = whole_logits(model, n_vocab, flash_attn)
        expected = whole[flash_attn]
        assert np.isfinite(expected).all()
        assert len(set(expected.argmax(axis=1))) > 4, "a model that always says the same proves nothing"
        error = float(np.abs(found - expected).max() / expected.std())
        assert error < error_max, f"cuts {cuts}: {error}"
        worst = max(worst, error)
    return worst
