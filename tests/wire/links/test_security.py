"""Goal: nothing leaves the machine in the clear unless asked for, and bad credentials are one line before the start.

The links themselves, with every refusal on both ends, are in test_private_links.
"""

from __future__ import annotations

import datetime
import logging
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from relayline.stage.config import StageConfig
from relayline.wire.common.errors import InternalError, UsageError
from relayline.wire.common.log_repeats import KEYS_MAX, QUIET_NS
from relayline.wire.links import rpc
from relayline.wire.links.guard import CERTIFICATES_MAX, Guard
from relayline.wire.links.refusals import CLIENT_REASONS, Reason, RefusalLog, peer_of, reason_named
from relayline.wire.links.roles import Credential, Role
from relayline.wire.links.security import (
    PLAINTEXT,
    LinkSecurity,
    address_of,
    check_connect,
    check_connects,
    check_listen,
    host_of,
    is_loopback,
    load_security,
)
from relayline.wire.links.tls_material import check_material
from tests.support.identities import DAY, NOW, Identities, make_identities, security_of

TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Identities:
    return make_identities(tmp_path_factory.mktemp("identities"))


# --- what counts as this machine --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "::ffff:127.0.0.1", "localhost", "a.localhost", "unix:a.sock",
             "LOCALHOST"]
)  # fmt: skip
def test_this_machine(host: str):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "[::]", "", "0", "10.0.0.1", "box1", "localhost.example.com", "127.0.0.1.example.com",
             "fe80::1%eth0", "::ffff:10.0.0.1", "notlocalhost"]
)  # fmt: skip
def test_beyond_this_machine(host: str):
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.1", "10.0.0.1:80"),
        ("::1", "[::1]:80"),
        ("[::1]", "[::1]:80"),
        ("box", "box:80"),
        ("fe80::1%e", "[fe80::1%e]:80"),
    ],
)
def test_address_of(host: str, address: str):
    assert address_of(host, 80) == address
    assert host_of(address) == host.strip("[]")


def test_host_of():
    assert host_of("10.0.0.1:80") == "10.0.0.1"
    assert host_of("[::1]:80") == "::1"
    assert host_of("stage-0.stage.ns.svc:50051") == "stage-0.stage.ns.svc"
    assert host_of("unix:/run/x.sock") == "unix:/run/x.sock"


def test_plaintext_stays_here_unless_it_is_asked_for(ids: Identities):
    check_listen("127.0.0.1", PLAINTEXT, "this stage")
    check_connect("[::1]:5", PLAINTEXT)
    check_listen("0.0.0.0", security_of(ids.box1), "this stage")
    check_connect("10.0.0.1:5", LinkSecurity(insecure=True))
    with pytest.raises(UsageError) as caught:
        check_listen("0.0.0.0", PLAINTEXT, "this stage")
    assert caught.value.message == (
        "this stage would listen on 0.0.0.0, beyond this machine, without TLS; give --tls DIR (made by "
        "`relayline certs`), or --insecure to send everything in the clear"
    )
    with pytest.raises(UsageError) as caught:
        check_connect("10.0.0.1:5", PLAINTEXT)
    assert caught.value.message == (
        "10.0.0.1:5 is beyond this machine and TLS is not set up; give --tls DIR (made by `relayline certs`), "
        "or --insecure to send everything in the clear"
    )


def test_the_rule_holds_where_links_are_made():
    with pytest.raises(UsageError, match="beyond this machine"):
        StageConfig(Path("x.gguf"), host="0.0.0.0")
    with pytest.raises(UsageError, match="beyond this machine"):
        rpc.open_channel("10.0.0.1:5")


def test_insecure_warns_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "relayline.security"):
        check_connects(("10.0.0.1:5", "10.0.0.2:5", "127.0.0.1:5"), LinkSecurity(insecure=True))
    assert [record.getMessage() for record in caplog.records] == [
        "the coordinator connects to 10.0.0.1:5, 10.0.0.2:5 in PLAINTEXT: anyone on the network path can read and "
        "change it"
    ]


# --- flags, files, environment ----------------------------------------------------------------------------------------


def test_the_token_comes_from_the_nearest_place(ids: Identities, tmp_path: Path):
    file = tmp_path / "token"
    file.write_text(f"coordinator/{TOKEN}-file\n")
    environment = {"RELAYLINE_TOKEN": f"coordinator/{TOKEN}-variable"}
    assert load_security(None, environment={}) == PLAINTEXT
    flag = f"coordinator/{TOKEN}-flag"
    assert load_security(None, token=flag, environment=environment).token == flag
    assert load_security(None, token_file=file, environment=environment).token == f"coordinator/{TOKEN}-file"
    assert load_security(ids.box1, environment=environment).token == f"coordinator/{TOKEN}-variable"
    assert load_security(ids.box1, environment={}) == security_of(ids.box1)
    assert load_security(None, insecure=True, environment={}) == LinkSecurity(insecure=True)


def test_the_token_is_in_no_text(ids: Identities):
    security = security_of(ids.box1)
    assert security.token
    assert security.token not in repr(security)
    shown = security.shown_to(Role.COORDINATOR)
    assert shown[0][0] == "authorization"
    assert security.token not in shown[0][1], "only the credential's content travels"
    assert security.shown_to(None) == ()


@pytest.mark.parametrize(
    ("content", "says"),
    [("", "is empty"), ("short\n", "has 5 characters; use 16 to 512"), ("with a space in the middle", "spaces"),
     ("schlüssel-mit-umlaut", "ASCII")],
)  # fmt: skip
def test_a_token_that_cannot_be_one(content: str, says: str, tmp_path: Path):
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(UsageError, match=says):
        load_security(None, token_file=file, environment={})


def test_flags_that_contradict_each_other(ids: Identities, tmp_path: Path):
    with pytest.raises(UsageError, match="contradict"):
        load_security(ids.box1, insecure=True, environment={})
    with pytest.raises(UsageError, match="not both"):
        load_security(None, token=TOKEN, token_file=tmp_path, environment={})
    with pytest.raises(UsageError, match="does not exist"):
        load_security(None, token_file=tmp_path / "none", environment={})
    with pytest.raises(UsageError, match="is not a directory"):
        load_security(tmp_path / "none", environment={})
    with pytest.raises(UsageError, match="all three or none"):
        LinkSecurity(ca=ids.box1 / "ca.pem")
    with pytest.raises(InternalError):
        assert PLAINTEXT.files


# --- faults of the material -------------------------------------------------------------------------------------------


@pytest.fixture
def copy(ids: Identities, tmp_path: Path) -> Path:
    """A separate directory to spoil."""
    directory = tmp_path / "tls"
    directory.mkdir()
    for file in ids.box1.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
        (directory / file.name).chmod(0o600)
    return directory


def fault(directory: Path) -> str:
    with pytest.raises(UsageError) as caught:
        load_security(directory, environment={})
    assert "\n" not in caught.value.message
    return caught.value.message.replace(str(directory), "DIR")


@pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem"])
def test_a_file_is_missing_empty_or_something_else(name: str, copy: Path):
    (copy / name).write_text("hello")
    what = "private key" if name == "key.pem" else "certificate"
    assert fault(copy) == f"DIR/{name} is not a PEM {what}"
    (copy / name).write_text("")
    assert fault(copy) == f"DIR/{name} is empty; `relayline certs issue` makes it"
    (copy / name).unlink()
    assert fault(copy) == f"DIR/{name} is missing; `relayline certs issue` makes it"


def test_files_that_do_not_belong_together(copy: Path, ids: Identities):
    (copy / "key.pem").write_bytes((ids.box2 / "key.pem").read_bytes())
    assert fault(copy) == "DIR/key.pem does not belong to DIR/cert.pem; take both from one `relayline certs issue`"
    for name in ("key.pem", "cert.pem"):
        (copy / name).write_bytes((ids.stranger / name).read_bytes())
    assert (
        fault(copy)
        == "DIR/cert.pem does not come from the CA in DIR/ca.pem; take both from one `relayline certs issue`"
    )


def test_a_key_with_a_passphrase(copy: Path):
    key = serialization.load_pem_private_key((copy / "key.pem").read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    (copy / "key.pem").write_bytes(locked)
    assert fault(copy) == "DIR/key.pem is protected by a passphrase; a service needs it without one"


def test_expired_and_not_yet_valid(ids: Identities):
    message = fault(ids.expired)
    assert message.startswith("DIR/cert.pem expired on 20")
    assert message.endswith(" UTC; issue a new one with `relayline certs issue`")
    assert fault(ids.early).endswith(" UTC; is the clock right?")
    files = security_of(ids.box1).files
    with pytest.raises(UsageError, match=r"ca\.pem expired on .*certs init"):
        check_material(*files, now=NOW + datetime.timedelta(days=4_000))


def test_warnings_about_a_readable_key_and_a_certificate_near_its_end(copy: Path, caplog: pytest.LogCaptureFixture):
    (copy / "key.pem").chmod(0o644)
    with caplog.at_level(logging.WARNING, "relayline.security"):
        check_material(copy / "ca.pem", copy / "cert.pem", copy / "key.pem", now=NOW + 85 * DAY)
    assert [record.getMessage().replace(str(copy), "DIR") for record in caplog.records] == [
        "DIR/key.pem can be read by every user of this machine; run: chmod 600 DIR/key.pem",
        "DIR/cert.pem expires in 4 days; renew it with `relayline certs issue`",
    ]


# --- how often a line is logged ---------------------------------------------------------------------------------------


def test_one_line_per_host_and_reason_and_minute():
    log, up_ns = RefusalLog(), 1_000 * QUIET_NS
    line = log.line(up_ns, "stage 1", "10.0.0.9", Reason.TOKEN_WRONG)
    assert line == "stage 1 refused 10.0.0.9: it sent a wrong join token"
    for at in (1, 2, QUIET_NS - 1):
        assert log.line(up_ns + at, "stage 1", "10.0.0.9", Reason.TOKEN_WRONG) is None
    assert log.line(up_ns + 5, "stage 1", "10.0.0.9", Reason.TOKEN_MISSING) is not None
    assert log.line(up_ns + 5, "stage 1", "10.0.0.8", Reason.TOKEN_WRONG) is not None
    again = log.line(up_ns + QUIET_NS, "stage 1", "10.0.0.9", Reason.TOKEN_WRONG)
    assert again == f"{line} (3 more since the last line)"
    assert log.line(up_ns + 2 * QUIET_NS, "stage 1", "10.0.0.9", Reason.TOKEN_WRONG) == line


def test_the_refusal_log_is_bounded():
    log = RefusalLog()
    for number in range(2 * KEYS_MAX):
        assert log.line(0, "stage 1", f"host{number}", Reason.UNKNOWN) is not None
    assert log.line(1, "stage 1", "host0", Reason.UNKNOWN) is not None  # forgotten
    assert log.line(1, "stage 1", f"host{2 * KEYS_MAX - 1}", Reason.UNKNOWN) is None


def test_every_reason_has_its_words():
    assert set(CLIENT_REASONS) == set(Reason)
    assert [reason_named(reason.value) for reason in Reason] == list(Reason)
    assert reason_named("invented") is None


def test_names_of_peers():
    assert peer_of("ipv4:10.0.0.1:80") == ("10.0.0.1", 80)
    assert peer_of("ipv6:%5B::1%5D:80") == ("::1", 80)
    assert peer_of("ipv6:[::ffff:10.0.0.1]:80") == ("10.0.0.1", 80)
    assert peer_of("unix:") == ("unix", 0)


def test_certificates_of_callers_are_read_once_and_the_longest_unused_forgotten(monkeypatch: pytest.MonkeyPatch):
    read: list[bytes] = []

    def credential_of(pem: bytes) -> Credential:
        read.append(pem)
        return Credential(None, len(read))

    monkeypatch.setattr("relayline.wire.links.tls_material.credential_of", credential_of)
    guard = Guard(PLAINTEXT)
    pems = [b"%d" % number for number in range(CERTIFICATES_MAX + 1)]
    for pem in (*pems[:-1], pems[0], pems[-1], pems[0]):
        assert guard._certified({"x509_pem_cert": [pem]}).serial == pems.index(pem) + 1
    assert read == pems
    guard._certified({"x509_pem_cert": [pems[1]]})
    assert read == [*pems, pems[1]], "it was forgotten for the last one"
    assert len(guard._known) == CERTIFICATES_MAX
