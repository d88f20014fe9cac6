"""A stage's spans in the traces of requests: bounded for any length of an answer, and ended however it ends."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from relayline.stage.observe.request_spans import EVENTS_MAX, LATEST_MAX, LINKS_MAX, RequestSpans, read_baggage
from relayline.stage.queue_types import QueuedFrame, Step
from relayline.stage.steps.step_types import StepResult
from relayline.wire.common import bounds
from relayline.wire.envelopes import trace_context
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry import names
from relayline.wire.telemetry.telemetry import Level, Role
from tests.support.fakes import control, rows_frame
from tests.support.spans import Kept, attributes_of

MS = 1_000_000


class World:
    """One stage's request spans, fed with made-up steps a millisecond apart; each waits 0.1 ms and decodes 0.5 ms."""

    def __init__(self, level: Level = Level.BATCHES) -> None:
        self.kept = Kept(Role.STAGE, level)
        self.requests = RequestSpans(self.kept.telemetry, 1)
        self.request, self.passes = trace_context.new_root(), trace_context.new_root()
        self.n_steps = 0

    def step(self, *frames: QueuedFrame, controls: tuple[QueuedFrame, ...] = ()) -> None:
        self.n_steps += 1
        taken_ns = self.n_steps * MS
        for frame in frames:
            frame.arrived_ns = taken_ns - MS // 10
        result = StepResult(Step(list(controls), list(frames), "x", taken_ns, 0, 0), [], list(frames), list(frames))
        result.n_rows, result.number = sum(frame.n_rows for frame in frames), self.n_steps
        result.started_ns, result.decode_ns = taken_ns, MS // 2
        result.closed = [frame for frame in controls if frame.flags & Flag.CLOSE]
        if frames:
            result.context = trace_context.new_below(self.passes)
        self.requests.step_done(result, "decode ×1", 0)

    def row(self, position: int, session_id: int = 5) -> QueuedFrame:
        frame = rows_frame(session_id, position)
        frame.trace = self.request
        return frame

    def batches(self) -> list[ReadableSpan]:
        return self.kept.spans(names.SPAN_BATCHES)


@pytest.mark.parametrize("n_tokens", [1, LATEST_MAX, LATEST_MAX + 1, EVENTS_MAX, 1_000, 20_000])
def test_events_are_bounded_and_lose_nothing(n_tokens: int) -> None:
    world = World()
    for position in range(n_tokens):
        world.step(world.row(position))
    world.step(controls=(control(5, Flag.CLOSE),))
    (span,) = world.batches()
    attributes = attributes_of(span)
    assert len(span.events) <= EVENTS_MAX
    assert len(span.events) == n_tokens or len(span.events) >= LATEST_MAX - 32
    assert attributes[names.ATTR_BATCHES] == n_tokens
    assert attributes[names.ATTR_WAIT] == pytest.approx(n_tokens * 1e-4)
    assert attributes[names.ATTR_DECODE] == pytest.approx(n_tokens * 5e-4)
    assert (attributes[names.ATTR_ROWS_MEAN], attributes[names.ATTR_ROWS_MAX], attributes[names.ATTR_STREAMS_MEAN]) == (
        1.0,
        1,
        1.0,
    )
    covered: list[int] = []
    n_grouped = 0
    for event in span.events:
        where = event.name.split(":")[0].split()[1]
        first, _, last = where.partition("-")
        covered += range(int(first), int(last or first) + 1)
        if last:
            n_grouped += int(event.name.split(": ")[1].split()[0])
    assert covered == list(range(n_tokens)), "each position once, in order"
    assert attributes.get(names.ATTR_BATCHES_GROUPED, 0) == n_grouped
    times = [event.timestamp for event in span.events]
    assert times == sorted(times)
    assert span.events[-1].name == f"position {n_tokens - 1}: waited 0.10 ms, decoded 0.50 ms, 1 stream in 1 row"


def test_a_phase_ends_where_frames_carry_another_context() -> None:
    world = World()
    world.step(world.row(0))
    prefill, world.request = world.request, trace_context.new_below(world.request)
    world.step(world.row(1))
    (first,) = world.batches()
    assert first.parent is not None
    assert first.parent.span_id == int.from_bytes(prefill[16:24], "big")
    world.requests.finish()
    second = world.batches()[1]
    assert second.parent is not None
    assert second.parent.span_id == int.from_bytes(world.request[16:24], "big")


def test_an_ended_epoch_ends_the_spans_of_its_route_alone() -> None:
    world = World()
    other = world.row(3, session_id=6)
    other.route_id += 1
    other.__post_init__()
    mine = world.row(0)
    world.step(mine, other)
    world.requests.finish(mine.route_id)
    (span,) = world.batches()
    assert attributes_of(span)[names.ATTR_SESSION_ID] == f"{5:016x}"
    assert "2 streams in 2 rows" in span.events[0].name


def test_a_link_for_each_second_of_passes_the_latest_ones() -> None:
    world = World()
    seconds = [trace_context.new_root() for _ in range(LINKS_MAX + 3)]
    for position, world.passes in enumerate(seconds):
        world.step(world.row(2 * position))
        world.step(world.row(2 * position + 1))
    world.requests.finish()
    (span,) = world.batches()
    linked = [f"{link.context.trace_id:032x}" for link in span.links]
    assert linked == [root[:16].hex() for root in seconds[3:]]
    assert attributes_of(span)[names.ATTR_LINKS_DROPPED] == 3


def test_a_lower_level_ends_open_spans() -> None:
    world = World()
    world.step(world.row(0))
    world.kept.telemetry.level = Level.SUMMARY
    world.step(world.row(1))
    (span,) = world.batches()
    assert attributes_of(span)[names.ATTR_BATCHES] == 1


def test_baggage_goes_with_a_session_that_is_opened_and_closed_by_one_step() -> None:
    """Its client went while the stage was computing something else."""
    world = World()
    opening = control(5, Flag.OPEN)
    opening.options = pb.SessionOptions(baggage="user=7")
    world.step(controls=(opening, control(5, Flag.CLOSE)))
    world.step(world.row(0))  # of a later one with its number
    world.step(controls=(control(5, Flag.CLOSE),))
    (span,) = world.batches()
    assert "baggage.user" not in attributes_of(span)


def test_baggage_of_sessions_that_are_refused_and_never_closed_is_bounded() -> None:
    world = World()
    for session_id in range(1, bounds.SESSIONS_PER_LINK_MAX + 9):
        opening = control(session_id, Flag.OPEN)
        opening.options = pb.SessionOptions(baggage=f"user={session_id}")
        world.step(controls=(opening,))
    assert len(world.requests._baggage) == bounds.SESSIONS_PER_LINK_MAX


def test_baggage_of_the_open_stands_on_the_span() -> None:
    world = World()
    opening = control(5, Flag.OPEN)
    opening.options = pb.SessionOptions(baggage="tenant=blue%20team;private,user=7,broken")
    world.step(controls=(opening,))
    world.step(world.row(0))
    world.step(controls=(control(5, Flag.CLOSE),))
    attributes = attributes_of(world.batches()[0])
    assert (attributes["baggage.tenant"], attributes["baggage.user"]) == ("blue team", "7")
    assert len(read_baggage(",".join(f"k{n}=v" for n in range(100)))) == 16
