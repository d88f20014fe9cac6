"""The security of links: TLS material, the join token, and the rule that nothing leaves this machine in the clear.

`LinkSecurity` is made once at the start of a process (`load_security`) and passed down to every channel and port.
Material is named by path and read when a channel or port is opened, so a renewed certificate takes effect without a
restart.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from relayline.wire.common.errors import InternalError, UsageError
from relayline.wire.common.texts import named_stage
from relayline.wire.links import role_tokens
from relayline.wire.links.roles import Identity, Role

log = logging.getLogger("relayline.security")

CA_FILE, CERT_FILE, KEY_FILE, TOKEN_FILE = "ca.pem", "cert.pem", "key.pem", "token"
_V6_NETWORK_BYTES = 8  # a holder of one IPv6 address has the 2^64 of its network
TOKEN_VARIABLE = "RELAYLINE_TOKEN"
# Shorter can be guessed; longer does not fit metadata together with error texts.
TOKEN_CHARS_MIN, TOKEN_CHARS_MAX = 16, 512
EVERY_INTERFACE = ("0.0.0.0", "::")  # hosts to listen on, and no place to connect to


@dataclasses.dataclass(frozen=True, slots=True)
class LinkSecurity:
    """How the links of one process are protected. Without any field set: plaintext, on this machine only."""

    ca: Path | None = None
    """CA certificate (PEM) that the other side's certificate must come from; None is plaintext."""
    cert: Path | None = None
    """This process's certificate (PEM), shown as client and as server alike."""
    key: Path | None = None
    """Private key of `cert` (PEM, without passphrase)."""
    token: str = dataclasses.field(default="", repr=False)
    """Join token, see wire.links.role_tokens: its proof is shown to the other end, and demanded of callers. Empty shows
    and demands nothing.
    """
    insecure: bool = False
    """Whether plaintext may leave this machine (--insecure)."""
    token_file: Path | None = dataclasses.field(default=None, compare=False)
    """Where the token was read, None for one that came otherwise."""

    def __post_init__(self) -> None:
        """Raise UsageError when only a part of the TLS material is given, or the token is not usable."""
        given = [path is not None for path in (self.ca, self.cert, self.key)]
        if any(given) and not all(given):
            raise UsageError("TLS needs a CA certificate, a certificate and a key; give all three or none")
        if self.token:
            check_token(self.token, "the join token")

    @property
    def is_tls(self) -> bool:
        """Whether links are TLS, with certificates checked on both sides."""
        return self.ca is not None

    @property
    def files(self) -> tuple[Path, Path, Path]:
        """CA, certificate and key. Raises InternalError without TLS."""
        if self.ca is None or self.cert is None or self.key is None:
            raise InternalError("asked for the TLS material of a plaintext link")
        return self.ca, self.cert, self.key

    @property
    def directory(self) -> Path | None:
        """Where lists of revoked credentials are: next to the certificate, else next to the token; None for nowhere."""
        credential = self.cert or self.token_file
        return credential.parent if credential is not None else None

    @property
    def identity(self) -> Identity | None:
        """The identity in this process's own credential; None without one, and for a coordinator's token.

        Raises UsageError for a certificate that states none.
        """
        if self.cert is not None:
            from relayline.wire.links.tls_material import (
                own_identity,  # loads cryptography, which plaintext does not need
            )

            return own_identity(self.cert)
        token = role_tokens.read(self.token)
        return token.identity if token is not None else None

    def certificate_expires_unix_s(self) -> float | None:
        """Return when this process's own certificate ends, in seconds of Unix time; None without one.

        Read from the file each time, since it may have been renewed. None as well while it cannot be read.
        """
        if self.cert is None:
            return None
        from relayline.wire.links.tls_material import read_certificate  # loads cryptography

        try:
            return read_certificate(self.cert).not_valid_after_utc.timestamp()
        except UsageError:
            return None

    def shown_to(self, peer: Identity | Role | None, generation: int = 0) -> tuple[tuple[str, str], ...]:
        """Return the metadata that proves this process's identity to `peer`: `authorization: Bearer ...`, or nothing.

        A stage identifies itself only to a coordinator (give its role), the coordinator to the stage that it names.
        `generation` counts the revocations of that stage's token.
        """
        if not self.token or peer is None:
            return ()
        token, shown = role_tokens.read(self.token), self.token
        if token is not None and token.role is Role.STAGE:
            shown = role_tokens.join_proof(token)
        elif token is not None:
            if self.is_tls or not isinstance(peer, Identity):
                return ()  # the certificate says it
            shown = role_tokens.coordinator_proof(self.token, peer, generation)
        elif not isinstance(peer, Role):
            return ()
        return (("authorization", f"Bearer {shown}"),)


PLAINTEXT = LinkSecurity()


def load_security(
    directory: Path | None,
    *,
    token: str = "",
    token_file: Path | None = None,
    insecure: bool = False,
    environment: Mapping[str, str] = os.environ,
    role: Role | None = None,
    name: str = "",
) -> LinkSecurity:
    """Return the security that flags and environment ask for, checked.

    `directory` holds ca.pem, cert.pem, key.pem and maybe a token, as `relayline certs issue` makes it; None is
    plaintext. The token is the first of: `token`, `token_file`, RELAYLINE_TOKEN, the directory's own. With `role` the
    credentials must be of that role, and with `name` of the stage of that name. Raises UsageError with one line for
    material that is missing, unreadable, expired, not yet valid, of another role or does not belong together.
    """
    if token and token_file is not None:
        raise UsageError("give the join token or a file with it, not both")
    token = token or (read_token(token_file) if token_file is not None else "") or environment.get(TOKEN_VARIABLE, "")
    if directory is None:
        return checked_role(LinkSecurity(token=token.strip(), insecure=insecure, token_file=token_file), role, name)
    if insecure:
        raise UsageError("--tls and --insecure contradict each other; give one of them")
    if not directory.is_dir():
        of_stage = f" HOST --stage {name}" if name else ""
        raise UsageError(f"--tls {directory} is not a directory; `relayline certs issue`{of_stage} makes one")
    if not token and (directory / TOKEN_FILE).exists():
        token = read_token(directory / TOKEN_FILE)
    files = (directory / CA_FILE, directory / CERT_FILE, directory / KEY_FILE)
    from relayline.wire.links.tls_material import check_material  # loads cryptography, which plaintext does not need

    check_material(*files)
    return checked_role(LinkSecurity(*files, token.strip(), token_file=token_file), role, name)


def checked_role(security: LinkSecurity, role: Role | None, name: str) -> LinkSecurity:
    """Return `security` if its credentials are of `role` and `name` (None, empty: any). Raises UsageError."""
    wanted = "--coordinator" if role is Role.COORDINATOR else f"--stage {name or 'NAME'}"
    remedy = f"make one with `relayline certs issue CA-DIR HOST {wanted}`"
    if security.token:
        token = role_tokens.read(security.token)
        if token is None:
            raise UsageError(f"the join token states no role, like those of older versions; {remedy}")
        if role is not None and token.role is not role:
            raise UsageError(
                f"the join token is for a {token.role.value}, but this process is a {role.value}; {remedy}"
            )
        if name and token.identity is not None and token.identity.name != name:
            raise UsageError(
                f"the join token is for {token.identity}, but this process is {named_stage(name)}; {remedy}"
            )
    if security.cert is not None and (identity := security.identity) is not None:
        if role is not None and identity.role is not role:
            raise UsageError(f"{security.cert} is for {identity}, but this process is a {role.value}; {remedy}")
        if name and identity.name != name:
            raise UsageError(f"{security.cert} is for {identity}, but this process is {named_stage(name)}; {remedy}")
    return security


def check_token(token: str, what: str) -> None:
    """Raise UsageError unless `token` is one line of 16 to 512 printable ASCII characters without spaces."""
    if not TOKEN_CHARS_MIN <= len(token) <= TOKEN_CHARS_MAX:
        raise UsageError(f"{what} has {len(token)} characters; use {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX}")
    if not all("!" <= char <= "~" for char in token):
        raise UsageError(f"{what} holds spaces or characters beyond ASCII; use the one from `relayline certs init`")


def read_token(path: Path) -> str:
    """Return the token in a file. Raises UsageError when the file is missing, empty or holds no usable token."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError as error:
        raise UsageError(f"token file {path} does not exist; `relayline certs issue` makes one") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"token file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not token:
        raise UsageError(f"token file {path} is empty; `relayline certs issue` makes one")
    check_token(token, f"the token in {path}")
    return token


# --- the rule ---------------------------------------------------------------------------------------------------------


def host_of(address: str) -> str:
    """Return the host of "HOST:PORT" (brackets of IPv6 removed); a unix socket is its own host."""
    if address.startswith(("unix:", "unix-abstract:")):
        return address
    host = address.rpartition(":")[0]
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def port_of(address: str) -> int:
    """Return the port of "HOST:PORT", or of a URL that ends with one. Raises ValueError where that is no number."""
    return int(address.rpartition(":")[2])


def reached_at(address: str, host: str) -> str:
    """Return the address to connect to for a listener at `address`: at `host`, where it listens on every interface."""
    return address_of(host, port_of(address)) if host_of(address) in EVERY_INTERFACE else address


def address_of(host: str, port: int) -> str:
    """Return "HOST:PORT", an IPv6 host in brackets as gRPC and URLs want it; the way back is `host_of`."""
    needs_brackets = ":" in host and not host.startswith(("[", "unix:", "unix-abstract:"))
    return f"[{host}]:{port}" if needs_brackets else f"{host}:{port}"


@functools.lru_cache(maxsize=1_024)  # asked for every connection of a client, with few different hosts
def is_loopback(host: str) -> bool:
    """Return whether bytes to `host` stay on this machine. Names are not looked up: only localhost is taken for it."""
    host = host.strip("[]").lower()
    if host.startswith(("unix:", "unix-abstract:")):
        return True
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


@functools.lru_cache(maxsize=1_024)
def address_group(host: str) -> str:
    """Return what connections from `host` are counted under: an IPv4 address, or the network of an IPv6 address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        if mapped is not None:
            return str(mapped)
        if not address.is_loopback:
            return address.packed[:_V6_NETWORK_BYTES].hex()
    return str(address)


def credential_host(host: str) -> str:
    """Return a host as credentials name it: every loopback address, and a unix socket, is localhost."""
    return "localhost" if is_loopback(host) else host.strip().strip("[]").lower().rstrip(".")


def check_listen(host: str, security: LinkSecurity, who: str) -> None:
    """Hold the rule where `who` ("stage 0") listens: beyond this machine TLS or --insecure. Raises UsageError."""
    if not (security.is_tls or security.insecure or is_loopback(host)):
        raise UsageError(
            f"{who} would listen on {host or 'every address'}, beyond this machine, without TLS; "
            "give --tls DIR (made by `relayline certs`), or --insecure to send everything in the clear"
        )


def warn_listen(host: str, security: LinkSecurity, who: str) -> None:
    """Log one warning if `who` listens beyond this machine in plaintext."""
    if not (security.is_tls or is_loopback(host)):
        log.warning("%s listens on %s in PLAINTEXT: anyone on the network path can read and change it", who, host)


def check_connect(address: str, security: LinkSecurity) -> None:
    """Hold the rule where a link is opened: beyond this machine TLS or --insecure. Raises UsageError."""
    if not (security.is_tls or security.insecure or is_loopback(host_of(address))):
        raise UsageError(
            f"{address} is beyond this machine and TLS is not set up; "
            "give --tls DIR (made by `relayline certs`), or --insecure to send everything in the clear"
        )


def check_connects(addresses: tuple[str, ...], security: LinkSecurity) -> None:
    """Hold `check_connect` for all of the coordinator's stages, and warn once if plaintext leaves the machine."""
    for address in addresses:
        check_connect(address, security)
    beyond = [address for address in addresses if not is_loopback(host_of(address))]
    if beyond and not security.is_tls:
        log.warning(
            "the coordinator connects to %s in PLAINTEXT: anyone on the network path can read and change it",
            ", ".join(beyond),
        )
