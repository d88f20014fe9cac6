"""What a stage learns of its own speed from steps of decode rows, of prompt rows, and of both."""

from __future__ import annotations

import random

import pytest

from benches.simulate_world import arithmetic
from stage.curves import Curves, StepShape
from wire.curve import OUTLIER, OUTLIERS_MAX

CONTEXT_NS = 13_000.0  # of the 1B shape's first ten layers, see benches/RESULTS.md
DECODE, PREFILL, BOTH = (4, 0), (0, 8), (2, 6)


def true_ns(shape: StepShape, factor: float = 1.0, context_ns: float = CONTEXT_NS) -> float:
    return factor * (arithmetic().cost_ns(shape.n_rows) + context_ns * shape.context)


def curves(context_ns: float = CONTEXT_NS) -> Curves:
    return Curves(arithmetic(), arithmetic(), context_ns)


def shape(rows: tuple[int, int], tokens: int) -> StepShape:
    return StepShape(*rows, context=sum(rows) * tokens)


@pytest.mark.parametrize("rows", [DECODE, PREFILL, BOTH])
def test_a_step_costs_its_rows_and_their_context(rows: tuple[int, int]) -> None:
    assert curves().predict_ns(shape(rows, 0)) == arithmetic().cost_ns(sum(rows))
    assert curves().predict_ns(shape(rows, 1_000)) == pytest.approx(true_ns(shape(rows, 1_000)))


def test_scratch_rows_cost_rows_and_no_context() -> None:
    padded = StepShape(3, 0, context=3 * 1_000, scratch_rows=1)
    assert padded.n_rows == 4
    assert curves().predict_ns(padded) == pytest.approx(arithmetic().cost_ns(4) + 3_000 * CONTEXT_NS)


def test_nothing_is_predicted_of_steps_whose_rows_nobody_has_seen() -> None:
    assert Curves().predict_ns(shape(DECODE, 100)) == 0
    assert Curves(decode=arithmetic()).predict_ns(shape(BOTH, 100)) == 0


@pytest.mark.parametrize("rows", [DECODE, PREFILL, BOTH])
def test_the_price_of_context_is_learned_from_every_kind_of_step(rows: tuple[int, int]) -> None:
    for wrong in (0.5, 2.0):
        known, rng = curves(wrong * CONTEXT_NS), random.Random(1)
        for _ in range(600):
            seen = shape(rows, rng.choice((20, 200, 500, 1_000)))
            known.observe(seen, round(true_ns(seen) * rng.uniform(0.9, 1.1)))
        assert known.context_ns == pytest.approx(CONTEXT_NS, rel=0.2)
        assert known.predict_ns(shape(rows, 2_000)) == pytest.approx(true_ns(shape(rows, 2_000)), rel=0.15)


def test_a_price_that_is_too_low_is_not_taken_for_a_slower_machine() -> None:
    """As a prompt beside running streams sees it: every step has the same rows, and one context grows."""
    known = curves(0.6 * CONTEXT_NS)
    for step in range(500):
        seen = StepShape(2, 2, context=2 * 60 + 2 * 2 * step)
        known.observe(seen, round(true_ns(seen)))
    assert known.decode.cost_ns(2) == pytest.approx(arithmetic().cost_ns(2), rel=0.1)
    assert 0.75 * CONTEXT_NS < known.context_ns < 1.1 * CONTEXT_NS


@pytest.mark.parametrize("rows", [DECODE, PREFILL, BOTH])
def test_a_context_that_grows_with_every_step_is_followed(rows: tuple[int, int]) -> None:
    # Steps of both kinds teach nothing until context is a tenth of their cost.
    known, miss = curves(0.6 * CONTEXT_NS), 0.08 if rows == BOTH else 0.05
    for tokens in range(2_000):
        seen = shape(rows, tokens)
        if tokens > 100:
            assert known.predict_ns(seen) == pytest.approx(true_ns(seen), rel=miss)
        known.observe(seen, round(true_ns(seen)))


@pytest.mark.parametrize("context_ns", [0.0, CONTEXT_NS])
def test_a_slower_machine_makes_rows_and_context_dearer_alike(context_ns: float) -> None:
    known, rng = curves(context_ns), random.Random(1)
    for _ in range(300):
        seen = shape(rng.choice((DECODE, PREFILL, BOTH)), rng.choice((0, 20, 60, 100, 1_000)))
        known.observe(seen, round(true_ns(seen, factor=3.0, context_ns=context_ns)))
    assert known.decode.cost_ns(4) == pytest.approx(3 * arithmetic().cost_ns(4), rel=0.1)
    assert known.prefill.cost_ns(8) == pytest.approx(3 * arithmetic().cost_ns(8), rel=0.1)
    assert known.context_ns == pytest.approx(3 * context_ns, rel=0.2, abs=1_000)


def test_steps_of_both_kinds_never_make_other_numbers_of_rows_dearer() -> None:
    """Single rows are quick, steps of both kinds slow: what nobody tries meanwhile must keep its price."""
    known = curves()
    before = known.decode.cost_ns(8)
    for _ in range(300):
        known.observe(StepShape(1, 0, 20), round(0.9 * arithmetic().cost_ns(1)))
        known.observe(StepShape(1, 1, 40), round(1.5 * arithmetic().cost_ns(2)))
    assert known.decode.cost_ns(8) <= before
    assert known.context_ns == pytest.approx(CONTEXT_NS, rel=0.1), "forty tokens say nothing of it"


@pytest.mark.parametrize("rows", [DECODE, PREFILL, BOTH])
def test_a_hiccup_teaches_nothing(rows: tuple[int, int]) -> None:
    known, seen = curves(), shape(rows, 1_000)
    for _ in range(OUTLIERS_MAX - 1):
        known.observe(seen, round((OUTLIER + 1) * true_ns(seen)))
    assert known.predict_ns(seen) == pytest.approx(true_ns(seen))


def test_an_impossibly_quick_step_leaves_usable_curves() -> None:
    known = curves()
    for _ in range(500):
        known.observe(shape(BOTH, 2_000), 1)
        known.observe(shape(DECODE, 2_000), 1)
    assert known.context_ns >= 0
    assert known.predict_ns(shape(DECODE, 100)) > 0


def test_a_curve_begins_with_what_it_sees() -> None:
    known = Curves()
    known.observe(shape(BOTH, 50), 1_000)
    assert not known.decode.is_known
    known.observe(shape(DECODE, 50), 1_000)
    assert known.decode.points() == [(4, 1_000)]
    assert not known.prefill.is_known


def test_prompts_teach_a_stage_without_head_what_untried_numbers_of_decode_rows_cost() -> None:
    """As after a calibration that found no gain in batches, so that none are tried."""
    wrong = [(1, 44_000_000), (4, 176_000_000), (8, 352_000_000)]
    headless = Curves.of_stage(has_head=False, decode=wrong, prefill=wrong)
    last = Curves.of_stage(has_head=True, decode=wrong, prefill=wrong)
    for known in (headless, last):
        for _ in range(20):
            known.observe(StepShape(1, 0), 30_000_000)
            known.observe(StepShape(0, 8), 160_000_000)
    assert headless.decode.cost_ns(8) < 6.5 * headless.decode.cost_ns(1)
    assert last.decode.cost_ns(8) > 7.5 * last.decode.cost_ns(1)
    assert last.prefill.cost_ns(8) < 6.5 * last.prefill.cost_ns(1)
