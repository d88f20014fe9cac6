"""`calibrate` names the neighbouring points of a curve between which a row gets dearer."""

from __future__ import annotations

from relayline.deploy.cli.calibrate import _cliffs
from relayline.wire.common.curve import CostCurve


def curve_of(points: dict[int, int]) -> CostCurve:
    return CostCurve(points.items())


def test_a_row_that_becomes_dearer_is_named_and_one_that_becomes_cheaper_is_not() -> None:
    curve = curve_of({1: 1_000_000, 32: 3_000_000, 63: 5_300_000, 64: 13_700_000, 128: 28_900_000})
    assert _cliffs(curve) == ["64 rows: a row costs 2.54 times as much as in a step of 63"]


def test_a_smooth_curve_has_no_cliff() -> None:
    assert _cliffs(curve_of({1: 1_000_000, 2: 2_500_000, 4: 6_000_000})) == []
