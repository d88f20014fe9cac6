"""Routes of a pipeline's sleep, as vLLM has them: put it to sleep, wake it, ask for its state."""

from __future__ import annotations

from typing import Protocol

from aiohttp import web

from relayline.coordinator.http.edge.middleware import response_of
from relayline.coordinator.http.edge.steering import SLEEP_PATHS, check_steers


class SleepControl(Protocol):
    """The one that puts the pipeline to sleep."""

    async def ask(self) -> dict[str, object]:
        """Sleep as soon as no request runs; return the state. Raises InvalidRequestError, NotReadyError."""

    async def wake(self) -> dict[str, object]:
        """Wake; return the state once requests can start. Raises InvalidRequestError, NotReadyError."""

    def describe(self) -> dict[str, object]:
        """Return the state."""


def sleep_routes(control: SleepControl | None) -> list[web.RouteDef]:
    """Return the routes; none where nothing sleeps."""
    if control is None:
        return []

    async def sleep(request: web.Request) -> web.StreamResponse:
        """POST /sleep: 200 once all stages were told to free their memory, 202 while requests run or it wakes."""
        check_steers(request)
        state = await control.ask()
        return response_of(state, 200 if state["is_sleeping"] else 202)

    async def wake_up(request: web.Request) -> web.StreamResponse:
        """POST /wake_up: 200 once requests can start; 503 where stages cannot load or are not here."""
        check_steers(request)
        return response_of(await control.wake())

    async def is_sleeping(_request: web.Request) -> web.StreamResponse:
        """GET /is_sleeping."""
        return response_of(control.describe())

    falls, wakes, state = SLEEP_PATHS
    return [web.post(falls, sleep), web.post(wakes, wake_up), web.get(state, is_sleeping)]
