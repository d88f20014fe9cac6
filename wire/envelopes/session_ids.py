"""Session ids: a number that grows, and above it the number of the adapter that the session's rows are computed with.

So a stage knows of each frame, without a look at its session, with which others it may share a step.
"""

from __future__ import annotations

ADAPTER_SHIFT = 56  # below it ids are as they always were; above it a signed 64-bit number has room for 127 adapters


def with_adapter(session_id: int, adapter: int) -> int:
    """Return the id of a session whose rows are computed with this adapter; 0: with none but those of every session.

    An id that has its adapter stays as it is.
    """
    return session_id | adapter << ADAPTER_SHIFT


def adapter_of(session_id: int) -> int:
    """Return the number of a session's adapter, see `with_adapter`."""
    return session_id >> ADAPTER_SHIFT
