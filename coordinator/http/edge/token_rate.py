"""The bound of tokens per minute of one API key, with the headers that OpenAI's API says it in. Pure.

A bucket with room for one minute's tokens fills evenly. A request may begin once the bucket holds its prompt; one that
is larger than the bucket waits until that is full. Prompts are taken out when a request begins, and answers when they
end: a long answer leaves a debt, for which the next request waits.
"""

from __future__ import annotations

import math

from relayline.coordinator.sessions.turnover import retry_after_s
from relayline.wire.common.errors import RateLimitError

HEADERS = ("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens")
_MINUTE_NS = 60_000_000_000


class TokenRate:
    """One key's bucket. Times are of the monotonic clock, in nanoseconds."""

    def __init__(self, per_minute: int, now_ns: int) -> None:
        self.per_minute = per_minute
        self._left, self._at_ns = float(per_minute), now_ns

    def left(self, now_ns: int) -> float:
        """Return how many tokens it holds; below 0: as many are owed."""
        gained = max(0, now_ns - self._at_ns) * self.per_minute / _MINUTE_NS
        self._left, self._at_ns = min(float(self.per_minute), self._left + gained), max(self._at_ns, now_ns)
        return self._left

    def check(self, name: str, n_prompt: int, now_ns: int) -> None:
        """Raise RateLimitError if a request with a prompt of so many tokens has to wait. `name`: of the key."""
        left = self.left(now_ns)
        short = min(n_prompt, self.per_minute) - left
        if short <= 0:
            return
        after_s = retry_after_s(short * 60 / self.per_minute)
        used = round(self.per_minute - left)
        text = f"Limit {self.per_minute}, Used {used}, Requested {n_prompt}"
        raise RateLimitError(
            f"Rate limit reached for API key {name!r} on tokens per min (TPM): {text}. Please try again in {after_s}s.",
            after_s,
        )

    def spend(self, n_tokens: int, now_ns: int) -> None:
        """Take tokens out."""
        self._left = self.left(now_ns) - n_tokens

    def headers(self, now_ns: int) -> dict[str, str]:
        """Return the headers of an answer that say how much is left, and when all of it will be again."""
        left = self.left(now_ns)
        full_s = (self.per_minute - left) * 60 / self.per_minute
        values = (str(self.per_minute), str(max(0, math.floor(left))), _written(full_s))
        return dict(zip(HEADERS, values, strict=True))


def _written(seconds: float) -> str:
    """Return a time as OpenAI writes it: 120ms, 6.5s or 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1_000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
