"""The address of a stage that has joined: the one that it says, or the one that it calls from.

A stage that is started with --advertise, as by a manifest for other hosts, still reports that address after its host
has got another one. Its membership comes from the new one, so it can probably be reached there.
"""

from __future__ import annotations

from relayline.wire.common import bounds
from relayline.wire.common.errors import RelaylineError
from relayline.wire.common.texts import named_stage
from relayline.wire.links import rpc
from relayline.wire.links.roles import Identity
from relayline.wire.links.security import LinkSecurity, address_of, is_loopback
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

BEHIND_NAT = "if it is behind NAT or a firewall, start it with --relay"
LOOK_S = 3.0  # to get an answer at an address; the log must name a problem within 15 s


async def whereabouts(
    name: str, reported: str, peer: str, port: int, security: LinkSecurity, who: Identity | None = None
) -> tuple[str, str]:
    """Return the address (host:port) of a stage, and a line for the log where it differs from the stage's own report.

    There is a line, too, where nobody answers. `reported` is the host that the stage reports, empty for none. `peer` is
    the host that its membership comes from, and `who` the name in its credential.
    """
    if reported in ("", peer):
        address = address_of(peer, port)
        trouble = "" if is_loopback(peer) else await _trouble(address, security, who)
        return address, _closed_text(name, address, trouble) if trouble else ""
    own, other = address_of(reported, port), address_of(peer, port)
    if is_loopback(peer) and not is_loopback(reported):  # this very host, where neighbours on others would not find it
        return own, ""
    own_trouble = await _trouble(own, security, who)
    if not own_trouble:
        return own, ""
    # Only now: a certificate for a name does not hold for the address, and the stage would warn of a caller who left.
    other_trouble = await _trouble(other, security, who)
    if not other_trouble:
        line = f"{named_stage(name)} reports the address {own}, but it is not there ({own_trouble})"
        remedy = f"If it stays there, start it with --advertise {peer}"
        return other, f"{line}; the coordinator reaches it at {other}, the address that it joins from. {remedy}"
    return own, (
        f"{named_stage(name)} reports the address {own} ({own_trouble}) and joins from {peer}, but it is at neither "
        f"({other_trouble}); start it again with --advertise HOST and --listen HOST:PORT of an address where "
        f"it can be reached, or, {BEHIND_NAT}"
    )


def _closed_text(name: str, address: str, trouble: str) -> str:
    port = address.rpartition(":")[2]
    text = f"{named_stage(name)} cannot be reached at {address} ({trouble})"
    return f"{text}; open port {port} on its host, or, {BEHIND_NAT}"


async def _trouble(address: str, security: LinkSecurity, who: Identity | None) -> str:
    """Return why no stage answers at an address, empty if one does."""
    request = pb.DescribeRequest(protocol_version=bounds.PROTOCOL_VERSION)
    try:
        channel = rpc.open_channel(address, security, who)
    except RelaylineError as error:
        return error.message
    try:
        await rpc.call(channel, "Describe", request, pb.DescribeResponse, address, LOOK_S)
    except RelaylineError as error:
        return error.message
    finally:
        await channel.close()
    return ""
