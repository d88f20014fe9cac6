"""Lists of items, as OpenAI pages them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from aiohttp import web

from relayline.coordinator.http.edge.body import joined
from relayline.coordinator.http.edge.middleware import json_response
from relayline.coordinator.http.edge.queries import page_size
from relayline.coordinator.http.replies import shapes
from relayline.coordinator.http.responses.items import KeptItem
from relayline.wire.common.errors import InvalidRequestError

PAGE_ITEMS_MAX = 100


async def page_of(request: web.Request, items: Sequence[KeptItem]) -> web.StreamResponse:
    """Answer with the page that a request asks for, the last item first unless `order` is asc.

    Raises InvalidRequestError.
    """
    if request.query.get("order", "desc") != "asc":
        items = items[::-1]
    after, begin = request.query.get("after", ""), 0
    if after:
        ids = [item_id for item_id, _ in items]
        if after not in ids:
            raise InvalidRequestError.of_field("after", f"no item {after[:100]!r} is here; list from the beginning")
        begin = ids.index(after) + 1
    page = items[begin : begin + page_size(request, PAGE_ITEMS_MAX)]
    return await item_list(page, has_more=begin + len(page) < len(items))


async def item_list(page: Sequence[KeptItem], *, has_more: bool) -> web.StreamResponse:
    """Answer with the list object of a page."""
    named = {
        "first_id": page[0][0] if page else None,
        "last_id": page[-1][0] if page else None,
        "has_more": has_more,
    }
    items = with_commas((item,) for _, item in page)
    return json_response(await joined([b'{"object":"list","data":[', *items, b"],", shapes.encode(named)[1:]]))


def with_commas(entries: Iterable[Sequence[bytes]]) -> Iterator[bytes]:
    """Yield the pieces of a list's or an object's entries, with commas between these."""
    for at, entry in enumerate(entries):
        if at:
            yield b","
        yield from entry
