"""Goal: `relayline certs` makes working certificates, keeps keys private to their owner, and overwrites no file."""

from __future__ import annotations

import base64
import ipaddress
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

from relayline.deploy.launch.certificates import CERT_DAYS_MAX, init_authority, issue, revoke
from relayline.deploy.testing.processes import relayline
from relayline.wire.common.errors import ProtocolError, UsageError
from relayline.wire.links.revocation import CRL_BYTES_MAX, Revocations
from relayline.wire.links.roles import Role
from relayline.wire.links.security import load_security, read_token
from relayline.wire.links.tls_material import credential_of, identity_of, names_of, read_certificate
from tests.support.identities import DAY, NOW


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    init_authority(tmp_path / "ca", "small", NOW)
    return tmp_path / "ca"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_authority(ca: Path):
    cert = read_certificate(ca / "ca.pem")
    assert cert.subject.rfc4514_string() == "CN=small CA"
    assert cert.not_valid_after_utc == (NOW + 3_652 * DAY).replace(microsecond=0)
    constraints = cert.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
    assert cert.public_key().curve.name == "secp256r1"
    assert {path.name: mode(path) for path in ca.iterdir()} == {"ca.pem": 0o644, "ca-key.pem": 0o600, "token": 0o600}
    assert len(read_token(ca / "token")) >= 43  # 256 bits


def test_a_host_gets_all_it_needs_and_nothing_else(ca: Path):
    names = ["10.0.0.7", "fd00::7", "*.stage.svc"]
    made = issue(ca, "Box1.lan", names, 100, ca / "box1", NOW, role=Role.STAGE, stage="alpha")
    assert str(made.identity) == "stage alpha on box1.lan"
    assert made.names == ("box1.lan", "10.0.0.7", "fd00::7", "*.stage.svc", "localhost", "127.0.0.1", "::1")
    assert sorted(path.name for path in made.directory.iterdir()) == ["ca.pem", "cert.pem", "key.pem", "token"]
    assert mode(made.directory) == 0o700
    assert [mode(made.directory / name) for name in ("ca.pem", "cert.pem", "key.pem", "token")] == [
        0o644, 0o644, 0o600, 0o600]  # fmt: skip
    cert = read_certificate(made.directory / "cert.pem")
    assert sorted(names_of(cert)) == sorted(made.names)
    assert cert.not_valid_after_utc == made.expires == (NOW + 100 * DAY).replace(microsecond=0)
    usage = cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usage) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    addresses = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert ipaddress.ip_address("10.0.0.7") in addresses.get_values_for_type(x509.IPAddress)
    assert not cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    token = load_security(made.directory, environment={}, role=Role.STAGE, name="alpha").token
    assert token.startswith("stage/alpha/box1.lan/")
    assert read_token(ca / "token").partition("/")[2] not in token


def test_a_certificate_never_outlives_its_ca(ca: Path):
    made = issue(ca, "box1", [], 800, ca / "box1", NOW + 3_600 * DAY, role=Role.COORDINATOR)
    assert made.expires <= read_certificate(ca / "ca.pem").not_valid_after_utc


def test_init_overwrites_nothing(ca: Path):
    before = {path.name: path.read_bytes() for path in ca.iterdir()}
    with pytest.raises(UsageError, match=r"ca\.pem exists"):
        init_authority(ca, "small", NOW)
    assert {path.name: path.read_bytes() for path in ca.iterdir()} == before
    (ca / "ca.pem").unlink()
    with pytest.raises(UsageError, match=r"ca-key\.pem exists"):
        init_authority(ca, "small", NOW)


def test_who_revokes_without_the_ca_is_told_where_that_of_up_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    there = re.escape(str(tmp_path / "state" / "relayline" / "NAME" / "tls"))
    with pytest.raises(UsageError, match=f"the CA is not here; that of `relayline up` is in {there}, and"):
        revoke(tmp_path / "pki", lambda identity: True, NOW)


def test_issue_again_renews_and_keeps_to_its_ca(ca: Path, tmp_path: Path):
    first = issue(ca, "box1", [], 10, ca / "box1", NOW, role=Role.COORDINATOR)
    second = issue(ca, "box1", [], 20, ca / "box1", NOW, role=Role.COORDINATOR)
    assert second.expires > first.expires
    load_security(ca / "box1", environment={})
    init_authority(tmp_path / "other", "other", NOW)
    with pytest.raises(UsageError, match="another CA"):
        issue(tmp_path / "other", "box1", [], 10, ca / "box1", NOW, role=Role.COORDINATOR)


@pytest.mark.parametrize("name", ["a b", "-box", "box-", "", "a..b", "ä", "10.0.0.0/8", "a*.b", "x" * 64])
def test_a_bad_host_name_is_refused(name: str, ca: Path):
    with pytest.raises(UsageError, match="neither an IP address nor a host name"):
        issue(ca, name, [], 10, ca / "x", NOW, role=Role.COORDINATOR)
    assert not (ca / "x").exists()


def test_refusals(ca: Path, tmp_path: Path):
    for days in (0, CERT_DAYS_MAX + 1):
        with pytest.raises(UsageError, match="--days"):
            issue(ca, "box1", [], days, ca / "x", NOW, role=Role.COORDINATOR)
    with pytest.raises(UsageError, match=r"the CA is not here"):
        issue(tmp_path, "box1", [], 10, ca / "x", NOW, role=Role.COORDINATOR)
    with pytest.raises(UsageError, match=r"ca\.pem expired on .*certs init"):
        issue(ca, "box1", [], 10, ca / "x", NOW + 4_000 * DAY, role=Role.COORDINATOR)
    for role, stage, says in (
        (Role.STAGE, "", "states its name"), (Role.COORDINATOR, "a", "states its name"),
        (Role.STAGE, "A_b", "not a DNS label"), (Role.STAGE, "monitor", "another role"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=says):
            issue(ca, "box1", [], 10, ca / "x", NOW, role=role, stage=stage)
    with pytest.raises(UsageError, match="--name has 0 characters"):
        init_authority(tmp_path / "y", "", NOW)
    (ca / "ca-key.pem").write_text("nonsense")
    with pytest.raises(UsageError, match="not a PEM private key"):
        issue(ca, "box1", [], 10, ca / "x", NOW, role=Role.COORDINATOR)


def test_the_command(tmp_path: Path):
    ca = tmp_path / "ca"
    made = relayline("certs", "init", ca, "--name", "small")
    assert (made.returncode, made.stdout.splitlines()[0].split(", valid")[0]) == (0, f"made the CA of small in {ca}")
    for flags in ((), ("--coordinator", "--stage", "alpha")):
        refused = relayline("certs", "issue", ca, "box1", *flags)
        assert (refused.returncode, "--coordinator, --stage NAME or --monitor" in refused.stderr) == (2, True)
    names = ("--ip", "10.0.0.7", "--dns", "box1.lan")
    made = relayline("certs", "issue", ca, "box1", "--stage", "alpha", *names, "--days", "30")
    assert made.returncode == 0, made.stderr
    text = f"made {ca}/alpha of stage alpha on box1, for box1, 10.0.0.7, box1.lan, localhost, 127.0.0.1, ::1, valid"
    assert text in made.stdout
    shown = relayline("certs", "show", ca / "alpha")
    assert shown.returncode == 0
    assert shown.stdout.splitlines()[2] == "cert.pem: CN=box1, from CN=small CA"
    assert "  of stage alpha on box1" in shown.stdout
    assert "expires in 29 days" in shown.stdout
    assert relayline("certs", "show", ca).returncode == 0  # the CA's own place has no cert.pem
    again = relayline("certs", "init", ca)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert f"{ca}/ca.pem exists" in again.stderr


def test_revoking(ca: Path, tmp_path: Path):
    for name in ("alpha", "beta"):
        issue(ca, "box1", [], 10, ca / name, NOW, role=Role.STAGE, stage=name)
    issue(ca, "head", [], 10, ca / "coordinator", NOW, role=Role.COORDINATOR)
    old, kept = read_token(ca / "alpha" / "token"), read_token(ca / "beta" / "token")
    with pytest.raises(UsageError, match=r"no such credential .* coordinator on head, stage alpha on box1"):
        revoke(ca, lambda identity: identity.name == "gamma", NOW)
    done = revoke(ca, lambda identity: identity.name == "alpha", NOW)
    assert done.identities == ("stage alpha on box1",)
    assert set(done.written) == {ca, ca / "alpha", ca / "beta", ca / "coordinator"}
    known = Revocations(load_security(ca / "coordinator", environment={}))
    for name, is_revoked in (("alpha", True), ("beta", False), ("coordinator", False)):
        credential = credential_of((ca / name / "cert.pem").read_bytes())
        assert known.is_revoked(credential) == is_revoked
    with pytest.raises(UsageError, match="already revoked: stage alpha on box1"):
        revoke(ca, lambda identity: identity.name == "alpha", NOW)
    again = issue(ca, "box1", [], 10, ca / "alpha", NOW, role=Role.STAGE, stage="alpha")
    assert not known.is_revoked(credential_of((again.directory / "cert.pem").read_bytes()))
    assert read_token(ca / "alpha" / "token") != old
    assert issue(ca, "box1", [], 10, ca / "beta", NOW, role=Role.STAGE, stage="beta")
    assert read_token(ca / "beta" / "token") == kept
    revoke(ca, lambda identity: identity.host == "box1", NOW)
    assert known.look()
    assert not known.look()
    assert known.number == 2
    shown = relayline("certs", "revoke", ca, "--coordinator")
    assert (shown.returncode, shown.stdout.splitlines()[0]) == (0, "revoked: coordinator on head")
    assert relayline("certs", "revoke", ca).returncode == 2


def test_lists_of_others_and_nonsense_revoke_nothing(ca: Path, tmp_path: Path):
    issue(ca, "box1", [], 10, ca / "alpha", NOW, role=Role.STAGE, stage="alpha")
    known = Revocations(load_security(ca / "alpha", environment={}))
    init_authority(tmp_path / "other", "other", NOW)
    issue(tmp_path / "other", "box1", [], 10, tmp_path / "other" / "a", NOW, role=Role.STAGE, stage="a")
    revoke(tmp_path / "other", lambda _: True, NOW)
    foreign = (tmp_path / "other" / "crl.pem").read_bytes()
    for found in (foreign, b"nonsense", b"x" * (CRL_BYTES_MAX + 1)):
        with pytest.raises(ProtocolError, match="cannot be used"):
            known.offer(found)
        (ca / "alpha" / "crl.pem").write_bytes(found)
        assert not known.look()
        assert known.number == 0
        with pytest.raises(UsageError):
            Revocations(load_security(ca / "alpha", environment={}))
    revoke(ca, lambda _: True, NOW)
    assert known.offer((ca / "crl.pem").read_bytes())
    assert not known.offer((ca / "crl.pem").read_bytes()), "nothing new"
    (ca / "alpha" / "crl.pem").unlink()
    known.look()
    assert known.number == 1, "revoked certificates stay revoked"


def test_show_fails_for_expired_or_mismatched_credentials(tmp_path: Path):
    init_authority(tmp_path / "ca", "small", NOW - 30 * DAY)
    issue(tmp_path / "ca", "box1", [], 10, tmp_path / "ca" / "box1", NOW - 20 * DAY, role=Role.COORDINATOR)
    shown = relayline("certs", "show", tmp_path / "ca" / "box1")
    assert shown.returncode == 1
    assert ": EXPIRED" in shown.stdout
    issue(tmp_path / "ca", "box2", [], 10, tmp_path / "ca" / "box2", NOW, role=Role.COORDINATOR)
    (tmp_path / "ca" / "box2" / "key.pem").unlink()
    shown = relayline("certs", "show", tmp_path / "ca" / "box2")
    assert shown.returncode == 1
    assert "problem: " in shown.stdout
    assert relayline("certs", "show", tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("issued", lambda content: content + b"\x9b"),
        ("issued", lambda content: content.replace(b"relayline:", b"")),
        ("ca-key.pem", lambda content: with_curve_of_nobody(content)),
        ("ca.pem", lambda content: with_curve_of_nobody(content)),
        ("crl.pem", lambda content: b"-----BEGIN X509 CRL-----\nMAA=\n-----END X509 CRL-----\n"),
    ],
)
def test_damaged_records_are_named_in_one_line(ca: Path, file: str, damage: Callable[[bytes], bytes]):
    issue(ca, "box1", [], 100, ca / "a", NOW, role=Role.STAGE, stage="a")
    path = ca / file
    path.write_bytes(damage(path.read_bytes() if path.exists() else b""))
    with pytest.raises(UsageError, match=re.escape(str(path))):
        revoke(ca, lambda identity: identity.name == "a", NOW)


@pytest.mark.parametrize("time", ["2026-02-30T00:00:00+00:00", "2027-01-01T00:00:00", "9999-01-01T00:00:00+00:00"])
def test_a_record_without_a_right_time_keeps_nobody_from_revoking(ca: Path, time: str):
    for name in ("a", "b"):
        issue(ca, "box1", [], 100, ca / name, NOW, role=Role.STAGE, stage=name)
    serial, _, rest = (ca / "issued").read_text().split(" ", 2)
    (ca / "issued").write_text(f"{serial} {time} {rest}")
    assert revoke(ca, lambda identity: identity.name == "b", NOW).identities == ("stage b on box1",)
    assert revoke(ca, lambda identity: identity.name == "a", NOW).identities == ("stage a on box1",)
    with pytest.raises(UsageError, match="no such credential that is still valid"):
        revoke(ca, lambda identity: identity.name == "a", NOW + 4000 * DAY)


def test_a_damaged_list_of_revoked_names_is_no_new_generation(ca: Path):
    (ca / "revoked").write_bytes(b"stage a on \xddox1\n")
    with pytest.raises(UsageError, match="revoked is damaged"):
        issue(ca, "box1", [], 100, ca / "a", NOW, role=Role.STAGE, stage="a")


def test_a_certificate_whose_names_cannot_be_read_states_no_role(ca: Path):
    made = issue(ca, "box1", [], 100, ca / "a", NOW, role=Role.STAGE, stage="a")
    der = read_certificate(made.directory / "cert.pem").public_bytes(Encoding.DER)
    uri = der.index(b"relayline:") - 2  # its tag and its length
    odd = x509.load_der_x509_certificate(der[:uri] + b"\x86\x7f" + der[uri + 2 :])
    assert (identity_of(odd), names_of(odd)) == (None, [])


def with_curve_of_nobody(pem: bytes) -> bytes:
    """Return a PEM file with another curve in its key than P-256, one that has no name."""
    begin, *body, end = pem.strip().splitlines()
    curve = bytes.fromhex("06082a8648ce3d030107")
    der = base64.b64decode(b"".join(body)).replace(curve, curve[:-1] + b"\x7d")
    return b"\n".join((begin, base64.encodebytes(der).strip(), end, b""))
