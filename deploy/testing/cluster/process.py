"""The process of a simulated stage: whether it runs, whether it responds, and how often it has been started."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from relayline.deploy.testing.cluster.clock import Clock


class Process:
    """One process after the other. Everything that reaches it goes through `do`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.instance = 0  # number of starts
        self.is_up = self.is_hung = False
        self.is_asleep = False  # whether it has nothing loaded, because the pipeline sleeps
        self.silent_since_ns = 0  # when it last stopped responding
        self._waiting: list[Callable[[], None]] = []  # messages to a process that hangs

    @property
    def answers(self) -> bool:
        """Whether it answers a request now."""
        return self.is_up and not self.is_hung

    def start(self) -> None:
        """Start again."""
        self.instance += 1
        self.is_up, self.is_hung = True, False
        self._waiting = []

    def do(self, action: Callable[[], None]) -> None:
        """Deliver an action to the process: it is lost if the process is dead, and waits while it hangs."""
        if not self.is_up:
            return
        if self.is_hung:
            self._waiting.append(action)
        else:
            action()

    def do_as(self, instance: int, action: Callable[..., None], *arguments: Any) -> None:
        """Deliver an action to this process alone: it is lost once another one has started."""
        if self.instance == instance:
            self.do(functools.partial(action, *arguments))

    def die(self) -> None:
        """Stop responding for good."""
        if not self.is_hung:
            self.silent_since_ns = self._clock.now_ns
        self.is_up = False

    def hang(self) -> None:
        """Stop responding for a while."""
        if not self.is_hung:
            self.is_hung, self.silent_since_ns = True, self._clock.now_ns

    def go_on(self, instance: int) -> None:
        """Let the process continue after it hung, if it is still the same one."""
        if self.is_up and self.instance == instance and self.is_hung:
            self.is_hung = False
            waiting, self._waiting = self._waiting, []
            for action in waiting:
                self.do(action)
