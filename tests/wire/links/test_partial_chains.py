"""Links whose CA is an intermediate one: what gRPC takes, joining stages take as well."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from relayline.wire.links import rpc
from relayline.wire.links.listening import Listener
from relayline.wire.links.roles import Role
from relayline.wire.links.security import LinkSecurity
from relayline.wire.links.tls_probe import server_certificate

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


class Signed(NamedTuple):
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def signed(name: str, issuer: Signed | None, uri: str = "") -> Signed:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - DAY)
        .not_valid_after(NOW + 9 * DAY)
        .add_extension(x509.BasicConstraints(ca=not uri, path_length=None), critical=True)
    )
    if uri:
        loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        names = [x509.DNSName("localhost"), loopback, x509.UniformResourceIdentifier(uri)]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return Signed(builder.sign(issuer.key if issuer else key, hashes.SHA256()), key)


def security_of(directory: Path, ca: Signed, leaf: Signed) -> LinkSecurity:
    directory.mkdir()
    files = directory / "ca.pem", directory / "cert.pem", directory / "key.pem"
    files[0].write_bytes(ca.certificate.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(leaf.certificate.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    files[2].write_bytes(leaf.key.private_bytes(serialization.Encoding.PEM, *form))
    return LinkSecurity(*files, "", False, None)


async def test_a_coordinator_below_an_intermediate_ca_shows_its_certificate(tmp_path: Path) -> None:
    intermediate = signed("intermediate", signed("root", None))
    leaf = signed("coordinator", intermediate, "relayline:coordinator:localhost")
    ours = security_of(tmp_path / "coordinator", intermediate, leaf)
    theirs = security_of(tmp_path / "stage", intermediate, signed("a", intermediate, "relayline:stage:a:localhost"))
    listener = Listener(ours, "test", 1 << 20)
    address = f"localhost:{listener.add_port('127.0.0.1', 0)}"
    await listener.server.start()
    try:
        shown = await asyncio.to_thread(server_certificate, address, theirs)
        assert shown == leaf.certificate.public_bytes(serialization.Encoding.DER)
        channel: grpc.aio.Channel = rpc.open_channel(address, theirs, Role.COORDINATOR, certificate=shown)
        async with asyncio.timeout(20):
            await channel.channel_ready()
        await channel.close()
    finally:
        await listener.stop(0.1)
