"""Lets an application keep files and batches, from its start to its end."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiohttp import web

from relayline.coordinator.batches.store import BatchStore
from relayline.coordinator.http.batches.keeper import BATCH_HEADER, Keeper
from relayline.coordinator.http.batches.own import KEEPER
from relayline.coordinator.http.edge.inside import Inside
from relayline.coordinator.sessions.generation import Generator
from relayline.wire.common.places import expanded
from relayline.wire.settings.table import ServingSettings


async def keep_batches(
    app: web.Application, serving: ServingSettings, generator: Generator, inside: Inside
) -> Keeper | None:
    """Give an application its keeper, where a directory is set. Call it before it is started.

    Raises UsageError for a directory that cannot be used.
    """
    if not serving.batch_dir:
        return None
    store = await asyncio.to_thread(BatchStore, Path(expanded(serving.batch_dir)))
    keeper = app[KEEPER] = Keeper(store, serving, generator, inside)
    inside.add(BATCH_HEADER, keeper.let_in)
    return keeper
