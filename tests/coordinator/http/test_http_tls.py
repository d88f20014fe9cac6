"""Goal: the HTTP API can be HTTPS, renews its certificate, names a bad file in one line, and warns of unprotected keys.

Method: a small application with the coordinator's own context and port, on loopback, with files made here.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import ssl
from pathlib import Path
from typing import cast

import pytest
from aiohttp import web

from relayline.coordinator.http.edge.api_keys import protect_http
from relayline.coordinator.http.edge.connection import Server
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.listener import HttpListener
from relayline.coordinator.http.edge.server import LIMITS, server_tls, start_http
from relayline.deploy.cli.up_changes import changes_of
from relayline.deploy.launch.certificates import init_authority, issue
from relayline.deploy.launch.prepare import override
from relayline.deploy.launch.serving import flag_defaults
from relayline.deploy.manifest import parse_manifest
from relayline.deploy.testing.paths import DEMO_MODEL
from relayline.deploy.testing.processes import relayline
from relayline.wire.common.errors import UsageError
from relayline.wire.links import tls_door
from relayline.wire.links.roles import Role
from relayline.wire.links.security import host_of
from relayline.wire.links.tls_material import check_pair
from tests.support.identities import DAY, NOW

KEY = "a-key-of-the-test-0123"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    init_authority(tmp_path / "ca", "web", NOW - 30 * DAY)
    return renewed(tmp_path, 90, NOW)


def renewed(tmp_path: Path, days: int, now: datetime.datetime) -> tuple[Path, Path]:
    out = tmp_path / "web"
    issue(tmp_path / "ca", "api.example.com", [], days, out, now, role=Role.MONITOR)
    return out / "cert.pem", out / "key.pem"


async def serial_shown(port: int, context: ssl.SSLContext) -> str:
    """The serial number of the certificate that a new connection is shown, once a request was answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    serial = str(writer.get_extra_info("peercert")["serialNumber"])
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    return serial


async def test_the_api_is_https_and_takes_up_a_renewed_certificate(pair: tuple[Path, Path], tmp_path: Path):
    async def answer(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/", answer)
    runner, port = await start_http(app, "127.0.0.1", 0, context=server_tls(pair))
    try:
        ca = ssl.create_default_context(cafile=str(tmp_path / "ca" / "ca.pem"))
        before = await serial_shown(port, ca)
        assert await serial_shown(port, ca) == before
        renewed(tmp_path, 60, NOW)
        after = await serial_shown(port, ca)
        assert after != before
        pair[1].write_bytes((tmp_path / "ca" / "ca-key.pem").read_bytes())  # half a renewal
        assert await serial_shown(port, ca) == after
        with pytest.raises(ssl.SSLCertVerificationError):
            await serial_shown(port, ssl.create_default_context())
    finally:
        await runner.cleanup()


def fault(cert: Path, key: Path) -> str:
    with pytest.raises(UsageError) as caught:
        check_pair(cert, key)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"])
async def test_connections_count_and_end_amid_their_handshake(
    sent: bytes, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio does not report them earlier, so no bound would hold; they make room for the next connection."""
    app = web.Application()
    app[LIMITS] = HttpLimits(connections_max=4)
    runner, port = await start_http(app, "127.0.0.1", 0, context=server_tls(pair))
    crowd = cast(Server, runner.server).crowd
    try:
        unfinished = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for _, writer in unfinished:
            writer.write(sent)
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 404 ")
        writer.close()
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(unfinished[0][0].read(), 60) == b"", "the one that waited longest went"
        assert 1 <= len(crowd) <= 4
        for _, writer in unfinished:
            writer.close()
        monkeypatch.setattr(tls_door, "HANDSHAKE_TIMEOUT_S", 0.1)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
    finally:
        await runner.cleanup()


def test_files_that_cannot_be_used(pair: tuple[Path, Path], tmp_path: Path):
    cert, key = pair
    assert server_tls(None) is None
    assert "is missing; give the files of your web server's certificate" in fault(tmp_path / "none.pem", key)
    assert "is missing" in fault(cert, tmp_path / "none.pem")
    assert "cannot be read: Is a directory" in fault(tmp_path, key)
    assert fault(key, key) == f"{key} is not a PEM certificate"
    assert fault(cert, cert) == f"{cert} is not a PEM private key"
    assert fault(cert, tmp_path / "ca" / "ca-key.pem").startswith(f"{tmp_path}/ca/ca-key.pem does not belong to {cert}")
    renewed(tmp_path, 1, NOW - 20 * DAY)
    assert "expired on" in fault(cert, key)
    renewed(tmp_path, 90, NOW + DAY)
    assert "is not valid before" in fault(cert, key)


@pytest.mark.parametrize(
    "command", [("serve", "--pipeline", ".", "--stages", "127.0.0.1:1"), ("up", "--model", DEMO_MODEL)]
)
def test_commands_say_it_in_a_line(command: tuple[str | Path, ...], pair: tuple[Path, Path], tmp_path: Path):
    done = relayline(*command, "--http-cert", pair[0])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--http-cert and --http-key go together; give both or none" in done.stderr
    if command[0] == "up":
        done = relayline(*command, "--http-cert", pair[0], "--http-key", tmp_path / "none")
        *before, line = done.stderr.splitlines()
        assert done.returncode == 2
        assert "no such file" in line
        assert not [each for each in before if "error" in each]  # what is before it is the context that was chosen


def test_a_manifest_names_them_and_flags_leave_them(pair: tuple[Path, Path], tmp_path: Path):
    text = """
apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {name: p}
spec:
  model: {path: m.gguf}
  coordinator: {http: {tls: {certFile: web/cert.pem, keyFile: web/key.pem}}}
"""
    manifest = parse_manifest(text.encode(), "m.yaml").with_directory(tmp_path)
    moved = override(manifest, changes_of({"http": ("127.0.0.1", 0)}))
    for found in (manifest, moved):
        defaults = flag_defaults(found)
        assert (defaults["http_cert"], defaults["http_key"]) == pair
    with pytest.raises(UsageError, match="keyFile"):
        override(manifest, {"coordinator.http.tls": {"certFile": "web/cert.pem"}})


@pytest.mark.parametrize(
    ("host", "is_tls", "warns"), [("0.0.0.0", False, True), ("0.0.0.0", True, False), ("127.0.0.1", False, False)]
)
async def test_keys_in_the_clear_are_warned_of(
    host: str, is_tls: bool, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    keys = tmp_path / "keys"
    keys.write_text(f"test: {KEY}\n")
    keys.chmod(0o600)
    listener = HttpListener(
        host, tls=(tmp_path / "cert.pem", tmp_path / "key.pem") if is_tls else None, api_keys_file=keys
    )
    with caplog.at_level(logging.WARNING), protect_http(web.Application(), listener):
        logged = [record.getMessage() for record in caplog.records]
    expected = "API keys travel to 0.0.0.0 in PLAINTEXT: give --http-cert and --http-key, or a proxy with TLS"
    assert logged == ([expected] if warns else [])
    assert host_of(f"{host}:1") == host
