"""What a request's query asks for."""

from __future__ import annotations

from aiohttp import web

from relayline.wire.common.errors import InvalidRequestError
from relayline.wire.common.texts import whole_number

PAGE_ENTRIES = 20  # of a list, where a client does not say, as OpenAI has it


def page_size(request: web.Request, n_max: int) -> int:
    """Return how many entries of a list a client asks for. Raises InvalidRequestError."""
    found = whole_number(request.query.get("limit", str(PAGE_ENTRIES)), 9)
    if found is None or not 1 <= found <= n_max:
        raise InvalidRequestError.of_field("limit", f"must be a number from 1 to {n_max}")
    return found
