"""The places of rows in models whose positions have several axes (M-RoPE), for lanes that hold images. Pure.

Everywhere else a row's position is its number in its lane. Such a model gives all rows of an image one position on the
first axis, and a line and a column of the image on the next two. The rows behind it continue after its longer side.
llama.cpp knows cells by the first axis alone. So an engine translates: numbers come in, and places go to llama.cpp.

A lane cannot be cut inside an image, because all its rows have one place there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from relayline.wire.common.errors import NativeError, PositionGapError

Array = npt.NDArray[Any]
_NUMBERS = 4  # of an image, as `saved` returns it


class Grid(NamedTuple):
    """Rows of one image in a step, one after the other."""

    row: int  # the first one's in the step
    n_rows: int
    lane: int
    start: int  # the number of the image's first row in its lane
    n_before: int  # rows of the image before these
    width: int  # of the whole image
    height: int


class _Image(NamedTuple):
    start: int
    width: int
    height: int
    n_held: int

    @property
    def n_rows(self) -> int:
        return self.width * self.height

    @property
    def n_places(self) -> int:
        return max(self.width, self.height)


class LanePlaces:
    """The images in the lanes of one engine. Without any, all its answers are the numbers that it is given."""

    def __init__(self, n_lanes: int) -> None:
        self._images: dict[int, list[_Image]] = {}
        self._shifts = np.zeros(n_lanes, np.int32)  # of rows behind all images of a lane: number less place

    def holds_images(self, lane: int) -> bool:
        """Return whether rows of the lane have other places than their numbers."""
        return lane in self._images

    def fill(self, axes: Array, numbers: Array, lanes: Array, grids: Sequence[Grid]) -> None:
        """Write the places of a step's rows.

        axes: i32 [4, n_rows], written; numbers, lanes: i32 [n_rows]. A lane's rows continue it.
        """
        axes[:3] = numbers - self._shifts[lanes] if self._images else numbers
        axes[3] = 0
        for grid in grids:
            part = axes[:3, grid.row : grid.row + grid.n_rows]
            rows = np.arange(grid.n_before, grid.n_before + grid.n_rows, dtype=np.int32)
            part[:] = self._first(grid.lane, grid.start)
            part[1] += rows // grid.width
            part[2] += rows % grid.width

    def note(self, grids: Iterable[Grid]) -> None:
        """Take note of a step that has run."""
        for grid in grids:
            images = self._images.setdefault(grid.lane, [])
            if images and images[-1].start == grid.start:
                images.pop()
            images.append(_Image(grid.start, grid.width, grid.height, grid.n_before + grid.n_rows))
            self._count(grid.lane)

    def check_cut(self, lane: int, number: int) -> None:
        """Raise PositionGapError where `number` is inside an image."""
        for image in self._images.get(lane, ()):
            if image.start < number < image.start + image.n_held:
                raise PositionGapError(f"lane {lane} cannot be taken back to row {number}, which is inside an image")

    def place(self, lane: int, number: int) -> int:
        """Return the place from which on the lane holds rows of this number and more; of an image, all its rows."""
        images = self._images.get(lane)
        if images is None:
            return number
        shift = 0
        for image in images:
            if number <= image.start:
                break
            if number < image.start + image.n_held:
                return image.start - shift
            if number < image.start + image.n_rows:  # behind the rows that are there
                return image.start - shift + 1
            shift += image.n_rows - image.n_places
        return number - shift

    def cut(self, lane: int, number: int) -> int:
        """Forget images that have rows from this number on, since those are dropped. Returns the place of the first
        dropped row."""
        found = self.place(lane, number)
        if lane in self._images:
            kept = [image for image in self._images[lane] if image.start + image.n_held <= number]
            self._set(lane, kept)
        return found

    def copy(self, source: int, target: int) -> None:
        """Let the target lane hold the source's images."""
        self._set(target, list(self._images.get(source, ())))

    def n_rows(self, lane: int, n_places: int) -> int:
        """Return how many rows a lane holds, from the number of places that llama.cpp reports."""
        shift = 0
        for image in self._images.get(lane, ()):
            first = image.start - shift
            if n_places <= first:  # the image is gone, as after a step that failed
                break
            if n_places == first + 1:
                return image.start + image.n_held
            shift += image.n_rows - image.n_places
        return n_places + shift

    def saved(self, lane: int) -> Array:
        """Return the lane's images as numbers: i64 [4 for each]."""
        return np.array([number for image in self._images.get(lane, ()) for number in image], np.int64)

    def put_back(self, lane: int, saved: Array) -> None:
        """Let an empty lane have the images that `saved` returned. Raises NativeError for other numbers."""
        if saved.size % _NUMBERS or (saved.size and saved.min() < 0):
            raise NativeError("these numbers are not a lane's images")
        self._set(lane, [_Image(*each) for each in saved.reshape(-1, _NUMBERS).tolist()])

    def _first(self, lane: int, start: int) -> int:
        shift = sum(each.n_rows - each.n_places for each in self._images.get(lane, ()) if each.start < start)
        return start - shift

    def _set(self, lane: int, images: list[_Image]) -> None:
        self._images.pop(lane, None)
        if images:
            self._images[lane] = images
        self._count(lane)

    def _count(self, lane: int) -> None:
        self._shifts[lane] = sum(each.n_rows - each.n_places for each in self._images.get(lane, ()))
