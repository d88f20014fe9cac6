"""The time for which a peer has been silent. Pure.

Time is counted in looks, not read from a clock: a process that was stopped itself for a while and continues has looked
once. A process that was itself stopped does not blame others for the silence.
"""

from __future__ import annotations

from relayline.wire.common import bounds


def looks_of(seconds: float) -> int:
    """Return with how many looks, BEAT_EVERY_S apart, so long has passed for certain: the first may come at once."""
    return round(seconds / bounds.BEAT_EVERY_S) + 1


class Silence:
    """Counts the looks at a peer since it was last heard. Call `look` every BEAT_EVERY_S."""

    def __init__(self) -> None:
        self.n_looks = 0
        """Looks since the peer was last heard."""

    def heard(self) -> None:
        """Note that the peer has said something."""
        self.n_looks = 0

    def look(self) -> int:
        """Count one look and return how many there are now since the peer was heard."""
        self.n_looks += 1
        return self.n_looks

    @property
    def is_final(self) -> bool:
        """Whether the peer must be taken for lost."""
        return self.n_looks >= looks_of(bounds.LOST_AFTER_S)


def silent_text(who: str) -> str:
    """Return what to say of a peer that is taken for lost."""
    return f"{who} has not answered for {bounds.LOST_AFTER_S:.0f} s"
