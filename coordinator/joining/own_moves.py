"""Moves layers automatically, when another split would be clearly faster and it is time. Event loop only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from relayline.coordinator.engine.moves import Moves
from relayline.coordinator.planner.imbalance import Imbalance
from relayline.coordinator.planner.rebalance import Rebalancer
from relayline.wire.common.errors import RelaylineError

log = logging.getLogger("relayline.coordinator")

Cuts = tuple[int, ...]


class OwnMoves:
    """The changes of one pipeline that its own measurements ask for."""

    def __init__(
        self, rebalancer: Rebalancer, moves: Moves, may_move: Callable[[], bool], move: Callable[[Cuts], None]
    ) -> None:
        """`may_move` says whether a change could begin now; `move(cuts)` begins one, or raises RelaylineError."""
        self._rebalancer, self._moves, self._may_move, self._move = rebalancer, moves, may_move, move
        self._is_own = False  # whether the latest change was automatic

    def found(self, imbalance: Imbalance) -> None:
        """Another split would be clearly faster: move to it, if it is time."""
        if self._moves.is_open or not self._may_move():
            return
        now_ns = time.monotonic_ns()
        wanted = self._rebalancer.wanted(imbalance, self._moves.cuts, now_ns)
        if not wanted:
            return
        log.info("moving layers for about %.0f %% more tokens", 100 * imbalance.gain)
        try:
            self._move(wanted)
        except RelaylineError as error:
            self._rebalancer.failed(wanted, now_ns)
            log.warning("layers were not moved, and nothing has changed: %s", error.message)
        else:
            self._is_own = True

    def begun(self) -> None:
        """A change has begun; it counts as a manual one for now."""
        self._is_own = False

    def failed(self, cuts: Cuts) -> None:
        """A change to these cuts has failed, automatic or not."""
        self._rebalancer.failed(cuts, time.monotonic_ns())

    def moved(self, before: Cuts, after: Cuts) -> None:
        """A change is done."""
        self._rebalancer.moved(before, after, time.monotonic_ns(), is_own=self._is_own)

    def moves_in_s(self, now_ns: int) -> float | None:
        """Return in how many seconds layers may move by themselves."""
        return self._rebalancer.wait_ns(self._moves.cuts, now_ns) / 1e9

    def describe(self, now_ns: int) -> dict[str, object]:
        """Return its present state, JSON-ready."""
        return self._rebalancer.describe(self._moves.cuts, now_ns)
