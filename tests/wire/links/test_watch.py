"""Goal: a hung peer is noticed within LOST_AFTER_S at both ends, and a busy one never counts as hung.

Method: real connections in this process, with beats of milliseconds. The hung peer is a handler or a caller that sends
nothing more. A peer that lives has sent many beats, however long they took: on a busy machine some come late. Real
stopped processes are in test_hung_processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from relayline.stage.joining.client import JOIN
from relayline.wire.common import bounds
from relayline.wire.common.errors import ProtocolError, RelaylineError, StageLostError, StaleEpochError
from relayline.wire.links import rpc
from relayline.wire.links.relay_link import RelayLink
from relayline.wire.links.silence import Silence, looks_of
from relayline.wire.links.watch import Watch, answer, first_beat, until_silent
from relayline.wire.pb.relayline.v1 import join_pb2 as join_pb
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.fakes import EPOCH, ROUTE
from tests.support.join_support import JoinPort, join_port
from tests.support.served_stage import Coordinator, served
from tests.support.stage_links import prompt, token_after

WAIT_S = 20


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred times as fast, so that silence is measured in tens of milliseconds."""
    for name in ("BEAT_EVERY_S", "QUIET_AFTER_S", "LOST_AFTER_S"):
        monkeypatch.setattr(bounds, name, getattr(bounds, name) / 100)


QUICK_S = bounds.LOST_AFTER_S / 100
N_BEATS = 3 * looks_of(bounds.LOST_AFTER_S)


@pytest.fixture
def forgiving(monkeypatch: pytest.MonkeyPatch) -> None:
    """No peer that sends beats at all is lost, and one that sends none is before the test's own bound."""
    monkeypatch.setattr(bounds, "LOST_AFTER_S", WAIT_S / 2)


class Heard:
    """How often each end of this process has heard the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._times: Counter[Silence] = Counter()
        self._changed = asyncio.Event()
        heard = Silence.heard

        def counted(silence: Silence) -> None:
            heard(silence)
            self._times[silence] += 1
            self._changed.set()

        monkeypatch.setattr(Silence, "heard", counted)

    async def until(self, n_ends: int) -> None:
        """Wait until that many ends have heard N_BEATS from now on."""
        self._times.clear()
        async with asyncio.timeout(WAIT_S):
            while sum(times >= N_BEATS for times in self._times.values()) < n_ends:
                self._changed.clear()
                await self._changed.wait()


def test_silence_is_counted_in_looks_and_ended_by_any_sign():
    silence = Silence()
    n_last = looks_of(bounds.LOST_AFTER_S)
    assert [silence.look() for _ in range(n_last - 1)] == list(range(1, n_last))
    assert not silence.is_final
    silence.heard()
    for _ in range(n_last - 1):
        silence.look()
    assert not silence.is_final
    silence.look()
    assert silence.is_final


class Peer:
    """A server whose Watch and Relay do what the test says."""

    def __init__(self) -> None:
        self.address = ""
        self.hellos: list[tuple[int, int]] = []
        self.n_calls = 0
        self.over = asyncio.Event()


Handler = Callable[[Peer, Any], Awaitable[None]]


@contextlib.asynccontextmanager
async def peer(watch: Handler | None) -> AsyncIterator[Peer]:
    made = Peer()

    async def handle_watch(_: Any, context: Any) -> None:
        made.n_calls += 1
        assert watch is not None
        await watch(made, context)

    async def handle_relay(_: Any, context: Any) -> None:
        await context.read()
        await context.write(
            rpc.serialize(pb.RelayResponse(accepted=pb.LinkAccepted(credit_bytes=1 << 20, max_rows=64)))
        )
        await made.over.wait()  # reads nothing more, and says nothing

    make = grpc.stream_stream_rpc_method_handler
    handlers = {"Relay": make(handle_relay)} | ({"Watch": make(handle_watch)} if watch else {})
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(rpc.SERVICE, handlers),))
    made.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield made
    finally:
        made.over.set()
        await server.stop(0)


async def alive(made: Peer, context: Any) -> None:
    hello = await first_beat(context)
    made.hellos.append((hello.route_id, hello.epoch))
    await answer(context, Silence())


async def hangs(made: Peer, context: Any) -> None:
    await context.write(b"")
    await made.over.wait()


async def breaks_after_three_beats(_: Peer, context: Any) -> None:
    for _ in range(3):
        await context.write(b"")
    await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")


class Signs:
    """The reports of a watch."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[RelaylineError] = asyncio.get_running_loop().create_future()
        self.n_heard = 0
        self.changed = asyncio.Event()

    def heard(self) -> None:
        self.n_heard += 1
        self.changed.set()

    async def until_heard(self, n_times: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.n_heard < n_times:
                self.changed.clear()
                await self.changed.wait()


async def never(*_: object) -> None:
    await asyncio.Event().wait()


async def long_enough() -> None:
    """Three times the silence that is not forgiven."""
    for _ in range(3):
        await until_silent(Silence())


def watch(address: str, signs: Signs) -> Watch:
    return Watch(address, (7, 3), signs.lost.set_result, who="stage 1", on_heard=signs.heard)


async def test_a_peer_that_hangs_is_lost_and_named():
    signs = Signs()
    async with peer(hangs) as other:
        one = watch(other.address, signs)
        async with asyncio.timeout(WAIT_S):
            error = await signs.lost
        assert isinstance(error, StageLostError)
        assert error.message.startswith("stage 1 has not answered for ")
        await one.close()


async def test_a_watch_that_fails_is_told_once_and_goes_on(caplog: pytest.LogCaptureFixture):
    signs, faults = Signs(), [RuntimeError("no room"), RuntimeError("no room")]

    def heard() -> None:
        if faults:
            raise faults.pop()
        signs.heard()

    async with peer(alive) as other:
        one = Watch(other.address, (7, 3), lambda _: None, who="stage 1", on_heard=heard)
        await signs.until_heard(1)
        await one.close()
    (record,) = [each for each in caplog.records if "tried again" in each.message]
    assert (record.message, record.exc_info is not None) == ("the watch over stage 1 is tried again", True)


@pytest.mark.usefixtures("forgiving")
async def test_a_peer_that_beats_is_heard_and_never_lost():
    signs = Signs()
    async with peer(alive) as other:
        one = watch(other.address, signs)
        await signs.until_heard(N_BEATS)
        assert not signs.lost.done()
        assert other.hellos == [(7, 3)]
        await one.close()


@pytest.mark.usefixtures("forgiving")
async def test_a_watch_whose_own_connection_breaks_is_made_again():
    signs = Signs()
    async with peer(breaks_after_three_beats) as other:
        one = watch(other.address, signs)
        await signs.until_heard(12)
        assert not signs.lost.done()
        assert other.n_calls >= 4
        await one.close()


async def test_an_address_where_nobody_is_any_more_is_lost():
    signs = Signs()
    async with peer(alive) as other:
        address = other.address
    one = watch(address, signs)
    async with asyncio.timeout(WAIT_S):
        await signs.lost
    await one.close()


@pytest.mark.usefixtures("forgiving")
async def test_a_version_that_knows_nothing_of_it_is_not_lost_for_that():
    signs = Signs()
    async with peer(None) as other:
        one = watch(other.address, signs)
        async with asyncio.timeout(WAIT_S):
            await one._task  # it has given up watching
        assert not signs.lost.done()
        await one.close()


@pytest.mark.parametrize("is_watched", [True, False])
async def test_a_link_whose_other_end_hangs_is_lost_while_nothing_is_sent(is_watched: bool):
    lost: asyncio.Future[RelaylineError] = asyncio.get_running_loop().create_future()
    hello = pb.LinkOpen(route_id=7, epoch=3, n_embd=8, dtype=pb.DTYPE_F32)
    async with peer(hangs) as other:
        link = await RelayLink.open(other.address, hello, lost.set_result, is_watched=is_watched)
        if is_watched:
            async with asyncio.timeout(WAIT_S):
                assert "has not answered for" in (await lost).message
        else:
            await long_enough()
            assert not lost.done()
        await link.close()


@pytest.mark.usefixtures("forgiving")
async def test_a_link_that_is_stuck_behind_its_data_is_not_cut(monkeypatch: pytest.MonkeyPatch):
    """The neighbour reads nothing that is sent, as over a slow line, and still sends heartbeats."""
    lost: asyncio.Future[RelaylineError] = asyncio.get_running_loop().create_future()
    hello = pb.LinkOpen(route_id=7, epoch=3, n_embd=8, dtype=pb.DTYPE_F32)
    heard = Heard(monkeypatch)
    async with peer(alive) as other:
        link = await RelayLink.open(other.address, hello, lost.set_result)

        async def fill() -> None:
            for _ in range(8):
                await link._call.write(bytes(bounds.MESSAGE_BYTES_MAX))

        stuck = asyncio.create_task(fill())
        await heard.until(2)
        assert not lost.done()
        assert not stuck.done()
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)
        await link.close()


# --- the stage's end --------------------------------------------------------------------------------------------------


async def test_a_stage_ends_the_epoch_of_a_user_that_hangs():
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        call = one.channel.stream_stream(rpc.method("Watch"))()
        await call.write(rpc.serialize(pb.WatchRequest(route_id=ROUTE, epoch=EPOCH)))
        fault = (await one.reply()).faults[0]  # said nothing more since
        assert (fault.session_id, fault.label) == (0, "stage_lost")
        assert "127.0.0.1, which sends to stage 1, has not answered for" in fault.message
        call.cancel()


@pytest.mark.usefixtures("forgiving")
async def test_a_user_that_beats_keeps_its_epoch_and_one_of_another_epoch_ends_nothing():
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        signs = Signs()
        mine = Watch(stage.address, (ROUTE, EPOCH), signs.lost.set_result, on_heard=signs.heard)
        call = one.channel.stream_stream(rpc.method("Watch"))()
        await call.write(rpc.serialize(pb.WatchRequest(route_id=ROUTE, epoch=EPOCH - 1)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(WAIT_S):
                await call.read()
        assert isinstance(rpc.typed(caught.value, "stage"), StaleEpochError)
        await signs.until_heard(N_BEATS)
        await one.send(*prompt(1))
        assert (await one.reply()).samples
        assert not signs.lost.done()
        await mine.close()


@pytest.mark.usefixtures("forgiving")
async def test_a_stage_whose_native_step_takes_long_is_not_lost():
    go_on, signs = threading.Event(), Signs()
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        mine = Watch(stage.address, (ROUTE, EPOCH), signs.lost.set_result, on_heard=signs.heard)
        stage.engine.on_decode = lambda: go_on.wait(WAIT_S)
        frames = prompt(1)
        await one.send(*frames)
        await signs.until_heard(N_BEATS)
        assert not signs.lost.done()
        go_on.set()
        assert (await one.reply()).samples[0].token == token_after(frames[1].payload)
        await mine.close()


async def test_a_watch_ends_although_grpc_swallows_its_cancellation(monkeypatch: pytest.MonkeyPatch):
    """gRPC does where a call's connection fails in the same turn: the reader gets the failure in place of the end."""
    reading, signs = asyncio.Event(), Signs()

    class Call:
        async def write(self, _: bytes) -> None: ...

        def cancel(self) -> None: ...

        async def read(self) -> bytes:
            try:
                reading.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                nothing = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing) from None
            return b""

    async with peer(None) as other:
        monkeypatch.setattr(bounds, "BEAT_EVERY_S", WAIT_S)
        one = watch(other.address, signs)
        monkeypatch.setattr(one._channel, "stream_stream", lambda *_, **__: lambda **__: Call())
        await reading.wait()
        async with asyncio.timeout(WAIT_S / 2):
            await one.close()


async def test_a_first_sign_that_is_none_is_refused():
    async with served() as stage, Coordinator(stage) as one:
        call = one.channel.stream_stream(rpc.method("Watch"))()
        await call.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert isinstance(rpc.typed(caught.value, "stage"), ProtocolError)


# --- the join link ----------------------------------------------------------------------------------------------------


async def until_held(port: JoinPort, holder: bool) -> None:
    place, changed = port.roster._membership.places[0], asyncio.Event()
    port.roster.on_change = lambda _: changed.set()
    async with asyncio.timeout(WAIT_S):
        while (place.member is not None) is not holder:
            changed.clear()
            await changed.wait()


@pytest.mark.usefixtures("forgiving")
async def test_a_member_that_hangs_loses_its_place_and_one_that_beats_keeps_it(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    heard = Heard(monkeypatch)
    monkeypatch.setattr("relayline.stage.joining.client.until_silent", never)  # only one end judges
    async with join_port(tmp_path) as port:
        member = await port.join()
        await heard.until(2)
        await until_held(port, holder=True)
        monkeypatch.setattr(bounds, "LOST_AFTER_S", QUICK_S)
        await member._writing.acquire()  # from here on it says nothing
        await until_held(port, holder=False)
        async with asyncio.timeout(WAIT_S):
            assert "it has not answered for" in (await member.lost).message
        member._writing.release()
        await member.close()


@pytest.mark.usefixtures("forgiving")
async def test_a_report_that_is_cancelled_halfway_ends_the_membership_and_is_no_silent_end(tmp_path: Any):
    async with join_port(tmp_path) as port:
        member = await port.join()
        member._call.cancel()  # as gRPC turns a cancelled write
        async with asyncio.timeout(WAIT_S):
            assert "was cancelled halfway" in (await member.lost).message
        await member.close()


async def test_a_coordinator_that_hangs_ends_the_membership(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("relayline.coordinator.joining.members.beat", never)
    monkeypatch.setattr("relayline.coordinator.joining.members.until_silent", never)  # only one end judges
    async with join_port(tmp_path) as port:
        member = await port.join()
        async with asyncio.timeout(WAIT_S):
            error = await member.lost
        assert error.message.startswith(f"the coordinator at {port.address} has not answered for")
        await member.close()


async def test_ends_of_which_one_knows_nothing_of_beats_have_none(tmp_path: Any):
    async with join_port(tmp_path) as port:
        channel = rpc.open_channel(port.address)
        call = channel.stream_stream(JOIN)()
        version = port.roster._membership._software_version
        old = join_pb.StageHello(
            protocol_version=bounds.PROTOCOL_VERSION, software_version=version, name="box2", process_id="old"
        )
        await call.write(rpc.serialize(join_pb.JoinRequest(hello=old)))
        assert not join_pb.JoinResponse.FromString(await call.read()).beats
        second = asyncio.create_task(call.read())
        await long_enough()
        assert not second.done()
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        await channel.close()
