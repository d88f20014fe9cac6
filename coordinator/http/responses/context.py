"""The stored context that the body of a response refers to: responses before it, items, or a conversation."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from relayline.coordinator.http.conversations.store import ConversationStore
from relayline.coordinator.http.edge.body import joined
from relayline.coordinator.http.edge.clients import client_of
from relayline.coordinator.http.replies import shapes
from relayline.coordinator.http.replies.service import Service, random_seed
from relayline.coordinator.http.responses.asking import References
from relayline.coordinator.http.responses.background import Background
from relayline.coordinator.http.responses.listing import with_commas
from relayline.coordinator.http.responses.orders import Sent
from relayline.coordinator.http.responses.store import ResponseStore
from relayline.coordinator.http.workers.prepared import Asked
from relayline.wire.common.errors import ContextLengthError, InvalidRequestError, ResponseNotFoundError

# A body without these words refers to nothing stored. Inside a JSON text, quotes have a backslash before them.
_REFERRING = (b"previous_response_id", b"item_reference", b'"conversation"')
LOOKED_AT_BYTES = 256 * 1024  # of a body, at once: 16 MiB would take 15 ms
_NOTHING = References()


async def may_refer(raw: bytes) -> bool:
    """Return whether one of the words is in a body."""
    n_shared = max(map(len, _REFERRING)) - 1  # with the piece before: a word may begin in that one
    for begin in range(0, len(raw), LOOKED_AT_BYTES):
        if begin:
            await asyncio.sleep(0)
        piece = raw[max(0, begin - n_shared) : begin + LOOKED_AT_BYTES]
        if any(word in piece for word in _REFERRING):
            return True
    return False


class Contexts:
    """Finds them in one application."""

    def __init__(
        self, service: Service, store: ResponseStore, background: Background, conversations: ConversationStore
    ) -> None:
        self._service, self._store = service, store
        self._background, self._conversations = background, conversations

    async def references(self, request: web.Request, raw: bytes) -> References:
        """Return the context that a request's body refers to. Raises InvalidRequestError."""
        if not await may_refer(raw):
            return _NOTHING
        answer = await self._service.pool.ask(client_of(request), Asked("references"), raw)
        return msgspec.msgpack.decode(answer, type=References)

    async def sent(self, raw: bytes, wanted: References, owner: str) -> Sent:
        """Return a body with the stored context that it refers to before it. Raises the error of what is not here."""
        if wanted == _NOTHING:
            return Sent(raw, 0, random_seed())
        pieces = self._context(wanted, owner)  # as it is now
        n_context = sum(map(len, pieces))
        return Sent(await joined([*pieces, raw]), n_context, random_seed())

    def _context(self, wanted: References, owner: str) -> list[bytes]:
        """Return the Context of a body as JSON, in pieces: it may have as many bytes as a body."""
        history: list[bytes] = []
        items = self._store.items(wanted.item_ids, owner)
        if wanted.conversation_id is not None:
            conversation = self._conversations.get(wanted.conversation_id, owner, "conversation")
            self._check_length(conversation.items_bytes, "conversation")
            history = [*conversation.items.values()]
            of_it = {each: conversation.items[each] for each in wanted.item_ids if each in conversation.items}
            items = of_it | items
        elif wanted.previous_response_id is not None:
            history = self._before(wanted.previous_response_id, owner)
        named = [(shapes.encode(item_id) + b":", item) for item_id, item in items.items()]
        return [b'{"history":[', *with_commas((item,) for item in history), b'],"items":{', *with_commas(named), b"}}"]

    def _before(self, previous_id: str, owner: str) -> list[bytes]:
        """Return the items of a stored response and of those before it."""
        if self._background.get(previous_id, owner) is not None:
            text = "the response is still in progress; wait for its end"
            raise InvalidRequestError.of_field("previous_response_id", text)
        chain = self._store.chain(previous_id, owner)
        if isinstance(chain, str):
            text = f"the response {chain[:100]!r} is not stored here (any more); send all items as input"
            raise ResponseNotFoundError(f"previous_response_id: {text}", "previous_response_id")
        self._check_length(sum(stored.items_bytes for stored in chain), "previous_response_id")
        return [item for stored in chain for _, item in (*stored.input_items, *stored.output_items)]

    def _check_length(self, n_bytes: int, param: str) -> None:
        if n_bytes > self._service.limits.body_bytes_max:
            text = "the conversation is too long to go on with; send the items that matter as input"
            raise ContextLengthError(f"{param}: {text}", param)
