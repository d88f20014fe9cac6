"""Estimates when a lane becomes free, from how long lanes were held recently. Pure.

Before any lane was given back, the estimate assumes that running requests continue at their pace to their limit of
tokens. So a burst at a fresh coordinator gets a realistic time and not "in a second".
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from relayline.coordinator.sessions.session import Session

HOLDS_MAX = 64  # latest holds of lanes that count
RETRY_AFTER_MAX_S = 120  # OpenAI's clients give up if the wait is longer


def retry_after_s(wait_s: float) -> int:
    """Return a wait as clients are told of it: whole seconds, 1 to RETRY_AFTER_MAX_S."""
    return min(max(1, math.ceil(wait_s)), RETRY_AFTER_MAX_S)


class Holding(NamedTuple):
    """A lane that is taken."""

    held_ns: int
    """For so long now."""
    foreseen_ns: float = 0.0
    """For so long altogether, if its request gets all the tokens that it may have; 0: not known."""


def holdings(running: Iterable[Session], now_ns: int, token_ns: float) -> list[Holding]:
    """Return the lanes of running sessions. `token_ns`: predicted time of a stream between two tokens, 0 if not known.

    A session's own pace counts before that.
    """
    found = []
    for session in running:
        if session.started_ns:
            held_ns, n_generated = now_ns - session.started_ns, session.n_generated
            pace_ns = held_ns / n_generated if n_generated else token_ns
            n_left = session.request.max_tokens - n_generated
            found.append(Holding(held_ns, held_ns + n_left * pace_ns if pace_ns else 0.0))
    return found


class Turnover:
    """How long requests hold their lanes."""

    def __init__(self) -> None:
        self._held_ns: collections.deque[int] = collections.deque(maxlen=HOLDS_MAX)

    def left(self, held_ns: int) -> None:
        """A request has given its lane back after so long."""
        self._held_ns.append(held_ns)

    def wait_s(self, n_before: int, n_lanes: int, running: Sequence[Holding]) -> int:
        """Return in how many seconds a request behind n_before others would get a lane: 1 to RETRY_AFTER_MAX_S."""
        hold_ns = max(_mean(self._held_ns), _mean([each.held_ns for each in running]))
        if not self._held_ns:
            hold_ns = max(hold_ns, _mean([each.foreseen_ns for each in running]))
        return retry_after_s(hold_ns * (n_before + 1) / max(1, n_lanes) / 1e9)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
