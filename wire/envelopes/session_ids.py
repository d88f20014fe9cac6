"""Session ids: a number that grows, and above it the number of the adapter that the session's rows are computed with.

So a stage knows of each frame, without a look at its session, with which others it may share a step. The uppermost bit
says that there is an adapter: coordinators of 0.1.0 put random bits where its number is, and never set that one.
"""

from __future__ import annotations

ADAPTER_SHIFT = 56  # ids of sessions without an adapter are below
ADAPTER_BITS = 127
_HAS_ADAPTER = 1 << 63
PLAIN_ID = (1 << ADAPTER_SHIFT) - 1  # the bits of an id's number, where it is from this release


def with_adapter(session_id: int, adapter: int) -> int:
    """Return the id of a session whose rows are computed with this adapter; 0: with none but those of every session.

    An id that has its adapter stays as it is. It is greater than every id without one.
    """
    return session_id | _HAS_ADAPTER | adapter << ADAPTER_SHIFT if adapter else session_id


def adapter_of(session_id: int) -> int:
    """Return the number of a session's adapter, see `with_adapter`."""
    return session_id >> ADAPTER_SHIFT & ADAPTER_BITS if session_id & _HAS_ADAPTER else 0
