"""The ports of joining: where stages join, and where hosts get the certificates for that."""

from __future__ import annotations

import contextlib
import importlib.metadata
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from relayline.coordinator.engine.membership import Membership
from relayline.coordinator.engine.roster import JoinedRoster
from relayline.coordinator.joining.config import JoinConfig
from relayline.coordinator.joining.enrol import serve_enrolment
from relayline.coordinator.joining.service import JoinService
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.wire.links.listening import Listener
from relayline.wire.links.security import LinkSecurity, address_of

SHUTDOWN_GRACE_S = 2.0


@contextlib.asynccontextmanager
async def serve_joining(
    config: JoinConfig,
    directory: Path,
    file: PipelineFile,
    roster: JoinedRoster,
    security: LinkSecurity,
    on_service: Callable[[JoinService], None] = lambda service: None,
) -> AsyncIterator[tuple[str, str]]:
    """Let stages join, and hosts enrol if the configuration says how, for the length of a with block.

    Yields where (host:port), the second empty without enrolment. `on_service` gets what answers there, before any
    stage can come. Raises StartError, UsageError.
    """
    service = JoinService(config, directory, file, roster, security)
    on_service(service)
    listener = Listener(security, "the coordinator")
    roster.ask_of_revoked(listener.guard.revocations.is_revoked)
    listener.server.add_generic_rpc_handlers((service.handlers(),))
    try:
        port = listener.add_port(config.host, config.port)
        await listener.server.start()
        address = address_of(config.host, port)
        async with serve_enrolment(config.enrol, security, address) as enrol_address:
            yield address, enrol_address
    finally:
        service.close()
        await listener.server.stop(SHUTDOWN_GRACE_S)
        listener.close()


def make_roster(config: JoinConfig) -> JoinedRoster:
    """Return the places that stages may take, all of them free."""
    names = [stage.name for stage in config.stages]
    return JoinedRoster(Membership(names, importlib.metadata.version("relayline"), time.monotonic_ns()))
