"""A stage over real gRPC with a fake engine: epochs, loss, two coordinators."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest

from relayline.stage.routes import RETURN_QUEUE_MAX, ROUTES_MAX, LeftRoutes, Route, Upstream
from relayline.stage.steps.step_types import RouteOutput, StepResult
from relayline.wire.common.errors import (
    LaneLimitError,
    NotReadyError,
    RelaylineError,
    StaleEpochError,
    UnauthenticatedError,
)
from relayline.wire.envelopes.frames import Flag
from relayline.wire.links import rpc
from relayline.wire.links.roles import Identity, Role
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.fakes import (
    EPOCH,
    ROUTE,
    control,
    hidden,
    rows_frame,
    step_of,
)
from tests.support.served_stage import Coordinator, served
from tests.support.stage_links import (
    OTHER,
    PREFILL,
    SAMPLE,
    prompt,
    token_after,
)


@pytest.mark.parametrize("where", ["envelope", "frame"])
async def test_frames_of_an_old_epoch_are_refused_and_change_nothing(where: str) -> None:
    async with served() as stage, Coordinator(stage, epoch=EPOCH + 1) as one:
        await one.start()
        await one.send(*prompt(1, epoch=one.epoch))
        await one.reply()
        before, n_steps = await stage.settled(), len(stage.engine.steps)
        blocked = asyncio.Event()
        end_route = stage.service.epochs._end

        async def held(route: Route, reason: RelaylineError | None = None) -> None:
            await blocked.wait()
            await end_route(route, reason)

        stage.service.epochs._end = held  # type: ignore[method-assign]
        stale = [control(1, Flag.CLOSE), rows_frame(1, 0, 2, SAMPLE), control(9, Flag.OPEN)]
        await one.write(*stale, epoch=one.epoch if where == "frame" else EPOCH)
        assert isinstance(await one.refusal(), StaleEpochError)
        assert await stage.settled() == before
        assert (len(stage.engine.steps), stage.executor.sessions.cancelled) == (n_steps, set())
        blocked.set()


async def test_a_new_epoch_ends_the_old_streams_and_reports_held_rows() -> None:
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


async def test_a_session_resumes_from_left_rows_in_the_next_epoch() -> None:
    async with served() as stage, Coordinator(stage) as old, Coordinator(stage, epoch=EPOCH + 1) as new:
        await old.start()
        await old.send(*prompt(1), *prompt(2), *prompt(3), control(3, Flag.CLOSE))
        answered: set[int] = set()
        while not {1, 2} <= answered:
            answered |= {sample.session_id for sample in (await old.reply()).samples}
        before = (await stage.settled())[1]
        await new.start()
        assert new.held == {1: 3, 2: 3}, "ended sessions leave nothing"
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


async def test_left_lanes_yield_to_other_streams_and_expire() -> None:
    async with served(n_lanes=2) as stage, Coordinator(stage) as one, Coordinator(stage, route_id=ROUTE + 1) as other:
        stage.service.epochs._left._after_s = 0.0
        await one.start()
        await one.send(*prompt(1), *prompt(2))
        while (await stage.settled())[0] < 2:
            await one.reply()
        await other.start()
        forgotten = asyncio.Event()
        forget, stage.service.epochs._left._forget = stage.service.epochs._left._forget, lambda _: forgotten.set()
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


async def test_a_stage_that_is_ended_reports_it() -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        await stage.service.close()
        async with asyncio.timeout(20):
            error = await one.lost
        assert isinstance(error, NotReadyError), "no request is accused of this loss"
        assert "stage 1 was told to end" in error.message


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
        assert stage.service.epochs.routes == {}


async def test_a_coordinator_that_stops_reading_loses_its_route_and_its_lanes() -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        await one.send(*prompt(1))
        await one.reply()
        route = stage.service.epochs.routes[ROUTE]
        listener = route.listen()  # nothing reads it
        sample = RouteOutput(ROUTE, EPOCH, samples=[pb.Sampled(session_id=1)])
        while not route.ended.is_set():
            assert listener.queue.qsize() <= listener.queue.maxsize
            route.report(sample)
        assert "stopped reading" in str(await one.refusal())
        async with asyncio.timeout(20):
            await one.lost
        await stage.settled()
        assert (await stage.settled())[0] == 0
        assert stage.service.epochs.routes == {}


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

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return rpc.route_metadata(self._hello.route_id, self._hello.epoch)

    async def read(self) -> bytes:
        return rpc.serialize(pb.RelayRequest(open=self._hello))

    async def write(self, _message: pb.RelayResponse) -> None:
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
                relaying.cancel()  # gRPC does this to the handler when the peer leaves
            with pytest.raises(asyncio.CancelledError if failure is None else type(failure)):
                await relaying
            await asyncio.gather(*stage.service.epochs._tasks)
        assert stage.service.epochs.routes == {}
        await one.configure(epoch=EPOCH)


async def test_coordinators_that_never_came_back_make_room_for_others() -> None:
    async with served() as stage, contextlib.AsyncExitStack() as stack:
        for route_id in range(ROUTES_MAX + 2):
            await (await stack.enter_async_context(Coordinator(stage, 100 + route_id))).configure()
        assert len(stage.service.epochs.routes) <= ROUTES_MAX


async def test_an_epoch_that_nobody_links_to_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own link would keep the next stage's route in use, whatever happens to the coordinator."""
    monkeypatch.setattr("relayline.stage.epochs.UNUSED_S", 0.0)
    async with served() as stage, Coordinator(stage) as one:
        await one.configure()
        async with asyncio.timeout(20):
            for route in list(stage.service.epochs.routes.values()):
                await route.ended.wait()
            await asyncio.gather(*stage.service.epochs._tasks)
        assert stage.service.epochs.routes == {}
    monkeypatch.setattr("relayline.stage.epochs.UNUSED_S", 3_600.0)
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        (route,) = stage.service.epochs.routes.values()
        stage.service.epochs._unused(route)
        await asyncio.gather(*stage.service.epochs._tasks)
        assert list(stage.service.epochs.routes.values()) == [route], "one that is linked to stays"


async def test_all_sessions_that_a_step_closes_are_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """More clients may leave during one step than the queue of a coordinator that reads has room for messages."""
    n_closed = RETURN_QUEUE_MAX + 7
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        (route,) = stage.service.epochs.routes.values()
        listener = route.listen()
        close = control(1, Flag.CLOSE)
        assert (close.route_id, close.epoch) == (route.route_id, route.epoch)
        closed = [(close, pb.SessionSummary(session_id=number)) for number in range(1, n_closed + 1)]
        monkeypatch.setattr(stage.service._observer, "step_done", lambda _: closed)
        stage.service.outbound.account(StepResult(step_of(), [], [], []))
        assert not route.ended.is_set()
        assert listener.queue.get_nowait().subscribed
        message = listener.queue.get_nowait()
        assert [summary.session_id for summary in message.summaries] == list(range(1, n_closed + 1))
        route.unlisten(listener)


async def test_a_coordinator_that_reads_slowly_hears_of_the_link_back_later() -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        (route,) = stage.service.epochs.routes.values()
        listener = route.listen()
        summary = pb.SessionSummary(session_id=1)
        while not listener.queue.full():
            route.report(RouteOutput(route.route_id, route.epoch, summaries=[summary]))
        route.tell_feeds_back()
        heard = [await listener.next() for _ in range(RETURN_QUEUE_MAX + 1)]
        assert [message.feeds_back for message in heard if message is not None] == [False] * RETURN_QUEUE_MAX + [True]
        assert not route.ended.is_set()
        route.unlisten(listener)


async def test_routes_in_use_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayline.stage.epochs.ROUTES_MAX", 1)
    async with served() as stage, Coordinator(stage) as one, Coordinator(stage, OTHER) as two:
        await one.start()
        with pytest.raises(LaneLimitError, match="already serves 1"):
            await two.configure()


async def test_left_routes_are_forgotten_once_and_not_before_their_time() -> None:
    loop, forgotten = asyncio.get_running_loop(), list[int]()
    left = LeftRoutes(forgotten.append, after_s=1_000.0)
    for route_id in (1, 2, 1):
        left.left(route_id, 2)
    assert len(left._timers) == 2
    (first, second) = left._timers[1], left._timers[2]
    left.left(1, 2)
    assert first.cancelled(), "left again"
    assert left._timers[1].when() > loop.time() + 900.0
    left._expired(2)
    assert (forgotten, list(left._timers)) == ([2], [1])
    second.cancel()
    timer = left._timers[1]
    left.close()
    assert timer.cancelled()
    assert not left._timers


async def test_lanes_left_by_successive_dead_coordinators_do_not_add_up() -> None:
    forgotten = list[int]()
    left = LeftRoutes(forgotten.append, after_s=1_000.0)
    for route_id, n_in_use in ((1, 2), (2, 1)):
        left.left(route_id, n_in_use)
    assert forgotten == [], "both were in use, and may come back"
    for route_id in (3, 4):  # a new process of the first, twice
        left.left(route_id, 2)
    assert forgotten == [1, 2]
    left.close()


async def test_lanes_of_coordinators_that_were_killed_do_not_add_up() -> None:
    async with served(n_lanes=8) as stage:
        for number in range(1, 5):
            async with Coordinator(stage, route_id=number) as one:
                await one.start()
                await one.send(*prompt(1), *prompt(2))
                while not (await one.reply()).samples:
                    pass
                one.call.cancel()
                async with asyncio.timeout(20):
                    await one.lost
        async with asyncio.timeout(20):
            while stage.executor.usage != (0, 2):  # event-driven work of other tasks
                await stage.settled()


async def test_a_coordinator_has_the_whole_time_to_open_left_lanes() -> None:
    async with served() as stage, Coordinator(stage) as old, Coordinator(stage, epoch=EPOCH + 1) as new:
        await old.start()
        await old.send(*prompt(1))
        await old.reply()
        old.call.cancel()
        async with asyncio.timeout(20):
            await old.lost
        await stage.settled()
        before = stage.service.epochs._left._timers[ROUTE]
        await stage.service.epochs._forget_left(ROUTE)  # of an earlier time, whose turn came only now
        await new.configure()
        assert new.held == {1: 3}
        assert before.cancelled()
        assert stage.service.epochs._left._timers[ROUTE].when() >= before.when()
    assert not stage.service.epochs._left._timers


async def test_a_route_is_its_own_coordinators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    who = Identity(Role.COORDINATOR, "box")
    monkeypatch.setattr("relayline.stage.epochs.caller", lambda: who)
    monkeypatch.setattr("relayline.stage.service.caller", lambda: who)
    async with served() as stage, Coordinator(stage) as one, Coordinator(stage, epoch=EPOCH + 1) as other:
        await one.configure()
        who = Identity(Role.COORDINATOR, "elsewhere")
        with pytest.raises(UnauthenticatedError, match="belongs to coordinator on box, not to"):
            await other.configure()
        with pytest.raises(UnauthenticatedError, match="belongs to coordinator on box"):
            await one.listen()  # nobody else hears its tokens
        assert stage.service.epochs.at(ROUTE, EPOCH) is not None, "its epoch stands"


def test_the_last_stage_sends_tokens_back_with_a_pass_of_its_own() -> None:
    owner = Identity(Role.COORDINATOR, "box")
    first, last = Identity(Role.STAGE, "box", "stage-0"), Identity(Role.STAGE, "box", "stage-2")
    route = Route(ROUTE, EPOCH, 0, None, Upstream("up"), owner, back=Upstream("back", "stage-2"))
    assert (route.is_back("back"), route.is_back("up"), route.is_back("")) == (True, False, False)
    route.check_upstream(owner, "up")
    route.check_upstream(last, "back")
    for who, shown in ((last, "up"), (first, "back"), (owner, "back"), (last, ""), (last, "other")):
        with pytest.raises(UnauthenticatedError):
            route.check_upstream(who, shown)
    assert not Route(ROUTE, EPOCH, 0, None, Upstream("up"), owner).is_back("back")
