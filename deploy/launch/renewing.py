"""Renews the certificates that the launcher made while their pipeline runs: it may run for longer than they last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

from relayline.deploy.launch.own_tls import needs_own_tls, renew_own_tls
from relayline.deploy.manifest import Manifest
from relayline.wire.common.errors import UsageError
from relayline.wire.common.tasks import end_task
from relayline.wire.common.texts import file_error_text

log = logging.getLogger("relayline.up")

LOOK_S = 6 * 3600.0  # between two looks; a certificate is renewed days before its end


@contextlib.asynccontextmanager
async def renewing(
    manifest: Manifest, root: Path, names: Callable[[], Iterable[str]], look_s: float = LOOK_S
) -> AsyncIterator[None]:
    """Keep certificates below `root` that the launcher made for the processes of these names from ending within."""
    if not needs_own_tls(manifest):
        yield
        return
    keeping = asyncio.create_task(_keep(root, names, look_s))
    try:
        yield
    finally:
        await end_task(keeping)


async def _keep(root: Path, names: Callable[[], Iterable[str]], look_s: float) -> None:
    while True:
        await asyncio.sleep(look_s)
        try:
            renewed = await asyncio.to_thread(renew_own_tls, root, tuple(names()))
        except (UsageError, OSError) as error:
            why = error.message if isinstance(error, UsageError) else file_error_text(error)
            log.warning("certificates cannot be renewed, which is tried again: %s", why)
        else:
            if renewed:
                log.info("renewed the certificates of %s", ", ".join(renewed))
