"""The routes below /v1/responses/ID."""

from __future__ import annotations

from aiohttp import hdrs, web

from relayline.coordinator.http.edge.clients import CLIENT
from relayline.coordinator.http.edge.middleware import json_response, response_of
from relayline.coordinator.http.replies.service import Service
from relayline.coordinator.http.responses.background import Background
from relayline.coordinator.http.responses.following import follow
from relayline.coordinator.http.responses.listing import page_of
from relayline.coordinator.http.responses.store import ResponseStore, Stored
from relayline.wire.common.bounds import CTX_TOKENS_MAX
from relayline.wire.common.errors import InvalidRequestError, ResponseNotFoundError
from relayline.wire.common.texts import whole_number


class ResponseHandlers:
    """The handlers of stored responses in one application."""

    def __init__(self, service: Service, store: ResponseStore, background: Background) -> None:
        self._service, self._store, self._background = service, store, background

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/responses/{id}; as a stream, the events of a background response after `starting_after`."""
        found = self._found(request)
        if request.method == hdrs.METH_HEAD or request.query.get("stream", "false") in ("", "false"):
            return json_response(found.body)
        if found.recording is None:
            text = "only a background response that was asked for as a stream can be streamed again; leave it out"
            raise InvalidRequestError.of_field("stream", text)
        first = _starting_after(request) + 1
        if found.recording.since(first, 0) is None:
            text = f"events before {found.recording.n_dropped} are no longer kept; get the response without `stream`"
            raise InvalidRequestError.of_field("starting_after", text)
        return await follow(request, found.recording, first, self._service.limits)

    async def input_items(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/responses/{id}/input_items: the items of its body, the last one first unless `order` is asc."""
        return await page_of(request, self._found(request).input_items)

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """DELETE /v1/responses/{id}; one that runs is cancelled."""
        found = self._found(request)
        running = self._background.get(found.id, found.owner)
        if running is not None:
            await self._background.cancel(running)
        if self._background.keeper is not None:  # first: what cannot go from the disk would be back after a restart
            await self._background.keeper.forget(found.id)
        self._store.delete(found.id, found.owner)
        return response_of({"id": found.id, "object": "response", "deleted": True})

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses/{id}/cancel: of a background response. One that has ended stays as it is."""
        found = self._found(request)
        running = self._background.get(found.id, found.owner)
        if running is not None:
            await self._background.cancel(running)
            found = self._found(request)
        if not found.is_background:
            raise InvalidRequestError("only a background response can be cancelled; for another, close its connection")
        if self._background.keeper is not None:
            await self._background.keeper.forget_order(found.id)
        return json_response(found.body)

    def _found(self, request: web.Request) -> Stored:
        name, owner = request.match_info["id"], request.get(CLIENT, "")
        running = self._background.get(name, owner)
        found = self._store.get(name, owner) if running is None else running.as_stored()
        if found is None:
            raise ResponseNotFoundError(f"no response {name[:100]!r} is stored here")
        return found


def _starting_after(request: web.Request) -> int:
    """Return the sequence number of the last event that the client has; -1 if none."""
    text = request.query.get("starting_after", "")
    if not text:
        return -1
    found = whole_number(text, len(str(CTX_TOKENS_MAX)) + 2)
    if found is None:
        raise InvalidRequestError.of_field("starting_after", "must be the sequence number of an event")
    return found
