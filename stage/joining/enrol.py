"""A host's side of enrolment: its key, its certificate, and where both are kept. Blocks; before the event loop runs.

    ROOT/NAME-FINGERPRINT/      ca.pem, cert.pem, key.pem, token: what `--tls DIR` takes
        joined.json             where the coordinator is, and which token was used
        pending-*.pem           a key whose certificate has not come yet: asked for again with the same key
        pending-*.json          what to ask for it with, since a code that was used brings no line again

The key is made here and never leaves. A token whose certificate is here already is not needed again, so the same line
can be run any number of times. The token is kept until its certificate has come.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import http.client
import logging
import shutil
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from relayline.wire.common import bounds
from relayline.wire.common.backoff import Backoff
from relayline.wire.common.errors import (
    HandshakeError,
    ProtocolError,
    RelaylineError,
    StageLostError,
    UnauthenticatedError,
    UsageError,
    from_wire,
)
from relayline.wire.common.files import write_file
from relayline.wire.common.texts import counted, file_error_text, printable
from relayline.wire.links import enrolment
from relayline.wire.links.enrolment import JoinToken
from relayline.wire.links.revocation import CRL_FILE
from relayline.wire.links.roles import Role
from relayline.wire.links.security import CA_FILE, CERT_FILE, KEY_FILE, TOKEN_FILE, address_of, is_loopback
from relayline.wire.links.tls_material import (
    RENEW_DAYS,
    canonical_name,
    check_material,
    identity_of,
    key_pem,
    names_of,
    read_certificate,
)
from relayline.wire.links.tls_probe import unverified_context

log = logging.getLogger("relayline.stage")

T = TypeVar("T")
M = TypeVar("M", bound=msgspec.Struct)

JOINED_FILE = "joined.json"
ATTEMPTS_MAX = 5  # after a connection that was lost on its way
RETRY_FIRST_S, RETRY_MAX_S = 0.2, 2.0
CLOCK_LOOK_S = 1.0  # between two looks whether the clock has been set
_PRIVATE, _PUBLIC = 0o600, 0o644
_X509_NOT_YET_VALID, _X509_EXPIRED = 9, 10  # X509_V_ERR_* of OpenSSL


class LostError(StageLostError):
    """A connection that ended on its way; worth another attempt at once."""


class JoinedFile(msgspec.Struct, frozen=True):
    """joined.json."""

    name: str
    """Of the stage."""
    enrol: str
    """host:port of the join line."""
    coordinator: str
    """host:port where stages join."""
    token: str
    """`digest_of` the secret of the token that was used."""
    is_relayed: bool = False
    """Whether it was last told that nobody can connect to this host."""


class PendingFile(msgspec.Struct, frozen=True):
    """pending-*.json: a join line whose certificate has not come yet."""

    name: str
    """Of the stage."""
    enrol: str
    """host:port of the join line."""
    token: str
    """Of the join line."""
    advertise: str = ""
    is_relayed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Joined:
    """A membership that this host has credentials for."""

    directory: Path
    """What `--tls` takes."""
    file: JoinedFile
    """The facts known of it."""


def memberships(root: Path) -> list[Joined]:
    """Return every membership of this host, the oldest first. Unreadable ones are left out."""
    found = []
    for path in sorted(root.glob(f"*/{JOINED_FILE}")):
        try:
            file = msgspec.json.decode(path.read_bytes(), type=JoinedFile)
            found.append((path.stat().st_mtime_ns, Joined(path.parent, file)))
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            log.warning("%s cannot be read and is ignored", path)
    return [joined for _, joined in sorted(found, key=lambda one: one[0])]


def unfinished(root: Path) -> list[PendingFile]:
    """Return the join lines that this host began with and has no certificate by. Unreadable ones are left out.

    A stage that was invited again has a certificate already, by another line.
    """
    joined = {one.directory: one.file.token for one in memberships(root)}
    found = []
    for path in sorted(root.glob("*/pending-*.json")):
        try:
            line = msgspec.json.decode(path.read_bytes(), type=PendingFile)
            digest = enrolment.digest_of(enrolment.read_token(line.token).secret)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, UsageError):
            log.warning("%s cannot be read and is ignored", path)
            continue
        if joined.get(path.parent) != digest:
            found.append(line)
    return found


def forget(root: Path, fits: Callable[[JoinedFile | PendingFile], bool]) -> list[JoinedFile | PendingFile]:
    """Delete the keys and certificates of the memberships, begun ones too, that `fits` picks. Returns what they were.

    Raises OSError where they cannot be deleted.
    """
    found: dict[Path, JoinedFile | PendingFile] = {
        _directory_of(root, enrolment.read_token(line.token)): line for line in unfinished(root)
    }
    found |= {one.directory: one.file for one in memberships(root)}
    gone = {directory: file for directory, file in found.items() if fits(file)}
    for directory in gone:
        shutil.rmtree(directory)
    return list(gone.values())


def _directory_of(root: Path, token: JoinToken) -> Path:
    return root / f"{token.name}-{token.fingerprint.hex()[:8]}"


def enrol(
    host: str, port: int, token: JoinToken, root: Path, advertise: str = "", *, is_relayed: bool = False
) -> Joined:
    """Return this host's credentials for the stage that `token` names, from the coordinator at host:port.

    `is_relayed`: others find the stage at the coordinator's host. Existing credentials for this token are used as they
    are. Raises UnauthenticatedError for a wrong token or coordinator, StageLostError where it cannot be reached,
    HandshakeError for clocks too far apart, ProtocolError for another service at that port, and OSError for a disk that
    cannot be written.
    """
    directory = _directory_of(root, token)
    known = next((one for one in memberships(root) if one.directory == directory), None)
    digest = enrolment.digest_of(token.secret)
    if known is not None and known.file.token == digest and _is_usable(directory):
        return renewed(known, host, port, advertise, is_relayed=is_relayed)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    pending = directory / f"pending-{digest[:16]}.pem"
    if not pending.exists():
        write_file(pending, key_pem(ec.generate_private_key(ec.SECP256R1())), _PRIVATE)
    own_key = pending.read_bytes()
    client = _Client(host, port, token)
    secret = base64.urlsafe_b64encode(token.secret).decode()
    asked = enrolment.Request(token.name, _csr(own_key), secret=secret, advertise=advertise, is_relayed=is_relayed)
    line = PendingFile(token.name, address_of(host, port), str(token), advertise, is_relayed)
    begun = pending.with_suffix(".json")
    write_file(begun, msgspec.json.encode(line) + b"\n", _PRIVATE)  # from here on the token may be used
    for replaced in set(directory.glob("pending-*.json")) - {begun}:  # by this one: of the same stage and pipeline
        replaced.unlink()
    try:
        got = client.enrol(asked)
    except UnauthenticatedError:  # the line is good for nothing, and would stand before this host's other ones
        begun.unlink(missing_ok=True)
        raise
    write_file(directory / KEY_FILE, own_key, _PRIVATE)
    _store(directory, client.ca_pem, got)
    file = JoinedFile(token.name, address_of(host, port), client.coordinator, digest, is_relayed)
    write_file(directory / JOINED_FILE, msgspec.json.encode(file) + b"\n", _PUBLIC)
    check_material(directory / CA_FILE, directory / CERT_FILE, directory / KEY_FILE)
    for left in directory.glob("pending-*"):
        left.unlink()
    return Joined(directory, file)


def renewed(known: Joined, host: str, port: int, advertise: str = "", *, is_relayed: bool = False) -> Joined:
    """Return a membership with a certificate that is valid for some time and for where others find this host now.

    If the coordinator cannot be asked or the disk has no room, the existing one must do; a warning is logged if it
    expires soon. Raises UsageError for one that has expired.
    """
    directory = known.directory
    cert = read_certificate(directory / CERT_FILE)
    left = cert.not_valid_after_utc - _now()
    token = JoinToken(known.file.name, b"", enrolment.fingerprint_of(_ca_der((directory / CA_FILE).read_text())))
    try:
        client = _Client(host, port, token)
        relay = client.join_host if is_relayed else ""
        wanted = {canonical_name(name) for name in (client.own_address, advertise, relay) if name}
        named = {*names_of(cert), *(name for name in wanted if is_loopback(name))}
        if left.days < RENEW_DAYS or not wanted <= named:
            pem = cert.public_bytes(serialization.Encoding.PEM).decode()
            csr = _csr((directory / KEY_FILE).read_bytes())
            asked = enrolment.Request(known.file.name, csr, certificate=pem, advertise=advertise, is_relayed=is_relayed)
            got = client.enrol(asked)
            with _tolerating("the certificate is not renewed"):
                _store(directory, client.ca_pem, got)
                log.info("certificate renewed", extra={"fields": {"for": ", ".join(sorted(wanted))}})
    except RelaylineError as error:
        if left < datetime.timedelta():
            raise UsageError(
                f"{directory / CERT_FILE} expired at {cert.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; "
                f"`relayline invite {known.file.name}` on the coordinator's machine prints a new line"
            ) from error
        is_harmless = isinstance(error, StageLostError) and left.days >= RENEW_DAYS
        level, days = logging.INFO if is_harmless else logging.WARNING, counted(left.days, "day")
        log.log(level, "keeping the old certificate, which lasts for %s: %s", days, error.message)
        return known
    file = msgspec.structs.replace(
        known.file, enrol=address_of(host, port), coordinator=client.coordinator, is_relayed=is_relayed
    )
    with _tolerating("where the coordinator is now is not noted"):
        write_file(directory / JOINED_FILE, msgspec.json.encode(file) + b"\n", _PUBLIC)
    return Joined(directory, file)


@contextlib.contextmanager
def _tolerating(what: str) -> Iterator[None]:
    """Go on after an error of the disk within, such as a full one: what is there is good, and is written again."""
    try:
        yield
    except OSError as error:
        log.warning("%s: %s", what, file_error_text(error))


def keep_current(
    known: Joined, host: str, port: int, advertise: str = "", *, is_relayed: bool = False, at_first: str = ""
) -> None:
    """Renew a membership's certificate if it ends soon or does not name the address that this host has now. Blocks.

    The coordinator is asked only then. `at_first`: the address for which it was asked already. Raises as `renewed`.
    """
    cert = read_certificate(known.directory / CERT_FILE)
    own = "" if is_relayed or advertise else own_address(host, port)
    is_named = own in ("", at_first) or is_loopback(own) or canonical_name(own) in names_of(cert)
    if not is_named or (cert.not_valid_after_utc - _now()).days < RENEW_DAYS:
        renewed(known, host, port, advertise, is_relayed=is_relayed)


def own_address(host: str, port: int) -> str:
    """Return this host's address on the route to host:port; empty where none leads there."""
    from relayline.stage.joining.config import facing  # loads numpy, which `status` has no use for

    try:
        return facing(address_of(host, port))
    except StageLostError:
        return ""


def await_clock(directory: Path) -> None:
    """Wait until the certificate of a membership has begun: at a boot the clock may be behind until it is set. Blocks.

    Raises UsageError for a certificate that cannot be read.
    """
    cert, has_said = read_certificate(directory / CERT_FILE), False
    while (now := _now()) < cert.not_valid_before_utc:
        if not has_said:
            log.warning(
                "this machine's clock says %s UTC, and this host's certificate begins at %s UTC; waiting for the clock "
                "to be set", f"{now:%Y-%m-%d %H:%M}", f"{cert.not_valid_before_utc:%Y-%m-%d %H:%M}"
            )  # fmt: skip
            has_said = True
        threading.Event().wait(CLOCK_LOOK_S)


class _Client:
    """Connections to one coordinator's enrolment port."""

    def __init__(self, host: str, port: int, token: JoinToken) -> None:
        """Take the CA's certificate, check it against the token, then meet the coordinator. Raises as `enrol`."""
        self._host, self._port, self._token = host, port, token
        self._address = address_of(host, port)
        self.own_address = ""
        self._names: list[str] = []
        self._welcome = persistently(lambda: self._read_welcome(self._exchange(unverified_context())))
        self.ca_pem = self._welcome.ca
        self._check_clock()
        persistently(lambda: self._exchange(self._verifying()))

    @property
    def coordinator(self) -> str:
        """host:port where stages join: by the host that was given, where the coordinator's certificate carries it."""
        is_known = canonical_name(self._host) in self._names
        return address_of(self._host if is_known else self._welcome.join_host, self._welcome.join_port)

    @property
    def join_host(self) -> str:
        """Host by which the coordinator's certificate knows it, where its relay is reached, too."""
        return self._welcome.join_host

    def enrol(self, asked: enrolment.Request) -> enrolment.Enrolled:
        """Ask for a certificate, again while connections are lost. Raises as the module's `enrol`."""
        return persistently(lambda: self._read_enrolled(self._exchange(self._verifying(), msgspec.json.encode(asked))))

    def _exchange(self, context: ssl.SSLContext, body: bytes | None = None) -> tuple[int, bytes]:
        """Make one call over its own connection: a POST if there is a body. Returns status and answer."""
        link = http.client.HTTPSConnection(self._host, self._port, context=context, timeout=bounds.ENROL_ANSWER_S)
        try:
            self._connect(link)
            if context.verify_mode is ssl.CERT_REQUIRED:
                self._check_role(link)
            try:
                link.request("GET" if body is None else "POST", enrolment.PATH, body)
                answer = link.getresponse()
                return answer.status, answer.read(bounds.ENROL_BYTES_MAX)
            except (OSError, http.client.HTTPException) as error:
                raise LostError(f"the connection to {self._address} was lost: {words_of(error)}") from error
        finally:
            link.close()

    def _connect(self, link: http.client.HTTPSConnection) -> None:
        try:
            link.connect()
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in (_X509_NOT_YET_VALID, _X509_EXPIRED):
                raise HandshakeError(
                    f"the coordinator's certificate is not valid at {_now():%Y-%m-%d %H:%M} UTC, the time of this "
                    "machine's clock; set the clock, or start `relayline up` again, which renews the certificate"
                ) from error
            raise UnauthenticatedError(
                f"{self._address} shows a certificate that is not of its own CA; nothing was sent to it"
            ) from error
        except (ssl.SSLEOFError, ConnectionResetError) as error:
            raise LostError(f"the connection to {self._address} was lost: {words_of(error)}") from error
        except ssl.SSLError as error:
            raise ProtocolError(
                f"{self._address} does not speak TLS; give the HOST:PORT of the line that `relayline up` printed"
            ) from error
        except OSError as error:
            raise StageLostError(
                f"{self._address} cannot be reached: {words_of(error)}; is `relayline up` running there, and is port "
                f"{self._port} open in its firewall?"
            ) from error
        self.own_address = str(link.sock.getsockname()[0])

    def _check_role(self, link: http.client.HTTPSConnection) -> None:
        """Raise UnauthenticatedError unless the coordinator itself answers: its stages have certificates as well."""
        cert = x509.load_der_x509_certificate(link.sock.getpeercert(binary_form=True) or b"")
        identity = identity_of(cert)
        if identity is None or identity.role is not Role.COORDINATOR:
            raise UnauthenticatedError(
                f"{self._address} is not a coordinator but {identity or 'unknown'}; nothing was sent"
            )
        self._names = names_of(cert)

    def _verifying(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # the CA and the role identify the peer, under any name
        context.load_verify_locations(cadata=self._welcome.ca)
        return context

    def _read_welcome(self, answer: tuple[int, bytes]) -> enrolment.Welcome:
        welcome = decoded(answer, enrolment.Welcome, self._address)
        if not enrolment.is_ca(self._token, _ca_der(welcome.ca)):
            raise UnauthenticatedError(
                f"{self._address} belongs to another pipeline than the token for {self._token.name}, or somebody "
                "intercepts the connection; nothing was sent. Copy the line from `relayline up` again"
            )
        return welcome

    def _read_enrolled(self, answer: tuple[int, bytes]) -> enrolment.Enrolled:
        return decoded(answer, enrolment.Enrolled, self._address)

    def _check_clock(self) -> None:
        try:
            skew_s = (_now() - datetime.datetime.fromisoformat(self._welcome.now)).total_seconds()
        except (ValueError, TypeError) as error:
            raise ProtocolError(
                f"{self._address} does not send its time; run the same relayline version on both ends"
            ) from error
        if abs(skew_s) > bounds.CLOCK_SKEW_MAX_S:
            side = "ahead of" if skew_s > 0 else "behind"
            raise HandshakeError(
                f"this machine's clock is {_minutes(abs(skew_s))} {side} the coordinator's, and certificates have "
                "dates; set the clock that is wrong and run the line again"
            )


def persistently(work: Callable[[], T]) -> T:
    """Repeat work while its connection is lost on the way. Raises its last error."""
    backoff = Backoff(RETRY_FIRST_S, RETRY_MAX_S)
    for _ in range(ATTEMPTS_MAX - 1):
        try:
            return work()
        except LostError as error:
            log.warning("%s; trying again", error.message)
        threading.Event().wait(backoff.next_s())
    return work()


def decoded(answer: tuple[int, bytes], kind: type[M], address: str) -> M:
    """Return a message, or raise the refusal that came in its place."""
    status, body = answer
    try:
        if status == http.client.OK:
            return msgspec.json.decode(body, type=kind)
        refusal = msgspec.json.decode(body, type=enrolment.Refusal)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(
            f"hosts cannot get certificates at {address} (it answers {status}); give the HOST:PORT of the line that "
            "`relayline up` printed"
        ) from error
    raise from_wire(refusal.error, printable(refusal.message, bounds.PEER_TEXT_CHARS_MAX))


def _store(directory: Path, ca_pem: str, got: enrolment.Enrolled) -> None:
    write_file(directory / CA_FILE, ca_pem.encode(), _PUBLIC)
    write_file(directory / CERT_FILE, got.certificate.encode(), _PUBLIC)
    if got.token:
        write_file(directory / TOKEN_FILE, got.token.encode() + b"\n", _PRIVATE)
    if got.crl:
        write_file(directory / CRL_FILE, got.crl.encode(), _PUBLIC)


def _is_usable(directory: Path) -> bool:
    try:
        check_material(directory / CA_FILE, directory / CERT_FILE, directory / KEY_FILE)
    except UsageError as error:
        log.info("asking for a certificate again: %s", error.message)
        return False
    return True


def _ca_der(pem: str) -> bytes:
    try:
        return x509.load_pem_x509_certificate(pem.encode()).public_bytes(serialization.Encoding.DER)
    except ValueError as error:
        raise ProtocolError("the coordinator's CA certificate cannot be read") from error


def _csr(pem: bytes) -> str:
    key = serialization.load_pem_private_key(pem, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey), "made here"
    # The coordinator decides the name: the request states nothing.
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode()


def _minutes(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def words_of(error: Exception) -> str:
    """Return why a connection failed."""
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
