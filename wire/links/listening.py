"""The listening side of a link: a gRPC server with its port, its certificates and its check of every caller."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2_grpc

from relayline.wire.common import bounds
from relayline.wire.common.errors import OverloadedError, ProtocolError, StartError, UnauthenticatedError, grpc_status
from relayline.wire.common.tasks import let_go, to_its_end
from relayline.wire.links import rpc
from relayline.wire.links.guard import CallerRefusedError, Guard
from relayline.wire.links.health import Health
from relayline.wire.links.refusals import NOTE_PREFIX, Reason, RefusalLog, peer_of, reason_named
from relayline.wire.links.revocation import IS_REVOKED
from relayline.wire.links.roles import HEALTH_PREFIX, Identity
from relayline.wire.links.security import LinkSecurity, address_of, check_listen, is_loopback, warn_listen

log = logging.getLogger("relayline.security")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

HANDLERS_END_S = 2.0  # for which handlers that were cancelled are waited for
TLS_HANDSHAKE_TIMEOUT_MS = 10_000  # a connection that never finishes its handshake is closed after this long
SERVER_OPTIONS = (*rpc.SERVER_OPTIONS, ("grpc.server_handshake_timeout_ms", TLS_HANDSHAKE_TIMEOUT_MS))

_CLIENT_ANSWERS = {
    Reason.TOKEN_MISSING: "asks for a join token; give --token-file FILE, RELAYLINE_TOKEN or --tls DIR",
    Reason.TOKEN_WRONG: "does not accept this join token; `relayline certs issue` makes each process its own",
    Reason.ROLE_NONE: "refuses this certificate: it states no role; issue it again with `relayline certs issue`",
    Reason.ROLE_WRONG: "refuses this call: this credential is of another role",
    Reason.REVOKED: f"refuses this credential: it {IS_REVOKED}",
}


class Listener:
    """One gRPC server on one port, with its security. Event loop only.

    Make it, register handlers with `server`, call `add_port`, start `server`; `stop` ends all of it. Raises UsageError
    for a revocation list that cannot be used.
    """

    def __init__(
        self,
        security: LinkSecurity,
        who: str,
        receive_bytes_max: int = bounds.UNARY_BYTES_MAX,
        coordinator: Identity | None = None,
    ) -> None:
        """`who` names this end in its own log and to a refused caller, e.g. "stage 1"; `coordinator` as in Guard.

        No message to this port may be longer than receive_bytes_max, and none of a call that sends but one longer than
        UNARY_BYTES_MAX.
        """
        self._security, self._who = security, who
        self.guard = Guard(security, coordinator)
        self._refusals = RefusalLog()
        self._n_health_calls = 0
        self._calls: set[asyncio.Task[Any]] = set()  # gRPC's tasks of the calls under way, which gRPC bounds
        self._welcome: Callable[[tuple[str, int]], None] = lambda _: None
        self._close: Callable[[], None] = lambda: None
        self.server = grpc.aio.server(
            interceptors=(_Gate(self),), options=(*SERVER_OPTIONS, rpc.receive_limit(receive_bytes_max))
        )

    def add_health(self) -> Health:
        """Answer the standard health service on this port; returns the object that holds the answer."""
        health = Health()
        health_pb2_grpc.add_HealthServicer_to_server(health, self.server)
        return health

    def add_reflection(self, *services: str) -> None:
        """Tell tools, to which every other call of this port is open too, of its services and their messages."""
        from relayline.wire.links.reflection import reflection_handlers

        self.server.add_generic_rpc_handlers(reflection_handlers(services))

    def add_port(self, host: str, port: int, flag: str = "") -> int:
        """Listen on host:port (0 takes a free port); return the port. For a host "unix:PATH" the port means nothing.
        `flag` chooses another one.

        Raises UsageError when the address is beyond this machine and plaintext was not asked for, StartError when it
        cannot be listened on.
        """
        check_listen(host, self._security, self._who)
        warn_listen(host, self._security, self._who)
        if not (self._security.is_tls or self._security.token or is_loopback(host)):
            log.warning("%s asks for no join token: anyone who can reach %s can give it work", self._who, host)
        address = host if host.startswith(("unix:", "unix-abstract:")) else address_of(host, port)
        try:
            if not self._security.is_tls:
                return int(self.server.add_insecure_port(address))
            return self._add_secure_port(address)
        except RuntimeError as error:
            more = f" {flag} chooses another one" if flag else ""
            raise StartError(f"cannot listen on {address}; is the port taken?{more}") from error

    def _add_secure_port(self, address: str) -> int:
        from relayline.wire.links.doorkeeper import Doorkeeper  # loads cryptography, which plaintext does not need

        doorkeeper = Doorkeeper(self._security.files, self.refused)
        self._welcome, self._close = doorkeeper.welcome, doorkeeper.close
        doorkeeper.port = int(self.server.add_secure_port(address, doorkeeper.credentials()))
        return doorkeeper.port

    def refused(self, host: str, reason: Reason, detail: str = "") -> None:
        """Log that `host` was refused, unless the same was logged just now."""
        line = self._refusals.line(time.monotonic_ns(), self._who, host, reason, detail)
        if line is not None:
            log.warning("%s", line)

    def began(self, call: asyncio.Task[Any]) -> None:
        """Take note of gRPC's task of a call, until it is done."""
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def called(self, peer: str) -> None:
        """Take note that a connection, by gRPC's name of its peer, got as far as a call."""
        self._welcome(peer_of(peer))

    async def read_request(self, data: Any, parse: Callable[[bytes], Any], context: Context) -> Any:
        """Parse the one request of a call. One that is too long or can't be read ends the call, and is logged once."""
        try:
            if len(data) > bounds.UNARY_BYTES_MAX:
                raise ProtocolError(f"a request of {len(data)} bytes is over the limit of {bounds.UNARY_BYTES_MAX}")
            return parse(data)
        except (ProtocolError, DecodeError) as error:
            self.refused(peer_of(context.peer())[0], Reason.MALFORMED)
            await rpc.abort(context, error if isinstance(error, ProtocolError) else ProtocolError("not a request"))

    @contextlib.asynccontextmanager
    async def counted(self, method: str, context: Context) -> AsyncIterator[None]:
        """Count a call that takes no credential, for as long as it takes. One too many is refused."""
        if not method.startswith(HEALTH_PREFIX):
            yield
            return
        if self._n_health_calls >= bounds.HEALTH_CALLS_MAX:
            text = f"{self._who} already answers {self._n_health_calls} health checks, which is the limit"
            await rpc.abort(context, OverloadedError(text))
        self._n_health_calls += 1
        try:
            yield
        finally:
            self._n_health_calls -= 1

    async def stop(self, grace_s: float | None) -> None:
        """Take no more calls, and return once all have ended, cancelled after `grace_s`; None: cancelled at once.

        gRPC's server has stopped as soon as every status is on its way. The handlers take a few turns of the event loop
        more, and where the loop ends meanwhile, gRPC writes a traceback of their cancellation into the log.
        """
        await to_its_end(self._stop(grace_s))

    async def _stop(self, grace_s: float | None) -> None:
        await self.server.stop(grace_s)
        if self._calls:
            await asyncio.wait(self._calls, timeout=HANDLERS_END_S)
            await asyncio.sleep(0)  # gRPC has one task more for each call, which waits for the handler's
        self._close()
        self.guard.close()

    async def refuse(self, reason: Reason, context: Context, detail: str = "") -> NoReturn:
        """End a call with the reason, and log it."""
        host, _ = peer_of(context.peer())
        self.refused(host, reason, detail)
        await rpc.abort(context, UnauthenticatedError(f"{self._who} {_CLIENT_ANSWERS.get(reason, 'has taken note')}"))


class _Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Runs before every handler: checks the caller, and records its connection as good."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler:
        method, task = handler_call_details.method, asyncio.current_task()
        if task is not None:
            self._listener.began(task)
        if not method.startswith(NOTE_PREFIX):
            return _guarded(await continuation(handler_call_details), method, self._listener)
        reason = reason_named(method.removeprefix(NOTE_PREFIX)) or Reason.UNKNOWN

        async def refuse(requests: Any, context: Context) -> None:
            self._listener.called(context.peer())
            await self._listener.refuse(reason, context)

        # The one kind that reads nothing before the handler runs, whatever the caller sends.
        return grpc.stream_stream_rpc_method_handler(refuse)


def _guarded(handler: grpc.RpcMethodHandler | None, method: str, listener: Listener) -> grpc.RpcMethodHandler | None:
    """Return the handler behind the check of its caller; None, to which gRPC says UNIMPLEMENTED, without one.

    The request of a call that sends one is parsed here, behind that check: gRPC would parse it before, and write a
    traceback into the log where that fails.
    """
    if handler is None:
        return None
    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    kind, inner = next((kind, getattr(handler, kind)) for kind in kinds if getattr(handler, kind) is not None)
    guard = listener.guard
    parse = handler.request_deserializer if kind.startswith("unary") else None

    async def answered(requests: Any, context: Context) -> Any:
        listener.called(context.peer())
        try:
            shown = guard.check(method, context)
        except CallerRefusedError as refusal:
            await listener.refuse(refusal.reason, context, refusal.detail)
        if parse is not None:
            requests = await listener.read_request(requests, parse, context)
        async with listener.counted(method, context), guard.admitted(shown) as revoked:
            if kind == "unary_unary":
                return await inner(requests, context)
            try:
                await _until_revoked(inner(requests, context), revoked)
            except grpc.aio.AbortError:
                if context.code() is grpc_status(ProtocolError("")):  # by a message inside the stream
                    listener.refused(peer_of(context.peer())[0], Reason.MALFORMED)
                raise
        if revoked.is_set():
            await listener.refuse(Reason.REVOKED, context, str(shown.identity) if shown is not None else "")
        return None

    async def checked(requests: Any, context: Context) -> Any:
        try:
            return await answered(requests, context)
        except grpc.aio.AbortError as error:
            let_go(error)  # the context keeps it, so its frames must not keep the context: a call and its connection
            del requests, context
            raise

    if not inspect.iscoroutinefunction(inner):
        return None  # of a form that could not be checked; ours are coroutines
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(checked, None if parse else handler.request_deserializer, handler.response_serializer)


async def _until_revoked(call: Coroutine[Any, Any, None], revoked: asyncio.Event) -> None:
    """Let a stream's handler run until it is done or its caller is revoked. Raises the handler's errors."""
    running, ending = asyncio.ensure_future(call), asyncio.ensure_future(revoked.wait())
    try:
        await asyncio.wait({running, ending}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        for task in (running, ending):
            task.cancel()
        await asyncio.gather(running, ending, return_exceptions=True)
