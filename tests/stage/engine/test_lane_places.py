"""Positions on several axes compared with a plain list of a lane's rows, in drawn histories."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.stage.engine.lane_places import Grid, LanePlaces
from relayline.wire.common.errors import NativeError, PositionGapError

N_LANES = 3


class Lane:
    """llama.cpp's state of one lane: each row's position, and the image to which it belongs."""

    def __init__(self) -> None:
        self.rows: list[
            tuple[int, int, int, int]
        ] = []  # first axis, line, column, number of the image's first row or -1
        self.next_place = 0

    def texts(self, n_rows: int) -> None:
        for _ in range(n_rows):
            self.rows.append((self.next_place, self.next_place, self.next_place, -1))
            self.next_place += 1

    def image(self, width: int, height: int) -> None:
        first, start = self.next_place, len(self.rows)
        for row in range(width * height):
            self.rows.append((first, first + row // width, first + row % width, start))
        self.next_place += max(width, height)

    def cut(self, n_rows: int) -> None:
        del self.rows[n_rows:]
        last = self.rows[-1] if self.rows else (-1, -1, -1, -1)
        self.next_place = last[0] + 1
        if last[3] >= 0:
            image = self.rows[last[3] :]
            self.next_place = last[0] + max(max(row[1], row[2]) - last[0] for row in image) + 1


def read(places: LanePlaces, lane: int, number: int, n_rows: int, grid: tuple[int, int, int] | None) -> np.ndarray:
    """Fill a step of rows of one lane, and note it; returns its axes."""
    axes, numbers = np.zeros((4, n_rows), np.int32), np.arange(number, number + n_rows, dtype=np.int32)
    grids = []
    if grid is not None:
        n_before, width, height = grid
        grids = [Grid(0, n_rows, lane, number - n_before, n_before, width, height)]
    places.fill(axes, numbers, np.full(n_rows, lane, np.int32), grids)
    places.note(grids)
    return axes


TEXT = st.tuples(st.just("text"), st.integers(1, 6), st.just(0), st.just(1))
IMAGE = st.tuples(st.just("image"), st.integers(1, 5), st.integers(1, 5), st.integers(1, 9))
CUT = st.tuples(st.just("cut"), st.integers(0, 60), st.just(0), st.just(1))
COPY = st.tuples(st.just("copy"), st.integers(0, 60), st.just(0), st.just(1))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, N_LANES - 1), TEXT | IMAGE | CUT | COPY), max_size=14))
def test_places_are_those_of_a_plain_list(events: list[tuple[int, tuple[str, int, int, int]]]) -> None:
    places, lanes = LanePlaces(N_LANES), [Lane() for _ in range(N_LANES)]
    for index, (what, one, other, chunk) in events:
        lane = lanes[index]
        start = len(lane.rows)
        if what == "text":
            lane.texts(one)
            axes = read(places, index, start, one, None)
            assert axes[:3].T.tolist() == [list(row[:3]) for row in lane.rows[start:]]
        elif what == "image":
            lane.image(one, other)
            for at in range(0, one * other, chunk):
                size = min(chunk, one * other - at)
                axes = read(places, index, start + at, size, (at, one, other))
                assert axes[:3].T.tolist() == [list(row[:3]) for row in lane.rows[start + at : start + at + size]]
                held = lane.rows[: start + at + size]
                assert places.n_rows(index, held[-1][0] + 1) == len(held)
            assert not axes[3].any()
        else:
            number = min(one, start)
            inside = 0 < number < start and lane.rows[number][3] >= 0 and lane.rows[number][3] != number
            if inside:
                with pytest.raises(PositionGapError, match="inside an image"):
                    places.check_cut(index, number)
                continue
            places.check_cut(index, number)
            if what == "cut":
                first = places.cut(index, number)
            else:
                index, lane = (index + 1) % N_LANES, Lane()
                places.copy((index - 1) % N_LANES, index)
                lane.rows = list(lanes[(index - 1) % N_LANES].rows)
                first, lanes[index] = places.cut(index, number), lane
            assert [row for row in lane.rows if row[0] < first] == lane.rows[:number]
            lane.cut(number)
        for number, lane in enumerate(lanes):
            n_places = lane.rows[-1][0] + 1 if lane.rows else 0
            assert places.n_rows(number, n_places) == len(lane.rows)
            others = LanePlaces(N_LANES)
            others.put_back(0, places.saved(number))
            assert others.n_rows(0, n_places) == len(lane.rows)


def test_a_lane_that_lost_its_images_in_a_step_that_failed_ends_before_them() -> None:
    places = LanePlaces(1)
    read(places, 0, 4, 6, (0, 3, 2))
    read(places, 0, 10, 2, None)
    read(places, 0, 12, 4, (0, 2, 4))
    assert places.n_rows(0, 10) == 16  # the first four rows of the second image
    assert places.n_rows(0, 9) == 12
    assert places.n_rows(0, 4) == 4
    assert places.cut(0, 4) == 4
    assert not places.holds_images(0)


def test_a_cut_inside_an_image_drops_all_of_it() -> None:
    places = LanePlaces(1)
    read(places, 0, 4, 6, (0, 3, 2))
    assert places.cut(0, 7) == 4
    assert not places.holds_images(0)


@pytest.mark.parametrize("numbers", [[1, 2, 3], [1, -1, 2, 3]])
def test_other_numbers_are_not_put_back(numbers: list[int]) -> None:
    with pytest.raises(NativeError):
        LanePlaces(1).put_back(0, np.array(numbers, np.int64))
