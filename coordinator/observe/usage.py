"""The requests and tokens of each API key since the start. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

NAMES_MAX = 256  # keys that are counted separately, the first that come; a label of metrics has no more values
OTHERS = "(others)"  # counts the keys beyond


class Spent(NamedTuple):
    """The tokens of one request."""

    prompt_tokens: int  # each prompt once, if it has brought a token
    cached_tokens: int  # of these, tokens that were copied
    completion_tokens: int


@dataclasses.dataclass(slots=True)
class KeyUsage:
    """The counts of one key. Running and waiting are choices: a request of `n` answers has as many."""

    name: str
    running: int = 0
    waiting: int = 0
    requests: int = 0  # that were admitted, and have ended
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class UsageByKey:
    """The counts of one coordinator's keys."""

    def __init__(self) -> None:
        self._keys: dict[str, KeyUsage] = {}

    def add(self, name: str, spent: Spent) -> None:
        """Count a request that has ended."""
        usage = self._of(name)
        usage.requests += 1
        usage.prompt_tokens += spent.prompt_tokens
        usage.cached_tokens += spent.cached_tokens
        usage.completion_tokens += spent.completion_tokens

    def figures(self, present: Mapping[str, tuple[int, int]]) -> list[dict[str, Any]]:
        """Return the counts of all keys that have sent anything, by name; `present`: how many run and wait now."""
        for usage in self._keys.values():
            usage.running = usage.waiting = 0
        for name, (n_running, n_waiting) in present.items():
            if name:
                usage = self._of(name)
                usage.running += n_running
                usage.waiting += n_waiting
        return [dataclasses.asdict(self._keys[name]) for name in sorted(self._keys)]

    def _of(self, name: str) -> KeyUsage:
        found = self._keys.get(name)
        if found is None:
            name = name if len(self._keys) < NAMES_MAX else OTHERS
            found = self._keys.setdefault(name, KeyUsage(name))
        return found
