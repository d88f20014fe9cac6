"""A stage's attempts to join its coordinator: how often, for how long, and what each failure says in the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from relayline.stage.joining.client import Member
from relayline.wire.common.backoff import Backoff
from relayline.wire.common.errors import PlaceTakenError, RelaylineError
from relayline.wire.common.process import first_of
from relayline.wire.common.tasks import to_its_end

log = logging.getLogger("relayline.stage")

REJOIN_FIRST_S, REJOIN_MAX_S = 0.2, 5.0
# How long a place that another process holds is asked for: the coordinator notices the silent loss of a host within
# bounds.LOST_AFTER_S, and after that the place is free.
PLACE_TAKEN_MAX_S = 60.0


async def persistently(
    join: Callable[[], Awaitable[Member]], level_of: Callable[[RelaylineError], int], *interrupts: asyncio.Future[Any]
) -> Member | None:
    """Call `join` again and again while that may help; return None as soon as one of the interrupts is done.

    `level_of`: the level at which a failure is logged. Raises the last failure once no further attempt can help, as
    after a refusal, or while another process holds the place for longer than PLACE_TAKEN_MAX_S.
    """
    backoff = Backoff(REJOIN_FIRST_S, REJOIN_MAX_S)
    taken_since_s, last_problem = float("inf"), ""
    while True:
        attempt = asyncio.ensure_future(join())
        try:
            await first_of(attempt, *interrupts)
        except asyncio.CancelledError:
            await to_its_end(_unwanted(attempt))
            raise
        if any(interrupt.done() for interrupt in interrupts):
            await _unwanted(attempt)
            return None
        try:
            return attempt.result()
        except RelaylineError as error:
            now_s = time.monotonic()
            is_taken = isinstance(error, PlaceTakenError)
            taken_since_s = min(taken_since_s, now_s) if is_taken else float("inf")
            if not error.retryable or now_s - taken_since_s > PLACE_TAKEN_MAX_S:
                raise
            if error.message != last_problem:
                log.log(level_of(error), "cannot join yet: %s", error.message)
            last_problem = error.message
        pause = asyncio.create_task(asyncio.sleep(backoff.apart_s()))
        await first_of(pause, *interrupts)
        pause.cancel()


async def _unwanted(attempt: asyncio.Future[Member]) -> None:
    """End an attempt to join; a membership that has just begun ends too."""
    if not attempt.done():
        attempt.cancel()
        await asyncio.wait({attempt})
    if not attempt.cancelled() and attempt.exception() is None:
        await attempt.result().close()
