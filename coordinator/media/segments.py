"""The parts of an image, audio or video file in a prompt: tokens, and rows between them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

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


def joined(segments: Iterable[Segment]) -> list[Segment]:
    """Return segments without tokens that follow tokens."""
    found: list[Segment] = []
    for each in segments:
        if isinstance(each, list) and found and isinstance(found[-1], list):
            found[-1] = found[-1] + each
        else:
            found.append(each)
    return found
