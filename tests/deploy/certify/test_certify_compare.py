"""The pure part of `certify`: its inputs, the comparison of logits, tolerances and failures."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from relayline.coordinator.model.inspection import inspect_model
from relayline.deploy.certify.compare import (
    FLOOR,
    MARGIN,
    MARGIN_MAX,
    Comparison,
    Noise,
    compare,
    kl_divergence,
    tolerance_for,
    verdict,
)
from relayline.deploy.certify.reference import SHAPES, Extent, Piece, mixed, one_after_another, one_prefill, row_by_row
from relayline.deploy.certify.run import plan_cuts
from relayline.deploy.certify.workload import PREFILL_CHUNK_ROWS, Run, Script, context_needed, draw_batches
from relayline.wire.common.errors import CutError, UsageError
from tests.support.tiny_models import make_tiny

SCRIPT = Script("s", (1, 2, 3), 0.0, 1)


def run_of(logits: np.ndarray) -> Run:
    return Run(SCRIPT, tuple(int(token) for token in logits.argmax(axis=1)), logits.astype(np.float32))


def random_logits(n_rows: int = 6, n_vocab: int = 50, seed: int = 3) -> np.ndarray:
    return (2.0 * np.random.default_rng(seed).standard_normal((n_rows, n_vocab))).astype(np.float32)


# --- comparison -------------------------------------------------------------------------------------------------------


def test_kl_of_known_distributions() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
    expected = float((p * np.log(p / q)).sum())
    shifted = np.log(q)[None] + 7.0  # a softmax does not see an offset
    assert kl_divergence(np.log(p)[None].astype(np.float32), shifted.astype(np.float32))[0] == pytest.approx(expected)


def test_kl_of_itself_is_zero_even_for_large_logits() -> None:
    logits = 1e4 * random_logits()
    assert kl_divergence(logits, logits).tolist() == [0.0] * 6


def test_equal_logits_agree_everywhere() -> None:
    logits = random_logits()
    found = compare([(logits, run_of(logits))])
    assert (found.max_abs, found.mean_kl, found.n_agree, found.first, found.widest) == (0.0, 0.0, 6, None, None)
    assert found.deviation == pytest.approx(math.sqrt(logits.var(axis=1).mean()))


def test_an_offset_between_rows_is_no_deviation() -> None:
    logits = random_logits()
    lifted = logits + 100 * np.arange(6, dtype=np.float32)[:, None]
    assert compare([(lifted, run_of(lifted))]).deviation == pytest.approx(
        compare([(logits, run_of(logits))]).deviation, rel=1e-4
    )


def test_first_and_widest_disagreement() -> None:
    reference = np.zeros((3, 4), np.float32)
    reference[0, 1], reference[1, 2], reference[2, 3] = 5.0, 5.0, 5.0
    found = reference.copy()
    reference[1, 0], found[1, 0] = 4.5, 6.0  # a margin of 0.5
    found[2, 1] = 9.0  # a margin of 5
    comparison = compare([(reference, run_of(found))])
    assert comparison.n_agree == 1
    assert comparison.agreement == pytest.approx(1 / 3)
    assert comparison.max_abs == 9.0
    assert comparison.first is not None
    assert comparison.widest is not None
    first, widest = comparison.first, comparison.widest
    assert (first.session, first.position, first.reference_token, first.found_token) == ("s", 4, 2, 0)
    assert first.margin == pytest.approx(0.5)
    assert first.relative_margin == pytest.approx(0.5 / comparison.deviation)
    assert (widest.position, widest.margin) == (5, 5.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_differ_infinitely_and_fail(value: float) -> None:
    reference = random_logits()
    found = reference.copy()
    found[2, 7] = value
    comparison = compare([(reference, run_of(found))])
    assert comparison.max_relative == math.inf
    for is_exact in (True, False):
        assert verdict(comparison, comparison, tolerance_for(noise_of(1.0), same_kernels=True), is_exact=is_exact)


def test_masked_tokens_are_equal() -> None:
    logits = random_logits()
    logits[:, 5] = -np.inf
    found = compare([(logits, run_of(logits))])
    assert (found.max_abs, found.mean_kl) == (0.0, 0.0)


# --- verdict ----------------------------------------------------------------------------------------------------------

EQUAL = compare([(random_logits(), run_of(random_logits()))])


def differing(relative: float, mean_kl: float = 0.0) -> Comparison:
    return dataclasses.replace(EQUAL, max_abs=relative * EQUAL.deviation, mean_kl=mean_kl)


def noise_of(relative: float, mean_kl: float = 0.0, again: float = 0.0) -> Noise:
    return Noise(differing(again), {"quiet": EQUAL, "loud": differing(relative, mean_kl)})


def test_noise_is_that_of_the_loudest_shape() -> None:
    noise = noise_of(0.02, 1e-4)
    assert (noise.max_relative, noise.mean_kl) == (pytest.approx(0.02), 1e-4)


def test_a_silent_model_is_granted_the_floor() -> None:
    tolerance = tolerance_for(noise_of(0.0), same_kernels=True)
    assert (tolerance.alone_relative, tolerance.max_relative, tolerance.margin) == (FLOOR, FLOOR, MARGIN)
    assert verdict(differing(0.9 * FLOOR), EQUAL, tolerance, is_exact=True) is None
    assert "beyond float noise" in (verdict(differing(1.1 * FLOOR), EQUAL, tolerance, is_exact=True) or "")


def test_a_restless_model_is_granted_its_noise_but_not_alone() -> None:
    tolerance = tolerance_for(noise_of(0.1), same_kernels=True)
    assert verdict(differing(0.3), EQUAL, tolerance, is_exact=True) is None
    assert verdict(differing(0.5), EQUAL, tolerance, is_exact=True)
    assert "a session alone differs by 0.3" in (verdict(differing(0.3), differing(0.3), tolerance, is_exact=True) or "")


def test_on_a_gpu_a_session_alone_is_granted_the_noise() -> None:
    tolerance = tolerance_for(noise_of(0.1), same_kernels=False)
    assert tolerance.alone_relative is None
    assert verdict(differing(0.3), differing(0.3), tolerance, is_exact=True) is None


def test_a_small_error_everywhere_does_not_hide_behind_a_large_flip() -> None:
    tolerance = tolerance_for(noise_of(1.0, mean_kl=1e-4), same_kernels=True)
    assert verdict(differing(1.0, 1.5e-3), EQUAL, tolerance, is_exact=True) is None
    assert "mean KL divergence is 0.002" in (verdict(differing(1.0, 2e-3), EQUAL, tolerance, is_exact=True) or "")


@pytest.mark.parametrize(("noise", "margin"), [(0.0, MARGIN), (0.05, 0.2), (3.0, MARGIN_MAX)])
def test_f16_fails_only_on_a_flip_across_a_margin(noise: float, margin: float) -> None:
    tolerance = tolerance_for(noise_of(noise), same_kernels=True)
    assert tolerance.margin == pytest.approx(margin)
    for share, fails in ((0.9, False), (1.1, True)):
        reference, found = random_logits(), random_logits()
        reference[1, 0], reference[1, 1] = 20.0, 20.0
        deviation = compare([(reference, run_of(reference))]).deviation
        reference[1, 1] -= share * margin * deviation
        found[1, 0], found[1, 1] = 19.0, 20.0
        comparison = compare([(reference, run_of(found))])
        assert comparison.n_agree == 5
        reason = verdict(comparison, comparison, tolerance, is_exact=False)
        assert (reason is not None) == fails
        assert not fails or "another top token" in str(reason)


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_the_same_seeds_give_the_same_scripts_and_other_seeds_others() -> None:
    tokens = np.arange(10, 90, dtype=np.int32)
    once, twice = draw_batches(tokens, (1, 2)), draw_batches(tokens, (1, 2))
    assert once == twice
    prompts = {script.prompt for batch in once for script in batch}
    assert len(prompts) == 12
    assert all(token in tokens for prompt in prompts for token in prompt)
    assert [len(batch) for batch in once] == [1, 5, 1, 5]


def test_lengths_cover_less_and_more_than_a_chunk() -> None:
    (alone,), together = draw_batches(np.arange(50, dtype=np.int32), (1,))
    lengths = [len(script.prompt) for script in together]
    assert min(lengths) == 1
    assert max(lengths) > PREFILL_CHUNK_ROWS
    assert len(set(lengths)) >= 5
    assert len(alone.prompt) > 2 * PREFILL_CHUNK_ROWS
    assert alone.temperature == 0
    assert {script.temperature for script in together} == {0.0, 1.0}
    assert context_needed(16) >= len(alone.prompt) + 17


EXTENTS = [Extent(1, 4), Extent(5, 8), Extent(9, 12)]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("max_rows", [4, 64])
def test_every_shape_feeds_every_row_once_and_in_order(name: str, max_rows: int) -> None:
    steps = SHAPES[name](EXTENTS, 4, max_rows)
    fed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for step in steps:
        assert 0 < sum(piece.end - piece.start for piece in step) <= max_rows
        for piece in step:
            fed[piece.session] += range(piece.start, piece.end)
    assert fed == {0: [*range(4)], 1: [*range(8)], 2: [*range(12)]}


def test_steps_have_the_named_shapes() -> None:
    one = [Extent(5, 7)]
    assert one_after_another(one, 4, 64) == [[Piece(0, 0, 4)], [Piece(0, 4, 5)], [Piece(0, 5, 6)], [Piece(0, 6, 7)]]
    assert one_prefill(one, 4, 64) == [[Piece(0, 0, 7)]]
    assert row_by_row(one, 4, 64) == [[Piece(0, at, at + 1)] for at in range(7)]
    steps = mixed([Extent(1, 3), Extent(5, 6)], 4, 64)
    assert steps == [
        [Piece(0, 0, 1), Piece(1, 0, 4)],
        [Piece(0, 1, 2), Piece(1, 4, 5)],
        [Piece(0, 2, 3), Piece(1, 5, 6)],
    ]


# --- plans ------------------------------------------------------------------------------------------------------------


def test_all_cuts_are_one_two_stage_pipeline_each(tmp_path: Path) -> None:
    facts = inspect_model(make_tiny("llama", tmp_path / "model.gguf", n_layers=4))
    assert plan_cuts(facts, None, None) == ((1,), (2,), (3,))
    assert plan_cuts(facts, (1, 3), None) == ((1, 3),)
    assert len(plan_cuts(facts, None, 3)[0]) == 2
    with pytest.raises(UsageError, match="either --stages or --cuts"):
        plan_cuts(facts, (1,), 2)
    with pytest.raises(CutError, match="legal cuts"):
        plan_cuts(facts, (4,), None)


def test_a_cut_that_needs_a_second_one_gets_it(tmp_path: Path) -> None:
    """deepseek2 with 30 layers may be cut at 3, but not into 3 and 27: llama.cpp takes 27 layers for the Lite model."""
    facts = inspect_model(make_tiny("deepseek2", tmp_path / "model.gguf", n_layers=30))
    plans = plan_cuts(facts, None, None)
    assert len(plans) == len(facts.legal_cuts)
    assert all(cut in plan for cut, plan in zip(facts.legal_cuts, plans, strict=True))
    assert any(len(plan) == 2 and 3 in plan for plan in plans)


def test_a_model_of_one_layer_has_nothing_to_certify(tmp_path: Path) -> None:
    facts = inspect_model(make_tiny("llama", tmp_path / "model.gguf", n_layers=1))
    with pytest.raises(CutError, match="1 layer has no legal cut"):
        plan_cuts(facts, None, None)
