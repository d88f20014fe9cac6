"""Checkpoints are bounded in number and bytes, and both ends of the wire drop the same ones."""

from __future__ import annotations

import numpy as np

from relayline.stage.engine.checkpoints import Checkpoints
from relayline.wire.common.checkpoints import CHECKPOINTS_PER_LANE_MAX, kept_positions


def state(n_bytes: int = 10) -> np.ndarray:
    return np.zeros(n_bytes, np.uint8)


def test_the_first_and_the_last_ones_stay() -> None:
    assert kept_positions([5]) == {5}
    assert kept_positions([40, 10, 30, 20]) == {10, 20, 30, 40}
    assert kept_positions([60, 10, 50, 30, 20, 40]) == {10, 40, 50, 60}
    assert len(kept_positions(range(100))) == CHECKPOINTS_PER_LANE_MAX


def test_a_lane_forgets_by_that_rule() -> None:
    checkpoints, added = Checkpoints(), []
    for position in (10, 20, 30, 40, 50, 60):
        checkpoints.add(0, position, state())
        added.append(position)
        assert set(checkpoints.positions(0)) == kept_positions(added)
        added = checkpoints.positions(0)
    assert checkpoints.positions(1) == []
    assert checkpoints.state(0, 20) is None


def test_bytes_are_bounded_over_all_lanes_and_the_oldest_goes_first() -> None:
    checkpoints = Checkpoints(bytes_max=35)
    for lane in range(3):
        checkpoints.add(lane, 5, state())
    checkpoints.add(1, 9, state())
    assert [checkpoints.positions(lane) for lane in range(3)] == [[], [5, 9], [5]]
    assert checkpoints.size_bytes == 30
    checkpoints.add(0, 7, state(36))
    assert checkpoints.size_bytes == 0, "one that alone is too large is not kept either"


def test_a_checkpoint_that_lanes_share_counts_once() -> None:
    checkpoints = Checkpoints(bytes_max=25)
    checkpoints.add(0, 5, state())
    checkpoints.add(0, 9, state())
    checkpoints.hand_on(0, 1, 8)
    checkpoints.hand_on(0, 2, 9)
    assert [checkpoints.positions(lane) for lane in range(3)] == [[5, 9], [5], [5, 9]]
    assert checkpoints.state(1, 5) is checkpoints.state(0, 5)
    assert checkpoints.size_bytes == 20
    checkpoints.drop_beyond(0, 0)
    assert checkpoints.size_bytes == 20
    checkpoints.drop_beyond(2, 8)
    assert [checkpoints.positions(lane) for lane in range(3)] == [[], [5], [5]]
    assert checkpoints.size_bytes == 10
