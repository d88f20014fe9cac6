"""The port where hosts get their certificates: HTTP over TLS, two calls, no certificate asked of the client.

The decisions are those of `coordinator.joining.invitations`; `code_calls` adds the calls of joining by a short code.
Signing and the invitations' file are an `Authority`, handed in by the code that starts the coordinator: this module
does not know where a CA keeps its key.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import datetime
import hashlib
import logging
import time
from collections.abc import AsyncIterator

import msgspec
from aiohttp import web

from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.middleware import response_of
from relayline.coordinator.http.edge.server import LIMITS, start_http
from relayline.coordinator.joining.code_calls import CodeCalls
from relayline.coordinator.joining.config import Authority, EnrolConfig
from relayline.coordinator.joining.invitations import Desk, WrongTokenError, may_be_called
from relayline.wire.common import bounds
from relayline.wire.common.errors import (
    NotReadyError,
    ProtocolError,
    RelaylineError,
    UnauthenticatedError,
    UsageError,
    http_status,
)
from relayline.wire.common.texts import named_stage
from relayline.wire.common.versions import version_of
from relayline.wire.links import enrolment
from relayline.wire.links.roles import NAME, Identity, Role
from relayline.wire.links.security import LinkSecurity, address_of, port_of, reached_at
from relayline.wire.links.tls_server import server_context

log = logging.getLogger("relayline.coordinator")

LIMITS_OF_ENROLMENT = HttpLimits(
    body_bytes_max=bounds.ENROL_BYTES_MAX,
    connections_max=bounds.ENROL_CONNECTIONS_MAX,
    connections_per_address_max=bounds.ENROL_WRONG_MAX,
    idle_timeout_s=bounds.ENROL_ANSWER_S,
)


class Enrolment:
    """Both calls. Event loop only."""

    def __init__(self, authority: Authority, join_host: str, join_port: int, pipeline: str = "") -> None:
        """`pipeline` is its name, for hosts that join by a code."""
        self._authority, self._join = authority, (join_host, join_port)
        self.codes = CodeCalls(authority, pipeline)
        self._desk = Desk()
        self._one_at_a_time = asyncio.Lock()  # the invitation may not change between reading and binding it

    def app(self) -> web.Application:
        """Return the application with these calls, those of joining by a code, and no other."""
        app = web.Application(client_max_size=bounds.ENROL_BYTES_MAX)
        app[LIMITS] = LIMITS_OF_ENROLMENT
        app.router.add_get(enrolment.PATH, self.welcome)
        app.router.add_post(enrolment.PATH, self.enrol)
        self.codes.add_to(app)
        return app

    async def welcome(self, request: web.Request) -> web.Response:
        """Tell the CA's certificate, the time and where stages join."""
        host, port = self._join
        ca = await asyncio.to_thread(self._authority.ca_pem)
        version = version_of()
        return response_of(enrolment.Welcome(ca, _now().isoformat(), host, port, version))

    async def enrol(self, request: web.Request) -> web.Response:
        """Sign a host's key, or say why not."""
        address = request.remote or ""
        try:
            asked = _read(await request.read())
            async with self._one_at_a_time:
                enrolled = await self._decide(asked, address)
        except RelaylineError as error:
            return _refusal(error, address)
        except OSError as error:  # a full disk
            text = f"certificates cannot be made on the coordinator's machine: {error.strerror or error}"
            return _refusal(NotReadyError(text), address)
        what = "certificate renewed" if asked.certificate else "host enrolled"
        log.info("%s", what, extra={"fields": {"stage": asked.name, "from": address}})
        return response_of(enrolled)

    async def _decide(self, asked: enrolment.Request, address: str) -> enrolment.Enrolled:
        now, now_ns = _now(), time.monotonic_ns()
        self._desk.check_address(address, now_ns)
        try:
            stage, key = await self._admitted(asked, now)
        except WrongTokenError:
            self._desk.note_wrong(address, now_ns)
            raise
        if not may_be_called(asked.advertise, stage, address):
            raise UnauthenticatedError(
                f"{named_stage(stage.name)} belongs on {stage.host} but calls from {address}, so it gets no "
                f"certificate for {asked.advertise}; write `host: {asked.advertise}` for it in the manifest, or leave "
                "out --advertise"
            )
        relay = self._join[0] if asked.is_relayed else ""
        names = tuple(name for name in (address, asked.advertise, relay) if name)
        if not asked.certificate:
            await asyncio.to_thread(self._authority.bind, asked.name, hashlib.sha256(key).hexdigest(), address)
        return await asyncio.to_thread(self._authority.sign, asked.csr, stage, names, now)

    async def _admitted(self, asked: enrolment.Request, now: datetime.datetime) -> tuple[Identity, bytes]:
        """Return the caller's name and its public key (DER). Raises UnauthenticatedError, UsageError."""
        key = await asyncio.to_thread(self._authority.key_of, asked.csr)
        if asked.certificate:
            stage, held = await asyncio.to_thread(self._authority.holder, asked.certificate, now)
            if stage.role is not Role.STAGE or stage.name != asked.name or held != key:
                raise WrongTokenError(f"a renewal for {named_stage(asked.name)} came with a certificate of {stage}")
            return stage, key
        invitation = await asyncio.to_thread(self._authority.invitation, asked.name)
        try:
            secret = base64.urlsafe_b64decode(asked.secret.encode())
        except (binascii.Error, ValueError):
            secret = b""
        self._desk.check_secret(asked.name, secret, hashlib.sha256(key).hexdigest(), invitation, now)
        assert invitation is not None, "the desk refuses where there is none"
        return invitation.stage, key


@contextlib.asynccontextmanager
async def serve_enrolment(config: EnrolConfig | None, security: LinkSecurity, join_address: str) -> AsyncIterator[str]:
    """Let hosts enrol for the length of a with block; yields the address (host:port), empty without a configuration.

    `security` is that of the links: TLS, with the coordinator's own certificate. Stages join at the port of
    `join_address`, host:port. Raises UsageError, StartError.
    """
    if config is None:
        yield ""
        return
    identity = security.identity
    if not security.is_tls or identity is None:
        raise UsageError("hosts can get certificates only if links are TLS; give --tls DIR")
    _, cert, key = security.files
    context = server_context(cert, key)
    service = Enrolment(config.authority, identity.host, port_of(join_address), config.pipeline)
    runner, port = await start_http(
        service.app(), config.host, config.port,
        context=context, what="enrolment", flag="--enrol-listen", for_hosts=True,
    )  # fmt: skip
    try:
        address = address_of(config.host, port)
        service.codes.address = enrol_address_of(security, address)
        yield address
    finally:
        await runner.cleanup()


def enrol_address_of(security: LinkSecurity, address: str) -> str:
    """Return where other hosts enrol. A listener on all addresses is reached by the host in this one's certificate."""
    identity = security.identity
    return reached_at(address, identity.host) if identity is not None else address


def _read(body: bytes) -> enrolment.Request:
    try:
        asked = msgspec.json.decode(body, type=enrolment.Request)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        text = "this is not a request for a certificate; run the same relayline version on both ends"
        raise ProtocolError(text) from error
    if not NAME.fullmatch(asked.name):
        raise ProtocolError("the request for a certificate names no stage")
    return asked


def _refusal(error: RelaylineError, address: str) -> web.Response:
    log.warning("enrolment refused", extra={"fields": {"from": address, "reason": error.message}})
    return response_of(enrolment.Refusal(error.label, error.message), http_status(error))


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
