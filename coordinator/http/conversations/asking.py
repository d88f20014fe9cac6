"""The bodies of /v1/conversations. Pure, and for a body's worker: they are checked as the input of a response is.

So a conversation holds nothing that no response could go on with, but for images and audio: these are looked at by the
response that reads them.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from relayline.coordinator.http.requests.bodies import decode_body
from relayline.coordinator.http.requests.inner_form import Fields, each_checked, json_bytes
from relayline.coordinator.http.responses.asking import messages_of
from relayline.coordinator.http.responses.bodies import Metadata
from relayline.coordinator.http.responses.items import KeptItem, kept_items
from relayline.wire.common.errors import InvalidRequestError

ITEMS_AT_ONCE_MAX = 20  # of one body, as OpenAI has it
Items = Annotated[list[dict[str, Any]], Meta(max_length=ITEMS_AT_ONCE_MAX)]


class ConversationBody(Struct, kw_only=True):
    """POST /v1/conversations. None means absent."""

    items: Items | None = None
    metadata: Metadata | None = None
    model: str | None = None  # not of OpenAI's: a gateway reads it, to choose the pipeline


class ConversationItemsBody(Struct):
    """POST /v1/conversations/{id}/items."""

    items: Items


class ConversationUpdateBody(Struct):
    """POST /v1/conversations/{id}."""

    metadata: Metadata | UnsetType | None = UNSET


class Told(Struct):
    """The contents of such a body."""

    items: list[KeptItem] = []
    metadata: bytes = b"{}"  # JSON


def read_new(raw: bytes | bytearray) -> bytes:
    """Return msgpack of what a conversation begins with. Raises InvalidRequestError."""
    body = decode_body(raw, ConversationBody)
    return msgspec.msgpack.encode(Told(_checked(body.items or []), _written(body.metadata)))


def read_items(raw: bytes | bytearray) -> bytes:
    """Return msgpack of the items to add. Raises InvalidRequestError."""
    return msgspec.msgpack.encode(Told(_checked(decode_body(raw, ConversationItemsBody).items)))


def read_update(raw: bytes | bytearray) -> bytes:
    """Return msgpack of the metadata to have. Raises InvalidRequestError."""
    body = decode_body(raw, ConversationUpdateBody)
    if body.metadata is UNSET:
        raise InvalidRequestError.of_field("metadata", "required field is missing")
    return msgspec.msgpack.encode(Told(metadata=_written(body.metadata)))


def _checked(sent: list[dict[str, Any]]) -> list[KeptItem]:
    items: list[Fields] = each_checked(sent, "items", lambda item, _: dict(item))
    messages_of(items, "items")
    return kept_items(items)


def _written(metadata: Metadata | UnsetType | None) -> bytes:
    return json_bytes(metadata or {})
