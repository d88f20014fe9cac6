"""The trace of a simulation, and its figures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """The figures between two moments."""

    tokens_per_s: float
    overlap: float  # share of the time in which two or more stages compute
    utilisation: float  # mean share of the stages that compute
    itl_mean_ms: float
    itl_p99_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    rows_mean: float  # rows per native step


class Trace:
    """Tokens, latencies and steps as they come."""

    def __init__(self, n_stages: int) -> None:
        self.n_stages = n_stages
        self.arrivals_ns: dict[int, int] = {}
        self.firsts: list[tuple[int, int]] = []  # (arrival, time to first token)
        self.itls: list[tuple[int, int, int]] = []  # (when, latency, session id)
        self.holds: list[tuple[int, int]] = []  # (time, how long the coordinator held a decode row)
        self.token_times_ns: list[int] = []
        self.steps: list[tuple[int, int, int, int]] = []  # (start, end, stage, rows)
        self._last_ns: dict[int, int] = {}

    def note_token(self, session_id: int, now_ns: int) -> None:
        """A client got a token."""
        self.token_times_ns.append(now_ns)
        if session_id in self._last_ns:
            self.itls.append((now_ns, now_ns - self._last_ns[session_id], session_id))
        else:
            self.firsts.append((self.arrivals_ns[session_id], now_ns - self.arrivals_ns[session_id]))
        self._last_ns[session_id] = now_ns

    def figures(self, from_ns: int = 0, to_ns: int | None = None) -> Figures:
        """Return the figures of a window of virtual time, by default until the last token so far."""
        if to_ns is None:
            to_ns = max(self.token_times_ns, default=0)
        span_ns = max(1, to_ns - from_ns)
        itls = sorted(latency for when, latency, _ in self.itls if from_ns <= when <= to_ns)
        ttfts = sorted(latency for when, latency in self.firsts if from_ns <= when <= to_ns)
        overlap, utilisation = self._overlap(from_ns, to_ns)
        steps = [rows for start, end, _, rows in self.steps if start >= from_ns and end <= to_ns]
        return Figures(
            tokens_per_s=1e9 * sum(from_ns < when <= to_ns for when in self.token_times_ns) / span_ns,
            overlap=overlap,
            utilisation=utilisation,
            itl_mean_ms=sum(itls) / max(1, len(itls)) / 1e6,
            itl_p99_ms=percentile(itls, 99) / 1e6,
            ttft_p50_ms=percentile(ttfts, 50) / 1e6,
            ttft_p99_ms=percentile(ttfts, 99) / 1e6,
            rows_mean=sum(steps) / max(1, len(steps)),
        )

    def steady_window(self, n_warm_tokens: int) -> tuple[int, int]:
        """Return (after the first n_warm_tokens tokens, before the last n_warm_tokens tokens): all streams run in
        between.
        """
        times = self.token_times_ns
        return times[n_warm_tokens], times[-n_warm_tokens - 1]

    def common_window(self) -> tuple[int, int]:
        """Return (when the last stream had its first token, when the first one had its last)."""
        return max(arrived_ns + ttft_ns for arrived_ns, ttft_ns in self.firsts), min(self._last_ns.values())

    def _overlap(self, from_ns: int, to_ns: int) -> tuple[float, float]:
        changes: list[tuple[int, int]] = []
        for start, end, _, _ in self.steps:
            if end > from_ns and start < to_ns:
                changes += [(max(start, from_ns), 1), (min(end, to_ns), -1)]
        busy = at_ns = together_ns = work_ns = 0
        for when, change in sorted(changes):
            together_ns += (when - at_ns) * (busy >= 2)
            work_ns += (when - at_ns) * busy
            at_ns, busy = when, busy + change
        span_ns = max(1, to_ns - from_ns)
        return together_ns / span_ns, work_ns / span_ns / self.n_stages


def percentile(ascending: Sequence[int], percent: float) -> float:
    """Return the smallest value that at least `percent` of the values do not exceed; 0 if there are none."""
    if not ascending:
        return 0.0
    return float(ascending[max(0, math.ceil(len(ascending) * percent / 100) - 1)])
