"""What to do after an attempt of a batch's request: keep its outcome, or try again, when, and for how long.

Pure. Two kinds of trouble are told apart. A server that is busy, loading or away (429, 503, no connection) is no fault
of the request: it waits, until nobody has been answered for `wait_s`. A server that has never answered is not waited
for as long: most often its URL is mistyped. Any other break (a connection that ends in the middle, 500, 502, 504) may
be the request's doing: after `n_attempts` of them the outcome is kept.
"""

from __future__ import annotations

import dataclasses
import enum

BUSY = (429, 503)
BROKEN = (408, 500, 502, 504)
REFUSED = (401, 403)  # every other request would be refused too
BACKOFF_S, BACKOFF_MAX_S = 1.0, 60.0
RETRY_AFTER_MAX_S = 600.0  # of a server's own word
FIRST_ANSWER_S = 15.0  # until a server answers at all: five attempts. Then its URL is taken for a wrong one


class Trouble(enum.Enum):
    """Why a request has no answer yet."""

    BUSY = "busy"
    BROKEN = "broken"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """The bounds of all attempts."""

    n_attempts: int = 4
    """Of one request that breaks."""
    wait_s: float = 3_600.0
    """How long a server may be busy or away."""
    timeout_s: float = 14_400.0
    """Of one attempt."""
    first_answer_s: float = FIRST_ANSWER_S
    """How long a server may be away that has not answered yet."""


@dataclasses.dataclass(slots=True)
class Attempts:
    """The attempts of one request so far."""

    began_s: float
    n_broken: int = 0
    n_busy: int = 0

    def next_wait_s(self, trouble: Trouble, retry_after_s: float | None, now_s: float, terms: Terms) -> float | None:
        """Return how long to wait before the next attempt; None if the outcome of the last one is kept."""
        if trouble is Trouble.BROKEN:
            self.n_broken += 1
            n_before, is_over = self.n_broken, self.n_broken >= terms.n_attempts
        else:
            self.n_busy += 1
            n_before, is_over = self.n_busy, now_s - self.began_s >= terms.wait_s
        if is_over:
            return None
        if retry_after_s is not None:
            return min(max(0.0, retry_after_s), RETRY_AFTER_MAX_S)
        return min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(n_before - 1, 16))


def trouble_of(status: int, *, may_retry: bool) -> Trouble | None:
    """Return what an answer's status says; None where the outcome is kept. `may_retry`: the server does not say no."""
    if status in REFUSED:
        return Trouble.REFUSED
    if not may_retry:
        return None
    if status in BUSY:
        return Trouble.BUSY
    return Trouble.BROKEN if status in BROKEN else None
