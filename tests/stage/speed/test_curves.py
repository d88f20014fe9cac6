"""A stage learns its own speed from steps of decode rows, of prompt rows, and of both."""

from __future__ import annotations

import random

import pytest

from relayline.deploy.testing.simulation.world import arithmetic
from relayline.stage.speed.curves import Curves, StepShape, shape_of
from relayline.wire.common.curve import ATTENTION_TILE_ROWS, OUTLIER, OUTLIERS_MAX, CostCurve
from relayline.wire.envelopes.frames import Flag
from tests.support.fakes import rows_frame

CONTEXT_NS = 13_000.0  # of the 1B shape's first ten layers, see docs/results/curves.md
TILED_NS = 3_000.0  # and of steps of 64 rows of one prompt or more
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


def chunk(n_rows: int, tokens: int) -> StepShape:
    """A step of prompt rows that all have this context."""
    return shape_of([rows_frame(1, tokens, n_rows, Flag.PREFILL)])


def tiled_curves(context_tiled_ns: float = TILED_NS) -> Curves:
    return Curves(arithmetic(), arithmetic(), CONTEXT_NS, context_tiled_ns)


SHAPES = {  # [(tokens before a frame, its rows)] -> tokens that the tiles of 64 rows read
    "one chunk, one tile": ([(1_000, 64)], 1_000),
    "a tile that is not full reads as much": ([(1_000, 65)], 2_000),
    "eight tiles": ([(1_000, 512)], 8_000),
    "every lane of a tile": ([(10, 1)] * 63 + [(500, 1)], 63 * 10 + 500),
    "lanes of other tiles are not read": ([(10, 64), (500, 64)], 510),
    "a chunk that begins in one tile and ends in the next": ([(10, 60), (500, 8), (0, 1)], 10 + 2 * 500),
    "a chunk that ends with its tile": ([(10, 60), (500, 4), (30, 1)], 10 + 500 + 30),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_tile_of_attention_reads_the_lanes_of_all_its_rows(name: str) -> None:
    frames, tile_tokens = SHAPES[name]
    found = shape_of(rows_frame(index, *frame, Flag.PREFILL * (index % 2)) for index, frame in enumerate(frames))
    assert found.tile_tokens == tile_tokens
    assert found.context == sum(tokens * n_rows for tokens, n_rows in frames)
    assert found.n_rows == sum(n_rows for _, n_rows in frames)
    assert found.prefill_rows == sum(n_rows for _, n_rows in frames[1::2])


def test_rows_of_a_tile_share_reads_and_pay_for_each_other() -> None:
    known = tiled_curves()
    assert known.predict_ns(chunk(63, 1_000)) == pytest.approx(arithmetic().cost_ns(63) + 63 * 1_000 * CONTEXT_NS)
    for n_rows, n_tiles in ((64, 1), (65, 2), (128, 2)):
        context_ns = n_tiles * ATTENTION_TILE_ROWS * 1_000 * TILED_NS
        assert known.predict_ns(chunk(n_rows, 1_000)) == pytest.approx(arithmetic().cost_ns(n_rows) + context_ns)
    lanes = [rows_frame(index, 1_000, 1) for index in range(64)]
    context_ns = 64 * ATTENTION_TILE_ROWS * 1_000 * TILED_NS
    assert known.predict_ns(shape_of(lanes)) == pytest.approx(arithmetic().cost_ns(64) + context_ns)
    assert known.predict_ns(shape_of(lanes)) > 2 * known.predict_ns(shape_of(lanes[:63]))


def test_scratch_rows_that_fill_a_tile_make_a_step_tiled() -> None:
    known, seen = tiled_curves(), shape_of([rows_frame(1, 1_000, 60)])
    assert known.predict_ns(seen.padded(4)) == known.predict_ns(chunk(64, 1_000)) < known.predict_ns(seen.padded(3))


def test_a_price_of_tiles_that_nobody_knows_is_that_of_single_rows() -> None:
    known = tiled_curves(context_tiled_ns=0.0)
    assert known.predict_ns(chunk(128, 1_000)) == pytest.approx(arithmetic().cost_ns(128) + 128_000 * CONTEXT_NS)
    for _ in range(100):
        known.observe(chunk(128, 2_000), round(arithmetic().cost_ns(128) + 128 * 2_000 * 0.5 * CONTEXT_NS))
    assert known.context_tiled_ns == 0.0
    assert known.context_ns < 0.9 * CONTEXT_NS, "as before such steps were known"


@pytest.mark.parametrize("wrong", [0.5, 2.0])
def test_each_price_of_context_is_learned_from_its_own_steps(wrong: float) -> None:
    known, truth, rng = tiled_curves(wrong * TILED_NS), tiled_curves(), random.Random(1)
    for _ in range(600):
        seen = chunk(rng.choice((16, 64, 128)), rng.choice((500, 2_000, 4_000)))
        known.observe(seen, round(truth.predict_ns(seen) * rng.uniform(0.95, 1.05)))
    assert known.context_tiled_ns == pytest.approx(TILED_NS, rel=0.2)
    assert known.context_ns == pytest.approx(CONTEXT_NS, rel=0.2)


def test_a_slower_machine_makes_both_prices_of_context_dearer() -> None:
    known, truth = tiled_curves(), tiled_curves()
    for _ in range(200):
        known.observe(shape(DECODE, 20), round(3 * truth.predict_ns(shape(DECODE, 20))))
    assert known.context_ns > 1.3 * CONTEXT_NS, "the common part moves with steps of one kind too"
    assert known.context_tiled_ns / TILED_NS == pytest.approx(known.context_ns / CONTEXT_NS)


def lanes_curves(first: float = 1.0, further: float = 1.0) -> Curves:
    """Lanes with separate cells: the price of a frame's first row, and of each further one, times their number."""
    return Curves(arithmetic(), arithmetic(), first * CONTEXT_NS, further * TILED_NS, is_per_lane=True)


def test_a_frame_reads_a_lane_with_separate_cells_once() -> None:
    known = lanes_curves()
    decode = shape_of(rows_frame(index, 1_000, 1) for index in range(80))
    assert known.predict_ns(decode) == pytest.approx(arithmetic().cost_ns(80) + 80 * 1_000 * CONTEXT_NS)
    both = shape_of([rows_frame(1, 500, 1), rows_frame(2, 2_000, 128, Flag.PREFILL)])
    context_ns = 500 * CONTEXT_NS + 2_000 * (CONTEXT_NS + 127 * TILED_NS)
    assert known.predict_ns(both) == pytest.approx(arithmetic().cost_ns(129) + context_ns)
    unequal = shape_of([rows_frame(1, 2_000, 1), *(rows_frame(index, 50, 1) for index in range(2, 5))])
    assert known.predict_ns(unequal) == pytest.approx(arithmetic().cost_ns(4) + 4 * 2_000 * CONTEXT_NS), (
        "together they go through as many cells as the longest has"
    )
    guessed = Curves(arithmetic(), arithmetic(), CONTEXT_NS, is_per_lane=True)
    assert guessed.predict_ns(chunk(8, 1_000)) == pytest.approx(arithmetic().cost_ns(8) + 8_000 * CONTEXT_NS)


@pytest.mark.parametrize(("first", "further"), [(0.5, 1.0), (2.0, 1.0), (1.0, 0.5), (1.0, 2.0), (0.5, 2.0), (0.3, 3.0)])
def test_first_rows_and_further_ones_learn_their_price_apart(first: float, further: float) -> None:
    known, truth, rng = lanes_curves(first, further), lanes_curves(), random.Random(1)
    for _ in range(600):
        tokens = rng.choice((500, 2_000, 4_000))
        seen = rng.choice((shape_of([rows_frame(1, tokens, 1)] * 4), chunk(rng.choice((32, 64)), tokens)))
        known.observe(seen, round(truth.predict_ns(seen) * rng.uniform(0.95, 1.05)))
    assert known.context_ns == pytest.approx(CONTEXT_NS, rel=0.2)
    assert known.context_tiled_ns == pytest.approx(TILED_NS, rel=0.2)


LEFTOVERS = CostCurve(
    [(1, 25e6), (4, 80e6), (5, 180e6), (6, 280e6), (7, 380e6), (8, 160e6), (60, 1_200e6), (64, 1_240e6)]
)


def test_padding_makes_no_step_tiled_where_there_are_tiles() -> None:
    """Its rows would have other bits, however cheap."""
    lanes = [rows_frame(index, 0, 1) for index in range(62)]
    assert Curves(LEFTOVERS, LEFTOVERS, CONTEXT_NS, 0.0).padded_rows(shape_of(lanes), 512) == 64
    known = Curves(LEFTOVERS, LEFTOVERS, CONTEXT_NS, TILED_NS)
    assert known.padded_rows(shape_of(lanes), 512) == 62
    assert known.padded_rows(shape_of(lanes[:7]), 512) == 8


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
    """As with a prompt during decode: every step has the same rows, and one context grows."""
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
    """Single rows are quick, steps of both kinds slow: untried sizes must keep their price."""
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


def test_a_curve_begins_with_its_first_measurement() -> None:
    known = Curves()
    known.observe(shape(BOTH, 50), 1_000)
    assert not known.decode.is_known
    known.observe(shape(DECODE, 50), 1_000)
    assert known.decode.points() == [(4, 1_000)]
    assert not known.prefill.is_known


def test_prompts_teach_a_stage_without_head_the_cost_of_untried_decode_rows() -> None:
    """As after a calibration that found no gain in batches, so none are tried."""
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


def test_steps_in_parts_cost_the_sum_and_teach_the_largest() -> None:
    known = curves(0.0)
    shape = StepShape(6, 0, micro_batches=(4, 2))
    expected_ns = arithmetic().cost_ns(4) + arithmetic().cost_ns(2)
    assert known.predict_ns(shape) == pytest.approx(expected_ns)
    for _ in range(200):
        known.observe(shape, round(2 * expected_ns))
    assert known.predict_ns(shape) == pytest.approx(2 * expected_ns, rel=0.1)
    blind = Curves()
    blind.observe(shape, round(expected_ns))
    assert not blind.decode.is_known, "the time of one part is unknown"


@pytest.mark.parametrize("seed", range(40))
def test_no_step_is_padded_to_a_slower_size(seed: int) -> None:
    """Also with prompt rows, which cost the last stage less than decode rows do."""
    rng = random.Random(seed)
    curves = Curves.of_stage(
        has_head=True,
        decode=[(rows, rng.uniform(10, 14) * -(-rows // 4) * 4) for rows in range(1, 80)],
        prefill=[(rows, rng.uniform(8, 12) * rows) for rows in range(1, 80)],
        context_ns=0.01,
        context_tiled_ns=rng.choice((0.0, 0.002)),
    )
    for _ in range(30):
        decode = [rows_frame(index, 50, 1, Flag.WANTS_SAMPLE) for index in range(rng.randint(1, 40))]
        prompt_rows = rng.choice((0, rng.randint(1, 30)))
        prompt = [rows_frame(99, 50, prompt_rows, Flag.PREFILL)] if prompt_rows else []
        shape = shape_of([*decode, *prompt])
        padded = shape.padded(curves.padded_rows(shape, 80) - shape.n_rows)
        assert curves.predict_ns(padded) <= curves.predict_ns(shape)


@pytest.mark.parametrize(
    ("points", "doubt"),
    [
        ([(1, 800_000), (8, 790_000), (64, 810_000)], "64 decode rows seem to take 0.81 ms and 1 0.80 ms"),
        ([(1, 800_000), (8, 800_000), (32, 800_000)], ""),
        ([(1, 800_000), (64, 2_000_000)], ""),
        ([(2, 1_000_000), (128, 1_000_000)], "128 decode rows"),
        ([], ""),
    ],
)
def test_a_curve_that_no_device_can_have_is_doubted(points: list[tuple[int, float]], doubt: str) -> None:
    text = Curves.of_stage(has_head=True, decode=points).doubt
    assert text.startswith(doubt)
    assert bool(text) == bool(doubt)
    assert text.endswith("measure again when it is idle" if doubt else "")


@pytest.mark.parametrize("has_head", [True, False])
def test_a_copy_with_as_many_times_the_layers_costs_as_many_times_as_much(*, has_head: bool) -> None:
    known = Curves.of_stage(
        has_head=has_head, decode=[(1, 100), (8, 400)], prefill=[(64, 2_000)], context_ns=2.0, context_tiled_ns=1.0
    )
    other = known.copy(has_head=has_head)
    other.scale(1.5)
    assert dict(other.decode.points())[8] == 600
    assert dict(other.prefill.points())[64] == 3_000
    assert (other.context_ns, other.context_tiled_ns) == (3.0, 1.5)
    assert (other.decode is other.prefill) is not has_head
    assert dict(known.decode.points())[8] == 400, "the curves of before stay as they are"
