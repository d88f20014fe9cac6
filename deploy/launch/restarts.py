"""Decides when a dead process is started again, and when the pipeline ends instead. Pure: lifetimes in, delays out."""

from __future__ import annotations

import dataclasses

EXIT_USAGE = 2  # a process that exits with a usage error would do the same again


@dataclasses.dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Exponential back-off with a limit."""

    first_s: float = 0.5
    """Delay before the first restart."""
    factor: float = 2.0
    """Each further delay is this many times longer."""
    max_s: float = 15.0
    """Longest delay."""
    deaths_max: int = 5
    """Deaths on record that a process may have; one more ends the pipeline."""
    starts_max: int = 3
    """Starts in a row that a native fault or a damaged artifact ended; then the pipeline ends."""
    healthy_s: float = 10.0
    """Every so many seconds of being ready, or at rest, take one death off the record."""


class RestartHistory:
    """The deaths of one process, less those that it has made good by being ready, or at rest, since."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.n_deaths = 0
        self._ready_s = 0.0  # that has taken no death off yet
        self._n_lost_starts = 0

    def died(self, ready_for_s: float, exit_code: int | None = None, *, is_damaged: bool = False) -> float | None:
        """Record a death after `ready_for_s` seconds of being ready, or at rest as a spare is; return the delay in
        seconds, None to give up. ready_for_s is 0 for a process that died before.

        A negative exit code is the signal that ended it. is_damaged: its artifact is damaged, and cannot be made again.
        """
        if exit_code == EXIT_USAGE:
            return None
        by_signal = exit_code is not None and exit_code < 0
        self._ready_s += ready_for_s
        n_forgiven = int(self._ready_s / self._policy.healthy_s)
        self._ready_s = self._ready_s - n_forgiven * self._policy.healthy_s if n_forgiven < self.n_deaths else 0.0
        self.n_deaths = max(0, self.n_deaths - n_forgiven) + 1
        is_lost = is_damaged or (by_signal and not ready_for_s)
        self._n_lost_starts = self._n_lost_starts + 1 if is_lost else 0
        if self.n_deaths > self._policy.deaths_max or self._n_lost_starts >= self._policy.starts_max:
            return None
        return min(self._policy.max_s, self._policy.first_s * self._policy.factor ** (self.n_deaths - 1))

    def ended_because(self, cause: str) -> str:
        """Return the message once it is not started again; `cause` is how it died the last time."""
        return f"{cause}; it died {self.n_deaths} times in a row" if self.n_deaths > 1 else cause
