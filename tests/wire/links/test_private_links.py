"""Goal: two ends that belong together get a link, and otherwise both ends say why they do not.

Method: a real gRPC server on loopback addresses with one method, real certificates, the same process on both ends. The
server's log line is awaited, so a refusal without one fails by its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as grpc_health_aio

from relayline.deploy.launch.certificates import issue
from relayline.wire.common import bounds
from relayline.wire.common.errors import ProtocolError, RelaylineError, StageLostError, UnauthenticatedError
from relayline.wire.envelopes import messages
from relayline.wire.links import doorkeeper, listening, role_tokens, rpc, tls_probe, trouble
from relayline.wire.links.doorkeeper import FIRST_BYTES_WAIT_S, LOOKS_PER_S_MAX, WAITED_MAX_S, Doorkeeper
from relayline.wire.links.listening import Listener
from relayline.wire.links.relay_link import RelayLink
from relayline.wire.links.roles import Identity, Role
from relayline.wire.links.security import PLAINTEXT, LinkSecurity
from relayline.wire.links.trouble import explained
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.cut_short import Crossing, CutShort
from tests.support.identities import NOW, Identities, make_identities, security_of
from tests.support.polling import pause

WAIT_S = 20
ROOT = role_tokens.new_root()
STAGE = Identity(Role.STAGE, "localhost", "box1")
STAGE_TOKEN = role_tokens.token_for(ROOT, STAGE, 0)


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Identities:
    return make_identities(tmp_path_factory.mktemp("identities"))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine either end may be slow to say why it refuses the other."""
    for name in ("FIRST_BYTES_WAIT_S", "SETTLED_AFTER_S"):
        monkeypatch.setattr(doorkeeper, name, WAIT_S)
    monkeypatch.setattr(doorkeeper, "WAITED_MAX_S", 100 * WAIT_S)
    for name in ("CONNECT_TIMEOUT_S", "HANDSHAKE_TIMEOUT_S"):
        monkeypatch.setattr(tls_probe, name, WAIT_S)
    monkeypatch.setattr(trouble, "NOTE_TIMEOUT_S", WAIT_S)


class Lines(logging.Handler):
    """The log lines of relayline.security, to be awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._new = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self._new.set()

    async def until(self, n_lines: int) -> list[str]:
        """Wait for that many lines and return them all."""
        async with asyncio.timeout(WAIT_S):
            while len(self.lines) < n_lines:
                self._new.clear()
                await self._new.wait()
        return self.lines


@pytest.fixture
async def lines() -> AsyncIterator[Lines]:
    handler = Lines()
    logger = logging.getLogger("relayline.security")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


class Serving:
    """A server with one method of each kind in use."""

    def __init__(self, security: LinkSecurity, host: str) -> None:
        self.listener = Listener(security, "stage 1")
        self.metadata: list[dict[str, str]] = []
        handlers = {
            "Describe": grpc.unary_unary_rpc_method_handler(
                self._describe, rpc.parser(pb.DescribeRequest), rpc.serialize
            ),
            "Return": grpc.unary_stream_rpc_method_handler(self._return, None, rpc.serialize),
            "Relay": grpc.stream_stream_rpc_method_handler(self._relay, None, rpc.serialize),
        }
        self.listener.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(rpc.SERVICE, handlers),))
        health = grpc_health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, self.listener.server)
        self.port = self.listener.add_port(host, 0)
        self.address = f"{host}:{self.port}"

    async def _describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        self.metadata.append(dict(context.invocation_metadata()))
        return pb.DescribeResponse(n_embd=7)

    async def _return(self, request: bytes, context: Any) -> None:
        self.metadata.append(dict(context.invocation_metadata()))
        await context.write(pb.ReturnResponse(subscribed=True))

    async def _relay(self, requests: Any, context: Any) -> None:
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            messages.read(pb.RelayRequest, await context.read(), "handshake")
        except RelaylineError as error:
            await rpc.abort(context, error)
        await context.write(pb.RelayResponse(accepted=pb.LinkAccepted(credit_bytes=1 << 20, max_rows=8)))
        await context.read()


@contextlib.asynccontextmanager
async def serving(security: LinkSecurity, host: str = "127.0.0.2") -> AsyncIterator[Serving]:
    server = Serving(security, host)
    await server.listener.server.start()
    try:
        yield server
    finally:
        await server.listener.stop(None)


async def describe(address: str, security: LinkSecurity) -> pb.DescribeResponse:
    """A coordinator's first calls to a stage."""
    channel = rpc.open_channel(address, security, STAGE)
    try:
        return await rpc.call(channel, "Describe", pb.DescribeRequest(), pb.DescribeResponse, address, WAIT_S)
    except StageLostError as error:
        raise await explained(error, address, security) from error
    finally:
        await channel.close()


async def refusal(address: str, security: LinkSecurity) -> str:
    with pytest.raises(UnauthenticatedError) as caught:
        await describe(address, security)
    assert "\n" not in caught.value.message
    return caught.value.message


# --- ends that belong together ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listen", "connect"),
    [("127.0.0.2", "127.0.0.2"), ("127.0.0.1", "localhost"), ("[::1]", "[::1]"), ("0.0.0.0", "127.0.0.2")],
)
async def test_both_show_certificates_that_carry_the_name(listen: str, connect: str, ids: Identities):
    async with serving(security_of(ids.box1), listen) as server:
        assert (await describe(f"{connect}:{server.port}", security_of(ids.coordinator))).n_embd == 7


async def test_the_name_of_a_kubernetes_service_is_checked_as_a_name(ids: Identities, tmp_path: Path):
    """The name is not resolvable here, so gRPC gets its address; the check of the name is the same."""
    name = "small-stage-0.small-stage.default.svc.cluster.local"
    issue(ids.ca, name, [], 30, tmp_path / "pod", NOW, role=Role.STAGE, stage="stage-0")
    async with serving(security_of(tmp_path / "pod")) as server:
        for asked, is_right in ((name, True), ("small-stage-1.small-stage.default.svc.cluster.local", False)):
            material = [path.read_bytes() for path in security_of(ids.coordinator).files]
            credentials = grpc.ssl_channel_credentials(material[0], material[2], material[1])
            options = (("grpc.ssl_target_name_override", asked),)
            async with grpc.aio.secure_channel(server.address, credentials, options) as channel:
                call = channel.unary_unary(rpc.method("Describe"))
                if is_right:
                    assert await call(b"")
                else:
                    with pytest.raises(grpc.aio.AioRpcError, match="Hostname Verification"):
                        await call(b"")


async def test_a_coordinator_proves_itself_to_a_stage_without_showing_its_token():
    root, stage = role_tokens.new_root(), Identity(Role.STAGE, "localhost", "box1")
    security = LinkSecurity(token=role_tokens.token_for(root, stage, 0))
    async with serving(security) as server:
        channel = rpc.open_channel(server.address, LinkSecurity(token=root), stage)
        await rpc.call(channel, "Describe", pb.DescribeRequest(), pb.DescribeResponse, "b", WAIT_S)
        await channel.unary_stream(rpc.method("Return"))(b"", metadata=(("x-mine", "kept"),)).read()
        hello = pb.LinkOpen(dtype=pb.DTYPE_TOKENS, n_embd=1)
        link = await RelayLink.open(server.address, hello, lambda _: None, LinkSecurity(token=root), "a-pass")
        await link.close()
        await channel.close()
        proof = f"Bearer {role_tokens.coordinator_proof(root, stage, 0)}"
        assert [sent.get("authorization") for sent in server.metadata] == [proof, proof, None]
        assert server.metadata[1]["x-mine"] == "kept"
        assert server.metadata[2][rpc.PASS_KEY] == "a-pass"
        assert root.partition("/")[2] not in str(server.metadata)


async def test_health_needs_no_token(ids: Identities):
    async with serving(LinkSecurity(token=STAGE_TOKEN)) as server, rpc.open_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_unix_socket_is_this_machine(tmp_path: Path):
    listener = Listener(LinkSecurity(token=STAGE_TOKEN), "stage 1")
    listener.add_port(f"unix:{tmp_path / 's'}", 0)
    await listener.server.start()
    async with rpc.open_channel(f"unix:{tmp_path / 's'}", LinkSecurity(token=ROOT), STAGE) as channel:
        with pytest.raises(RelaylineError, match="not a relayline stage"):
            await rpc.call(channel, "Describe", pb.DescribeRequest(), pb.DescribeResponse, "b", WAIT_S)
    await listener.server.stop(None)


async def test_streams_that_cannot_be_read_are_one_line(lines: Lines):
    async with serving(LinkSecurity(), "127.0.0.1") as server, rpc.open_channel(server.address) as channel:
        for _ in range(3):
            call = channel.stream_stream(rpc.method("Relay"))()
            await call.write(b"\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert isinstance(rpc.typed(caught.value, "stage"), ProtocolError)
        logged = [line for line in await lines.until(1) if "cannot be read" in line]
    assert logged == [
        "stage 1 refused 127.0.0.1: it sent a call that cannot be read; something else may be talking to this port"
    ]


# --- ends that do not belong together: the client's error, the server's log line --------------------------------------


async def test_another_ca(ids: Identities, lines: Lines):
    async with serving(security_of(ids.box1)) as server:
        assert await refusal(server.address, security_of(ids.stranger)) == (
            f"{server.address} shows a certificate that does not come from the CA in {ids.stranger}/ca.pem; "
            "both ends need certificates of one `relayline certs init`"
        )
        assert await lines.until(1) == ["stage 1 refused 127.0.0.1: it does not trust the CA of this end's certificate"]


async def test_a_client_whose_certificate_comes_from_another_ca(ids: Identities, lines: Lines):
    mixed = LinkSecurity(ids.box1 / "ca.pem", ids.stranger / "cert.pem", ids.stranger / "key.pem")
    async with serving(security_of(ids.box1)) as server:
        assert await refusal(server.address, mixed) == (
            f"{server.address} refuses our certificate {ids.stranger}/cert.pem: it trusts another CA; "
            "both ends need certificates of one `relayline certs init`"
        )
        assert await lines.until(1) == ["stage 1 refused 127.0.0.1: its certificate comes from another CA"]


async def test_a_client_whose_certificate_has_expired(ids: Identities, lines: Lines):
    async with serving(security_of(ids.box1)) as server:
        assert await refusal(server.address, security_of(ids.expired)) == (
            f"{server.address} refuses our certificate {ids.expired}/cert.pem: it has expired; "
            "renew it with `relayline certs issue`"
        )
        assert await lines.until(1) == ["stage 1 refused 127.0.0.1: its certificate has expired"]


async def test_a_client_whose_certificate_is_not_valid_yet(ids: Identities, lines: Lines):
    async with serving(security_of(ids.box1)) as server:
        message = await refusal(server.address, security_of(ids.early))
        assert message.endswith("cert.pem: it is not valid there; are both clocks right?")
        assert await lines.until(1) == ["stage 1 refused 127.0.0.1: its certificate is not valid here"]


async def test_a_server_whose_certificate_has_expired(ids: Identities, lines: Lines):
    async with serving(security_of(ids.expired)) as server:
        message = await refusal(server.address, security_of(ids.coordinator))
        assert message.startswith(f"the certificate of {server.address} has expired (20")
        assert message.endswith(" UTC); renew it there with `relayline certs issue`")
        assert await lines.until(1) == [
            "stage 1 refused 127.0.0.1: this end's own certificate has expired; renew it with `relayline certs issue`"
        ]


async def test_a_server_that_is_called_by_another_name(ids: Identities, lines: Lines):
    async with serving(security_of(ids.box1), "127.0.0.3") as server:
        assert await refusal(server.address, security_of(ids.coordinator)) == (
            f"the certificate of {server.address} is for box1, localhost, 127.0.0.2, 127.0.0.1, ::1, "
            "not for 127.0.0.3; issue one with that name too (`relayline certs issue --ip` or `--dns`)"
        )
        assert await lines.until(1) == [
            "stage 1 refused 127.0.0.1: this end's certificate does not have the name under which it was called"
        ]


async def test_a_client_that_speaks_plaintext(ids: Identities, lines: Lines):
    async with serving(security_of(ids.box1)) as server:
        assert await refusal(server.address, PLAINTEXT) == (
            f"{server.address} speaks TLS and this process does not; give --tls DIR"
        )
        assert await lines.until(1) == [
            "stage 1 refused 127.0.0.1: it speaks plaintext and this end TLS; give it --tls DIR"
        ]


@pytest.mark.parametrize("reads", [False, True], ids=["at once", "after the greeting"])
async def test_hanging_up_before_the_handshake_refuses_no_certificate(reads: bool, ids: Identities):
    """A forwarder whose server is not there yet does that: trying again is right, and giving up is not."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if reads:
            await reader.read(1)
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as forwarder:
        address = f"127.0.0.1:{forwarder.sockets[0].getsockname()[1]}"
        with pytest.raises(StageLostError):
            await describe(address, security_of(ids.coordinator))
        if reads:
            assert await refusal(address, security_of(ids.expired)) == (
                f"{address} refuses our certificate {ids.expired}/cert.pem: it has expired; "
                "renew it with `relayline certs issue`"
            ), "our own fault is reported all the same"


async def test_a_server_that_speaks_plaintext(ids: Identities, lines: Lines):
    async with serving(PLAINTEXT) as server:
        assert await refusal(server.address, security_of(ids.coordinator)) == (
            f"{server.address} does not speak TLS; start it with --tls DIR as well"
        )
        assert await lines.until(1) == [
            "stage 1 refused 127.0.0.1: it speaks TLS and this end does not; give --tls DIR on both or on neither"
        ]
        assert server.metadata == []  # no call reached a handler, so no token travelled in the clear


@pytest.mark.parametrize(
    ("sent", "to_client", "to_server"),
    [
        ("", "asks for a join token; give --token-file FILE, RELAYLINE_TOKEN or --tls DIR", "it sent no join token"),
        (role_tokens.new_root(), "does not accept this join token; `relayline certs issue` makes each process its own",
         "it sent a wrong join token"),
    ],
    ids=["missing", "wrong"],
)  # fmt: skip
async def test_a_missing_or_wrong_token(sent: str, to_client: str, to_server: str, lines: Lines):
    async with serving(LinkSecurity(token=STAGE_TOKEN)) as server:
        for _ in range(3):
            channel = rpc.open_channel(server.address, LinkSecurity(token=sent), STAGE)
            with pytest.raises(UnauthenticatedError) as caught:
                await rpc.call(channel, "Describe", pb.DescribeRequest(), pb.DescribeResponse, "b", WAIT_S)
            assert caught.value.message == f"stage 1 {to_client}"
            await channel.close()
        assert lines.lines == [f"stage 1 refused 127.0.0.1: {to_server}"]  # said once
        assert server.metadata == []


@pytest.mark.parametrize(("n_calls", "expected"), [(2, UnauthenticatedError), (3, StageLostError)])
async def test_a_refusal_that_crosses_the_first_message_is_asked_for_again(
    n_calls: int, expected: type[Exception], ids: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_channel = rpc.open_channel
    monkeypatch.setattr(rpc, "open_channel", lambda *args, **named: CutShort(open_channel(*args, **named), n_calls))
    async with serving(security_of(ids.box1)) as server:
        hello = pb.LinkOpen(dtype=pb.DTYPE_TOKENS, n_embd=1)
        with pytest.raises(expected):
            await RelayLink.open(server.address, hello, lambda _: None, security_of(ids.monitor))


async def test_a_refusal_does_not_cross_the_first_message_twice() -> None:
    channel = Crossing()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rpc.first_reply(cast(grpc.aio.Channel, channel), rpc.method("Relay"), b"hello")
    assert (caught.value.code(), channel.n_calls) == (grpc.StatusCode.UNAUTHENTICATED, 2)


async def test_a_link_between_stages_says_it_too(ids: Identities, lines: Lines):
    async with serving(security_of(ids.box1)) as server:
        hello = pb.LinkOpen(dtype=pb.DTYPE_TOKENS, n_embd=1)
        with pytest.raises(UnauthenticatedError, match="does not come from the CA"):
            await RelayLink.open(server.address, hello, lambda _: None, security_of(ids.stranger))
        assert len(await lines.until(1)) == 1


async def test_nobody_there_is_a_lost_stage_and_no_riddle(ids: Identities):
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        with pytest.raises(StageLostError, match="cannot be reached"):
            await describe(f"127.0.0.2:{taken.getsockname()[1]}", security_of(ids.coordinator))


HEALTH = "/grpc.health.v1.Health/Check"


@pytest.mark.parametrize("method", [rpc.method("Describe"), HEALTH])
@pytest.mark.parametrize("request_", [b"\xff\xff\xff", bytes(bounds.UNARY_BYTES_MAX + 1), bytes(5_000_000)])
async def test_a_malformed_call_is_one_line_and_no_traceback(
    method: str, request_: bytes, lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(PLAINTEXT, "127.0.0.1") as server, rpc.open_channel(server.address) as channel:
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(method)(request_)
            assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert len(lines.lines) == (len(request_) <= bounds.UNARY_BYTES_MAX), "gRPC itself refuses a text that is too long"
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


# --- strangers that do not say why they were refused ------------------------------------------------------------------


def shake_hands(port: int) -> None:
    """A TLS client without a certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    raw = socket.create_connection(("127.0.0.2", port), WAIT_S)
    with contextlib.suppress(OSError), raw, context.wrap_socket(raw) as link:
        link.recv(1)


async def test_a_stranger_is_noticed_and_a_guest_that_leaves_early_is_not(
    ids: Identities, lines: Lines, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(doorkeeper, "SETTLED_AFTER_S", 0.01)
    came: list[tuple[Doorkeeper, doorkeeper.Peer, bytes]] = []
    async with serving(security_of(ids.box1)) as server:
        await describe(server.address, security_of(ids.coordinator))
        with monkeypatch.context() as at_the_door:
            at_the_door.setattr(Doorkeeper, "_came", lambda *known: came.append(known))
            await asyncio.to_thread(shake_hands, server.port)
            while {peer for _, peer, _ in came} & doorkeeper._connections(server.port).keys():
                await pause()  # the stranger has gone by the time at which its handshake is settled
        for keeper, peer, first in came:
            keeper._came(peer, first)
        await describe(server.address, security_of(ids.coordinator))
        assert await lines.until(1) == [
            "stage 1 got no call from 127.0.0.1: "
            "it gave up, or one of the certificates is not accepted by the other end"
        ]


async def test_a_guest_that_first_waited_at_the_door_is_no_stranger(
    ids: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that waits for its coordinator drops the connection by which it saw it come, and joins over another."""
    monkeypatch.setattr(doorkeeper, "SETTLED_AFTER_S", 0.0)
    strangers: list[str] = []
    keeper = Doorkeeper(security_of(ids.box1).files, lambda host, _: strangers.append(host))
    for host in ("10.0.0.9", "127.0.0.1", "10.0.0.8"):
        keeper._came((host, 1), b"\x16\x03\x01")
    for host in ("10.0.0.9", "127.0.0.1"):
        keeper.welcome((host, 2))
    while len(strangers) < 2:
        await pause()
    assert sorted(strangers) == ["10.0.0.8", "127.0.0.1"], "on loopback an address says nothing about who it is"
    keeper.close()


async def test_a_guest_that_comes_twice_from_one_port_is_one_guest(
    ids: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorkeeper, "SETTLED_AFTER_S", 0.0)
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    strangers: list[str] = []
    keeper = Doorkeeper(security_of(ids.box1).files, lambda host, _: strangers.append(host))
    for _ in range(2):
        keeper._came(("10.0.0.9", 1), b"\x16\x03\x01")
    keeper._came(("10.0.0.8", 1), b"\x16\x03\x01")
    while "10.0.0.8" not in strangers:
        await pause()
    assert (strangers, faults) == (["10.0.0.9", "10.0.0.8"], [])
    keeper.close()


async def test_port_checks_and_noise_do_no_harm(ids: Identities, lines: Lines):
    async with serving(security_of(ids.box1)) as server:
        for noise in (b"", b"\x00" * 100, b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection(("127.0.0.2", server.port), WAIT_S) as raw:
                raw.sendall(noise)
        assert (await describe(server.address, security_of(ids.coordinator))).n_embd == 7
        assert "it speaks plaintext" in (await lines.until(1))[0]


async def test_a_crowd_that_says_nothing_keeps_nobody_out(
    ids: Identities, lines: Lines, monkeypatch: pytest.MonkeyPatch
):
    """More silent connections than are checked in a second, all still open while a stage is described."""
    monkeypatch.undo()  # with the waits of a real server
    async with serving(security_of(ids.box1)) as server:
        with contextlib.ExitStack() as crowd:
            for _ in range(3 * LOOKS_PER_S_MAX):
                crowd.enter_context(socket.create_connection(("127.0.0.2", server.port), WAIT_S))
            assert (await describe(server.address, security_of(ids.coordinator))).n_embd == 7
        assert lines.lines == []


@pytest.mark.parametrize("speaks", [True, False])
async def test_a_slow_greeting_is_waited_for_and_a_silent_crowd_is_not(
    speaks: bool, ids: Identities, monkeypatch: pytest.MonkeyPatch
):
    """A refused client's greeting holds its reason, and comes late on a busy machine."""
    monkeypatch.undo()
    now_s, waits_s = 0.0, []

    def first_bytes(fd: int, timeout_s: float) -> bytes:
        nonlocal now_s
        waits_s.append(timeout_s)
        now_s += 0.0 if speaks else timeout_s
        return b""

    monkeypatch.setattr(doorkeeper, "_first_bytes", first_bytes)
    monkeypatch.setattr(doorkeeper, "time", SimpleNamespace(monotonic=lambda: now_s))
    keeper = Doorkeeper(security_of(ids.box1).files, lambda *_: None)
    for _ in range(LOOKS_PER_S_MAX):
        keeper._first_bytes(0)
    if speaks:
        assert {*waits_s} == {FIRST_BYTES_WAIT_S}
    else:
        assert waits_s[0] == FIRST_BYTES_WAIT_S
        assert sum(waits_s) < WAITED_MAX_S
        assert min(waits_s) > 0


@pytest.mark.parametrize("word", ["client-expired", "invented", "x" * 200])
async def test_a_peers_reason_only_selects_one_of_our_lines(word: str, ids: Identities, lines: Lines):
    note = f"/relayline.v1.Refused/{word}"
    async with serving(PLAINTEXT) as server, grpc.aio.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(note)(b"", timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert len(lines.lines) == 1
    assert word not in lines.lines[0] or word == "client-expired"


# --- renewal ----------------------------------------------------------------------------------------------------------


def certificate_shown(port: int, security: LinkSecurity) -> bytes:
    context = ssl.create_default_context(cafile=str(security.files[0]))
    context.load_cert_chain(security.files[1], security.files[2])
    context.set_alpn_protocols(["h2"])
    raw = socket.create_connection(("127.0.0.2", port), WAIT_S)
    with raw, context.wrap_socket(raw, server_hostname="127.0.0.2") as link:
        link.recv(1)
        return link.getpeercert(binary_form=True) or b""


async def test_a_renewed_certificate_is_taken_up_without_a_restart(
    ids: Identities, tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(doorkeeper, "SETTLED_AFTER_S", 1e6)  # after it, a link without a call is logged
    own = tmp_path / "tls"
    shutil.copytree(ids.box1, own)
    async with serving(security_of(own)) as server:
        before = await asyncio.to_thread(certificate_shown, server.port, security_of(ids.coordinator))
        issue(ids.ca, "box1", ["127.0.0.2"], 60, own, NOW, role=Role.STAGE, stage="box1")
        after = await asyncio.to_thread(certificate_shown, server.port, security_of(ids.coordinator))
        assert after != before
        assert lines.lines == [f"took up the renewed certificate {own}/cert.pem"]
        (own / "key.pem").write_bytes((ids.box2 / "key.pem").read_bytes())  # half a renewal
        assert await asyncio.to_thread(certificate_shown, server.port, security_of(ids.coordinator)) == after
        assert lines.lines[1].startswith(f"keeping the old certificate: {own}/key.pem does not belong to")


def test_grpc_knows_the_option_that_ends_silent_handshakes():
    keys = {key for key, _ in listening.SERVER_OPTIONS} - {key for key, _ in rpc.SERVER_OPTIONS}
    assert keys == {"grpc.server_handshake_timeout_ms"}
    with Path(cygrpc.__file__).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        assert all(library.find(key.encode() + b"\0") >= 0 for key in keys)
    assert listening.TLS_HANDSHAKE_TIMEOUT_MS <= 1_000 * bounds.HANDSHAKE_TIMEOUT_S
