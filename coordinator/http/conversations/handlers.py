"""The routes of /v1/conversations."""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from aiohttp import web

from relayline.coordinator.http.conversations.asking import Told
from relayline.coordinator.http.conversations.keeper import Conversations
from relayline.coordinator.http.conversations.store import Conversation
from relayline.coordinator.http.edge.clients import CLIENT, client_of
from relayline.coordinator.http.edge.middleware import json_response, response_of
from relayline.coordinator.http.replies.service import Service
from relayline.coordinator.http.responses.items import new_id
from relayline.coordinator.http.responses.listing import item_list, page_of
from relayline.coordinator.http.workers.prepared import Asked

PATH = "/v1/conversations"


class ConversationHandlers:
    """The handlers of /v1/conversations in one application."""

    def __init__(self, service: Service, conversations: Conversations) -> None:
        self._service, self._conversations, self._store = service, conversations, conversations.store

    def routes(self) -> list[web.RouteDef]:
        """Return all of them."""
        one, items = f"{PATH}/{{id}}", f"{PATH}/{{id}}/items"
        return [
            web.post(PATH, self.create),
            web.get(one, self.retrieve),
            web.post(one, self.update),
            web.delete(one, self.delete),
            web.post(items, self.add),
            web.get(items, self.items),
            web.get(f"{items}/{{item}}", self.retrieve_item),
            web.delete(f"{items}/{{item}}", self.delete_item),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/conversations: begin a conversation."""
        told = await self._told("conversation", request)
        owner, id = request.get(CLIENT, ""), new_id("conv")
        conversation = Conversation.of(id, owner, int(time.time()), told.metadata, told.items)
        self._store.put(conversation)
        await self._conversations.settled()
        return _shown(conversation)

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/conversations/{id}: a conversation without its items."""
        return _shown(self._found(request))

    async def update(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/conversations/{id}: set the metadata of a conversation."""
        told = await self._told("conversation_update", request)
        found = self._found(request)
        updated = self._store.update(found.id, found.owner, told.metadata)
        await self._conversations.settled()
        return _shown(updated)

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """DELETE /v1/conversations/{id}: forget a conversation with its items."""
        found = self._found(request)
        await self._conversations.delete(found)
        return response_of({"id": found.id, "object": "conversation.deleted", "deleted": True})

    async def add(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/conversations/{id}/items: add items to a conversation; returns these."""
        told = await self._told("conversation_items", request)
        found = self._found(request)
        self._store.add(found.id, found.owner, told.items)
        await self._conversations.settled()
        return await item_list(told.items, has_more=False)

    async def items(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/conversations/{id}/items: the items of a conversation, the last one first unless `order` is asc."""
        return await page_of(request, [*self._found(request).items.items()])

    async def retrieve_item(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/conversations/{id}/items/{item}: one item of a conversation."""
        return json_response(self._found(request).item(request.match_info["item"]))

    async def delete_item(self, request: web.Request) -> web.StreamResponse:
        """DELETE /v1/conversations/{id}/items/{item}: forget an item of a conversation; returns the conversation."""
        id, item_id, owner = request.match_info["id"], request.match_info["item"], request.get(CLIENT, "")
        return _shown(await self._conversations.delete_item(id, owner, item_id))

    async def _told(
        self, route: Literal["conversation", "conversation_items", "conversation_update"], request: web.Request
    ) -> Told:
        """Return a body after a worker has checked it. Raises the body's error."""
        raw = await request.read()
        answer = await self._service.pool.ask(client_of(request), Asked(route), raw)
        return msgspec.msgpack.decode(answer, type=Told)

    def _found(self, request: web.Request) -> Conversation:
        return self._store.get(request.match_info["id"], request.get(CLIENT, ""))


def _shown(conversation: Conversation) -> web.StreamResponse:
    fields = {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created,
        "metadata": msgspec.Raw(conversation.metadata),
    }
    return response_of(fields)
