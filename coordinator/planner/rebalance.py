"""Decides when layers move automatically, without going back and forth. Pure.

`coordinator.planner.imbalance` reports a faster cut once it has been faster for a minute. If the cause is short-lived,
a move costs more than it gains. So two moves are at least `every_ns` apart, automatic or not. A move that takes a
boundary back towards where it came from waits twice as long, the next such one four times, up to a day. A day without a
move forgets that. A cut whose move failed waits too, longer after each failure.
"""

from __future__ import annotations

from relayline.coordinator.planner.imbalance import GAIN_MIN, Imbalance

Cuts = tuple[int, ...]

DAY_NS = 86_400_000_000_000


class Rebalancer:
    """The automatic moves of one pipeline. Times are monotonic nanoseconds of the caller."""

    def __init__(self, every_ns: int) -> None:
        """`every_ns`: between two moves, at least; the first may come at once."""
        self._every_ns = every_ns
        self._last_ns: int | None = None  # of the last move, or attempt at one
        self._steps: tuple[int, ...] = ()  # of the last move: how far each boundary went
        self._n_turns = 0  # moves back, without a day of quiet between
        self._failed: Cuts = ()
        self._n_failed = 0  # times in a row that a move to these cuts failed
        self._wanted: Cuts = ()
        self.n_moves = 0
        """Moves that this began and that came to their end."""

    def wanted(self, found: Imbalance | None, cuts: Cuts, now_ns: int) -> Cuts:
        """Return the cuts to move to now; () for none.

        `found`: the imbalance reported now, if any. `cuts`: the first layer of each stage but the first, as served.
        """
        if self._last_ns is not None and now_ns - self._last_ns >= DAY_NS:
            self._n_turns, self._steps = 0, ()
        self._wanted = tuple(start for start, _ in found.layers[1:]) if found is not None else ()
        if found is None or found.gain < GAIN_MIN or self._wanted == cuts or self.wait_ns(cuts, now_ns) > 0:
            return ()
        self._last_ns = now_ns
        return self._wanted

    def wait_ns(self, cuts: Cuts, now_ns: int) -> int:
        """Return how long the move that is wanted has to wait yet; without one, how long any has to."""
        if self._last_ns is None:
            return 0
        doubled = self._n_failed if self._wanted and self._wanted == self._failed else 0
        if self._wanted and self._turns_back(self._step(cuts, self._wanted)):
            doubled += self._n_turns + 1
        return max(0, self._last_ns + min(self._every_ns << doubled, max(DAY_NS, self._every_ns)) - now_ns)

    def moved(self, before: Cuts, after: Cuts, now_ns: int, *, is_own: bool) -> None:
        """Layers have moved: automatically, or on request."""
        steps = self._step(before, after)
        self._n_turns += self._turns_back(steps)
        # A boundary that stayed keeps the way it went before.
        known = self._steps if len(self._steps) == len(steps) else (0,) * len(steps)
        self._steps = tuple(new or old for new, old in zip(steps, known, strict=True))
        self._last_ns, self._failed, self._n_failed = now_ns, (), 0
        self.n_moves += is_own

    def failed(self, cuts: Cuts, now_ns: int) -> None:
        """A move to these cuts could not be made."""
        self._n_failed = self._n_failed + 1 if cuts == self._failed else 1
        self._last_ns, self._failed = now_ns, cuts

    def describe(self, cuts: Cuts, now_ns: int) -> dict[str, object]:
        """Return it for GET /v1/pipeline."""
        return {
            "every_s": round(self._every_ns / 1e9, 1),
            "wait_s": round(self.wait_ns(cuts, now_ns) / 1e9, 1),
            "moves": self.n_moves,
            "failed": list(self._failed),
        }

    @staticmethod
    def _step(before: Cuts, after: Cuts) -> tuple[int, ...]:
        if len(before) != len(after):
            return (0,) * len(after)  # other stages than before: no boundary has gone anywhere
        return tuple(new - old for old, new in zip(before, after, strict=True))

    def _turns_back(self, steps: tuple[int, ...]) -> bool:
        return any(new * old < 0 for new, old in zip(steps, self._steps, strict=False))
