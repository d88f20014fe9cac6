"""The tokens of a request are counted for the API key that it has shown."""

from __future__ import annotations

import time

from aiohttp import web

from relayline.coordinator.http.edge.clients import KEY, RATE
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.observe.usage import Spent


class Spending:
    """One request's tokens. Nothing is counted where no keys are demanded."""

    def __init__(self, request: web.Request, observer: Observer) -> None:
        self._rate, self._usage = request.get(RATE), observer.usage
        self._name: str = request[KEY].name if KEY in request else ""
        self._has_begun = False
        self._n_said = 0

    def check(self, n_prompt: int) -> None:
        """Raise RateLimitError if the key's bound of tokens has no room for this prompt now."""
        if self._rate is not None:
            self._rate.check(self._name, n_prompt, time.monotonic_ns())

    def begun(self, n_prompt: int, n_said: int = 0) -> None:
        """The request was admitted. `n_said`: tokens of its answer that were generated before."""
        self._has_begun, self._n_said = True, n_said
        if self._rate is not None:
            self._rate.spend(n_prompt, time.monotonic_ns())

    def ended(self, spent: Spent) -> None:
        """Nothing more comes of the request, for any reason. A request that was not admitted is not counted."""
        if not self._has_begun:
            return
        if self._rate is not None:
            self._rate.spend(max(0, spent.completion_tokens - self._n_said), time.monotonic_ns())
        if self._name:
            self._usage.add(self._name, spent)
