"""A stage over real gRPC with a fake engine: handshakes, garbage, epochs, loss, two coordinators, credits."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from stage.routes import RETURN_QUEUE_MAX, ROUTES_MAX, LeftRoutes, Route
from stage.runner import OUTBOX_STEPS_MAX
from stage.step_types import RouteOutput, StepResult
from tests.fakes import (
    EPOCH,
    MAX_ROWS,
    ROUTE,
    WIDTH,
    BlockedDecode,
    control,
    greedy,
    hidden,
    logits_of,
    rows_frame,
    step_of,
    tokens_frame,
)
from tests.served_stage import Coordinator, StageUnderTest, envelope_of, served
from wire import bounds, envelope, rpc
from wire.errors import (
    ChecksumError,
    HandshakeError,
    LaneLimitError,
    NotReadyError,
    ProtocolError,
    RelaylineError,
    SessionError,
    StageLostError,
    StaleEpochError,
)
from wire.frames import Flag
from wire.pb.relayline.v1 import relayline_pb2 as pb

SAMPLE, PREFILL = Flag.WANTS_SAMPLE, Flag.PREFILL
OTHER = ROUTE + 1


def prompt(session_id: int, route_id: int = ROUTE, epoch: int = EPOCH, n_rows: int = 3) -> list[Any]:
    """An open and a whole prompt."""
    names = {"route_id": route_id, "epoch": epoch}
    return [
        control(session_id, Flag.OPEN, **names),
        rows_frame(session_id, 0, n_rows, PREFILL | SAMPLE, **names),
    ]


def token_after(*rows: np.ndarray) -> int:
    """The token that the fake engine picks for a session that holds these rows."""
    return int(logits_of([tuple(row) for part in rows for row in part.tolist()]).argmax())


# --- what a stage says and takes --------------------------------------------------------------------------------------


async def test_describe_status_and_one_token() -> None:
    async with served() as stage, Coordinator(stage) as one:
        facts = await one.client.describe()
        assert (facts.stage_index, facts.n_lanes, facts.max_rows, facts.instance_id) == (1, 4, MAX_ROWS, "fake-1")
        await one.start()
        await one.send(*prompt(5))
        (sample,) = (await one.reply()).samples
        assert (sample.session_id, sample.position) == (5, 3)
        assert sample.token == token_after(hidden(3, 500.0))
        status = await one.client.status(with_recent=True)
        assert status is not None
        assert (status.lanes_used, status.n_rows, status.envelopes_in) == (1, 3, 1)
        assert dict(status.steps_by_rows) == {3: 1}
        await one.send(control(5, Flag.CLOSE))
        await one.send(*prompt(6))
        await one.reply()
        assert (await stage.settled())[0] == 1


def guesses(session_id: int, position: int, tokens: list[int], flags: int = 0) -> Any:
    frame = rows_frame(session_id, position, hidden(len(tokens), float(position)), SAMPLE | Flag.DRAFTED | flags)
    frame.draft_tokens = tuple(tokens)
    return frame


async def test_guesses_are_answered_over_links() -> None:
    """Sent at once: right ones of two sessions, a wrong one, what follows it, and the next true row."""
    read = [hidden(3, 500.0), hidden(3, 600.0)]
    first = [token_after(each) for each in read]
    second = [token_after(each, hidden(1, 3.0)) for each in read]
    third = token_after(read[0], hidden(2, 3.0))
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        await one.send(*prompt(5), *prompt(6), guesses(5, 3, [first[0], second[0]]), guesses(6, 3, [first[1], 99, 1]))
        await one.send(guesses(5, 5, [third], Flag.GUESSED), guesses(6, 6, [7, 8], Flag.GUESSED))
        await one.send(rows_frame(6, 4, hidden(1, 9.0), SAMPLE))
        samples: list[pb.Sampled] = []
        passed: list[tuple[int, int]] = []
        while not samples or (samples[-1].session_id, samples[-1].position) != (6, 5):
            reply = await one.reply()
            assert not reply.faults
            samples += reply.samples
            passed += [(each.session_id, each.position) for each in reply.progress]
        assert [(each.position, each.token) for each in samples if each.session_id == 5][:3] == [
            *((3, first[0]), (4, second[0]), (5, third)),
        ]
        assert [(each.position, each.token) for each in samples if each.session_id == 6] == [
            *((3, first[1]), (4, second[1]), (5, token_after(read[1], hidden(1, 3.0), hidden(1, 9.0)))),
        ]
        assert passed == [(6, 6), (6, 8)]
        _, lanes = await stage.settled()
        assert sorted(len(lane) for lane in lanes if lane) == [5, 6]


async def test_a_link_with_guesses_of_a_prompt_is_ended() -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        frame = guesses(5, 0, [1, 2])
        frame.flags |= PREFILL
        await one.send(control(5, Flag.OPEN), frame)
        error = await one.refusal()
        assert isinstance(error, ProtocolError)
        assert "flags 0x7 have no meaning" in error.message


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"protocol_version": 99}, HandshakeError, "protocol 99"),
        ({"pipeline_id": "another"}, HandshakeError, "pipeline another"),
        ({"stage_index": 0}, HandshakeError, "asked to be stage 0"),
        ({"instance_id": "fake-0"}, NotReadyError, "started anew"),
        ({"next_address": "127.0.0.1:1"}, HandshakeError, "only the last stage"),
        ({"epoch": EPOCH}, StaleEpochError, "not newer"),
        ({"epoch": EPOCH - 1}, StaleEpochError, "not newer"),
    ],
)
async def test_configure_refuses_what_does_not_fit(
    changes: dict[str, Any], error: type[RelaylineError], text: str
) -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        await one.send(*prompt(5))
        await one.reply()
        with pytest.raises(error, match=text):
            await one.configure(**({"epoch": EPOCH + 1} | changes))
        await one.send(rows_frame(5, 3, 1, SAMPLE))
        assert (await one.reply()).samples[0].position == 4, "a refusal leaves the running epoch alone"


async def test_configure_refuses_a_downstream_that_is_not_there() -> None:
    async with served(0, 2) as stage, Coordinator(stage) as one:
        with pytest.raises(StageLostError, match=r"127\.0\.0\.1:1"):
            await one.configure(next_address="127.0.0.1:1")
        with pytest.raises(HandshakeError, match="only the last stage"):
            await one.configure()
        assert stage.service._routes == {}


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"protocol_version": 99}, HandshakeError, f"protocol 99 here {bounds.PROTOCOL_VERSION}"),
        ({"pipeline_id": "another"}, HandshakeError, "pipeline another"),
        ({"source_sha256": "f" * 64}, HandshakeError, "model ffffffffffff"),
        ({"next_layer": 3}, HandshakeError, "next layer 3 here 1"),
        ({"n_embd": 8}, HandshakeError, "width 8 here 4"),
        ({"dtype": pb.DTYPE_TOKENS}, HandshakeError, "token rows go to stage 0"),
        ({"dtype": 77}, ProtocolError, "unknown dtype 77"),
        ({"epoch": EPOCH - 1}, StaleEpochError, "epoch 0 is over"),
        ({"epoch": EPOCH + 1}, HandshakeError, "not been configured"),
        ({"route_id": 1234}, HandshakeError, "not been configured"),
    ],
)
async def test_a_neighbour_that_does_not_fit_is_refused(
    changes: dict[str, Any], error: type[RelaylineError], text: str
) -> None:
    async with served() as stage, Coordinator(stage) as one, Coordinator(stage) as right:
        await right.configure()
        with pytest.raises(error, match=text):
            await one.upstream(**changes)
        await right.listen()
        await right.upstream()
        await right.send(*prompt(1))
        assert (await right.reply()).samples


async def test_hidden_rows_are_refused_by_stage_0() -> None:
    async with served(0, 1) as stage, Coordinator(stage) as one:
        await one.configure()
        with pytest.raises(HandshakeError, match="token rows go to stage 0"):
            await one.upstream(dtype=pb.DTYPE_F32)


async def test_a_second_upstream_is_refused_and_the_first_goes_on() -> None:
    async with served() as stage, Coordinator(stage) as one, Coordinator(stage) as two:
        await one.start()
        with pytest.raises(HandshakeError, match="already has an upstream"):
            await two.upstream()
        await one.send(*prompt(1))
        assert (await one.reply()).samples


@pytest.mark.parametrize(
    "message",
    [b"", b"\xff" * 40, b"GET / HTTP/1.1\r\n\r\n", envelope_of(*prompt(1)), rpc.serialize(pb.Envelope(epoch=1))],
    ids=["empty", "noise", "http", "data first", "no handshake"],
)
async def test_a_link_that_does_not_begin_with_a_handshake_is_refused(message: bytes) -> None:
    async with served() as stage, Coordinator(stage) as one:
        with pytest.raises(ProtocolError):
            await one.first_message(message)


async def test_a_link_that_closes_before_its_handshake_is_refused() -> None:
    async with served() as stage, Coordinator(stage) as one:
        one.call = one.channel.stream_stream(rpc.method("Relay"))()
        await one.call.done_writing()
        assert isinstance(await one.refusal(), ProtocolError)


async def test_return_of_another_epoch_is_refused() -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.configure()
        one.epoch += 1
        with pytest.raises(StaleEpochError):
            await one.listen()


async def test_a_stage_that_stops_begins_no_epoch() -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        await stage.service.close()
        await asyncio.wait_for(one.lost, 20)
        one.epoch += 1
        with pytest.raises(NotReadyError, match="stopping"):
            await one.configure()


# --- garbage ----------------------------------------------------------------------------------------------------------


def altered(position: int) -> bytes:
    message = bytearray(envelope_of(rows_frame(1, 3, 1, SAMPLE)))
    message[position] ^= 0x41
    return bytes(message)


GARBAGE = {
    "noise": random.Random(1).randbytes(300),
    "empty": b"",
    "truncated": envelope_of(rows_frame(1, 3, 1, SAMPLE))[:-3],
    "altered payload": altered(-1),
    "handshake again": rpc.serialize(pb.Envelope(open=pb.LinkOpen(route_id=ROUTE))),
    "another width": envelope_of(rows_frame(1, 3, np.ones((1, 7), np.float32), SAMPLE)),
    "another dtype": envelope_of(rows_frame(1, 3, np.ones((1, WIDTH), np.float16), SAMPLE), dtype=envelope.DTYPE_F16),
    "frame wider than a step": envelope_of(rows_frame(1, 3, MAX_ROWS + 1)),
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_ends_its_own_link_with_one_error_and_nobody_elses(name: str) -> None:
    async with served() as stage, Coordinator(stage) as bad, Coordinator(stage, OTHER) as good:
        await bad.start()
        await good.start()
        await bad.send(*prompt(1))
        await bad.reply()
        await good.send(*prompt(1, OTHER))
        first = (await good.reply()).samples[0]
        n_steps = len(stage.engine.steps)
        await bad.call.write(GARBAGE[name])
        error = await bad.refusal()
        assert type(error) is (ChecksumError if name == "altered payload" else ProtocolError)
        (fault,) = (await bad.reply()).faults
        assert (fault.session_id, fault.retryable) == (0, True)
        await bad.lost
        lanes_used, _ = await stage.settled()
        assert lanes_used == 1
        assert len(stage.engine.steps) == n_steps
        await good.send(rows_frame(1, 3, 1, SAMPLE, route_id=OTHER))
        second = (await good.reply()).samples[0]
        assert (first.position, second.position) == (3, 4)
        assert second.token == token_after(hidden(3, 100.0), hidden(1, 103.0))


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", random.Random(2).randbytes(2_000), b"\0" * 100],
    ids=["http", "noise", "0"],
)
async def test_noise_on_the_port_is_not_noticed(noise: bytes) -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        host, port = stage.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(noise)
        writer.write_eof()
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await one.send(*prompt(1))
        assert (await one.reply()).samples


async def test_a_faulty_session_hurts_only_itself() -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        bad_options = control(2, Flag.OPEN, options=greedy(top_p=9.0))
        await one.send(*prompt(1), bad_options, rows_frame(2, 0, 2, PREFILL | SAMPLE), rows_frame(3, 0, 1))
        reply = await one.reply()
        assert [sample.session_id for sample in reply.samples] == [1]
        assert {(fault.session_id, fault.label) for fault in reply.faults} == {
            (2, ProtocolError.label),
            (3, SessionError.label),
        }
        status = await one.client.status(with_recent=True)
        assert status is not None
        assert dict(status.faults_by_label) == {ProtocolError.label: 1, SessionError.label: 1}


# --- epochs, loss, two coordinators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["envelope", "frame"])
async def test_frames_of_an_old_epoch_are_refused_and_change_nothing(where: str) -> None:
    async with served() as stage, Coordinator(stage, epoch=EPOCH + 1) as one:
        await one.start()
        await one.send(*prompt(1, epoch=one.epoch))
        await one.reply()
        before, n_steps = await stage.settled(), len(stage.engine.steps)
        blocked = asyncio.Event()
        end_route = stage.service._end_route

        async def held(route: Route) -> None:
            await blocked.wait()
            await end_route(route)

        stage.service._end_route = held  # type: ignore[method-assign]
        stale = [control(1, Flag.CLOSE), rows_frame(1, 0, 2, SAMPLE), control(9, Flag.OPEN)]
        await one.call.write(envelope_of(*stale, epoch=one.epoch if where == "frame" else EPOCH))
        assert isinstance(await one.refusal(), StaleEpochError)
        assert await stage.settled() == before
        assert (len(stage.engine.steps), stage.executor.sessions.cancelled) == (n_steps, set())
        blocked.set()


async def test_a_new_epoch_ends_the_old_streams_and_tells_what_their_sessions_hold() -> None:
    async with served() as stage, Coordinator(stage) as old, Coordinator(stage, epoch=EPOCH + 1) as new:
        await old.start()
        await old.send(*prompt(1))
        await old.reply()
        await new.start()
        assert new.held == {1: 3}
        assert (await stage.settled())[0] == 0
        async with asyncio.timeout(20):
            assert isinstance(await old.lost, StaleEpochError)
        assert isinstance(await old.refusal(), StaleEpochError)
        await new.send(*prompt(1, epoch=new.epoch))
        (sample,) = (await new.reply()).samples
        assert sample.token == token_after(hidden(3, 100.0))
        assert (await stage.settled())[0] == 1


async def test_a_session_goes_on_in_the_next_epoch_from_what_is_left() -> None:
    async with served() as stage, Coordinator(stage) as old, Coordinator(stage, epoch=EPOCH + 1) as new:
        await old.start()
        await old.send(*prompt(1), *prompt(2), *prompt(3), control(3, Flag.CLOSE))
        said: set[int] = set()
        while not {1, 2} <= said:
            said |= {sample.session_id for sample in (await old.reply()).samples}
        before = (await stage.settled())[1]
        await new.start()
        assert new.held == {1: 3, 2: 3}, "what had ended leaves nothing"
        n_steps = len(stage.engine.steps)
        rows = hidden(1, 7.0)
        await new.send(
            control(1, Flag.OPEN, epoch=new.epoch), control(1, Flag.TRIM, 2, epoch=new.epoch),
            rows_frame(1, 2, rows, PREFILL | SAMPLE, epoch=new.epoch), control(2, Flag.CLOSE, epoch=new.epoch),
        )  # fmt: skip
        (sample,) = (await new.reply()).samples
        assert sample.position == 3
        assert sample.token == token_after(np.concatenate((hidden(2, 100.0), rows)))
        assert len(stage.engine.steps) == n_steps + 1
        n_used, after = await stage.settled()
        assert n_used == 1
        assert sorted(map(len, after)) == [0, 0, 0, 3]
        assert sorted(map(len, before)) == [0, 0, 3, 3]


async def test_what_is_left_yields_to_whoever_needs_a_lane_and_is_forgotten_after_a_while() -> None:
    async with served(n_lanes=2) as stage, Coordinator(stage) as one, Coordinator(stage, route_id=ROUTE + 1) as other:
        stage.service._left._after_s = 0.0
        await one.start()
        await one.send(*prompt(1), *prompt(2))
        while (await stage.settled())[0] < 2:
            await one.reply()
        await other.start()
        forgotten = asyncio.Event()
        forget, stage.service._left._forget = stage.service._left._forget, lambda _: forgotten.set()
        one.call.cancel()
        async with asyncio.timeout(20):
            await one.lost
            await forgotten.wait()
        assert (await stage.settled())[0] == 0
        await other.send(*prompt(7, route_id=ROUTE + 1))
        assert (await other.reply()).samples[0].session_id == 7
        assert [lane.session_id for lane in stage.executor.lanes.of_route(ROUTE)] == [2]
        forget(ROUTE)
        async with asyncio.timeout(20):
            while stage.executor.lanes.of_route(ROUTE):
                await stage.settled()
        assert [lane.session_id for lane in stage.executor.lanes.of_route(ROUTE + 1)] == [7]


@pytest.mark.parametrize("how", ["cancel", "half-close", "channel"])
async def test_an_upstream_that_leaves_takes_no_lane_along(how: str) -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        await one.send(*prompt(1), *prompt(2))
        while (await stage.settled())[0] < 2:
            await one.reply()
        if how == "cancel":
            one.call.cancel()
        elif how == "half-close":
            await one.call.done_writing()
        else:
            await one.channel.close()
        async with asyncio.timeout(20):
            await one.lost
        assert (await stage.settled())[0] == 0
        assert stage.executor.sessions.samplers == {}
        await stage.service.runner.call(lambda: stage.executor.sessions.forget_left(ROUTE))
        assert await stage.settled() == (0, [[], [], [], []])
        assert stage.service._routes == {}


async def test_a_coordinator_that_stops_reading_loses_its_route_and_its_lanes() -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        await one.send(*prompt(1))
        await one.reply()
        route = stage.service._routes[ROUTE]
        listener = route.listen()  # nobody reads it
        sample = RouteOutput(ROUTE, EPOCH, samples=[pb.Sampled(session_id=1)])
        while not route.ended.is_set():
            assert listener.queue.qsize() <= listener.queue.maxsize
            route.report(sample)
        assert "stopped reading" in str(await one.refusal())
        async with asyncio.timeout(20):
            await one.lost
        await stage.settled()
        assert (await stage.settled())[0] == 0
        assert stage.service._routes == {}


async def test_two_coordinators_share_a_stage() -> None:
    async with served() as stage, Coordinator(stage) as one, Coordinator(stage, OTHER, epoch=7) as two:
        await one.start()
        await two.start()
        for session_id in (1, 2):
            await one.send(*prompt(session_id))
            await two.send(*prompt(session_id, OTHER, 7, n_rows=5))
        positions = {}
        for coordinator in (one, two):
            found = []
            while len(found) < 2:
                found += [(s.session_id, s.position, s.token) for s in (await coordinator.reply()).samples]
            positions[coordinator.route_id] = sorted(found)
        expected = {ROUTE: 3, OTHER: 5}
        for route_id, n_rows in expected.items():
            assert positions[route_id] == [
                (session_id, n_rows, token_after(hidden(n_rows, 100.0 * session_id))) for session_id in (1, 2)
            ]
        await one.send(control(1, Flag.CLOSE), control(2, Flag.CLOSE))
        one.call.cancel()
        async with asyncio.timeout(20):
            await one.lost
        assert (await stage.settled())[0] == 2
        await two.send(rows_frame(1, 5, 1, SAMPLE, route_id=OTHER, epoch=7))
        assert (await two.reply()).samples[0].position == 6


class LostContext:
    """A Relay stream whose upstream says hello and is gone before it hears that it was accepted."""

    def __init__(self, hello: pb.LinkOpen, failure: Exception | None) -> None:
        self._hello, self._failure = hello, failure
        self.writing = asyncio.Event()

    async def read(self) -> bytes:
        return rpc.serialize(pb.Envelope(open=self._hello))

    async def write(self, _message: pb.LinkReply) -> None:
        self.writing.set()
        if self._failure is not None:
            raise self._failure
        await asyncio.Event().wait()


@pytest.mark.parametrize("failure", [asyncio.InvalidStateError("the call has ended"), None], ids=["write", "cancel"])
async def test_an_upstream_that_dies_while_it_is_accepted_leaves_no_route(failure: Exception | None) -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.configure()
        context = LostContext(one.hello(), failure)
        relaying = asyncio.create_task(stage.service.relay(None, context))  # type: ignore[arg-type]
        async with asyncio.timeout(20):
            await context.writing.wait()
            if failure is None:
                relaying.cancel()  # what gRPC does to the handler when the peer goes
            with pytest.raises(asyncio.CancelledError if failure is None else type(failure)):
                await relaying
            await asyncio.gather(*stage.service._tasks)
        assert stage.service._routes == {}
        await one.configure(epoch=EPOCH)


async def test_coordinators_that_never_came_back_make_room_for_others() -> None:
    async with served() as stage, contextlib.AsyncExitStack() as stack:
        for route_id in range(ROUTES_MAX + 2):
            await (await stack.enter_async_context(Coordinator(stage, 100 + route_id))).configure()
        assert len(stage.service._routes) <= ROUTES_MAX


async def test_an_epoch_that_nobody_links_to_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own link would keep the next stage's route in use, whatever becomes of the coordinator."""
    monkeypatch.setattr("stage.service.UNUSED_S", 0.0)
    async with served() as stage, Coordinator(stage) as one:
        await one.configure()
        async with asyncio.timeout(20):
            for route in list(stage.service._routes.values()):
                await route.ended.wait()
            await asyncio.gather(*stage.service._tasks)
        assert stage.service._routes == {}
    monkeypatch.setattr("stage.service.UNUSED_S", 3_600.0)
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        (route,) = stage.service._routes.values()
        stage.service._unused(route.route_id, route.epoch)
        await asyncio.gather(*stage.service._tasks)
        assert list(stage.service._routes.values()) == [route], "one that is linked to stays"


async def test_all_that_a_step_closes_is_told_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """More clients may leave during one step than the queue of a coordinator that reads has room for messages."""
    n_closed = RETURN_QUEUE_MAX + 7
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        (route,) = stage.service._routes.values()
        listener = route.listen()
        close = control(1, Flag.CLOSE)
        assert (close.route_id, close.epoch) == (route.route_id, route.epoch)
        closed = [(close, pb.SessionSummary(session_id=number)) for number in range(1, n_closed + 1)]
        monkeypatch.setattr(stage.service._observer, "step_done", lambda _: closed)
        stage.service.account(StepResult(step_of(), [], [], []))
        assert not route.ended.is_set()
        assert listener.queue.get_nowait().subscribed
        message = listener.queue.get_nowait()
        assert [summary.session_id for summary in message.summaries] == list(range(1, n_closed + 1))
        route.unlisten(listener)


async def test_routes_in_use_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage.service.ROUTES_MAX", 1)
    async with served() as stage, Coordinator(stage) as one, Coordinator(stage, OTHER) as two:
        await one.start()
        with pytest.raises(LaneLimitError, match="already serves 1"):
            await two.configure()


# --- downstream -------------------------------------------------------------------------------------------------------


class Downstream:
    """A neighbour that accepts the link and then does only what the test says."""

    def __init__(self, credit_bytes: int, reads: bool = True) -> None:
        self.credit_bytes, self.reads = credit_bytes, reads
        self.received: asyncio.Queue[bytes] = asyncio.Queue()
        self.credits: asyncio.Queue[int] = asyncio.Queue()
        self.gone = asyncio.Event()
        self.address = ""
        self.n_links = 0

    async def relay(self, _: object, context: Any) -> None:
        await context.read()
        accepted = pb.LinkAccepted(credit_bytes=self.credit_bytes, max_rows=MAX_ROWS)
        await context.write(rpc.serialize(pb.LinkReply(accepted=accepted)))
        giving = asyncio.create_task(self._give(context))
        self.n_links += 1
        try:
            while self.reads and isinstance(message := await context.read(), bytes):
                self.received.put_nowait(message)
            await self.gone.wait()
        finally:
            self.n_links -= 1
            giving.cancel()

    async def _give(self, context: Any) -> None:
        while True:
            await context.write(rpc.serialize(pb.LinkReply(credit_bytes=await self.credits.get())))


@contextlib.asynccontextmanager
async def downstream(credit_bytes: int, reads: bool = True) -> AsyncIterator[Downstream]:
    neighbour = Downstream(credit_bytes, reads)
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(neighbour.relay, None, None)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(rpc.SERVICE, {"Relay": handler}),))
    neighbour.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield neighbour
    finally:
        neighbour.gone.set()
        await server.stop(0)


def counted_steps(stage: StageUnderTest) -> asyncio.Queue[None]:
    """A queue that gets one entry for every native step."""
    loop, steps = asyncio.get_running_loop(), asyncio.Queue[None]()
    stage.engine.on_decode = lambda: loop.call_soon_threadsafe(steps.put_nowait, None)
    return steps


async def counted(steps: asyncio.Queue[None], n_steps: int) -> None:
    async with asyncio.timeout(20):
        for _ in range(n_steps):
            await steps.get()


async def test_two_stages_pass_rows_and_controls_on() -> None:
    async with served(0, 2) as first, served(1, 2) as last, Coordinator(first) as one, Coordinator(last) as end:
        await end.configure()
        await end.listen()
        await one.configure(next_address=last.address)
        await one.upstream()
        await one.send(control(1, Flag.OPEN), tokens_frame(1, 0, [3, 4, 5], PREFILL | SAMPLE))
        (sample,) = (await end.reply()).samples
        rows = [[token + index + 1.0] * WIDTH for index, token in enumerate((3, 4, 5))]
        assert sample.token == token_after(np.asarray(rows, np.float32))
        await one.send(control(1, Flag.CLOSE), control(2, Flag.OPEN), tokens_frame(2, 0, [9], PREFILL | SAMPLE))
        await end.reply()
        assert ((await first.settled())[0], (await last.settled())[0]) == (1, 1)
        one.call.cancel()
        async with asyncio.timeout(20):
            await end.lost
        assert ((await first.settled())[0], (await last.settled())[0]) == (0, 0)


async def test_a_route_without_credit_downstream_stops_stepping() -> None:
    row_bytes = WIDTH * 4
    async with downstream(credit_bytes=4 * row_bytes) as neighbour, served(0, 2) as stage, Coordinator(stage) as one:
        steps = counted_steps(stage)
        await one.configure(next_address=neighbour.address)
        await one.upstream()
        await one.send(control(1, Flag.OPEN), *(tokens_frame(1, position, [1]) for position in range(30)))
        await counted(steps, 4 + OUTBOX_STEPS_MAX)
        await stage.settled()
        assert steps.empty(), "a step ran although nothing can leave"
        assert stage.service.runner.queued_rows == 30 - 4 - OUTBOX_STEPS_MAX
        neighbour.credits.put_nowait(2 * row_bytes)
        await counted(steps, 2)
        await stage.settled()
        assert steps.empty()
        seen = []
        async with asyncio.timeout(20):
            for index in range(30):
                seen += envelope.parse(await neighbour.received.get()).frames["position"][-1:].tolist()
                if index >= 2:
                    neighbour.credits.put_nowait(row_bytes)
        assert seen == list(range(30))


@pytest.mark.parametrize("reads", [True, False], ids=["no credit", "does not read"])
async def test_a_stuck_neighbour_does_not_outlive_its_epoch(reads: bool) -> None:
    """The sender waits for credit, or inside gRPC's own flow control; a new epoch frees it either way."""
    n_embd, credit = 16_384, 1 if reads else bounds.ENVELOPE_BYTES_MAX  # 2 MiB a step: more than gRPC keeps unread
    async with (
        downstream(credit, reads) as stuck,
        downstream(1 << 30) as healthy,
        served(0, 2, n_embd=n_embd) as stage,
        Coordinator(stage) as old,
        Coordinator(stage, epoch=EPOCH + 1) as new,
    ):
        steps = counted_steps(stage)
        await old.configure(next_address=stuck.address)
        await old.upstream()
        # The same chunk again and again is a retry each time, and each takes a step of its own.
        await old.send(control(1, Flag.OPEN), *(tokens_frame(1, 0, [1] * 32, PREFILL) for _ in range(40)))
        await counted(steps, OUTBOX_STEPS_MAX)
        while stage.service._sends.qsize() < OUTBOX_STEPS_MAX - 1:  # the rest of the outbox is in the sender's hand
            await stage.settled()
        await new.configure(next_address=healthy.address)
        await new.upstream()
        await new.send(control(1, Flag.OPEN, epoch=new.epoch), tokens_frame(1, 0, [1], epoch=new.epoch))
        async with asyncio.timeout(20):
            view = envelope.parse(await healthy.received.get())
        assert view.epoch == new.epoch


async def test_credit_comes_back_for_what_was_decoded_and_for_what_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    row_bytes = WIDTH * 4
    monkeypatch.setattr("stage.inbound.CREDIT_REPLY_BYTES", 8 * row_bytes)
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        await one.send(*prompt(1, n_rows=8))
        async with asyncio.timeout(20):
            assert (await one.call.read()).credit_bytes == 8 * row_bytes
            await one.send(*prompt(2, n_rows=4), rows_frame(77, 0, 4))
            assert (await one.call.read()).credit_bytes == 8 * row_bytes


async def test_a_lost_downstream_is_told_to_the_coordinator() -> None:
    async with downstream(1 << 20) as neighbour, served(0, 2) as stage, Coordinator(stage) as one:
        await one.configure(next_address=neighbour.address)
        await one.listen()
        await one.upstream()
        neighbour.reads = False
        neighbour.gone.set()
        await one.send(control(1, Flag.OPEN), tokens_frame(1, 0, [1]))
        (fault,) = (await one.reply()).faults
        assert (fault.session_id, fault.label) == (0, StageLostError.label)


@pytest.mark.parametrize("epochs", [1, 2])
async def test_a_coordinator_that_leaves_while_it_configures_leaves_nothing_half_begun(epochs: int) -> None:
    """It dies, or is stopped while it recovers, and a native step takes its time: no link stays, and no route."""
    async with downstream(1 << 20) as neighbour, served(0, 2) as stage, contextlib.AsyncExitStack() as stack:
        first, *others = [
            await stack.enter_async_context(Coordinator(stage, epoch=EPOCH + number)) for number in range(epochs)
        ]
        blocked = BlockedDecode(stage.engine)
        other = await stack.enter_async_context(Coordinator(stage, OTHER))
        await other.configure(next_address=neighbour.address)
        await other.upstream()
        if others:
            await first.configure(next_address=neighbour.address)
            await first.upstream()
        await other.send(control(1, Flag.OPEN, route_id=OTHER), tokens_frame(1, 0, [1], route_id=OTHER))
        await asyncio.to_thread(blocked.entered.wait, 20)
        last = others[-1] if others else first
        configuring = asyncio.create_task(last.configure(next_address=neighbour.address))
        async with asyncio.timeout(20):
            while not stage.service.runner._calls:  # it waits for the decode thread
                await status_of(other)
            configuring.cancel()
            await asyncio.gather(configuring, return_exceptions=True)
            while not stage.service._tasks:  # the stage has heard of it
                await status_of(other)
            blocked.release()
            while stage.service._tasks:
                await status_of(other)
            assert list(stage.service._routes) == [OTHER]
            while neighbour.n_links > 1:
                await status_of(other)


async def status_of(one: Coordinator) -> pb.StatusResponse:
    return await rpc.call(one.channel, "Status", pb.StatusRequest(), pb.StatusResponse, "stage", 20)


async def test_a_busy_stage_stops_reading_controls_at_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage.service.QUEUED_FRAMES_MAX", 8)
    async with served() as stage, Coordinator(stage) as one:
        blocked = BlockedDecode(stage.engine)
        await one.start()
        await one.send(*prompt(1, n_rows=2))
        await asyncio.to_thread(blocked.entered.wait, 20)
        for session_id in range(100, 150):
            await one.send(control(session_id, Flag.CLOSE))
        async with asyncio.timeout(20):
            while stage.service.runner.queued_frames <= 8:
                await status_of(one)
        for _ in range(5):  # round trips in which an unbounded reader would have taken the rest
            await status_of(one)
        assert stage.service.runner.queued_frames == 9
        blocked.release()
        async with asyncio.timeout(20):
            while (await status_of(one)).envelopes_in < 51:
                pass
            while stage.service.runner.queued_frames:
                await status_of(one)


async def test_a_reader_that_waits_for_room_goes_on_when_another_coordinator_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stage.service.QUEUED_FRAMES_MAX", 4)
    async with served() as stage, Coordinator(stage) as one, Coordinator(stage, OTHER) as other:
        await one.start()
        await other.start()
        runner = stage.service.runner
        runner._outbox_steps = OUTBOX_STEPS_MAX  # as if downstream gave no credit: no step comes that would wake
        runner.push([rows_frame(1, position, 1, PREFILL) for position in range(8)])
        await other.send(*prompt(5, OTHER, n_rows=1))
        await other.send(rows_frame(5, 1, 1, SAMPLE, route_id=OTHER))
        async with asyncio.timeout(20):
            while runner.queued_frames < 10:
                await status_of(other)
            assert (await status_of(other)).envelopes_in == 1, "no room for the second"
            await one.channel.close()
            while (await status_of(other)).envelopes_in < 2:
                pass
        runner._outbox_steps = OUTBOX_STEPS_MAX + 1
        for _ in range(OUTBOX_STEPS_MAX + 1):
            runner.sent()
        assert (await other.reply()).samples[0].session_id == 5


async def test_left_routes_are_forgotten_once_and_not_before_their_time() -> None:
    loop, forgotten = asyncio.get_running_loop(), list[int]()
    left = LeftRoutes(forgotten.append, after_s=1_000.0)
    for route_id in (1, 2, 1):
        left.left(route_id)
    assert len(left._timers) == 2
    (first, second) = left._timers[1], left._timers[2]
    left.left(1)
    assert first.cancelled(), "left anew"
    assert left._timers[1].when() > loop.time() + 900.0
    left._expired(2)
    assert (forgotten, list(left._timers)) == ([2], [1])
    second.cancel()
    timer = left._timers[1]
    left.close()
    assert timer.cancelled()
    assert not left._timers


async def test_who_is_told_what_is_left_has_the_whole_time_to_open_it() -> None:
    async with served() as stage, Coordinator(stage) as old, Coordinator(stage, epoch=EPOCH + 1) as new:
        await old.start()
        await old.send(*prompt(1))
        await old.reply()
        old.call.cancel()
        async with asyncio.timeout(20):
            await old.lost
        await stage.settled()
        before = stage.service._left._timers[ROUTE]
        await stage.service._forget_left(ROUTE)  # of an earlier time, which came to its turn only now
        await new.configure()
        assert new.held == {1: 3}
        assert before.cancelled()
        assert stage.service._left._timers[ROUTE].when() >= before.when()
    assert not stage.service._left._timers
