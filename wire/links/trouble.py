"""Finds out why a link could not be made, when gRPC only reports that the socket closed.

A short probe with the standard library's TLS asks the peer again and reads the true reason off the handshake. It runs
only after a link has failed, never in the way of a working one. It reports its finding to the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from relayline.wire.common import bounds
from relayline.wire.common.errors import StageLostError, UnauthenticatedError
from relayline.wire.links.refusals import NOTE_PREFIX, Reason
from relayline.wire.links.security import LinkSecurity, host_of
from relayline.wire.links.tls_probe import client_message, knock, probe

log = logging.getLogger("relayline.security")

NOTE_TIMEOUT_S = 2.0


@contextlib.asynccontextmanager
async def first_call(
    channel: grpc.aio.Channel, address: str, security: LinkSecurity, missed: str
) -> AsyncIterator[None]:
    """Make the first call over a channel to `address` in an async with block; where it fails, close the channel.

    Raises StageLostError where the call is lost, and after HANDSHAKE_TIMEOUT_S; `missed` then says what the other side
    did not do in time. Raises UnauthenticatedError where that is the reason of a loss. Other errors pass.
    """
    try:
        async with asyncio.timeout(bounds.HANDSHAKE_TIMEOUT_S):
            yield
    except TimeoutError as error:
        await channel.close()
        late = StageLostError(f"{missed} within {bounds.HANDSHAKE_TIMEOUT_S:.0f} s")
        raise await explained(late, address, security) from error
    except StageLostError as error:
        await channel.close()
        reason = await explained(error, address, security)
        if reason is error:  # as its own cause it would be a chain without an end
            raise
        raise reason from error
    except BaseException:
        await channel.close()
        raise


async def explained(
    error: StageLostError, address: str, security: LinkSecurity
) -> StageLostError | UnauthenticatedError:
    """Return what to raise for a first call to `address` that was lost: the true reason, or `error` itself.

    Takes at most a few seconds (the probe's timeouts), and no time if no process listens there.
    """
    if host_of(address).startswith(("unix:", "unix-abstract:")):
        return error
    found = await asyncio.to_thread(probe, address, security)
    if found is None:
        return error
    if found.reason is Reason.PLAINTEXT_SERVER:
        await _note_in_the_clear(address, found.reason)
    elif found.reason is not Reason.PLAINTEXT_CLIENT:  # that one is plain to see for the other end
        await asyncio.to_thread(knock, address, found.reason)
    return UnauthenticatedError(client_message(found, address, security))


def neighbour_error(error: UnauthenticatedError, who: str) -> UnauthenticatedError:
    """Log that `who` gets no link, and return the error for the caller that asked `who` to make it."""
    log.warning("%s cannot connect to its neighbour: %s", who, error.message)
    return UnauthenticatedError(f"{who} cannot connect to its neighbour: {error.message}")


async def _note_in_the_clear(address: str, reason: Reason) -> None:
    """Let a server that speaks no TLS know who wanted it. Nothing but the reason is sent."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await channel.unary_unary(NOTE_PREFIX + reason.value)(b"", timeout=NOTE_TIMEOUT_S)
