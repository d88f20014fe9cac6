"""Goal: commands on `up`'s machine trust the certificate of its pipeline by themselves, and no other one there.

Method: a small HTTPS server with the coordinator's own TLS, a stored state that names its certificate, real clients.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from relayline.coordinator.http.edge.server import server_tls, start_http
from relayline.deploy.cli import bench, console_http, load
from relayline.deploy.launch.board import Board
from relayline.deploy.launch.certificates import init_authority, issue
from relayline.deploy.launch.control import describe, find
from relayline.deploy.launch.process_id import ProcessId, identify
from relayline.deploy.launch.state import StateDir
from relayline.deploy.launch.tell import curl_of
from relayline.deploy.launch.trust import refused, trust_of
from relayline.wire.common.errors import StartError
from relayline.wire.common.phase import Phase
from relayline.wire.links.roles import Role
from tests.support.identities import DAY, NOW

LIVE = {"phase": "ready", "phase_s": 1.0, "running": 0, "waiting": 0, "stages": []}


def issued(tmp_path: Path, name: str, days: int = 90, now: datetime.datetime = NOW) -> Path:
    issue(tmp_path / "ca", "chat.example", [], days, tmp_path / name, now, role=Role.MONITOR)
    return tmp_path / name / "cert.pem"


@pytest.fixture
def cert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    init_authority(tmp_path / "ca", "web", NOW - 400 * DAY)
    return issued(tmp_path, "web")


@pytest.fixture
async def port(cert: Path) -> AsyncIterator[int]:
    async def pipeline(_: web.Request) -> web.Response:
        return web.json_response(LIVE)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    app = web.Application()
    app.router.add_get("/v1/pipeline", pipeline)
    app.router.add_get("/v1/models", models)
    runner, port = await start_http(app, "127.0.0.1", 0, context=server_tls((cert, cert.with_name("key.pem"))))
    yield port
    await runner.cleanup()


def stored(url: str, certificate: Path | None, *, runs: bool = True) -> None:
    """Store the state of a pipeline whose supervisor is this process, or one that is gone."""
    directory = StateDir(Path(os.environ["XDG_STATE_HOME"]) / "relayline" / "small")
    directory.path.mkdir(parents=True, exist_ok=True)
    me = identify(os.getpid())
    assert me is not None
    supervisor = me if runs else ProcessId(me.pid, me.start_ticks - 1)
    board = Board(directory, "small", "/nowhere/small.yaml", supervisor, (), certificate)
    board.set_phase(Phase.READY)
    board.set_addresses(url, "127.0.0.1:1")


def with_others(path: Path, *others: Path) -> Path:
    """Append certificates to a file of one."""
    path.write_bytes(b"".join(each.read_bytes() for each in (path, *others)))
    return path


async def asked(url: str) -> dict[str, object]:
    async with console_http.Coordinator(url) as coordinator:
        return await coordinator.get("/v1/pipeline")


async def test_clients_of_this_machines_pipeline_trust_its_certificate(cert: Path, port: int):
    """Its name is another than the address, and its CA is unknown."""
    url = f"https://127.0.0.1:{port}"
    with pytest.raises(StartError, match="not trusted here; set SSL_CERT_FILE"):
        await asked(url)
    stored(url, cert)
    assert (await asked(url))["phase"] == "ready"
    assert (await asked(f"https://localhost:{port}/"))["phase"] == "ready"
    async with load.client(tls=console_http.client_tls(url)) as session:
        assert await bench._model(session, url) == "m"
    pipeline = find("small", None)
    assert pipeline is not None
    facts = await asyncio.to_thread(describe, pipeline)
    assert (facts["phase"], facts["problem"], facts["requests"]) == ("ready", "", {"running": 0, "waiting": 0})


async def test_no_other_certificate_is_trusted_there(cert: Path, port: int, tmp_path: Path):
    """Neither another one of its CA, nor those that follow in its file."""
    url = f"https://127.0.0.1:{port}"
    stored(url, with_others(issued(tmp_path, "other"), tmp_path / "ca" / "ca.pem", cert))
    with pytest.raises(StartError, match="not trusted here"):
        await asked(url)
    pipeline = find("small", None)
    assert pipeline is not None
    facts = await asyncio.to_thread(describe, pipeline)
    assert facts["phase"] == "ready", "it answers all the same"
    assert facts["problem"].startswith("its certificate is not trusted here")


def test_only_the_url_of_a_pipeline_that_runs_is_special(cert: Path, tmp_path: Path):
    stored("https://0.0.0.0:8443", cert)
    context = trust_of("https://127.0.0.1:8443/v1")
    assert context is not None
    assert context.cert_store_stats()["x509"] == 1
    for url in ("http://127.0.0.1:8443", "https://127.0.0.1:8444", "https://10.0.0.1:8443", "https://127.0.0.1:x", "a"):
        assert trust_of(url) is None, url
    both = tmp_path / "both.pem"
    both.write_bytes(
        "# Schlüssel und Zertifikat\n".encode() + cert.with_name("key.pem").read_bytes() + cert.read_bytes()
    )
    stored("https://chat.example", both)
    assert trust_of("https://chat.example:443") is not None
    both.write_text("no certificate")
    assert trust_of("https://chat.example") is None
    stored("https://127.0.0.1:8443", tmp_path / "gone.pem")
    assert trust_of("https://127.0.0.1:8443") is None
    stored("https://127.0.0.1:8443", cert, runs=False)
    assert trust_of("https://127.0.0.1:8443") is None
    stored("https://127.0.0.1:8443", None)
    assert trust_of("https://127.0.0.1:8443") is None


def test_an_expired_certificate_is_called_so():
    error = ssl.SSLCertVerificationError("certificate verify failed")
    error.verify_message = "certificate has expired"
    assert refused(error) == "its certificate has expired; renew it"


def test_curl_is_told_to_trust_this_machine():
    """The line that `up` prints has to work as it is."""
    event = {"url": "https://127.0.0.1:8443", "model": "m"}
    assert curl_of(event).startswith("curl -sk https://127.0.0.1:8443/v1/chat/completions ")
    assert curl_of(event | {"url": "http://127.0.0.1:8080"}).startswith("curl -s http://")
    assert curl_of(event | {"clients": "https://chat.example:8443"}).startswith("curl -s https://chat.example")
