"""One request's life: the pure session, then the pipeline's own glue around it against a model of the stages."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benches.simulate_world import smooth
from coordinator import prefixes
from coordinator.draft_flights import DRAFT_AUTO
from coordinator.drafts import Acceptance
from coordinator.generation import GenerationRequest, SamplingParams, TokenEvent
from coordinator.pipeline import Phase, Pipeline, PipelineConfig
from coordinator.scheduler import ScheduleConfig
from coordinator.session import REPLAYS_MAX, OutFrame, Session, State
from coordinator.stage_cost import StageCost
from coordinator.streams import SessionStream
from coordinator.suspects import LOSSES_ALONE, LOSSES_MAX
from stage.picking import is_guessed_wrong
from tests.fakes import pipeline_file
from wire.curve import CostCurve
from wire.envelope import DTYPE_F16
from wire.errors import (
    HandshakeError,
    NotReadyError,
    NumericError,
    OverloadedError,
    PositionGapError,
    ProtocolError,
    RelaylineError,
    StageLostError,
)
from wire.frames import Flag
from wire.pb.relayline.v1 import relayline_pb2 as pb

SAMPLE, PREFILL = Flag.WANTS_SAMPLE, Flag.PREFILL
END_TOKEN = 3


def new_session(n_prompt: int, max_tokens: int, *, ignore_eos: bool = False) -> Session:
    prompt = tuple(range(100, 100 + n_prompt))
    request = GenerationRequest("r", prompt, max_tokens, SamplingParams(), ignore_eos=ignore_eos)
    return Session(7, request, lambda token: token == END_TOKEN)


def chunks_of(session: Session, rows_max: int) -> list[OutFrame]:
    """All chunks that the session still has to send."""
    return list(iter(lambda: session.next_chunk(rows_max), None))  # type: ignore[arg-type]


def prefilled(session: Session) -> None:
    """Send everything up to the first sample."""
    session.start()
    chunks_of(session, 64)


def shape(frames: Iterable[OutFrame]) -> list[tuple[int, tuple[int, ...], int]]:
    return [(frame.position, frame.tokens, int(frame.flags)) for frame in frames]


@pytest.mark.parametrize(
    ("n_prompt", "chunks"),
    [(1, [(0, 1)]), (4, [(0, 4)]), (5, [(0, 4), (4, 1)]), (9, [(0, 4), (4, 4), (8, 1)])],
)
def test_the_prompt_leaves_in_chunks_and_only_the_last_is_sampled(n_prompt: int, chunks: list[tuple[int, int]]) -> None:
    session = new_session(n_prompt, 2)
    assert shape(session.start()) == [(0, (), Flag.OPEN)]
    assert session.prefill_left == n_prompt
    rest = chunks_of(session, 4)
    assert session.prefill_left == 0
    assert [(frame.position, len(frame.tokens)) for frame in rest] == chunks
    assert sum((frame.tokens for frame in rest), ()) == session.request.prompt_tokens
    assert [bool(frame.flags & SAMPLE) for frame in rest] == [False] * (len(chunks) - 1) + [True]
    assert all(frame.flags & PREFILL for frame in rest)


def test_a_token_goes_to_the_client_and_back_into_the_pipeline() -> None:
    session = new_session(3, 3)
    prefilled(session)
    event, frames = session.sampled(3, 50, -0.5, ((50, -0.5),))
    assert event == TokenEvent(50, -0.5, ((50, -0.5),))
    assert shape(frames) == [(3, (50,), SAMPLE)]
    assert (session.state, session.n_generated) == (State.DECODE, 1)


@pytest.mark.parametrize(
    ("tokens", "ignore_eos", "reason", "is_end_token"),
    [
        ([50, 51], False, "length", False),
        ([50, END_TOKEN], False, "stop", True),
        ([END_TOKEN], False, "stop", True),
        ([END_TOKEN, END_TOKEN], True, "length", False),
    ],
)
def test_the_last_token_says_why_and_closes(
    tokens: list[int], ignore_eos: bool, reason: str, is_end_token: bool
) -> None:
    session = new_session(2, 2, ignore_eos=ignore_eos)
    session.start()
    events = [session.sampled(2 + index, token) for index, token in enumerate(tokens)]
    assert [event.finish_reason for event, _ in events if event] == [None] * (len(tokens) - 1) + [reason]
    last, frames = events[-1]
    assert last is not None
    assert last.is_end_token == is_end_token
    assert shape(frames) == [(0, (), Flag.CLOSE)]
    assert session.sampled(2 + len(tokens), 9) == (None, [])


@pytest.mark.parametrize("position", [0, 2, 3, 5])
def test_an_echo_changes_nothing(position: int) -> None:
    session = new_session(3, 5)
    session.start()
    session.sampled(3, 50)
    assert session.sampled(position, 51) == (None, [])
    assert session.history[3:] == [50]


def test_a_waiting_session_takes_no_token_and_needs_no_close() -> None:
    session = new_session(3, 5)
    assert session.sampled(3, 50) == (None, [])
    assert session.cancel() == []
    assert session.start() == []
    assert session.state is State.DONE


def test_a_session_that_gives_way_loses_nothing_but_its_lane() -> None:
    session = new_session(3, 5)
    assert session.give_way() == [], "it has no lane yet"
    prefilled(session)
    session.sampled(3, 50)
    assert shape(session.give_way()) == [(0, (), Flag.CLOSE)]
    assert session.sampled(4, 51) == (None, []), "said before it gave way"
    assert (session.give_way(), session.next_chunk(64), session.state) == ([], None, State.WAITING)
    assert shape(session.start()) == [(0, (), Flag.OPEN)]
    (chunk,) = chunks_of(session, 64)
    assert (chunk.position, chunk.tokens) == (0, (100, 101, 102, 50))
    assert shape(session.give_way()) == [(0, (), Flag.CLOSE)]
    assert (session.cancel(), session.give_way(), session.state) == ([], [], State.DONE)


def test_a_new_epoch_replays_prompt_and_tokens_as_prefill() -> None:
    session = new_session(3, 5)
    prefilled(session)
    session.sampled(3, 50)
    session.sampled(4, 51)
    assert session.prefill_left == 0
    assert shape(session.start()) == [(0, (), Flag.OPEN)]
    frames = chunks_of(session, 2)
    assert sum((frame.tokens for frame in frames), ()) == (100, 101, 102, 50, 51)
    assert [frame.position for frame in frames] == [0, 2, 4]
    assert frames[-1].flags == PREFILL | SAMPLE
    event, _ = session.sampled(5, 52)
    assert event is not None


def test_cancel_closes_once() -> None:
    session = new_session(3, 5)
    session.start()
    assert shape(session.cancel()) == [(0, (), Flag.CLOSE)]
    assert session.cancel() == []


# --- drafts -----------------------------------------------------------------------------------------------------------


def drafting(prediction: tuple[int, ...], max_tokens: int = 20) -> Session:
    """A session that has its first token, 50, and expects these after it."""
    request = GenerationRequest("r", (100, 101, 102), max_tokens, SamplingParams(), prediction=(50, *prediction))
    session = Session(7, request, lambda token: token == END_TOKEN, acceptance=Acceptance())
    prefilled(session)
    return session


def extended(session: Session, frames: list[OutFrame], n_tokens: int) -> OutFrame:
    (frame,) = frames
    session.extend(frame, n_tokens)
    return frame


GUESS = SAMPLE | Flag.DRAFTED


def test_guesses_travel_behind_the_row_and_right_ones_need_no_frame() -> None:
    session = drafting((51, 52, 53, 54))
    frame = extended(session, session.sampled(3, 50)[1], 2)
    assert shape([frame]) == [(3, (50, 51, 52), GUESS)]
    assert frame.n_drafted == 2
    for position, token in ((4, 51), (5, 52)):
        event, frames = session.sampled(position, token)
        assert event is not None
        assert (frames, event.is_drafted, event.is_predicted) == ([], True, True)
    event, frames = session.sampled(6, 53)
    assert event is not None
    assert (shape(frames), event.is_drafted, event.is_predicted) == ([(6, (53,), SAMPLE)], False, True)


def test_behind_a_wrong_guess_the_right_row_leaves() -> None:
    session = drafting((51, 52, 53, 54))
    extended(session, session.sampled(3, 50)[1], 3)
    assert session.sampled(4, 51)[1] == []
    event, frames = session.sampled(5, 99)
    assert event is not None
    assert (shape(frames), event.is_drafted) == ([(5, (99,), SAMPLE)], False)
    assert not session.ahead
    assert session.sampled(6, 53)[0] is not None, "guesses of before count no more"


def test_guesses_follow_behind_those_that_are_under_way() -> None:
    session = drafting((51, 52, 53, 54, 55))
    extended(session, session.sampled(3, 50)[1], 1)
    following = session.guess(2)
    assert following is not None
    assert shape([following]) == [(5, (52, 53), GUESS | Flag.GUESSED)]
    assert following.n_drafted == 2
    assert session.chances(9) == pytest.approx(session._drafter.chances(3, 2))  # type: ignore[union-attr]
    session.sampled(4, 51)
    last = session.guess(9)
    assert last is not None
    assert shape([last]) == [(7, (54, 55), GUESS | Flag.GUESSED)]
    assert session.guess(1) is None
    assert session.chances(1) == []


def test_no_guess_ends_an_answer_or_goes_beyond_it() -> None:
    session = drafting((51, END_TOKEN, 53))
    frame = extended(session, session.sampled(3, 50)[1], 9)
    assert frame.tokens == (50, 51)
    session = drafting((51, 52, 53, 54), max_tokens=3)
    frame = extended(session, session.sampled(3, 50)[1], 9)
    assert frame.tokens == (50, 51), "what this row brings is the last token"
    assert session.guess(1) is None
    assert session.sampled(4, 51)[1] == []
    event, frames = session.sampled(5, 52)
    assert event is not None
    assert (event.finish_reason, shape(frames)) == ("length", [(0, (), Flag.CLOSE)])
    assert not session.ahead


def test_who_starts_again_has_nothing_under_way() -> None:
    session = drafting((51, 52, 53, 54, 55))
    extended(session, session.sampled(3, 50)[1], 4)
    session.sampled(4, 51)
    session.give_way()
    session.start()
    assert not session.ahead
    assert (session.chances(3), session.guess(3)) == ([], None), "while its history is read"
    chunks_of(session, 64)
    frame = extended(session, session.sampled(5, 52)[1], 2)
    assert frame.tokens == (52, 53, 54), "what was learned of its text stays"


def test_behind_a_replay_within_an_epoch_nothing_is_guessed() -> None:
    """Answers of before it are taken as well, and might be of other guesses than those that are under way now."""
    session = drafting((51, 52, 53, 54, 55))
    extended(session, session.sampled(3, 50)[1], 3)
    session.start()
    chunks_of(session, 64)
    (waiting,) = session.sampled(4, 51)[1]
    later = session.sampled(5, 52)[1]
    assert extended(session, [waiting], 2).tokens == (51,)
    assert extended(session, later, 2).tokens == (52,)
    assert (session.chances(3), session.guess(3)) == ([], None)
    session.give_way()
    session.start()  # the next epoch
    chunks_of(session, 64)
    assert extended(session, session.sampled(6, 53)[1], 2).tokens == (53, 54, 55)


def test_of_an_answer_that_waits_behind_another_nothing_is_guessed() -> None:
    session = drafting((51, 52, 53, 54, 55))
    (waiting,) = session.sampled(3, 50)[1]
    later = session.sampled(4, 51)[1]
    assert extended(session, [waiting], 2).tokens == (50,), "its successor has a frame of its own"
    assert extended(session, later, 2).tokens == (51, 52, 53)


def test_what_was_predicted_is_told_where_nothing_is_drafted_too() -> None:
    session = drafting((51, 52, 53))
    session.acceptance = None
    events = [session.sampled(3 + at, token)[0] for at, token in enumerate((50, 51, 99, 53))]
    assert [event.is_predicted for event in events if event] == [True, True, False, True]
    assert (session.chances(3), session.guess(3)) == ([], None)


def test_a_session_without_acceptance_drafts_nothing() -> None:
    session = new_session(3, 9)
    prefilled(session)
    frame = extended(session, session.sampled(3, 100)[1], 5)
    assert (frame.tokens, frame.flags, session.guess(3), session.chances(3)) == ((100,), SAMPLE, None, [])


# --- the pipeline's glue against a model of the stages ----------------------------------------------------------------

CTX = 64


ORACLE_VOCAB = 1_500


def oracle(session_id: int, position: int) -> int:
    """The one right token."""
    return 1_000 + (session_id * 31 + position * 7) % 500


@dataclasses.dataclass
class StagesModel:
    """What all stages together do: lanes, positions, and a sample for every row that wants one."""

    n_lanes: int
    frames: list[OutFrame] = dataclasses.field(default_factory=list)  # in flight towards the stages
    replies: list[pb.ReturnEnvelope] = dataclasses.field(default_factory=list)  # in flight towards the coordinator
    said: list[pb.ReturnEnvelope] = dataclasses.field(default_factory=list)  # everything ever said, for echoes
    rows: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    last: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)  # position and token sampled last
    refused: set[int] = dataclasses.field(default_factory=set)  # sessions whose open was; their rows are dropped
    epoch: int = 0
    n_taken: int = 0  # lanes that another coordinator has
    n_behind: int = -1  # rows that some stage lacks when an epoch ends; -1: it was started anew

    def push(self, frames: Iterable[OutFrame]) -> None:
        for frame in frames:
            if frame.flags & Flag.CLOSE:  # what its session still waits for is dropped, but what others are to copy
                key, kept = frame.session.session_id, 0
                for at, other in enumerate(self.frames):
                    kept = at if other.flags & Flag.COPY_PREFIX and other.argument == key else kept
                own = {id(other) for other in self.frames[kept:] if other.session is frame.session and other.tokens}
                self.frames = [other for other in self.frames if id(other) not in own]
            self.frames.append(frame)

    def left(self) -> dict[int, int]:
        """What a new epoch is told that all stages hold: the last one, of what the first has, all but n_behind rows."""
        if self.n_behind < 0:
            self.rows = {}
        self.rows = {key: rows for key, rows in self.rows.items() if rows}
        return {key: max(0, len(rows) - self.n_behind) for key, rows in self.rows.items()}

    def step(self) -> None:
        if not self.frames:
            return
        frame = self.frames.pop(0)
        session_id = frame.session.session_id
        if frame.flags & Flag.OPEN:
            self.refused.discard(session_id)
            self.last.pop(session_id, None)
            if session_id not in self.rows and len(self.rows) + self.n_taken >= self.n_lanes:
                assert self.n_taken, "the coordinator opened more sessions than there are lanes"
                self.refused.add(session_id)
                fault = pb.SessionFault(session_id=session_id, label="no_lane", message="taken", retryable=True)
                self.say(pb.ReturnEnvelope(epoch=self.epoch, faults=[fault]))
                return
            self.rows.setdefault(session_id, [])
        elif frame.flags & Flag.COPY_PREFIX and session_id not in self.refused:
            source = self.rows.get(frame.argument)
            if source is None or frame.argument in self.refused:  # or it was given up while its frames waited
                self.refused.add(session_id)
                fault = pb.SessionFault(session_id=session_id, label="bad_session", message="not open")
                self.say(pb.ReturnEnvelope(epoch=self.epoch, faults=[fault]))
                return
            assert not self.rows[session_id], "a copy goes into an empty lane"
            assert frame.position <= len(source), "the source does not hold so much"
            self.rows[session_id] = source[: frame.position]
        elif frame.flags & Flag.CLOSE:
            self.rows.pop(session_id, None)
            self.refused.discard(session_id)
        elif frame.flags & Flag.TRIM and session_id not in self.refused:
            assert frame.position <= len(self.rows[session_id]), "it does not hold so much"
            del self.rows[session_id][frame.position :]
        elif session_id not in self.refused:
            self.compute(frame)

    def compute(self, frame: OutFrame) -> None:
        session_id, flags = frame.session.session_id, frame.flags
        held = self.rows[session_id]
        assert frame.position <= len(held), "a gap"
        held[frame.position :] = frame.tokens
        answer = pb.ReturnEnvelope(epoch=self.epoch)
        queued = mock.Mock(flags=flags, position=frame.position, draft_tokens=frame.tokens)
        n_good = 0
        if not is_guessed_wrong(queued, mock.Mock(last=self.last.get(session_id))):
            for at in range(len(frame.tokens)) if flags & Flag.DRAFTED else (len(frame.tokens) - 1,):
                n_good = frame.position + at + 1
                if flags & SAMPLE:
                    token = oracle(session_id, n_good)
                    self.last[session_id] = (n_good, token)
                    answer.samples.append(pb.Sampled(session_id=session_id, position=n_good, token=token))
                if at + 1 < len(frame.tokens) and frame.tokens[at + 1] != oracle(session_id, n_good):
                    break
        n_prompt = len(frame.session.request.prompt_tokens)
        true = [*frame.session.request.prompt_tokens, *(oracle(session_id, at) for at in range(n_prompt, n_good))]
        assert held[:n_good] == true[:n_good], "what was sampled stood on another history"
        if not (answer.samples and n_good == len(held)):
            answer.progress.append(pb.Progress(session_id=session_id, position=len(held)))
        self.say(answer)

    def say(self, message: pb.ReturnEnvelope) -> None:
        self.replies.append(message)
        self.said.append(message)


class Client:
    """Reads one stream without waiting and holds it to its contract."""

    def __init__(self, stream: SessionStream, session: Session) -> None:
        self.stream, self.session = stream, session
        self.tokens: list[int] = []
        self.ends: list[str] = []
        self.left = False

    def read(self) -> None:
        while not self.stream._events.empty():
            event = self.stream._events.get_nowait()
            assert not self.ends, "an event after the end"
            if isinstance(event, RelaylineError):
                self.ends.append(event.label)
                continue
            self.tokens.append(event.token)
            if event.finish_reason is not None:
                self.ends.append(event.finish_reason)
        n_prompt = len(self.session.request.prompt_tokens)
        expected = [oracle(self.session.session_id, n_prompt + index) for index in range(len(self.tokens))]
        assert self.tokens == expected, "a token was lost, repeated or invented"


class World:
    """A pipeline whose connection is the model."""

    def __init__(
        self, n_lanes: int, mode: str = "auto", share: bool = False, prefix_lanes: int = 0, draft: int = 0
    ) -> None:
        """With `draft` not 0 clients predict their answers, and every third token wrongly."""
        schedule = ScheduleConfig(mode, n_groups=2, group_rows=2, chunk_rows=3, draft=draft)
        config = PipelineConfig(("a:1",), DTYPE_F16, schedule, waiting_max=2, share=share, prefix_lanes=prefix_lanes)
        self.pipeline = Pipeline(config, pipeline_file(1, n_vocab=ORACLE_VOCAB), lambda _: False)
        self.stages = StagesModel(n_lanes)
        self.clients: list[Client] = []
        self.connect()

    def connect(self, n_lanes: int = 0) -> None:
        pipeline, stages = self.pipeline, self.stages
        stages.n_lanes = n_lanes or stages.n_lanes
        pipeline.epoch += 1
        stages.epoch = pipeline.epoch
        stages.frames, stages.refused, stages.last = [], set(), {}
        held = stages.left()
        pipeline._connection = mock.Mock(n_lanes=stages.n_lanes, ctx_tokens=CTX, held=held)
        curve = smooth() if pipeline.config.schedule.draft else CostCurve()  # two stages: guesses have one to fill
        pipeline._connection.stage_costs = lambda: [StageCost(curve, curve, 64)] * (2 if curve.is_known else 1)
        with mock.patch("coordinator.pipeline.TokenSender", return_value=stages):
            pipeline._resume(pipeline._connection)

    def disconnect(self) -> None:
        self.pipeline.phase, self.pipeline._lost_at_ns = Phase.RECOVERING, time.monotonic_ns()
        self.pipeline._give_up_guilty(StageLostError("a stage died"))
        self.pipeline._connection = self.pipeline._sender = None

    def open(self, n_prompt: int, max_tokens: int) -> None:
        request = GenerationRequest(f"r{len(self.clients)}", tuple(range(n_prompt)), max_tokens, SamplingParams())
        try:
            stream = self.pipeline.open(request)
            (session,) = (a.session for a in self.pipeline._audiences.values() if stream in a.streams)
            if self.pipeline.config.schedule.draft:
                predicted = [oracle(session.session_id, n_prompt + at) + (at % 3 == 2) for at in range(max_tokens)]
                session.request = dataclasses.replace(session.request, prediction=tuple(predicted))
            self.clients.append(Client(stream, session))
        except NotReadyError:
            assert self.pipeline.phase is Phase.LOADING
        except OverloadedError:
            assert len(self.pipeline._admission.waiting) >= 2

    def deliver(self) -> None:
        if self.stages.replies:
            self.pipeline._on_return(self.stages.replies.pop(0))

    def fault(self, client: Client, retryable: bool, position: int = 0) -> None:
        session_id, label = client.session.session_id, "no_lane" if retryable else "not_finite"
        fault = pb.SessionFault(session_id=session_id, position=position, label=label, message="m", retryable=retryable)
        self.stages.said.append(pb.ReturnEnvelope(epoch=self.pipeline.epoch, faults=[fault]))
        self.pipeline._on_return(self.stages.said[-1])

    def check(self) -> None:
        for client in self.clients:
            client.read()
            assert len(client.ends) <= 1
        running = {id(c.session) for c in self.clients if c.session.state in (State.PREFILL, State.DECODE)}
        assert len(running) <= self.stages.n_lanes
        admission = self.pipeline._admission
        assert not admission.waiting or admission.running, "nobody's end will bring them a lane"
        if not any(fault.label == "no_lane" for message in self.stages.said for fault in message.faults):
            assert not admission.waiting or len(admission.running) >= admission.n_lanes, "a lane is free and some wait"

    def turn(self) -> None:
        """Let one frame and one answer arrive."""
        self.pipeline._dispatch_now()
        self.stages.step()
        self.deliver()
        self.check()

    def finish(self) -> None:
        """Let everything run out; then nothing may be left."""
        if self.pipeline.phase is not Phase.READY:
            self.connect()
        self.pipeline._dispatch_now()
        while self.stages.frames or self.stages.replies:
            self.stages.step()
            self.deliver()
            self.pipeline._dispatch_now()
        self.check()
        for client in self.clients:
            assert client.left or len(client.ends) == 1, "a request that never ended"
            if client.ends in (["length"], ["stop"]):
                assert len(client.tokens) == client.session.request.max_tokens
        admission = self.pipeline._admission
        assert (admission.running, len(admission.waiting)) == ({}, 0)
        assert (self.pipeline._audiences, self.pipeline._shared) == ({}, {})
        kept = {kept.session.session_id: kept.tokens for kept in self.pipeline._prefixes._kept}
        assert self.stages.rows == kept, "a lane was never given back, or is not what the coordinator believes"
        assert len(kept) <= self.pipeline.config.prefix_lanes
        assert self.pipeline._idle.is_set()


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(1, 8), st.integers(1, 6)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("deliver"), st.integers(1, 4)),
        st.tuples(st.just("echo"), st.integers(0, 50)),
        st.tuples(st.just("fault"), st.integers(0, 9), st.booleans()),
        st.tuples(st.just("leave"), st.integers(0, 9)),
        st.tuples(st.just("taken"), st.integers(0, 2)),
        st.tuples(st.just("lose"), st.integers(-1, 3)),
        st.tuples(st.just("recover"), st.integers(1, 3)),
    ),
    max_size=60,
)


async def play(world: World, event: tuple[object, ...]) -> None:
    match event:
        case ("open", int(n_prompt), int(max_tokens)):
            world.open(n_prompt, max_tokens)
        case ("step", int(times)):
            for _ in range(times if world.pipeline.phase is Phase.READY else 0):
                world.stages.step()
        case ("deliver", int(times)):
            for _ in range(times):
                world.deliver()
        case ("echo", int(which)) if world.stages.said:
            world.pipeline._on_return(world.stages.said[which % len(world.stages.said)])
        case ("fault", int(which), bool(retryable)) if world.clients:
            world.fault(world.clients[which % len(world.clients)], retryable)
        case ("leave", int(which)) if world.clients:
            client = world.clients[which % len(world.clients)]
            client.read()
            client.left = True
            await client.stream.aclose()
        case ("taken", int(n_lanes)):
            world.stages.n_taken = n_lanes
        case ("lose", int(n_behind)):
            world.stages.n_behind = n_behind
            world.disconnect()
        case ("recover", int(n_lanes)) if world.pipeline.phase is Phase.RECOVERING:
            world.connect(n_lanes)


@settings(max_examples=200, deadline=None)
@given(
    EVENTS,
    st.integers(1, 3),
    st.sampled_from(["auto", "drain", "fixed"]),
    st.booleans(),
    st.integers(0, 2),
    st.sampled_from([0, DRAFT_AUTO, 1, 4]),
)
def test_every_request_ends_once_with_its_tokens_in_order(
    events: list[tuple[object, ...]], n_lanes: int, mode: str, share: bool, prefix_lanes: int, draft: int
) -> None:
    async def scenario() -> None:
        world = World(n_lanes, mode, share, prefix_lanes, draft)
        for event in events:
            await play(world, event)
            world.pipeline._dispatch_now()  # what the end of a turn of the loop does
            world.check()
        world.finish()

    with mock.patch.object(prefixes, "PREFIX_TOKENS_MIN", 2):
        asyncio.run(scenario())


async def test_giving_up_ends_running_and_waiting_requests_once() -> None:
    world = World(n_lanes=1)
    for _ in range(3):
        world.open(4, 4)
    for _ in range(3):
        world.pipeline._dispatch_now()
        world.stages.step()
    world.deliver()
    world.disconnect()
    world.pipeline._fail_all(NotReadyError("gone"))
    world.check()
    assert [client.ends for client in world.clients] == [["not_ready"]] * 3
    world.finish()


async def test_an_error_that_cannot_be_retried_reaches_clients_as_a_lost_stage() -> None:
    world = World(n_lanes=1)
    world.open(4, 4)
    world.pipeline._fail_all(HandshakeError("a handshake that no longer fits"))
    world.check()
    assert world.clients[0].ends == [StageLostError.label]
    world.finish()


def test_an_answer_from_before_a_replay_counts_once_and_the_replay_goes_on() -> None:
    session = new_session(3, 5)
    prefilled(session)
    session.sampled(3, 50)
    session.start()
    assert session.next_chunk(2) is not None
    event, frames = session.sampled(4, 51)  # was on its way when the replay began
    assert event is not None
    assert frames == []
    (rest,) = chunks_of(session, 64)
    assert (rest.position, rest.tokens) == (2, (102, 50, 51))
    assert rest.flags & SAMPLE


async def test_a_token_outside_the_vocabulary_ends_the_epoch_and_no_request() -> None:
    world = World(n_lanes=1)
    world.open(1, 4)
    wrong = pb.Sampled(session_id=world.clients[0].session.session_id, position=1, token=ORACLE_VOCAB)
    world.pipeline._on_return(pb.ReturnEnvelope(epoch=world.pipeline.epoch, samples=[wrong]))
    assert isinstance(world.pipeline._lost.result(), ProtocolError)
    assert not world.clients[0].ends
    world.connect()
    world.finish()


async def test_the_next_rows_leave_before_the_answer_is_written() -> None:
    """Stages wait for them, whereas writing takes the longer the more streams a step had."""
    world = World(n_lanes=1)
    world.open(1, 3)
    stream, in_flight = world.clients[0].stream, []
    put = stream.put

    def look(event: TokenEvent | RelaylineError) -> None:
        in_flight.append([frame.flags for frame in world.stages.frames])
        put(event)

    with mock.patch.object(stream, "put", look):
        world.finish()
    assert in_flight == [[SAMPLE], [SAMPLE], [Flag.CLOSE]]


async def test_a_sample_that_meets_a_bug_costs_no_other_stream_its_token() -> None:
    """What was taken note of is told, whatever comes of the rest of the message: a replay does not tell it again."""
    world = World(n_lanes=2)
    for n_prompt in (1, 2):
        world.open(n_prompt, 3)
    first, second = (client.session for client in world.clients)
    samples = [
        pb.Sampled(session_id=session.session_id, position=n, token=oracle(session.session_id, n))
        for session, n in ((first, 1), (second, 2))
    ]
    sampled = Session.sampled

    def stumble(session: Session, *arguments: Any) -> tuple[TokenEvent | None, list[OutFrame]]:
        if session is second:
            raise ZeroDivisionError("a bug of ours")
        return sampled(session, *arguments)

    with mock.patch.object(Session, "sampled", stumble), pytest.raises(ZeroDivisionError):
        world.pipeline._on_return(pb.ReturnEnvelope(epoch=world.pipeline.epoch, samples=samples))
    world.check()
    assert [len(client.tokens) for client in world.clients] == [1, 0]
    world.connect()
    world.finish()


def state_of(client: Client) -> State:
    return client.session.state


def states_of(world: World) -> list[State]:
    return [*map(state_of, world.clients)]


async def decoding(n_lanes: int, n_clients: int) -> World:
    """A pipeline in which whoever has a lane has got its first token, and which was then lost."""
    world = World(n_lanes)
    for n_prompt in range(3, 3 + n_clients):
        world.open(n_prompt, max_tokens=6)
    while any(not client.tokens for client in world.clients[:n_lanes]):
        world.turn()
    world.disconnect()
    return world


async def test_with_fewer_lanes_the_youngest_wait_and_go_on_where_they_were() -> None:
    world = await decoding(n_lanes=3, n_clients=4)
    world.connect(n_lanes=1)
    assert states_of(world) == [State.PREFILL, State.WAITING, State.WAITING, State.WAITING]
    begun = [len(client.tokens) for client in world.clients]
    assert min(begun[:3]) > 0
    fault = pb.SessionFault(session_id=world.clients[1].session.session_id, label="not_finite")
    world.pipeline._on_return(pb.ReturnEnvelope(epoch=world.pipeline.epoch, faults=[fault]))
    assert not world.clients[1].ends, "it has sent nothing in this epoch"
    world.open(3, 3)
    assert len(world.clients) == 4, "the line is full"
    world.clients[1].left = True
    await world.clients[1].stream.aclose()
    world.check()
    assert states_of(world) == [State.PREFILL, State.DONE, State.WAITING, State.WAITING]
    world.finish()
    assert [client.ends for client in world.clients] == [["length"], [], ["length"], ["length"]]


async def test_with_more_lanes_those_who_wait_start_at_once() -> None:
    world = await decoding(n_lanes=1, n_clients=3)
    assert states_of(world)[1:] == [State.WAITING] * 2
    world.connect(n_lanes=3)
    assert states_of(world) == [State.PREFILL] * 3
    world.finish()
    assert [client.ends for client in world.clients] == [["length"]] * 3


async def test_who_gets_a_lane_during_a_recovery_starts_with_the_next_epoch() -> None:
    world = await decoding(n_lanes=1, n_clients=2)
    await world.clients[0].stream.aclose()
    assert states_of(world) == [State.DONE, State.WAITING]
    assert not world.clients[1].session.record.started_ns
    world.clients[0].left = True
    world.connect()
    assert states_of(world) == [State.DONE, State.PREFILL]
    world.finish()


async def test_a_stream_whose_lane_another_coordinator_has_waits_for_the_end_of_one_of_ours() -> None:
    world = World(n_lanes=2)
    world.open(3, max_tokens=6)
    world.stages.n_taken = 1
    world.open(4, max_tokens=2)
    while state_of(world.clients[1]) is not State.WAITING:
        world.turn()
    world.open(5, max_tokens=2)
    assert states_of(world)[1:] == [State.WAITING] * 2, "no newcomer overtakes it"
    while not world.clients[0].ends:
        assert not world.clients[1].ends
        world.turn()
    assert states_of(world)[1:] == [State.PREFILL] * 2, "both try, for the other coordinator may be done"
    world.finish()
    assert [client.ends for client in world.clients] == [["length"]] * 3
    assert [client.session.replays for client in world.clients] == [0, 0, 0]
    assert world.clients[1].session.record.events[0].name == "replayed"


async def both_open() -> tuple[World, Client]:
    """Two streams whose opens have passed the first stage; the second one."""
    world = World(n_lanes=2)
    for n_prompt in (3, 4):
        world.open(n_prompt, max_tokens=4)
    world.pipeline._dispatch_now()
    world.stages.step()
    world.stages.step()
    assert [*world.stages.rows] == [client.session.session_id for client in world.clients]
    return world, world.clients[1]


async def test_a_stream_that_a_later_stage_refuses_gives_its_lanes_before_it_back() -> None:
    world, refused = await both_open()
    world.fault(refused, True)
    assert (state_of(refused), refused.session.replays) == (State.WAITING, 0)
    world.pipeline._dispatch_now()
    while world.stages.frames:
        world.stages.step()
    assert refused.session.session_id not in world.stages.rows
    world.finish()
    assert [client.ends for client in world.clients] == [["length"]] * 2


async def test_a_stream_that_had_its_lane_and_finds_no_room_for_more_is_replayed() -> None:
    world, refused = await both_open()
    world.fault(refused, True, position=3)
    assert (state_of(refused), refused.session.replays) == (State.PREFILL, 1)
    world.finish()


async def test_a_stream_that_runs_alone_is_replayed_when_it_gets_no_lane() -> None:
    world = World(n_lanes=1)
    world.stages.n_taken = 1
    world.open(3, max_tokens=2)
    world.finish()
    assert world.clients[0].ends == ["no_lane"]
    assert world.clients[0].session.replays == REPLAYS_MAX


async def test_a_suspect_that_gets_no_lane_lets_the_next_one_try() -> None:
    world = World(n_lanes=2)
    for n_prompt in (4, 5):
        world.open(n_prompt, max_tokens=2)
    for _ in range(LOSSES_ALONE):
        world.disconnect()  # before any token
        world.connect()
    first, second = world.clients
    world.stages.n_taken = 2
    while state_of(first) is not State.WAITING:
        world.turn()
    world.stages.n_taken = 1
    world.finish()
    assert [first.ends, second.ends] == [["length"]] * 2


async def test_a_suspect_that_gets_a_lane_when_another_leaves_waits_for_its_turn() -> None:
    world = World(n_lanes=3)
    for n_prompt in (4, 5, 6):
        world.open(n_prompt, max_tokens=2)
    for n_lanes in (3, 2):
        world.disconnect()  # before any token
        world.connect(n_lanes)
    tried, second, third = world.clients
    assert [state_of(client) for client in (tried, third)] == [State.PREFILL, State.WAITING]
    await second.stream.aclose()
    second.left = True
    assert third.session.session_id in world.pipeline._admission.running
    assert state_of(third) is State.WAITING, "it may be the one that brings the pipeline down"
    while not tried.tokens:
        assert state_of(third) is State.WAITING
        world.turn()
    assert state_of(third) is State.PREFILL
    world.finish()


@pytest.mark.parametrize("lanes", [[4], [2, 4], [1], [3, 1, 2], [4, 2, 1]], ids=str)
async def test_a_request_that_kills_a_stage_each_time_is_given_up_and_the_others_go_on(lanes: list[int]) -> None:
    """Its rows end the epoch wherever they arrive; nothing else does. The stages come back with so many lanes."""
    world, lanes_then = World(n_lanes=4), itertools.cycle(lanes)
    for n_prompt in (4, 5, 6, 7):
        world.open(n_prompt, max_tokens=6)
    poison = world.clients[1]
    n_lost = 0
    for _ in range(500):
        world.pipeline._dispatch_now()
        if any(frame.session is poison.session and frame.tokens for frame in world.stages.frames):
            world.disconnect()
            n_lost += 1
            world.connect(next(lanes_then))
            continue
        if not (world.stages.frames or world.stages.replies):
            break
        world.stages.step()
        world.deliver()
        world.check()
    assert n_lost == LOSSES_MAX
    assert poison.ends == ["internal"]
    assert [client.ends for client in world.clients if client is not poison] == [["length"]] * 3
    world.finish()


async def test_a_bug_in_scheduling_ends_the_epoch_and_no_request() -> None:
    world = World(n_lanes=2)
    world.open(4, max_tokens=3)
    with mock.patch.object(world.pipeline._scheduler, "take", side_effect=ZeroDivisionError("a bug")):
        world.pipeline._dispatch_now()
    assert "a bug" in str(world.pipeline._lost.result())
    world.disconnect()
    world.finish()
    assert world.clients[0].ends == ["length"]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_what_is_left_of_who_has_left_is_closed_in_the_next_epoch(when: str) -> None:
    world = World(3)
    world.open(4, 6)
    for _ in range(6):
        world.turn()
    if when == "before":
        await play(world, ("leave", 0))
    await play(world, ("lose", 0))
    if when == "meanwhile":
        await play(world, ("leave", 0))
    await play(world, ("recover", 3))
    world.finish()


async def test_who_is_lost_twice_without_a_token_does_not_go_on_from_what_is_there() -> None:
    world = World(3)
    world.open(9, 2)
    (client,) = world.clients
    there = []
    for _ in range(2):
        world.pipeline._dispatch_now()
        for _ in range(3):
            world.stages.step()
        world.stages.replies.clear()
        await play(world, ("lose", 0))
        await play(world, ("recover", 3))
        there.append(client.session.n_there)
    assert there[0] > 0
    assert there[1] == 0
    world.finish()


def test_what_a_stage_had_to_give_away_costs_no_replay() -> None:
    """Streams over a bad link to stages that others use as well may meet that more often than REPLAYS_MAX."""
    session = Session(1, GenerationRequest("r", tuple(range(9)), 50, SamplingParams()), lambda _: False)
    gap = PositionGapError("it cannot be trimmed to 5, it holds 0")
    for _ in range(2 * REPLAYS_MAX):
        session.start(5)
        assert session.may_replay(NumericError("in what was left"), is_retryable=False)
        session.count_replay()
    for n_replays in range(REPLAYS_MAX):
        session.start()
        assert session.replays == n_replays
        assert session.may_replay(gap, is_retryable=True)
        session.count_replay()
    assert not session.may_replay(gap, is_retryable=True)
