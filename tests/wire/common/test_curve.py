"""Cost curves: prediction between points, padding, learning from real steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayline.wire.common.curve import OUTLIER, OUTLIERS_MAX, PAD_SEARCH_ROWS, CostCurve, mixed_cost_ns

FIELD = {
    1: 14.7, 2: 28.3, 3: 43.2, 4: 26.5, 5: 40.7, 6: 54.0, 7: 75.4, 8: 50.7, 12: 77.0, 16: 90.0, 24: 141.0, 32: 165.0,
}  # fmt: skip

points = st.dictionaries(st.integers(1, 300), st.integers(1_000, 10**9), min_size=1, max_size=12)


def field_curve() -> CostCurve:
    return CostCurve((rows, 1e6 * ms) for rows, ms in FIELD.items())


def test_nothing_is_known_without_points() -> None:
    curve = CostCurve()
    assert not curve.is_known
    assert (curve.cost_ns(4), curve.padded_rows(3, 8), curve.points()) == (0.0, 3, [])


def test_points_that_mean_nothing_are_left_out() -> None:
    assert CostCurve([(0, 5.0), (-1, 5.0), (2, 0.0), (3, 7.0)]).points() == [(3, 7)]


def test_a_curve_predicts_its_measured_points() -> None:
    curve = field_curve()
    assert [curve.cost_ns(rows) for rows in FIELD] == pytest.approx([1e6 * ms for ms in FIELD.values()])
    assert curve.cost_ns(0) == 0


def test_between_tiles_leftover_rows_cost_as_much_as_above_the_first_tile() -> None:
    curve = field_curve()
    assert curve.cost_ns(20) == pytest.approx(115.5e6)  # half way between 16 and 24
    assert curve.cost_ns(21) == pytest.approx((115.5 + 40.7 - 26.5) * 1e6)


def test_beyond_the_last_point_the_last_slope_goes_on_and_never_falls() -> None:
    assert field_curve().cost_ns(40) == pytest.approx((165 + 8 * 3) * 1e6)
    assert CostCurve([(1, 10.0), (2, 5.0)]).cost_ns(50) == pytest.approx(5.0)
    assert CostCurve([(4, 10.0)]).cost_ns(8) == pytest.approx(20.0)


def test_padding_takes_the_cheaper_tile() -> None:
    curve = field_curve()
    assert [curve.padded_rows(rows, 64) for rows in range(1, 9)] == [1, 4, 4, 4, 5, 8, 8, 8]
    assert curve.padded_rows(3, 3) == 3, "no more rows than fit"


def test_the_noise_of_a_flat_curve_pads_nothing() -> None:
    curve = CostCurve([(1, 100.0), (2, 99.0), (4, 98.5), (8, 99.0)])
    assert [curve.padded_rows(rows, 8) for rows in range(1, 9)] == list(range(1, 9))


@given(points, st.integers(1, 400), st.integers(1, 400))
def test_padding_is_never_slower_by_the_curve(known: dict[int, int], rows: int, rows_max: int) -> None:
    curve = CostCurve(known.items())
    padded = curve.padded_rows(rows, rows_max)
    assert rows <= padded <= max(rows, min(rows + PAD_SEARCH_ROWS, rows_max))
    assert curve.cost_ns(padded) <= curve.cost_ns(rows)
    assert curve.padded_cost_ns(rows, rows_max) == curve.cost_ns(padded)


@given(points, st.lists(st.tuples(st.integers(-1, 300), st.integers(-5, 10**10)), max_size=30))
def test_any_observations_leave_a_usable_curve(known: dict[int, int], seen: list[tuple[int, int]]) -> None:
    curve = CostCurve(known.items())
    for rows, ns in seen:
        curve.observe(rows, ns)
    assert [rows for rows, _ in curve.points()] == sorted({rows for rows, _ in curve.points()})
    assert all(ns > 0 for _, ns in curve.points())
    assert all(curve.cost_ns(rows) > 0 for rows in range(1, 310))


@given(points, st.integers(1, 300), st.integers(10_000, 10**9))
def test_observations_that_agree_are_learned(known: dict[int, int], rows: int, ns: int) -> None:
    curve = CostCurve(known.items())
    for _ in range(400):
        curve.observe(rows, ns)
    assert curve.cost_ns(rows) == pytest.approx(ns, rel=0.01)


def test_a_curve_is_learned_from_nothing() -> None:
    curve = CostCurve()
    curve.observe(4, 1_000)
    assert curve.points() == [(4, 1_000)]
    assert curve.cost_ns(8) == pytest.approx(2_000)


def test_a_hiccup_is_ignored_and_a_lasting_change_is_not() -> None:
    curve = CostCurve([(4, 1_000.0)])
    slow = round(OUTLIER * 1_000) + 1
    for _ in range(OUTLIERS_MAX - 1):
        curve.observe(4, slow)
    assert curve.cost_ns(4) == 1_000
    curve.observe(4, 1_000)  # the hiccup is over; another may come
    for _ in range(OUTLIERS_MAX - 1):
        curve.observe(4, slow)
    assert curve.cost_ns(4) == 1_000
    for _ in range(100):
        curve.observe(4, slow)
    assert curve.cost_ns(4) == pytest.approx(slow, rel=0.01)


def test_a_machine_that_slows_down_does_so_at_every_row_count() -> None:
    curve = field_curve()
    for _ in range(60):
        curve.observe(4, round(3 * 26.5e6))
    assert curve.cost_ns(8) > 1.4 * 50.7e6, "never observed, yet known to have slowed too"


def test_padding_follows_the_learned_curve() -> None:
    curve = field_curve()
    assert curve.padded_rows(3, 8) == 4
    for _ in range(60):
        curve.observe(3, 10_000_000)
    assert curve.padded_rows(3, 8) == 3


def test_slower_and_quicker_again_cancel_out_for_rows_that_were_not_seen() -> None:
    """A machine that is loaded now and then: single rows are seen alone, eight rows under load, sixteen never."""
    curve = field_curve()
    for _ in range(50):
        for rows, factor in ((1, 1.0), (8, 2.0)):
            for _ in range(20):
                curve.observe(rows, round(factor * field_curve().cost_ns(rows)))
    assert 0.9 < curve.cost_ns(16) / field_curve().cost_ns(16) < 2.1
    assert curve.cost_ns(1) < 1.1 * field_curve().cost_ns(1)


def test_prompt_rows_take_the_place_of_padding_and_decode_rows_pay_for_the_head() -> None:
    layers = CostCurve([(1, 15), (3, 43), (4, 26), (8, 50)])
    with_head = CostCurve([(1, 20), (3, 60), (4, 40), (8, 75)])
    assert mixed_cost_ns(layers, layers, 3, 1) == 26, "cheaper than the three alone"
    assert mixed_cost_ns(layers, layers, 4, 4) == 50
    assert mixed_cost_ns(with_head, layers, 4, 4) == 50 + 14
    assert mixed_cost_ns(with_head, CostCurve(), 4, 4) == 0


@pytest.mark.parametrize(
    ("points", "is_flat"),
    [
        ([], False),
        ([(1, 1_000)], False),
        ([(1, 1_000), (8, 9_000), (64, 1_000)], True),
        ([(1, 1_000), (8, 1_000), (64, 64_000)], False),
    ],
)
def test_a_curve_is_flat_if_its_most_rows_cost_no_more_than_its_fewest(
    points: list[tuple[int, int]], is_flat: bool
) -> None:
    assert CostCurve(points).is_flat == is_flat
