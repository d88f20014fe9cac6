"""Enrolment: a host with nothing but the join line gets its certificate, and no other host does."""

from __future__ import annotations

import asyncio
import datetime
import errno
import json
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from relayline.coordinator.joining.config import EnrolConfig
from relayline.coordinator.joining.enrol import Enrolment, serve_enrolment
from relayline.coordinator.joining.invitations import Desk, Invitation, WrongTokenError, may_be_called
from relayline.deploy.launch import invitations
from relayline.deploy.launch.certificates import init_authority, issue, revoke
from relayline.deploy.launch.invitations import CODES_FILE, FILE, SigningAuthority, open_invitation
from relayline.stage.joining import enrol as client
from relayline.stage.joining.enrol import Joined, await_clock, enrol, keep_current, memberships, renewed
from relayline.wire.common import bounds
from relayline.wire.common.errors import (
    HandshakeError,
    OverloadedError,
    ProtocolError,
    RelaylineError,
    StageLostError,
    UnauthenticatedError,
    UsageError,
)
from relayline.wire.links.enrolment import JoinToken, digest_of, new_token, read_token
from relayline.wire.links.roles import Identity, Role
from relayline.wire.links.security import load_security
from relayline.wire.links.tls_material import names_of, read_certificate
from tests.support.ipv6 import need_ipv6

NOW = datetime.datetime.now(datetime.UTC)
HOUR = datetime.timedelta(hours=1)
S = 1_000_000_000
OLD = Identity(Role.STAGE, "old.test", "old")


# --- the token ------------------------------------------------------------------------------------------------------


def test_a_token_holds_its_parts_and_is_short():
    token = new_token("old", b"a certificate")
    assert read_token(f" {token}\n") == token
    assert len(str(token)) == len("old.") + 48
    assert token.secret.hex() not in repr(token)
    assert new_token("old", b"a certificate").secret != token.secret


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("old", "not one of a join line"),
        ("Old.x", "not one of a join line"),
        ("old.short", "has 5 characters behind the dot, not 48"),
        ("old." + "!" * 48, "characters that no token has"),
        ("old." + "A" * 48, "another version"),
    ],
)
def test_a_bad_token_is_refused_in_one_line(text: str, why: str):
    with pytest.raises(UsageError, match=why) as caught:
        read_token(text)
    assert "\n" not in caught.value.message


# --- the decision ---------------------------------------------------------------------------------------------------


def an_invitation(**changes: Any) -> Invitation:
    return Invitation(OLD, **{"digest": digest_of(b"right"), "expires": NOW + HOUR} | changes)


@pytest.mark.parametrize("expires", ["soon", "2026-01-01T00:00:00"])
def test_a_time_that_is_none_in_the_files_of_invitations_is_one_line(tmp_path: Path, expires: str):
    init_authority(tmp_path, "small", NOW)
    invitations.invite(tmp_path, "old", "old.test", NOW)
    for file, look in (
        (FILE, lambda: SigningAuthority(tmp_path).invitation("old")),
        (CODES_FILE, lambda: open_invitation(tmp_path, "old", NOW)),
    ):
        rows = json.loads((tmp_path / file).read_bytes())
        (tmp_path / file).write_text(json.dumps({name: row | {"expires": expires} for name, row in rows.items()}))
        with pytest.raises(UsageError, match=f"{file} cannot be read"):
            look()


def test_an_invitation_opens_once_for_one_key():
    desk = Desk()
    desk.check_secret("old", b"right", "key", an_invitation(), NOW)
    bound = an_invitation(key_digest="key", used_by="10.0.0.7")
    desk.check_secret("old", b"right", "key", bound, NOW + 2 * HOUR)  # its answer was lost, for hours
    with pytest.raises(UnauthenticatedError, match=r"already used, by 10\.0\.0\.7"):
        desk.check_secret("old", b"right", "another", bound, NOW)
    with pytest.raises(UnauthenticatedError, match=r"expired at .* UTC; `relayline invite old`"):
        desk.check_secret("old", b"right", "key", an_invitation(), NOW + 2 * HOUR)


def test_a_wrong_token_and_an_unknown_name_get_the_same_answer():
    texts = []
    for invitation in (None, an_invitation(), an_invitation(key_digest="key")):
        with pytest.raises(WrongTokenError) as caught:
            Desk().check_secret("old", b"wrong", "key", invitation, NOW)
        texts.append(caught.value.message)
    assert len({*texts}) == 1


def test_attempts_are_bounded_by_address_and_forgotten():
    desk = Desk()
    for _ in range(bounds.ENROL_WRONG_MAX):
        desk.check_address("10.0.0.7", 0)
        desk.note_wrong("10.0.0.7", 0)
    desk.check_address("10.0.0.8", 0)
    with pytest.raises(OverloadedError, match=r"from 10\.0\.0\.7; wait 50 s"):
        desk.check_address("10.0.0.7", 10 * S)
    desk.check_address("10.0.0.7", 61 * S)
    for number in range(bounds.ENROL_ADDRESSES_MAX + 5):
        desk.note_wrong(str(number), 61 * S)
    assert len(desk._wrong) == bounds.ENROL_ADDRESSES_MAX


def test_a_stage_gets_no_certificate_for_another_host():
    assert may_be_called("", OLD, "10.0.0.7")
    assert may_be_called("Old.test", OLD, "10.0.0.7")
    assert may_be_called("10.0.0.7", OLD, "10.0.0.7")
    assert may_be_called("127.0.0.3", OLD, "10.0.0.7"), "every host's own"
    assert not may_be_called("head.test", OLD, "10.0.0.7")


# --- both ends over TLS ---------------------------------------------------------------------------------------------


def invite(ca: Path, name: str, host: str, now: datetime.datetime | None = None) -> JoinToken:
    return read_token(invitations.invite(ca, name, host, now).token)


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    init_authority(tmp_path / "ca", "small", NOW)
    issue(tmp_path / "ca", "127.0.0.1", (), 30, tmp_path / "ca" / "coordinator", NOW, role=Role.COORDINATOR)
    return tmp_path / "ca"


class Port:
    """An enrolment port that answers, and a host that asks there."""

    def __init__(self, ca: Path, disk: Path, address: str) -> None:
        self.ca, self.disk, self.number = ca, disk, int(address.rpartition(":")[2])

    async def enrol(self, token: JoinToken, advertise: str = "", disk: str = "host") -> Joined:
        return await asyncio.to_thread(enrol, "127.0.0.1", self.number, token, self.disk / disk, advertise)

    async def renew(self, known: Joined, advertise: str = "") -> Joined:
        return await asyncio.to_thread(renewed, known, "127.0.0.1", self.number, advertise)

    async def refusal(self, token: JoinToken, disk: str = "other") -> RelaylineError:
        with pytest.raises(RelaylineError) as caught:
            await self.enrol(token, disk=disk)
        assert "\n" not in caught.value.message
        assert not list((self.disk / disk).rglob("cert.pem"))
        return caught.value


@pytest.fixture
async def port(ca: Path, tmp_path: Path) -> AsyncIterator[Port]:
    security = load_security(ca / "coordinator", environment={}, role=Role.COORDINATOR)
    config = EnrolConfig(SigningAuthority(ca), "127.0.0.1", 0)
    async with serve_enrolment(config, security, "0.0.0.0:7000") as address:
        yield Port(ca, tmp_path / "disk", address)


def secrets_in(directory: Path) -> list[bytes]:
    return [path.read_bytes() for path in directory.rglob("*") if path.is_file()]


async def test_a_host_with_an_empty_disk_gets_a_stages_files(port: Port):
    token = invite(port.ca, "old", "old.test")
    joined = await port.enrol(token)
    security = load_security(joined.directory, environment={}, role=Role.STAGE, name="old")
    assert security.identity == OLD
    assert security.token.startswith("stage/old/old.test/")
    assert {"old.test", "127.0.0.1"} <= {*names_of(read_certificate(joined.directory / "cert.pem"))}
    assert joined.file.coordinator == "127.0.0.1:7000"
    key = joined.directory / "key.pem"
    assert key.stat().st_mode & 0o777 == 0o600
    assert key.read_bytes() not in secrets_in(port.ca), "the key never leaves the host"
    assert not any(token.secret in data or str(token).encode() in data for data in secrets_in(port.ca))
    assert "relayline:stage:old:old.test" in (port.ca / "issued").read_text(), "so that it can be revoked"
    assert [one.file.name for one in memberships(port.disk / "host")] == ["old"]


async def test_hosts_enrol_by_both_families_at_every_address(ca: Path, tmp_path: Path):
    need_ipv6()
    security = load_security(ca / "coordinator", environment={}, role=Role.COORDINATOR)
    async with serve_enrolment(EnrolConfig(SigningAuthority(ca), "0.0.0.0", 0), security, "0.0.0.0:7000") as address:
        number = int(address.rpartition(":")[2])
        for name, host in (("old", "127.0.0.1"), ("server", "::1")):
            token = invite(ca, name, f"{name}.test")
            joined = await asyncio.to_thread(enrol, host, number, token, tmp_path / name)
            assert host in {*names_of(read_certificate(joined.directory / "cert.pem"))}, "the address that it has"


async def test_the_same_line_again_on_the_same_host_asks_for_nothing(port: Port):
    token = invite(port.ca, "old", "old.test")
    first = await port.enrol(token)
    before = (first.directory / "cert.pem").read_bytes()
    assert (await port.enrol(token)).directory == first.directory
    assert (first.directory / "cert.pem").read_bytes() == before
    fresh = invite(port.ca, "old", "old.test")
    await port.enrol(fresh)
    assert (first.directory / "cert.pem").read_bytes() != before, "a new line brings a new certificate"


async def test_every_wrong_token_is_refused_in_one_line(port: Port, tmp_path: Path):
    token = invite(port.ca, "old", "old.test")
    wrong = JoinToken("old", b"0" * 16, token.fingerprint)
    assert "is not the newest one for stage old" in (await port.refusal(wrong)).message
    other_name = JoinToken("server", token.secret, token.fingerprint)
    assert "is not the newest one for stage server" in (await port.refusal(other_name)).message
    await port.enrol(token)
    assert "already used, by 127.0.0.1" in (await port.refusal(token)).message
    late = invite(port.ca, "late", "late.test", NOW - 25 * HOUR)
    assert "expired at" in (await port.refusal(late)).message
    init_authority(tmp_path / "elsewhere", "other", NOW)
    foreign = await port.refusal(invite(tmp_path / "elsewhere", "old", "old.test"))
    assert "belongs to another pipeline than the token for old" in foreign.message
    assert "nothing was sent" in foreign.message


async def test_the_right_token_has_to_wait_after_too_many_wrong_ones(port: Port):
    token = invite(port.ca, "old", "old.test")
    for number in range(bounds.ENROL_WRONG_MAX):
        await port.refusal(JoinToken("old", bytes([number]) * 16, token.fingerprint))
    late = await port.refusal(token)
    assert (late.label, "too many wrong tokens" in late.message) == ("overloaded", True)


async def test_an_answer_that_is_lost_is_asked_for_again_with_the_same_key(port: Port, monkeypatch: pytest.MonkeyPatch):
    enrol_of, cut = Enrolment.enrol, threading.Event()

    async def cut_once(self: Enrolment, request: Any) -> Any:
        answer = await enrol_of(self, request)
        if not cut.is_set():
            cut.set()
            request.transport.abort()
        return answer

    monkeypatch.setattr(Enrolment, "enrol", cut_once)
    monkeypatch.setattr(client, "RETRY_FIRST_S", 0.001)
    # The routes are bound when the application is made, so the cut one gets its own port.
    security = load_security(port.ca / "coordinator", environment={})
    async with serve_enrolment(EnrolConfig(SigningAuthority(port.ca), "127.0.0.1", 0), security, "x:7000") as address:
        cutting = Port(port.ca, port.disk, address)
        joined = await cutting.enrol(invite(port.ca, "old", "old.test"))
    assert cut.is_set()
    load_security(joined.directory, environment={}, name="old")
    assert not list(joined.directory.glob("pending-*"))


async def test_a_stage_cannot_play_the_coordinator(ca: Path, tmp_path: Path):
    issue(ca, "127.0.0.1", (), 30, ca / "evil", NOW, role=Role.STAGE, stage="evil")
    config = EnrolConfig(SigningAuthority(ca), "127.0.0.1", 0)
    async with serve_enrolment(config, load_security(ca / "evil", environment={}), "x:1") as address:
        refused = await Port(ca, tmp_path, address).refusal(invite(ca, "old", "old.test"))
    assert "is not a coordinator but stage evil on localhost; nothing was sent" in refused.message


@pytest.mark.parametrize(("hours", "side"), [(-3, "behind"), (2, "ahead of")])
async def test_clocks_that_are_far_apart_are_reported(
    port: Port, hours: int, side: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(client, "_now", lambda: datetime.datetime.now(datetime.UTC) + hours * HOUR)
    error = await port.refusal(invite(port.ca, "old", "old.test"))
    assert isinstance(error, HandshakeError)
    assert f"this machine's clock is {abs(hours)} h 0 min {side} the coordinator's" in error.message


async def test_a_port_without_enrolment_is_one_clear_line(ca: Path, tmp_path: Path):
    token = invite(ca, "old", "old.test")
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]

        def answer_in_the_clear() -> None:
            link, _ = server.accept()
            with link:
                link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                link.recv(4096)

        thread = threading.Thread(target=answer_in_the_clear)
        thread.start()
        with pytest.raises(ProtocolError, match="does not speak TLS; give the HOST:PORT of the line"):
            await asyncio.to_thread(enrol, "127.0.0.1", number, token, tmp_path / "x")
        thread.join()
    with pytest.raises(StageLostError, match=rf"cannot be reached: .* is port {number} open"):
        await asyncio.to_thread(enrol, "127.0.0.1", number, token, tmp_path / "x")


async def test_nobody_can_call_anything_else_without_a_certificate(port: Port):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for path in ("/", "/v1/models", "/metrics", "/relayline.v1.PipelineService/Join"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port.number, ssl=context)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert b" 404 " in (await reader.readline())
        writer.close()


# --- renewal --------------------------------------------------------------------------------------------------------


async def test_a_certificate_is_renewed_before_it_ends_and_for_a_new_address(
    port: Port, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(invitations, "CERT_DAYS_DEFAULT", 5)
    joined = await port.enrol(invite(port.ca, "old", "old.test"))
    monkeypatch.undo()
    key = (joined.directory / "key.pem").read_bytes()
    await port.renew(joined)
    cert = read_certificate(joined.directory / "cert.pem")
    assert (cert.not_valid_after_utc - NOW).days > 300
    assert (joined.directory / "key.pem").read_bytes() == key
    load_security(joined.directory, environment={}, name="old")
    await port.renew(joined)
    assert read_certificate(joined.directory / "cert.pem") == cert, "nothing has changed"


async def test_a_certificate_is_renewed_while_its_host_runs(port: Port, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(invitations, "CERT_DAYS_DEFAULT", 5)
    joined = await port.enrol(invite(port.ca, "old", "old.test"))
    monkeypatch.undo()
    path = joined.directory / "cert.pem"

    async def look(number: int, **more: Any) -> x509.Certificate:
        await asyncio.to_thread(keep_current, joined, "127.0.0.1", number, **more)
        return read_certificate(path)

    cert = await look(port.number)
    assert (cert.not_valid_after_utc - NOW).days > 300, "it ended soon"
    nobody = 1  # answers at this port, and nobody is asked for a certificate that is good
    assert await look(nobody) == cert
    monkeypatch.setattr("relayline.stage.joining.config.facing", lambda _: "192.0.2.7")
    assert await look(nobody, at_first="192.0.2.7") == cert, "the start has asked for this address"
    assert await look(nobody, advertise="old.test") == cert, "others are told another one"
    monkeypatch.setattr(client._Client, "own_address", property(lambda _: "192.0.2.7", lambda *_: None), raising=False)
    assert await look(port.number) != cert, "this host has another address than before"


async def test_a_full_disk_keeps_no_member_out(
    port: Port, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(invitations, "CERT_DAYS_DEFAULT", 5)
    joined = await port.enrol(invite(port.ca, "old", "old.test"))
    monkeypatch.undo()
    before = {path: path.read_bytes() for path in joined.directory.iterdir()}

    def full(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(client, "write_file", full)
        assert (await port.renew(joined)).file == joined.file
    assert "the certificate is not renewed: " in caplog.text
    assert "joined.json: No space left on device" in caplog.text
    assert {path: path.read_bytes() for path in joined.directory.iterdir()} == before
    await port.renew(joined)
    assert (read_certificate(joined.directory / "cert.pem").not_valid_after_utc - NOW).days > 300


async def test_a_certificate_that_has_ended_names_the_command_for_a_new_line(
    port: Port, monkeypatch: pytest.MonkeyPatch
):
    joined = await port.enrol(invite(port.ca, "old", "old.test"))
    monkeypatch.setattr(client, "_now", lambda: NOW + 400 * 24 * HOUR)
    with pytest.raises(UsageError, match=r"cert\.pem expired at .* UTC; `relayline invite old` on the coordinator"):
        await port.renew(joined)


async def test_a_clock_that_is_behind_at_a_boot_is_waited_for(
    port: Port, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    joined = await port.enrol(invite(port.ca, "old", "old.test"))
    clock = iter([NOW - 9_000 * HOUR, NOW - 9_000 * HOUR, NOW])
    monkeypatch.setattr(client, "_now", lambda: next(clock))
    monkeypatch.setattr(client, "CLOCK_LOOK_S", 0.0)
    await asyncio.to_thread(await_clock, joined.directory)
    assert next(clock, None) is None
    (said,) = [record.message for record in caplog.records if "clock" in record.message]
    assert said.startswith("this machine's clock says ")
    assert said.endswith("; waiting for the clock to be set")


async def test_a_revoked_or_foreign_key_renews_no_certificate(port: Port, caplog: pytest.LogCaptureFixture):
    joined = await port.enrol(invite(port.ca, "old", "old.test"))
    pem = (joined.directory / "cert.pem").read_text()
    authority = SigningAuthority(port.ca)
    stage, key = authority.holder(pem, NOW + HOUR)
    assert (stage, key) == (OLD, authority.key_of(client._csr((joined.directory / "key.pem").read_bytes())))
    with pytest.raises(UnauthenticatedError, match="expired at"):
        authority.holder(pem, NOW + 400 * 24 * HOUR)
    with pytest.raises(UnauthenticatedError, match="does not belong to this pipeline"):
        authority.holder("nonsense", NOW)
    own_ca = x509.load_pem_x509_certificate((port.ca / "ca.pem").read_bytes())
    assert own_ca.public_bytes(serialization.Encoding.PEM).decode() == authority.ca_pem()
    revoke(port.ca, lambda identity: identity == OLD, NOW)
    with pytest.raises(UnauthenticatedError, match="is revoked"):
        authority.holder(pem, NOW + HOUR)


# --- stages that others reach through the relay ---------------------------------------------------------------------


async def test_a_relayed_stages_certificate_holds_at_the_coordinators_host_and_no_others(ca: Path, tmp_path: Path):
    issue(ca, "head.test", (), 30, ca / "head", NOW, role=Role.COORDINATOR)
    security = load_security(ca / "head", environment={}, role=Role.COORDINATOR)
    config = EnrolConfig(SigningAuthority(ca), "127.0.0.1", 0)

    def names(joined: Joined) -> set[str]:
        return {*names_of(read_certificate(joined.directory / "cert.pem"))}

    async with serve_enrolment(config, security, "0.0.0.0:7000") as address:
        number, root = int(address.rpartition(":")[2]), tmp_path / "disk"
        token = invite(ca, "old", "old.test")
        dialled = await asyncio.to_thread(enrol, "127.0.0.1", number, token, root)
        assert "head.test" not in names(dialled)
        relayed = await asyncio.to_thread(enrol, "127.0.0.1", number, token, root, is_relayed=True)
        assert "head.test" in names(relayed), "the same line with --relay renews it"
        assert [one.file.is_relayed for one in memberships(root)] == [True], "a later `relayline join` goes on so"
        fresh = invite(ca, "new", "new.test")
        first = await asyncio.to_thread(enrol, "127.0.0.1", number, fresh, root, is_relayed=True)
        assert {"head.test", "new.test"} <= names(first)
        await asyncio.to_thread(renewed, first, "127.0.0.1", number)
        assert [one.file.is_relayed for one in memberships(root) if one.file.name == "new"] == [False], "--no-relay"
