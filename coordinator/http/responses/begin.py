"""Lets an application keep its responses in a directory, from its start to its end."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiohttp import web

from relayline.coordinator.http.conversations.keeper import ConversationKeeper, Conversations
from relayline.coordinator.http.edge.inside import Inside
from relayline.coordinator.http.responses.background import Background
from relayline.coordinator.http.responses.directory import ResponseDirectory
from relayline.coordinator.http.responses.keeper import ResponseKeeper
from relayline.coordinator.http.responses.resuming import Resuming
from relayline.coordinator.http.responses.store import ResponseStore
from relayline.coordinator.http.responses.waiting import Waiting
from relayline.coordinator.sessions.generation import Generator
from relayline.wire.common.places import expanded
from relayline.wire.settings.table import ServingSettings

BACKGROUND = web.AppKey("background_responses", Background)
CONVERSATIONS = web.AppKey("conversations", Conversations)
STORE = web.AppKey("response_store", ResponseStore)


async def keep_responses(
    app: web.Application, serving: ServingSettings, generator: Generator, inside: Inside
) -> Resuming | None:
    """Keep an application's responses where a directory is set, with those that are there. Call it before it starts.

    Raises UsageError for a directory that cannot be used.
    """
    if not serving.responses_dir:
        return None
    store, background, conversations = app[STORE], app[BACKGROUND], app[CONVERSATIONS]
    directory = await asyncio.to_thread(ResponseDirectory, Path(expanded(serving.responses_dir)))
    stored, unfinished = await asyncio.to_thread(directory.load)
    for each in stored:
        store.put(each)
    keeper = store.mirror = ResponseKeeper(directory)
    conversations.keep(ConversationKeeper(keeper), await asyncio.to_thread(directory.load_conversations))
    orders = [each.order for each in unfinished]
    turns = [conversations.turn_again(order.conversation_id, order.owner) for order in orders]
    background.keep(keeper, [Waiting(each, turn) for each, turn in zip(unfinished, turns, strict=True)])
    return Resuming(background, keeper, generator, inside)
