"""A link: delivers messages in order, after its delay, until it is cut."""

from __future__ import annotations

import random
from collections.abc import Callable

from relayline.deploy.testing.cluster.clock import MS, Clock

NOTICED_NS = 40 * MS  # the longest time until an end notices that the link was cut
IN_FLIGHT_MAX = 4_096  # messages; the real ones are bounded by bytes, see wire.common.bounds


class Link:
    """From one process to another, for one epoch of one route."""

    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        delay_ns: int,
        deliver: Callable[[bytes], None],
        *,
        upstream_lost: Callable[[], None] = lambda: None,
        downstream_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`upstream_lost` and `downstream_lost` are called at the ends once they notice that it was cut."""
        self._clock, self._rng, self._deliver = clock, rng, deliver
        self._upstream_lost, self._downstream_lost = upstream_lost, downstream_lost
        self.delay_ns = delay_ns
        self.is_cut = False
        self.n_in_flight = self.n_sent = 0
        self._latest_ns = 0  # arrival of the latest message: none overtakes another

    def send(self, message: bytes) -> None:
        """Send a message; it is lost if the link is cut."""
        if self.is_cut:
            return
        self.n_in_flight += 1
        self.n_sent += 1
        delay_ns = round(self.delay_ns * (0.5 + self._rng.random()))
        self._latest_ns = max(self._latest_ns, self._clock.now_ns + delay_ns)
        self._clock.at(self._latest_ns, self._arrive, message)

    def _arrive(self, message: bytes) -> None:
        self.n_in_flight -= 1
        if not self.is_cut:
            self._deliver(message)

    def cut(self) -> None:
        """Cut the link: messages in flight and later ones are lost. Both ends notice, at different times."""
        if self.is_cut:
            return
        self.is_cut = True
        for lost in (self._upstream_lost, self._downstream_lost):
            self._clock.after(self._rng.randrange(NOTICED_NS), lost)

    def close(self) -> None:
        """The upstream end closes the link; the other end notices."""
        if not self.is_cut:
            self.is_cut = True
            self._clock.after(self._rng.randrange(NOTICED_NS), self._downstream_lost)
