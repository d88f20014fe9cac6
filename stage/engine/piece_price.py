"""What a token costs that is put back into a lane in pieces, as measured. Decode thread only; reading it, any."""

from __future__ import annotations

import collections
import statistics

_N_LATEST = 15  # pieces, of which the median counts: on a busy host a piece may have waited
# A token is put back in at most so many times the time in which one is taken out. 0.5 to 6.5 were measured, the most
# with the smallest rows in long lanes.
_DEARER_MAX = 8


class PiecePrice:
    """The times of the latest pieces of one engine."""

    def __init__(self) -> None:
        self._out_ns: collections.deque[float] = collections.deque(maxlen=_N_LATEST)
        self._back_ns: collections.deque[float] = collections.deque(maxlen=_N_LATEST)
        self.token_ns = 0.0
        """Time in which one token is put back; 0 before the first piece."""

    def taken_out(self, n_tokens: int, took_ns: int) -> None:
        """A piece was taken out of a lane.

        It takes about as long as one that is put back, and so shows a price that is far too high. With that nothing
        might ever be brought back, and the price stay.
        """
        self._out_ns.append(took_ns / n_tokens)
        self._renew()

    def put_back(self, n_tokens: int, took_ns: int) -> None:
        """A piece was put back into a lane."""
        self._back_ns.append(took_ns / n_tokens)
        self._renew()

    def _renew(self) -> None:
        out_ns = statistics.median_low(self._out_ns) if self._out_ns else 0.0
        back_ns = statistics.median_low(self._back_ns) if self._back_ns else out_ns
        self.token_ns = min(back_ns, _DEARER_MAX * out_ns) if out_ns else back_ns
