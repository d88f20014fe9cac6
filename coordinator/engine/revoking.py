"""Applies revoked credentials: a coordinator notifies the stages, and leaves stages with a revoked credential.
gRPC does not expose the certificate that a server shows.

So a separate handshake reads it, and only where anything is revoked at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from relayline.coordinator.engine.stage_client import StageClient
from relayline.wire.common.errors import RelaylineError, UnauthenticatedError
from relayline.wire.links.revocation import IS_REVOKED, LOOK_S, Revocations
from relayline.wire.links.security import LinkSecurity

log = logging.getLogger("relayline.coordinator")


async def check_servers(
    addresses: Sequence[str],
    security: LinkSecurity,
    revocations: Revocations,
    on_heard: Callable[[int], None] = lambda index: None,
) -> None:
    """Raise UnauthenticatedError, with the stage's index, if a stage's own certificate is revoked.

    `on_heard` gets the index of each other stage that showed one: it is there, though no epoch can begin.
    """
    if not (security.is_tls and revocations.crl_pem):
        return
    from relayline.wire.links.tls_material import credential_of_der  # loads cryptography, which plaintext does not need
    from relayline.wire.links.tls_probe import server_certificate

    shown = await asyncio.gather(*(asyncio.to_thread(server_certificate, address, security) for address in addresses))
    refused: UnauthenticatedError | None = None
    for index, (address, der) in enumerate(zip(addresses, shown, strict=True)):
        if not der:
            continue
        credential = credential_of_der(der)
        if not revocations.is_revoked(credential):
            on_heard(index)
        elif refused is None:
            refused = UnauthenticatedError(f"the credential of {address} ({credential.identity}) {IS_REVOKED}")
            refused.stage_index = index
    if refused is not None:
        raise refused


async def tell(stages: Sequence[StageClient], revocations: Revocations) -> None:
    """Send the list of revoked certificates, if there is one, to every stage. Raises the first stage's error."""
    if revocations.crl_pem:
        await asyncio.gather(*(stage.revoke(revocations.crl_pem) for stage in stages))


async def push_revocations(
    revocations: Revocations,
    stages: Sequence[StageClient],
    security: LinkSecurity,
    on_lost: Callable[[RelaylineError], None],
) -> None:
    """Do both again whenever more is revoked; `on_lost` gets each stage that must be left.

    Ends only by cancellation.
    """
    seen = revocations.version
    while True:
        await asyncio.sleep(LOOK_S)
        revocations.look()
        if revocations.version == seen:
            continue
        seen = revocations.version
        try:
            await tell(stages, revocations)
        except RelaylineError as error:  # the next epoch sends it again
            log.warning("a stage has not received the list of revoked credentials yet: %s", error.message)
        try:
            await check_servers([stage.address for stage in stages], security, revocations)
        except UnauthenticatedError as error:
            on_lost(error)
