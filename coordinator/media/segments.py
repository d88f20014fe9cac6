"""The parts of an image or audio file in a prompt: tokens, and rows between them. Pure."""

from __future__ import annotations

import msgspec


class Grid(msgspec.Struct, frozen=True):
    """Rows of an image that have places on several axes, line by line."""

    width: int
    height: int


Segment = list[int] | int | Grid
"""Tokens of a prompt around rows of a file, or the number of these rows, or their grid."""


def n_rows_in(segment: Segment) -> int:
    """Return how many rows of a file a segment has; 0 for tokens."""
    if isinstance(segment, Grid):
        return segment.width * segment.height
    return segment if isinstance(segment, int) else 0
