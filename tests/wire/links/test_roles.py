"""Goal: each call is open exactly to the roles in the table of calls, and a revoked caller is out.

Method: the ports of a stage and of a coordinator on loopback, with real certificates or real join tokens. Every method
is called by every kind of process. An admitted call may still fail for its content: only the guard's refusal is tested
here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from relayline.coordinator.engine.revoking import check_servers, push_revocations
from relayline.coordinator.engine.stage_client import StageClient
from relayline.coordinator.joining.config import JoinConfig, JoiningStage
from relayline.coordinator.joining.port import make_roster, serve_joining
from relayline.deploy.launch.certificates import issue, issued_token, revoke
from relayline.deploy.testing import paths
from relayline.stage.joining.client import Member, introduction
from relayline.stage.service import handlers
from relayline.wire.common.errors import RelaylineError, StageLostError, UnauthenticatedError, UsageError
from relayline.wire.links import role_tokens, rpc, tls_probe
from relayline.wire.links.listening import Listener
from relayline.wire.links.relay_link import RelayLink
from relayline.wire.links.revocation import IS_REVOKED, Revocations
from relayline.wire.links.role_tokens import token_for
from relayline.wire.links.roles import (
    CALLS,
    METRICS,
    REFLECTION_METHOD,
    REFLECTION_SERVICES,
    Credential,
    Identity,
    Proof,
    Role,
    identity_among,
    identity_named,
)
from relayline.wire.links.security import LinkSecurity, load_security
from relayline.wire.pb.relayline.v1 import join_pb2, relayline_pb2, tunnel_pb2
from tests.support.cut_short import CutShort
from tests.support.identities import NOW, Identities, make_identities, security_of
from tests.support.join_support import NAMES, write_split
from tests.support.served_stage import Coordinator, StageUnderTest, served

WAIT_S = 20
pb = relayline_pb2
ROOT = role_tokens.new_root()
BOX1, BOX2 = Identity(Role.STAGE, "localhost", "box1"), Identity(Role.STAGE, "localhost", "box2")
STAGE_METHODS = sorted(method for method in CALLS if "StageService" in method)
JOIN_METHODS = sorted(method for method in CALLS if "PipelineService" in method)


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Identities:
    return make_identities(tmp_path_factory.mktemp("identities"))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine either end may be slow to answer the other; a stage tries again, and these tests do not."""
    for name in ("CONNECT_TIMEOUT_S", "HANDSHAKE_TIMEOUT_S"):
        monkeypatch.setattr(tls_probe, name, WAIT_S)
    monkeypatch.setattr("relayline.stage.joining.client.GOODBYE_TIMEOUT_S", WAIT_S)


def services_of_the_contract() -> list[Any]:
    files = (relayline_pb2, join_pb2, tunnel_pb2)
    return [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]


# --- the table itself -------------------------------------------------------------------------------------------------


def test_every_method_of_the_contract_has_a_rule():
    services = services_of_the_contract()
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    reflection = {f"/{service}/{REFLECTION_METHOD}" for service in REFLECTION_SERVICES}
    assert set(CALLS) == methods | {METRICS} | reflection


def test_messages_of_calls_are_named_as_buf_wants():
    """`buf lint` says the same by buf.yaml; it is not installed everywhere."""
    services = services_of_the_contract()
    for method in (method for service in services for method in service.methods):
        assert method.input_type.name == f"{method.name}Request"
        assert method.output_type.name == f"{method.name}Response"


def test_the_documented_table_is_the_same():
    """The page shows the table to people; this compares it with the checked one."""
    text = (paths.ROOT / "docs" / "explanation" / "security.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    for method, call in CALLS.items():
        name = method.rpartition("/")[2] if method != METRICS else method
        (row,) = [line for line in rows if f"`{name}`" in line.split("|")[1]]
        documented = {role for role in Role if role.value in row.split("|")[2]}
        assert documented == set(call.roles), row


@pytest.mark.parametrize(
    "uri",
    ["", "relayline", "relayline:", "relayline:root:box1", "relayline:stage:box1", "relayline:stage::box1",
     "relayline:stage:Alpha:box1", "relayline:stage:a b:box1", "relayline:stage:alpha:", "relayline:coordinator:",
     "relayline:coordinator:a b", "relayline:coordinator:a\nb", "spiffe:coordinator:box1", "relayline:stage:\x1b:box1"],
)  # fmt: skip
def test_a_uri_without_an_identity_is_none(uri: str):
    assert identity_named(uri) is None


def test_identities_are_read_as_they_are_written():
    for identity in (BOX1, Identity(Role.COORDINATOR, "fd00::1"), Identity(Role.MONITOR, "*.small.default")):
        assert identity_named(identity.uri) == identity
    assert identity_among(["https://x", BOX1.uri]) == BOX1
    assert identity_among([BOX1.uri, BOX2.uri]) is None, "two names would be every name"
    assert identity_among([]) is None


def test_tokens_prove_their_claims_and_nothing_else():
    token = role_tokens.read(token_for(ROOT, BOX1, 0))
    assert token is not None
    assert token.identity == BOX1
    proof = role_tokens.join_proof(token)
    assert role_tokens.joined_identity(ROOT, proof, lambda _: 0) == BOX1
    assert role_tokens.joined_identity(ROOT, proof, lambda _: 1) is None, "revoked since"
    assert role_tokens.joined_identity(role_tokens.new_root(), proof, lambda _: 0) is None
    assert role_tokens.joined_identity(ROOT, proof.replace("box1", "box2"), lambda _: 0) is None
    assert role_tokens.joined_identity(ROOT, token_for(ROOT, BOX1, 0), lambda _: 0) is None, "the token itself"
    assert role_tokens.is_coordinator(token, role_tokens.coordinator_proof(ROOT, BOX1, 0))
    for shown in (role_tokens.coordinator_proof(ROOT, BOX2, 0), proof, ROOT, "", "ü"):
        assert not role_tokens.is_coordinator(token, shown)
    for text in (
        "",
        "coordinator",
        "coordinator/",
        "stage/box1/localhost",
        "stage/Box/localhost/k",
        "0123456789abcdef",
    ):
        assert role_tokens.read(text) is None


# --- every cell, with certificates and with tokens --------------------------------------------------------------------


@contextlib.asynccontextmanager
async def stage_port(security: LinkSecurity) -> AsyncIterator[str]:
    """A stage's port: every method of the contract is there and answers at once that it was reached."""
    async with port_of(security, STAGE_METHODS) as address:
        yield address


@contextlib.asynccontextmanager
async def port_of(
    security: LinkSecurity, methods: list[str], *more: str, coordinator: Identity | None = None
) -> AsyncIterator[str]:
    async def reached(request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "reached")

    listener = Listener(security, "stage 1", coordinator=coordinator)
    for method in (*methods, *more):
        service, name = method.strip("/").split("/")
        handlers = {name: grpc.unary_unary_rpc_method_handler(reached)}
        listener.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = listener.add_port("127.0.0.1", 0)
    await listener.server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await listener.stop(None)


async def outcome(address: str, method: str, security: LinkSecurity, to: Identity | Role | None) -> grpc.StatusCode:
    async with rpc.open_channel(address, security, to) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(method)(b"", timeout=WAIT_S)
        return caught.value.code()


REACHED, REFUSED = grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("caller", ["coordinator", "box1", "box2", "monitor"])
async def test_each_call_with_each_certificate(caller: str, ids: Identities):
    directory = getattr(ids, caller)
    role = load_security(directory, environment={}).identity.role  # type: ignore[union-attr]
    async with port_of(security_of(ids.box1, ""), [*STAGE_METHODS, *JOIN_METHODS]) as address:
        for method in (*STAGE_METHODS, *JOIN_METHODS):
            expected = REACHED if role in CALLS[method].roles else REFUSED
            assert await outcome(address, method, security_of(directory), None) is expected, method


async def test_a_method_without_a_rule_is_nobodys(ids: Identities):
    method = "/relayline.v1.StageService/Shell"
    async with port_of(security_of(ids.box1), [], method) as address:
        assert await outcome(address, method, security_of(ids.coordinator), None) is REFUSED
    async with port_of(LinkSecurity(), [], method) as address:
        assert await outcome(address, method, LinkSecurity(), None) is REFUSED


TOKENS = {
    "coordinator": (ROOT, BOX1),
    "its own coordinator's proof for another stage": (ROOT, BOX2),
    "another coordinator": (role_tokens.new_root(), BOX1),
    "the stage itself": (token_for(ROOT, BOX1, 0), Role.COORDINATOR),
    "another stage": (token_for(ROOT, BOX2, 0), Role.COORDINATOR),
    "a token of an older version": ("0123456789abcdef", Role.COORDINATOR),
    "nobody": ("", None),
}


@pytest.mark.parametrize("caller", TOKENS)
async def test_each_call_of_a_stage_with_each_token(caller: str):
    token, to = TOKENS[caller]
    async with stage_port(LinkSecurity(token=token_for(ROOT, BOX1, 0))) as address:
        for method in STAGE_METHODS:
            by_pass = CALLS[method].proof is Proof.PASS  # the stage itself looks at that
            expected = REACHED if caller == "coordinator" or by_pass else REFUSED
            assert await outcome(address, method, LinkSecurity(token=token), to) is expected, method


@pytest.mark.parametrize("caller", TOKENS)
async def test_joining_with_each_token(caller: str):
    token, to = TOKENS[caller]
    async with port_of(LinkSecurity(token=ROOT), JOIN_METHODS) as address:
        for method in JOIN_METHODS:
            expected = REACHED if "stage" in caller and "proof" not in caller else REFUSED
            assert await outcome(address, method, LinkSecurity(token=token), to) is expected, method


# --- further checks of handlers: upstream neighbours, owners ----------------------------------------------------------


@contextlib.asynccontextmanager
async def guarded_stage(security: LinkSecurity) -> AsyncIterator[tuple[StageUnderTest, str, Listener]]:
    """A whole stage (index 1 of 2, the last) behind a guarded port."""
    async with served() as stage:
        listener = Listener(security, "stage 1")
        stage.service.attach(stage.service.runner, listener.guard)
        listener.server.add_generic_rpc_handlers((handlers(lambda: stage.service),))
        port = listener.add_port("127.0.0.1", 0)
        await listener.server.start()
        try:
            yield stage, f"127.0.0.1:{port}", listener
        finally:
            await listener.stop(None)


async def configured(
    stage: StageUnderTest, address: str, security: LinkSecurity, to: Identity | None = None, **more: Any
) -> Coordinator:
    """A coordinator that has begun an epoch over the guarded port."""
    stage.address = address
    one = Coordinator(stage, security=security, to=to)
    await one.configure(**more)
    return one


async def relayed(address: str, one: Coordinator, security: LinkSecurity, shown_pass: str) -> str:
    """Open the upstream link; returns the refusal, empty when it was taken."""
    try:
        link = await RelayLink.open(address, one.hello(), lambda _: None, security, shown_pass)
    except UnauthenticatedError as error:
        return error.message
    await link.close()
    return ""


async def test_a_stage_takes_work_from_its_upstream_and_nobody_else(ids: Identities):
    head, upstream, other = security_of(ids.coordinator), security_of(ids.box1), security_of(ids.box2)
    async with (
        guarded_stage(security_of(ids.box2)) as (stage, address, _),
        await configured(stage, address, head, upstream_pass="right", upstream_name="box1") as one,
    ):
        assert await relayed(address, one, upstream, "wrong") == "stage 1 accepts work only with the pass of its epoch"
        assert await relayed(address, one, upstream, "") == "stage 1 accepts work only with the pass of its epoch"
        assert await relayed(address, one, other, "right") == (
            "stage 1 accepts work from stage box1, not from stage box2 on box2"
        )
        assert await relayed(address, one, head, "right") == (
            "stage 1 accepts work from stage box1, not from coordinator on head"
        )
        assert await relayed(address, one, upstream, "right") == ""


async def test_a_route_stays_with_the_coordinator_that_began_it(ids: Identities, tmp_path: Path):
    issue(ids.ca, "head2", [], 30, tmp_path / "second", NOW, role=Role.COORDINATOR)
    async with (
        guarded_stage(security_of(ids.box2)) as (stage, address, _),
        await configured(stage, address, security_of(ids.coordinator), upstream_pass="p") as one,
    ):
        stage.address = address
        async with Coordinator(stage, epoch=one.epoch + 1, security=security_of(tmp_path / "second")) as thief:
            with pytest.raises(UnauthenticatedError, match="belongs to coordinator on head"):
                await thief.configure()
            thief.epoch = one.epoch
            with pytest.raises(UnauthenticatedError, match="belongs to coordinator on head"):
                await thief.listen()
        assert await relayed(address, one, security_of(tmp_path / "second"), "p") == (
            "stage 1 accepts work from its coordinator, not from coordinator on head2"
        )
        assert await relayed(address, one, security_of(ids.coordinator), "p") == ""


async def test_the_pass_decides_on_plaintext_links():
    """With tokens, and without any: another process of this machine has no pass."""
    for token, root in ((token_for(ROOT, BOX2, 0), ROOT), ("", "")):
        async with guarded_stage(LinkSecurity(token=token)) as (stage, address, _):
            head = LinkSecurity(token=root)
            async with await configured(stage, address, head, to=BOX2, upstream_pass="right") as one:
                for shown in ("", "wrong", "right" * 1_000):
                    assert "only with the pass" in await relayed(address, one, LinkSecurity(), shown)
                assert await relayed(address, one, LinkSecurity(), "right") == ""


async def test_a_stage_that_joined_takes_work_from_no_other_coordinator(ids: Identities, tmp_path: Path):
    issue(ids.ca, "head2", [], 30, tmp_path / "second", NOW, role=Role.COORDINATOR)
    method = STAGE_METHODS[0]
    async with joining(tmp_path / "split", security_of(ids.coordinator)) as address:
        member = await join(address, security_of(ids.box1), "box1")
        owner = identity_named(member.order.coordinator)
        await member.close()
    assert owner == Identity(Role.COORDINATOR, "head")
    async with port_of(security_of(ids.box1), [method], coordinator=owner) as address:
        assert await outcome(address, method, security_of(ids.coordinator), None) is REACHED
        assert await outcome(address, method, security_of(tmp_path / "second"), None) is REFUSED


# --- joining ----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def joining(directory: Path, security: LinkSecurity) -> AsyncIterator[str]:
    config = JoinConfig(tuple(JoiningStage(name) for name in NAMES))
    file = write_split(directory)
    async with serve_joining(config, directory, file, make_roster(config), security) as (address, _):
        yield address


async def join(address: str, security: LinkSecurity, name: str, process_id: str = "p") -> Member:
    return await Member.join(address, security, introduction(name, process_id))


async def test_a_stage_joins_at_no_port_where_another_stage_answers(ids: Identities, tmp_path: Path):
    """As a relayed stage might, whose certificate holds at the coordinator's host."""
    async with joining(tmp_path / "split", security_of(ids.box2)) as address:
        with pytest.raises(UnauthenticatedError, match="is not a coordinator but stage box2 on box2; nothing was sent"):
            await join(address, security_of(ids.box1), "box1")


async def test_who_showed_a_coordinators_certificate_is_who_gets_the_introduction(
    ids: Identities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Somebody on the way may hand one connection to the coordinator and take the next one."""
    cert = x509.load_pem_x509_certificate((ids.coordinator / "cert.pem").read_bytes())
    shown = cert.public_bytes(serialization.Encoding.DER)
    other = security_of(ids.box2, security_of(ids.coordinator).token)
    for answer in (shown, b""):
        monkeypatch.setattr("relayline.stage.joining.client.server_certificate", lambda *_, answer=answer: answer)
        async with joining(tmp_path / "split", other) as address:
            with pytest.raises(StageLostError, match=None if answer else "did not show its certificate"):
                await join(address, security_of(ids.box1), "box1")


async def put_out(member: Member) -> None:
    """Wait until the coordinator removes a member.

    If a heartbeat of the member crosses the end of its call, gRPC loses the reason; asking again gives it.
    """
    async with asyncio.timeout(WAIT_S):
        message = (await member.lost).message
    assert "revoked" in message or "ended the call" in message


async def join_refusal(address: str, security: LinkSecurity, name: str) -> str:
    with pytest.raises(UnauthenticatedError) as caught:
        await join(address, security, name, "another")
    assert "\n" not in caught.value.message
    return caught.value.message


async def test_a_name_is_the_credentials_and_belongs_to_its_first_holder(ids: Identities, tmp_path: Path):
    again = tmp_path / "box1-elsewhere"
    issue(ids.ca, "box9", [], 30, again, NOW, role=Role.STAGE, stage="box1")
    async with joining(tmp_path / "split", security_of(ids.coordinator)) as address:
        assert await join_refusal(address, security_of(ids.box2), "box1") == (
            "this credential is for stage box2 on box2; it cannot join as box1"
        )
        assert "refuses this call" in await join_refusal(address, security_of(ids.coordinator), "box1")
        assert "refuses this call" in await join_refusal(address, security_of(ids.monitor), "box1")
        token_of_another = security_of(ids.box1, security_of(ids.box2).token)
        assert "does not accept this join token" in await join_refusal(address, token_of_another, "box1")
        member = await join(address, security_of(ids.box1), "box1")
        await member.close()
        refused = await join_refusal(address, security_of(again), "box1")
        assert refused.startswith("the name box1 belongs to stage box1 on box1, which joined first; to move it, revoke")
        issue(ids.ca, "box1", ["127.0.0.2"], 80, ids.box1, NOW, role=Role.STAGE, stage="box1")
        await (await join(address, security_of(ids.box1), "box1", "p2")).close()


async def test_a_ticket_fetches_for_its_own_member_only(ids: Identities, tmp_path: Path):
    async with joining(tmp_path / "split", security_of(ids.coordinator)) as address:
        one = await join(address, security_of(ids.box1), "box1")
        two = await join(address, security_of(ids.box2), "box2")
        assert [chunk async for chunk in one.fetch(0)]
        two.order.ticket = one.order.ticket
        with pytest.raises(RelaylineError, match="belongs to no member"):
            [chunk async for chunk in two.fetch(0)]
        for member in (one, two):
            await member.close()


async def test_names_are_bound_with_tokens_too(tmp_path: Path):
    (tmp_path / "token").write_text(ROOT)
    head = load_security(None, token_file=tmp_path / "token", environment={}, role=Role.COORDINATOR)
    elsewhere = LinkSecurity(token=token_for(ROOT, Identity(Role.STAGE, "box9", "box1"), 0))
    async with joining(tmp_path / "split", head) as address:
        box1 = LinkSecurity(token=token_for(ROOT, BOX1, 0))
        assert "cannot join as box2" in await join_refusal(address, box1, "box2")
        await (await join(address, box1, "box1")).close()
        assert "belongs to stage box1 on localhost" in await join_refusal(address, elsewhere, "box1")


# --- revoking, on running processes -----------------------------------------------------------------------------------


async def test_a_revoked_member_is_put_out_and_its_name_passes_on_while_others_stay(tmp_path: Path):
    ids = make_identities(tmp_path / "ids")
    moved = tmp_path / "moved"
    issue(ids.ca, "box9", [], 30, moved, NOW, role=Role.STAGE, stage="box1")
    async with joining(tmp_path / "split", security_of(ids.coordinator)) as address:
        one = await join(address, security_of(ids.box1), "box1")
        two = await join(address, security_of(ids.box2), "box2")
        revoke(ids.ca, lambda identity: identity.host == "box1", NOW)
        await put_out(one)
        assert "it is revoked" in await join_refusal(address, security_of(ids.box1), "box1")
        assert not two.lost.done()
        successor = await join(address, security_of(moved), "box1", "p9")
        for member in (one, two, successor):
            await member.close()


async def test_a_refused_stage_that_lost_the_reason_asks_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ids = make_identities(tmp_path / "ids")
    revoke(ids.ca, lambda identity: identity.host == "box1", NOW)  # first: it looks at the file once a second
    async with joining(tmp_path / "split", security_of(ids.coordinator)) as address:
        open_channel = rpc.open_channel
        monkeypatch.setattr(rpc, "open_channel", lambda *args, **named: CutShort(open_channel(*args, **named), 1))
        assert "it is revoked" in await join_refusal(address, security_of(ids.box1), "box1")


async def test_a_revoked_token_is_put_out_and_its_successor_let_in(tmp_path: Path):
    ids = make_identities(tmp_path / "ids")
    file = ids.coordinator / "token"
    head = load_security(None, token_file=file, environment={}, role=Role.COORDINATOR)
    box1, box2 = (LinkSecurity(token=security_of(directory).token) for directory in (ids.box1, ids.box2))
    async with joining(tmp_path / "split", head) as address:
        one, two = await join(address, box1, "box1"), await join(address, box2, "box2")
        revoke(ids.ca, lambda identity: identity.name == "box1", NOW)
        await put_out(one)
        assert "does not accept this join token" in await join_refusal(address, box1, "box1")
        assert not two.lost.done()
        fresh = LinkSecurity(token=issued_token(ids.ca, Identity(Role.STAGE, "box1", "box1")))
        successor = await join(address, fresh, "box1", "p2")
        for member in (one, two, successor):
            await member.close()


async def test_a_stage_ends_the_calls_of_a_revoked_coordinator(tmp_path: Path):
    """It learns of it from another coordinator: nothing was copied to the stage's host."""
    ids = make_identities(tmp_path / "ids")
    issue(ids.ca, "head2", [], 30, ids.ca / "second", NOW, role=Role.COORDINATOR)
    async with (
        guarded_stage(security_of(ids.box2)) as (stage, address, listener),
        await configured(stage, address, security_of(ids.coordinator)) as one,
    ):
        await one.listen()
        revoke(ids.ca, lambda identity: identity.host == "head", NOW)
        (ids.box2 / "crl.pem").unlink()
        async with Coordinator(stage, route_id=99, security=security_of(ids.ca / "second")) as second:
            await second.client.revoke((ids.ca / "crl.pem").read_bytes())
            async with asyncio.timeout(WAIT_S):
                assert "it is revoked" in (await one.lost).message
            with pytest.raises(UnauthenticatedError, match="it is revoked"):
                await one.client.describe()
            await second.client.describe()
            with pytest.raises(RelaylineError, match="cannot be used"):
                await second.client.revoke(b"nonsense")
        assert listener.guard.revocations.number == 1


async def test_a_link_of_a_revoked_neighbour_ends(tmp_path: Path):
    ids = make_identities(tmp_path / "ids")
    async with guarded_stage(security_of(ids.box2)) as (stage, address, _):
        head = security_of(ids.coordinator)
        async with await configured(stage, address, head, upstream_pass="p", upstream_name="box1") as one:
            lost: asyncio.Future[RelaylineError] = asyncio.get_running_loop().create_future()
            link = await RelayLink.open(address, one.hello(), lost.set_result, security_of(ids.box1), "p")
            revoke(ids.ca, lambda identity: identity.name == "box1", NOW)
            async with asyncio.timeout(WAIT_S):
                assert "revoked" in (await lost).message
            await link.close()


class ObservedClient(StageClient):
    """Knows when its stage has got the revocation list."""

    def __init__(self, address: str, security: LinkSecurity) -> None:
        super().__init__(address, security)
        self.has_revoked = asyncio.Event()

    async def revoke(self, crl_pem: bytes) -> None:
        await super().revoke(crl_pem)
        self.has_revoked.set()


async def test_a_coordinator_leaves_a_stage_whose_own_credential_is_revoked(tmp_path: Path):
    """Its addresses are given: no membership ends for it."""
    ids = make_identities(tmp_path / "ids")
    head = security_of(ids.coordinator)
    lost: asyncio.Future[RelaylineError] = asyncio.get_running_loop().create_future()
    async with guarded_stage(security_of(ids.box2)) as (_, address, listener):
        known, clients = Revocations(head), [ObservedClient(address, head)]
        await check_servers([address], head, known)
        telling = asyncio.create_task(push_revocations(known, clients, head, lost.set_result))
        revoke(ids.ca, lambda identity: identity.name == "box1", NOW)
        async with asyncio.timeout(WAIT_S):
            await clients[0].has_revoked.wait()
        assert listener.guard.revocations.number == 1
        heard: list[int] = []
        await check_servers([address], head, known, heard.append)
        assert heard == [0], "it is there: nothing else asks it until an epoch begins"
        assert not lost.done()
        revoke(ids.ca, lambda identity: identity.name == "box2", NOW)
        async with asyncio.timeout(WAIT_S):
            assert (await lost).message == f"the credential of {address} (stage box2 on box2) {IS_REVOKED}"
        with pytest.raises(UnauthenticatedError, match="is revoked") as refusal:
            await check_servers(["127.0.0.1:1", address], head, known, heard.append)
        assert (refusal.value.stage_index, heard) == (1, [0])
        telling.cancel()
        await clients[0].close()


# --- credentials at the start of a process ----------------------------------------------------------------------------


def test_a_process_refuses_credentials_of_another_role(ids: Identities):
    cases = (
        (ids.box1, Role.COORDINATOR, "", "the join token is for a stage, but this process is a coordinator"),
        (ids.coordinator, Role.STAGE, "box1", "the join token is for a coordinator, but this process is a stage"),
        (ids.box1, Role.STAGE, "box2", "the join token is for stage box1 on box1, but this process is stage box2"),
    )
    for directory, role, name, says in cases:
        with pytest.raises(UsageError, match=says):
            load_security(directory, environment={}, role=role, name=name)
    with pytest.raises(UsageError, match="states no role, like those of older versions; make one with"):
        load_security(None, token="0123456789abcdef", environment={}, role=Role.STAGE, name="alpha")
    assert load_security(ids.box1, environment={}, role=Role.STAGE, name="box1").identity == (
        Identity(Role.STAGE, "box1", "box1")
    )


def test_a_credential_of_nobody_is_never_a_revoked_one():
    assert not Revocations(LinkSecurity()).is_revoked(Credential(None, 0))
