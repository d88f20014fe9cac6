"""Typed view of _otlp.c."""

from collections.abc import Sequence
from typing import Any

def span(
    name: str,
    own: bytes,
    parent: bytes,
    start_ns: int,
    end_ns: int,
    attributes: dict[str, Any],
    events: Sequence[tuple[str, int, Any]],
    links: Sequence[tuple[bytes, Any]],
    kind: int,
    error: str,
    n_dropped_links: int,
    n_dropped_events: int,
    /,
) -> bytes:
    """Return an OTLP Span. own and parent hold a trace id and a span id, zeros for no parent; kind is OTLP's number.

    Attributes are text, bool, int, float, or lists of these. Raises TypeError for others, OverflowError for an int of
    more than 64 bits.
    """
