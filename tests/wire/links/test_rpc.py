"""Goal: errors keep their kind across a real gRPC call, and gRPC knows every channel option.

Method: an in-process grpc.aio server whose handlers are passed in by each test.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc

from relayline.deploy.testing.paths import ROOT
from relayline.wire.common import bounds
from relayline.wire.common.errors import (
    HandshakeError,
    InternalError,
    NativeError,
    ProtocolError,
    RelaylineError,
    StageLostError,
    StaleEpochError,
)
from relayline.wire.links import rpc
from relayline.wire.links.security import LinkSecurity
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.polling import pause
from tests.wire.common.test_errors import OURS

Handler = Callable[[pb.DescribeRequest, Any], Awaitable[pb.DescribeResponse]]


@contextlib.asynccontextmanager
async def serving(describe: Handler, host: str = "127.0.0.1") -> AsyncIterator[grpc.aio.Channel]:
    """A server with one method, and a channel to it, which calls it by this name."""
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    handler = grpc.unary_unary_rpc_method_handler(describe, rpc.parser(pb.DescribeRequest), rpc.serialize)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(rpc.SERVICE, {"Describe": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = rpc.open_channel(f"{host}:{port}", LinkSecurity(insecure=True))
    try:
        yield channel
    finally:
        await channel.close()
        await server.stop(None)


async def describe(channel: grpc.aio.Channel, timeout_s: float = 10) -> Any:
    return await rpc.call(
        channel, "Describe", pb.DescribeRequest(protocol_version=1), pb.DescribeResponse, "b", timeout_s
    )


def raising(error: RelaylineError) -> Handler:
    async def handler(request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        await rpc.abort(context, error)

    return handler


async def test_a_call_carries_request_and_reply():
    async def answer(request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        return pb.DescribeResponse(protocol_version=request.protocol_version, n_embd=7)

    async with serving(answer) as channel:
        assert await describe(channel) == pb.DescribeResponse(protocol_version=1, n_embd=7)


@pytest.mark.parametrize("leaf", OURS, ids=lambda leaf: leaf.__name__)
async def test_every_error_keeps_its_kind(leaf: type[RelaylineError]):
    async with serving(raising(leaf("what happened: 1 %\nsecond line, größer"))) as channel:
        with pytest.raises(leaf) as caught:
            await describe(channel)
    assert type(caught.value) is leaf
    assert caught.value.message == "what happened: 1 %\\nsecond line, größer", "one line, whoever the sender is"


async def test_longer_text_is_cut_to_its_bound_and_still_typed():
    text = "ä" * bounds.ERROR_TEXT_BYTES_MAX  # percent-encoded, each takes six bytes of metadata
    async with serving(raising(NativeError(text))) as channel:
        with pytest.raises(NativeError) as caught:
            await describe(channel)
    assert caught.value.message == "ä" * (bounds.ERROR_TEXT_BYTES_MAX // 2)


@pytest.mark.parametrize(
    ("code", "expected", "text"),
    [
        (grpc.StatusCode.UNAVAILABLE, StageLostError, "b cannot be reached (why)"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, StageLostError, "b did not answer in time"),
        (grpc.StatusCode.CANCELLED, StageLostError, "b closed the stream"),
        (grpc.StatusCode.UNIMPLEMENTED, HandshakeError, "b is not a relayline stage of this version (why)"),
        (grpc.StatusCode.INTERNAL, StageLostError, "the connection to b broke (why)"),
        (grpc.StatusCode.UNKNOWN, InternalError, "b failed: why"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ProtocolError, "b answered RESOURCE_EXHAUSTED: why"),
    ],
)
async def test_a_status_without_label(code: grpc.StatusCode, expected: type[RelaylineError], text: str):
    async def abort(request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        await context.abort(code, "why")

    async with serving(abort) as channel:
        with pytest.raises(expected) as caught:
            await describe(channel)
    assert caught.value.message == text


async def test_a_peer_that_is_not_there_is_named_with_the_words_of_the_system_alone():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        async with rpc.open_channel(f"127.0.0.1:{taken.getsockname()[1]}", LinkSecurity(insecure=True)) as channel:
            with pytest.raises(StageLostError) as caught:
                await describe(channel)
    assert caught.value.message == "b cannot be reached (Connection refused)"


async def test_a_label_of_a_newer_peer_falls_back_to_its_status():
    async def abort(request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "later", (("relayline-error", "invented_later"),))

    async with serving(abort) as channel:
        with pytest.raises(StageLostError, match="later"):
            await describe(channel)


async def test_a_handler_that_fails_by_itself_is_an_internal_error():
    async def fail(request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        raise KeyError("oops")

    async with serving(fail) as channel:
        with pytest.raises(InternalError, match="b failed"):
            await describe(channel)


async def test_an_unknown_method_and_garbage_bytes_end_the_call_only():
    async def answer(request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        return pb.DescribeResponse()

    async with serving(answer) as channel:
        with pytest.raises(HandshakeError):
            await rpc.call(channel, "Invented", pb.StatusRequest(), pb.StatusResponse, "b", 10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(rpc.method("Describe"))(b"\xff\xff\xff")
        assert isinstance(rpc.typed(caught.value, "b"), InternalError)
        assert await describe(channel) == pb.DescribeResponse()


async def test_a_reply_that_does_not_parse_is_a_protocol_error():
    async def answer(request: pb.DescribeRequest, context: Any) -> Any:
        return pb.ReturnResponse(samples=[pb.Sampled(token=2**32 - 1)])  # field 3 is not UTF-8

    async with serving(answer) as channel:
        with pytest.raises(ProtocolError, match="b: answer to Describe cannot be read"):
            await describe(channel)


async def test_nobody_listening_is_a_lost_stage():
    with socket.socket() as taken:  # bound but not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        channel = rpc.open_channel(f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(StageLostError, match="cannot be reached"):
            await describe(channel)
        await channel.close()


async def test_a_deadline_is_a_lost_stage():
    async def hang(request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        await cancelled.wait()
        return pb.DescribeResponse()

    cancelled = asyncio.Event()
    async with serving(hang) as channel:
        with pytest.raises(StageLostError, match="in time"):
            await describe(channel, timeout_s=0.05)
        cancelled.set()


@contextlib.asynccontextmanager
async def held() -> AsyncIterator[tuple[grpc.aio.Channel, asyncio.Task[Any]]]:
    """A channel, and a call over it that the other side has taken and does not answer."""

    async def hang(request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        entered.set()
        await never.wait()
        return pb.DescribeResponse()

    entered, never = asyncio.Event(), asyncio.Event()
    async with serving(hang) as channel:
        calling = asyncio.create_task(describe(channel))
        async with asyncio.timeout(60):
            await entered.wait()
        yield channel, calling


async def test_a_channel_that_closes_under_a_call_is_a_lost_stage():
    async with held() as (channel, calling):
        await channel.close()
        with pytest.raises(StageLostError, match="was closed before it answered Describe"):
            await calling
        with pytest.raises(StageLostError, match="connection to b is closed"):
            await describe(channel)


async def test_a_call_that_is_cancelled_stays_cancelled():
    async with held() as (_, calling):
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
    assert calling.cancelled()


async def test_a_call_that_ended_behind_unread_messages_is_let_go():
    """As where a stage was stopped for so long that the other side gave it up: its first heartbeat is one too many."""
    ended = asyncio.Event()

    async def talk(_: Any, context: Any) -> None:
        await context.read()
        for _ in range(3):
            await context.write(b"heartbeat")
        context.add_done_callback(lambda _: ended.set())

    def kept() -> list[asyncio.Task[Any]]:
        return [task for task in asyncio.all_tasks() if "_handle_status_once_received" in repr(task)]

    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    handlers = {"Watch": grpc.stream_stream_rpc_method_handler(talk)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(rpc.SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = rpc.open_channel(f"127.0.0.1:{port}")
    try:
        call = channel.stream_stream(rpc.method("Watch"))()
        await call.write(b"hello")
        async with asyncio.timeout(30):
            await ended.wait()
            with contextlib.suppress(grpc.aio.AioRpcError):
                while True:
                    await call.write(b"heartbeat")
                    await pause()
            assert await call.details() == "Internal error from Core"
            assert not call.cancel(), "gRPC takes the call as done"
            assert kept()
            rpc.end_call(call)
            while kept():  # each keeps its connection
                await pause()
    finally:
        await channel.close()
        await server.stop(None)


async def test_a_taken_port_fails_loudly():
    async with serving(raising(StaleEpochError("x"))):
        first, second = grpc.aio.server(options=rpc.SERVER_OPTIONS), grpc.aio.server(options=rpc.SERVER_OPTIONS)
        port = first.add_insecure_port("127.0.0.1:0")
        with pytest.raises(RuntimeError):
            second.add_insecure_port(f"127.0.0.1:{port}")
        await first.stop(None)
        await second.stop(None)


@pytest.mark.parametrize("key", sorted({key for key, _ in (*rpc.CHANNEL_OPTIONS, *rpc.SERVER_OPTIONS)}))
def test_gprc_knows_every_option(key: str):
    """gRPC ignores unknown keys in silence, so the names are looked up in its own library."""
    with Path(cygrpc.__file__).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        assert library.find(key.encode() + b"\0") >= 0
        assert library.find(b"grpc.invented_by_this_test\0") < 0


@pytest.mark.parametrize("name", re.findall(r"\w+", os.environ["GRPC_EXPERIMENTS"]))
def test_grpc_knows_every_experiment_that_is_switched_off(name: str):
    """It would only log an unknown one and poll with its own threads again: then a hop must be measured again."""
    assert name in {"event_engine_client", "event_engine_listener"}, "the environment of this test run says otherwise"
    with Path(cygrpc.__file__).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        assert library.find(name.encode() + b"\0") >= 0


async def test_names_are_resolved_as_by_other_programs() -> None:
    """As in /etc/hosts and with mDNS. gRPC's own resolver would ask a DNS server for this form of 127.0.0.1."""

    async def answer(request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        return pb.DescribeResponse(n_embd=7)

    async with serving(answer, host="127.1") as channel:
        assert (await describe(channel)).n_embd == 7


SEEN_AT_FIRST_IMPORT = """
import importlib.abc, importlib, os, sys
class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_EXPERIMENTS"))
            sys.exit()
sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize(
    "module",
    ["relayline.stage.process", "relayline.stage.joining.join",
     "relayline.coordinator.engine.stage_client", "relayline.coordinator.serve", "benches.hop", "benches.hop_stage",
     "benches.compare"],
)  # fmt: skip
def test_grpc_finds_its_settings_whatever_is_imported_first(module: str):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    command = [sys.executable, "-c", SEEN_AT_FIRST_IMPORT, module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == wire_setting()


def wire_setting() -> str:
    source = (ROOT / "wire" / "__init__.py").read_text()
    found = re.search(r'"GRPC_EXPERIMENTS", "([^"]+)"', source)
    assert found
    return found[1]


def test_channel_options_equal_the_bounds():
    for options in (dict(rpc.CHANNEL_OPTIONS), dict(rpc.SERVER_OPTIONS)):
        assert options["grpc.max_send_message_length"] == bounds.MESSAGE_BYTES_MAX
        assert options["grpc.keepalive_time_ms"] == bounds.KEEPALIVE_TIME_MS
    # A server that allows fewer pings than its clients send ends their connections with "too_many_pings".
    assert dict(rpc.SERVER_OPTIONS)["grpc.http2.min_ping_interval_without_data_ms"] < bounds.KEEPALIVE_TIME_MS


def test_options_that_only_count_when_something_goes_wrong():
    channel, server = dict(rpc.CHANNEL_OPTIONS), dict(rpc.SERVER_OPTIONS)
    for options in (channel, server):  # a link in a long prefill sends nothing, and is looked after all the same
        assert (options["grpc.keepalive_permit_without_calls"], options["grpc.http2.max_pings_without_data"]) == (1, 0)
    assert channel["grpc.enable_retries"] == channel["grpc.enable_http_proxy"] == 0
    assert channel["grpc.use_local_subchannel_pool"] == 1
    assert (server["grpc.http2.max_ping_strikes"], server["grpc.so_reuseport"]) == (0, 0)
    assert server["grpc.max_concurrent_streams"] == bounds.CALLS_PER_CONNECTION_MAX
