"""Trying until a pipeline's stages are connected: how long, how often, and what ends the trying."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from relayline.coordinator.engine.connection import Connection
from relayline.coordinator.engine.pipeline_config import PipelineConfig
from relayline.coordinator.engine.roster import Roster
from relayline.wire.common.backoff import Backoff
from relayline.wire.common.errors import (
    HandshakeError,
    RelaylineError,
    StageLostError,
    StartError,
    UnauthenticatedError,
    UsageError,
)

log = logging.getLogger("relayline.coordinator")

RECONNECT_FIRST_S, RECONNECT_MAX_S = 0.1, 0.5  # an attempt asks each stage once; everybody waits for the next


class Reconnector:
    """Makes the connections of a pipeline, one epoch after the other. Event loop only."""

    def __init__(
        self,
        config: PipelineConfig,
        roster: Roster,
        open_connection: Callable[[tuple[str, ...]], Awaitable[Connection]],
        has_waiting: Callable[[], bool],
        fail_waiting: Callable[[RelaylineError], None],
        on_problem: Callable[[RelaylineError], None] = lambda error: None,
    ) -> None:
        """`open_connection(addresses)` makes one attempt; `fail_waiting` ends the requests that `has_waiting`.

        `on_problem` hears why an attempt failed.
        """
        self._config, self._roster, self._open = config, roster, open_connection
        self._has_waiting, self._fail_waiting, self._on_problem = has_waiting, fail_waiting, on_problem

    async def connect(self, *, is_first: bool) -> Connection:
        """Try until a connection stands.

        With given addresses a misfit or a timeout at the first start is final: it raises HandshakeError,
        UnauthenticatedError, UsageError or StartError. Later, and with stages that join by themselves, no failure ends
        it; requests that wait longer than `recovery_timeout_s` end.
        """
        began_s = time.monotonic()
        backoff, last_problem = Backoff(RECONNECT_FIRST_S, RECONNECT_MAX_S), ""
        while True:
            addresses = await self._present(began_s)
            try:
                return await self._open(addresses)
            except RelaylineError as error:
                self._on_problem(error)
                waited_s = time.monotonic() - began_s
                if is_first and not self._roster.joins:
                    if isinstance(error, HandshakeError | UnauthenticatedError | UsageError):
                        raise
                    if waited_s > self._config.start_timeout_s:
                        raise StartError(f"{error.message}; gave up after {waited_s:.0f} s") from error
                elif waited_s > self._config.recovery_timeout_s:
                    self._fail_waiting(error)
                if error.message != last_problem:
                    level = logging.WARNING if self._roster.joins else logging.INFO
                    log.log(level, "not connected yet: %s", error.message)
                last_problem = error.message
            await asyncio.sleep(backoff.next_s())

    async def _present(self, began_s: float) -> tuple[str, ...]:
        """Wait for every stage to be there; requests that waited for that too long since `began_s` are ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, began_s + self._config.recovery_timeout_s - time.monotonic())):
                return await self._roster.present()
        if self._has_waiting():  # since the loss or since then: requests still come while a stage is waited for
            missing = ", ".join(self._roster.missing())
            self._fail_waiting(StageLostError(f"stages did not come back in time: {missing}"))
        return await self._roster.present()
