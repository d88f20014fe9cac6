"""gRPC reflection: off by default, in the form that tools use, and open to callers of the port's other methods."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2 as pb

from relayline.coordinator.joining.members import SERVICE as JOINING
from relayline.deploy.testing.engines import stage_config
from relayline.deploy.testing.tiny_slices import TinyShape, write_pipeline
from relayline.stage.process import serve
from relayline.wire.common import bounds
from relayline.wire.links import role_tokens, rpc
from relayline.wire.links.listening import Listener
from relayline.wire.links.role_tokens import token_for
from relayline.wire.links.roles import REFLECTION_METHOD, REFLECTION_SERVICES, Identity, Role
from relayline.wire.links.security import PLAINTEXT, LinkSecurity
from relayline.wire.settings.table import EngineSettings
from tests.support.identities import Identities, make_identities, security_of
from tests.support.join_support import join_port

WAIT_S = 20
TRIES = 20
V1, V1ALPHA = REFLECTION_SERVICES
ROOT = role_tokens.new_root()
BOX1, BOX2 = Identity(Role.STAGE, "localhost", "box1"), Identity(Role.STAGE, "localhost", "box2")
LIST = pb.ServerReflectionRequest(list_services="*").SerializeToString()


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Identities:
    return make_identities(tmp_path_factory.mktemp("identities"))


async def asked(channel: grpc.aio.Channel, request: bytes, service: str = V1ALPHA) -> pb.ServerReflectionResponse:
    call = channel.stream_stream(f"/{service}/{REFLECTION_METHOD}")(timeout=WAIT_S)
    with contextlib.suppress(grpc.aio.AioRpcError):  # reading gives the reason
        await call.write(request)
        await call.done_writing()
    answer = await call.read()
    if answer is grpc.aio.EOF:
        raise AssertionError("no answer")
    return pb.ServerReflectionResponse.FromString(answer)


async def listed(address: str, security: LinkSecurity = PLAINTEXT, to: Identity | Role | None = None) -> set[str]:
    for _ in range(TRIES):
        try:
            async with rpc.open_channel(address, security, to) as channel:
                answer = await asked(channel, LIST)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INTERNAL:  # gRPC loses the reason if a call ends while it sends
                continue
            raise
        return {service.name for service in answer.list_services_response.service}
    raise AssertionError(f"no reason in {TRIES} tries")


@contextlib.asynccontextmanager
async def port_of(security: LinkSecurity) -> AsyncIterator[str]:
    listener = Listener(security, "stage 1")
    listener.add_reflection(rpc.SERVICE)
    port = listener.add_port("127.0.0.1", 0)
    await listener.server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await listener.stop(None)


async def test_a_stage_lists_its_services_where_reflection_is_on(tmp_path: Path) -> None:
    artifact = write_pipeline(tmp_path, TinyShape(), [2])[0]
    few = {"n_lanes": 2, "ctx_tokens": 32, "n_threads": 1, "calibrate": False, "verify": False}
    async with serve(stage_config(artifact, reflection=True, **few)) as (address, _, _):
        assert await listed(address) == {rpc.SERVICE, "grpc.health.v1.Health", *REFLECTION_SERVICES}
    async with serve(stage_config(artifact, **few)) as (address, _, _):
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await listed(address)


async def test_the_join_port_follows_the_same_setting(tmp_path: Path) -> None:
    async with join_port(tmp_path / "on", EngineSettings(reflection=True)) as port:
        assert await listed(port.address) == {JOINING, *REFLECTION_SERVICES}
    async with join_port(tmp_path / "off") as port:
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await listed(port.address)


@pytest.mark.parametrize("service", REFLECTION_SERVICES)
async def test_a_tool_finds_the_messages_of_a_service(service: str) -> None:
    symbol = pb.ServerReflectionRequest(file_containing_symbol=rpc.SERVICE).SerializeToString()
    unknown = pb.ServerReflectionRequest(file_containing_symbol="relayline.v1.Nothing").SerializeToString()
    async with port_of(PLAINTEXT) as address, rpc.open_channel(address) as channel:
        answer = await asked(channel, symbol, service)
        file = FileDescriptorProto.FromString(answer.file_descriptor_response.file_descriptor_proto[0])
        assert "Describe" in {method.name for method in file.service[0].method}
        assert (await asked(channel, unknown, service)).error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


@pytest.mark.parametrize("data", [b"\xff\xff", LIST + b"\x1a\x00" * bounds.UNARY_BYTES_MAX], ids=["garbage", "long"])
async def test_a_request_that_is_none_ends_its_call_in_one_line(data: bytes) -> None:
    data = data[: bounds.UNARY_BYTES_MAX + 10]  # above the handler's bound, where the port itself allows longer ones
    listener = Listener(PLAINTEXT, "stage 1", 4 * bounds.UNARY_BYTES_MAX)
    listener.add_reflection(rpc.SERVICE)
    address = f"127.0.0.1:{listener.add_port('127.0.0.1', 0)}"
    await listener.server.start()
    try:
        async with rpc.open_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match=r"not a request|over the limit of 65536"):
                await asked(channel, data)
    finally:
        await listener.stop(None)


async def test_with_certificates_it_takes_the_roles_of_other_calls(ids: Identities) -> None:
    async with port_of(security_of(ids.box1)) as address:
        for directory in (ids.coordinator, ids.box2):
            assert rpc.SERVICE in await listed(address, security_of(directory))
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await listed(address, security_of(ids.monitor))


async def test_with_tokens_it_takes_the_proof_of_the_ports_other_calls() -> None:
    stage = LinkSecurity(token=token_for(ROOT, BOX1, 0))
    coordinator = LinkSecurity(token=ROOT)
    other = LinkSecurity(token=token_for(ROOT, BOX2, 0))
    async with port_of(stage) as address:
        assert rpc.SERVICE in await listed(address, coordinator, BOX1)
        for security, to in ((coordinator, BOX2), (other, Role.COORDINATOR), (PLAINTEXT, None)):
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                await listed(address, security, to)
    async with port_of(coordinator) as address:
        assert rpc.SERVICE in await listed(address, other, Role.COORDINATOR)
        for security, to in ((coordinator, BOX1), (PLAINTEXT, None)):
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                await listed(address, security, to)
