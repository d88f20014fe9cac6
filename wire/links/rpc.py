"""The gRPC edge: channel and server options, method names, and typed errors across a call, both ways.

Envelopes cross as ready-made bytes (no serializer), everything else as protobuf messages.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from relayline.wire.common import bounds
from relayline.wire.common.errors import (
    STATUS,
    HandshakeError,
    InternalError,
    ProtocolError,
    RelaylineError,
    StageLostError,
    from_wire,
    grpc_status,
)
from relayline.wire.common.tasks import set_within
from relayline.wire.common.texts import printable
from relayline.wire.envelopes import messages
from relayline.wire.links.roles import Identity, Role
from relayline.wire.links.security import PLAINTEXT, LinkSecurity, check_connect

SERVICE = "relayline.v1.StageService"
_LABEL_KEY = "relayline-error"
PASS_KEY = "relayline-pass"  # metadata of a Relay call: the coordinator's pass for both neighbours
_ROUTE_KEY = "relayline-route"
_ROUTE_FORM = re.compile("([0-9a-f]{16})-([0-9a-f]{8})")
HANDSHAKE_TRIES = 3  # where gRPC loses the reason for which the other side ended the call at once
REFUSAL_WAIT_S = 0.5  # in which a refusal arrives, and no message of ours crosses it
# What gRPC says around the system's own words: all addresses that were tried, and the number of the error.
_NO_CONNECTION = re.compile(r".*Failed to connect to remote host: (?:connect: )?(?P<why>[^:()]+?)(?: \(\d+\))?")
_CALL_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

_KEEPALIVE: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", bounds.KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", bounds.KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.ping_timeout_ms", bounds.PING_TIMEOUT_MS),
)
_SENT_SIZE: tuple[tuple[str, int], ...] = (("grpc.max_send_message_length", bounds.MESSAGE_BYTES_MAX),)
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_KEEPALIVE,
    *_SENT_SIZE,
    ("grpc.enable_http_proxy", 0),  # http_proxy is for the web; stages are reached at the addresses they say
    ("grpc.enable_retries", 0),  # a lost stream is an epoch change, never a silent retry
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection, so recovery never meets a dead one
)
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_KEEPALIVE,
    *_SENT_SIZE,
    # gRPC ignores unknown keys in silence; this is the one that stops GOAWAY "too_many_pings" (a test holds it).
    ("grpc.http2.min_ping_interval_without_data_ms", bounds.KEEPALIVE_TIME_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_concurrent_streams", bounds.CALLS_PER_CONNECTION_MAX),
    ("grpc.so_reuseport", 0),  # a taken port must fail loudly
)


def method(name: str) -> str:
    """Return the full path of a StageService method."""
    return f"/{SERVICE}/{name}"


def route_metadata(route_id: int, epoch: int) -> tuple[tuple[str, str], ...]:
    """Return the metadata with which a stream of envelopes names its route, so that it's known before any message."""
    return ((_ROUTE_KEY, f"{route_id:016x}-{epoch:08x}"),)


def pass_metadata(shown_pass: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata with which a neighbour shows the pass of a route; nothing for none."""
    return ((PASS_KEY, shown_pass),) if shown_pass else ()


def route_of(metadata: Any) -> tuple[int, int]:
    """Return (route_id, epoch) of a stream of envelopes. Raises HandshakeError where it names none."""
    route = next((value for key, value in metadata or () if key == _ROUTE_KEY), "")
    found = _ROUTE_FORM.fullmatch(route) if isinstance(route, str) else None
    if found is None:
        raise HandshakeError(
            f"the stream names no route; this end speaks protocol {bounds.PROTOCOL_VERSION}, run the same relayline "
            "version on both ends"
        )
    return int(found[1], 16), int(found[2], 16)


def pass_of(metadata: Any) -> str:
    """Return the pass that a call shows in its metadata, empty for none."""
    shown = next((value for key, value in metadata or () if key == PASS_KEY), "")
    return shown.decode(errors="replace") if isinstance(shown, bytes) else str(shown)


def receive_limit(bytes_max: int) -> tuple[str, int]:
    """Return the option with which gRPC refuses longer messages by what their first bytes announce, unread."""
    return "grpc.max_receive_message_length", bytes_max


def open_channel(
    address: str,
    security: LinkSecurity = PLAINTEXT,
    to: Identity | Role | None = None,
    generation: int = 0,
    *,
    receive_bytes_max: int = bounds.ORDER_BYTES_MAX,
    certificate: bytes = b"",
) -> grpc.aio.Channel:
    """Open a channel with `security`; must be called inside the running event loop.

    No answer, nor a message of a stream of answers, may be longer than receive_bytes_max. With TLS both sides show
    certificates and the server's must carry the host of `address`. With a token every call carries its proof for `to`
    (see LinkSecurity.shown_to), none where `to` is None. Raises UsageError when plaintext would leave this machine
    without permission, or the TLS material cannot be read.

    `certificate`: the one (DER) that the server must show; empty for any of the CA.
    """
    check_connect(address, security)
    options = (*CHANNEL_OPTIONS, receive_limit(receive_bytes_max))
    if security.is_tls:
        from relayline.wire.links.tls_material import read_material  # loads cryptography, which plaintext does not need

        material = read_material(*security.files)
        trusted = ssl.DER_cert_to_PEM_cert(certificate).encode() if certificate else material.ca
        credentials = grpc.ssl_channel_credentials(trusted, material.key, material.cert)
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    else:
        channel = grpc.aio.insecure_channel(address, options=options)
    shown = security.shown_to(to, generation)
    return TokenChannel(channel, shown) if shown else channel


class TokenChannel:
    """A channel whose every call carries metadata.

    No interceptor does this, because grpc.aio copies the messages of an intercepted stream through a queue, which
    costs time and breaks the reuse of message buffers.
    """

    def __init__(self, channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> None:
        self._channel, self._metadata = channel, metadata

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._channel, name)
        return self._wrapped(found) if name in _CALL_KINDS else found

    def _wrapped(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def make_call(*args: Any, **options: Any) -> Callable[..., Any]:
            call = make(*args, **options)

            def start(*args: Any, metadata: Any = (), **options: Any) -> Any:
                return call(*args, metadata=(*(metadata or ()), *self._metadata), **options)

            return start

        return make_call

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()


def serialize(message: Any) -> bytes:
    """Return the wire bytes of a control message."""
    encoded: bytes = message.SerializeToString()
    return encoded


def parser(message_type: type[Any]) -> Callable[[bytes], Any]:
    """Return a deserializer for gRPC that raises ProtocolError; behind a `Listener` callers get the error."""

    def parse(data: bytes) -> Any:
        return messages.read(message_type, data, message_type.DESCRIPTOR.name, bytes_max=bounds.UNARY_BYTES_MAX)

    return parse


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: RelaylineError) -> NoReturn:
    """End a server call with the status, text and label of a typed error. Text beyond ERROR_TEXT_BYTES_MAX is cut."""
    text = error.message.encode()[: bounds.ERROR_TEXT_BYTES_MAX].decode(errors="ignore")
    await context.abort(grpc_status(error), text, ((_LABEL_KEY, error.label),))
    raise InternalError("context.abort returned")


def typed(error: grpc.aio.AioRpcError, peer: str) -> RelaylineError:
    """Turn a failed call to `peer` back into the typed error its server raised, or into the loss of that peer."""
    detail = printable(error.details() or error.code().name)
    for key, value in error.trailing_metadata() or ():
        if key == _LABEL_KEY and isinstance(value, str) and value in STATUS:
            return from_wire(value, detail)
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        found = _NO_CONNECTION.fullmatch(detail)
        return StageLostError(f"{peer} cannot be reached ({found['why'] if found else detail})")
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return StageLostError(f"{peer} did not answer in time")
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return HandshakeError(f"{peer} is not a relayline stage of this version ({detail})")
    if error.code() is grpc.StatusCode.CANCELLED:
        return StageLostError(f"{peer} closed the stream")
    if was_cut_short(error):
        return StageLostError(f"{peer} ended the call")
    if error.code() is grpc.StatusCode.INTERNAL:  # of HTTP/2 itself: a handler that failed has UNKNOWN
        return StageLostError(f"the connection to {peer} broke ({detail})")
    if error.code() is grpc.StatusCode.UNKNOWN:
        return InternalError(f"{peer} failed: {detail}")
    return ProtocolError(f"{peer} answered {error.code().name}: {detail}")


def was_cut_short(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the other side ended a call just as this one wrote to it: grpc.aio then loses the reason."""
    return error.code() is grpc.StatusCode.INTERNAL and "execute_batch" in (error.debug_error_string() or "")


async def first_reply(
    channel: grpc.aio.Channel, path: str, message: bytes, metadata: tuple[tuple[str, str], ...] = ()
) -> tuple[Any, Any]:
    """Open a two-way stream, say its first message and read the first reply: (call, its bytes or grpc.aio.EOF).

    Where the other side ends the call at once, gRPC may lose the reason. The first message is then said again, up to
    HANDSHAKE_TRIES times: nothing has been accepted yet. Each new try gives the refusal REFUSAL_WAIT_S to arrive before
    it writes, so that the two do not cross again. Raises grpc.aio.AioRpcError.
    """
    for n_left in reversed(range(HANDSHAKE_TRIES)):
        # Replies are parsed later: grpc.aio turns one that its deserializer refuses into None and continues.
        call = channel.stream_stream(path, request_serializer=None, response_deserializer=None)(metadata=metadata)
        try:
            if n_left < HANDSHAKE_TRIES - 1:
                await _ended_within(call, REFUSAL_WAIT_S)
            try:
                await call.write(message)
            except asyncio.InvalidStateError:
                pass  # the call has ended already; reading says why
            return call, await call.read()
        except grpc.aio.AioRpcError as error:
            if not (n_left and was_cut_short(error)):
                raise
    raise AssertionError("the last try returns or raises")


async def _ended_within(call: grpc.aio.Call, timeout_s: float) -> None:
    ended = asyncio.Event()
    call.add_done_callback(lambda _: ended.set())
    await set_within(ended, timeout_s)


def end_call(call: Any) -> None:
    """Cancel a call that nobody reads any more, in gRPC's core as well.

    grpc.aio takes a call as done once a write has failed, and `cancel` then does nothing. If the other side ended the
    call behind messages that nobody had read, as of a process that was stopped, core keeps it and its connection open.
    """
    if not call.cancel() and (in_core := getattr(call, "_cython_call", None)) is not None:
        in_core.cancel("it is not read any more")


def task_is_cancelled() -> bool:
    """Tell a cancelled task from a cancelled call, which gRPC reports in the same way."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def call(
    channel: grpc.aio.Channel,
    name: str,
    request: Any,
    reply: type[Any],
    peer: str,
    timeout_s: float,
    bytes_max: int = bounds.UNARY_BYTES_MAX,
) -> Any:
    """Make one unary call.

    Raises the typed error of the other side, StageLostError if it cannot be reached or the channel is closed before it
    answers, ProtocolError if its reply is not one, or longer than bytes_max.
    """
    try:
        unary = channel.unary_unary(method(name), request_serializer=serialize, response_deserializer=None)
        data = await unary(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise typed(error, peer) from error
    except grpc.aio.UsageError as error:
        raise StageLostError(f"the connection to {peer} is closed") from error
    except asyncio.CancelledError as error:
        if task_is_cancelled():
            raise
        raise StageLostError(f"the connection to {peer} was closed before it answered {name}") from error
    return messages.read(reply, data, f"answer to {name}", bytes_max=bytes_max, who=peer)
