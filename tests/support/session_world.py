"""Drives the pipeline's shell against a model of the stages."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from unittest import mock

from hypothesis import strategies as st

from relayline.coordinator.engine.epoch_facts import EpochFacts
from relayline.coordinator.engine.pipeline import Phase, Pipeline, PipelineConfig
from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.frame import Frame
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.request_log import SessionRecord
from relayline.coordinator.sessions.session import Session, State
from relayline.coordinator.sessions.streams import SessionStream
from relayline.deploy.testing.simulation.world import smooth
from relayline.stage.steps.picking import is_guessed_wrong
from relayline.wire.common.curve import CostCurve
from relayline.wire.common.errors import (
    NotReadyError,
    OverloadedError,
    RelaylineError,
    StageLostError,
)
from relayline.wire.envelopes.dtypes import DTYPE_F16
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.settings.table import ServingSettings
from tests.support.fakes import pipeline_file
from tests.support.sessions import SAMPLE

CTX = 64


ORACLE_VOCAB = 1_500


def oracle(session_id: int, position: int) -> int:
    """The one right token."""
    return 1_000 + (session_id * 31 + position * 7) % 500


@dataclasses.dataclass
class StagesModel:
    """A model of all stages together: lanes, positions, and a sample for every row that wants one."""

    n_lanes: int
    frames: list[Frame] = dataclasses.field(default_factory=list)  # in flight towards the stages
    replies: list[pb.ReturnResponse] = dataclasses.field(default_factory=list)  # in flight towards the coordinator
    said: list[pb.ReturnResponse] = dataclasses.field(default_factory=list)  # everything ever said, for echoes
    rows: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    last: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)  # position and token sampled last
    refused: set[int] = dataclasses.field(
        default_factory=set
    )  # sessions whose open was refused; their rows are dropped
    epoch: int = 0
    n_taken: int = 0  # lanes held by another coordinator
    prompts: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    n_behind: int = -1  # rows that some stage lacks when an epoch ends; -1: it was restarted

    def push(self, frames: Iterable[Frame], _context: bytes = b"", _now_ns: int = 0) -> None:
        for frame in frames:
            if frame.flags & Flag.CLOSE:  # its waiting rows are dropped, except those that others will copy
                key, kept = frame.session_id, 0
                for at, other in enumerate(self.frames):
                    kept = at if other.flags & Flag.COPY_PREFIX and other.argument == key else kept
                own = {id(other) for other in self.frames[kept:] if other.session_id == key and other.tokens}
                self.frames = [other for other in self.frames if id(other) not in own]
            self.frames.append(frame)

    def left(self) -> dict[int, int]:
        """The stages' report to a new epoch: the last stage holds all rows of the first, except n_behind."""
        if self.n_behind < 0:
            self.rows = {}
        self.rows = {key: rows for key, rows in self.rows.items() if rows}
        return {key: max(0, len(rows) - self.n_behind) for key, rows in self.rows.items()}

    def step(self) -> None:
        if not self.frames:
            return
        frame = self.frames.pop(0)
        session_id = frame.session_id
        if frame.flags & Flag.OPEN:
            self.refused.discard(session_id)
            self.last.pop(session_id, None)
            if session_id not in self.rows and len(self.rows) + self.n_taken >= self.n_lanes:
                assert self.n_taken, "the coordinator opened more sessions than there are lanes"
                self.refused.add(session_id)
                fault = pb.SessionFault(session_id=session_id, label="no_lane", message="taken", retryable=True)
                self.say(pb.ReturnResponse(epoch=self.epoch, faults=[fault]))
                return
            self.rows.setdefault(session_id, [])
        elif frame.flags & Flag.COPY_PREFIX and session_id not in self.refused:
            source = self.rows.get(frame.argument)
            if source is None or frame.argument in self.refused:  # or it was cancelled while its frames waited
                self.refused.add(session_id)
                fault = pb.SessionFault(session_id=session_id, label="bad_session", message="not open")
                self.say(pb.ReturnResponse(epoch=self.epoch, faults=[fault]))
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

    def compute(self, frame: Frame) -> None:
        session_id, flags = frame.session_id, frame.flags
        held = self.rows[session_id]
        assert frame.position <= len(held), "a gap"
        held[frame.position :] = frame.tokens
        answer = pb.ReturnResponse(epoch=self.epoch)
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
        prompt = self.prompts[session_id]
        true = [*prompt, *(oracle(session_id, at) for at in range(len(prompt), n_good))]
        assert held[:n_good] == true[:n_good], "the sample belonged to another history"
        if not (answer.samples and n_good == len(held)):
            answer.progress.append(pb.Progress(session_id=session_id, position=len(held)))
        self.say(answer)

    def say(self, message: pb.ReturnResponse) -> None:
        self.replies.append(message)
        self.said.append(message)


class Client:
    """Reads one stream without waiting and checks it."""

    def __init__(self, stream: SessionStream, session: Session, record: SessionRecord) -> None:
        self.stream, self.session, self.record = stream, session, record
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
        """With `draft` not 0 clients predict their answers, with every third token wrong."""
        schedule = ScheduleConfig(mode, n_groups=2, group_rows=2, chunk_rows=3, draft=draft)
        serving = ServingSettings(queue=2, share=share, prefix_lanes=prefix_lanes)
        config = PipelineConfig(("a:1",), DTYPE_F16, schedule, serving=serving)
        self.pipeline = Pipeline(config, pipeline_file(1, n_vocab=ORACLE_VOCAB), lambda _: False)
        self.stages = StagesModel(n_lanes)
        self.clients: list[Client] = []
        self.n_starts = 0
        self.connect()

    def connect(self, n_lanes: int = 0) -> None:
        pipeline, stages = self.pipeline, self.stages
        stages.n_lanes = n_lanes or stages.n_lanes
        stages.epoch = pipeline.conductor.begin_epoch()
        stages.frames, stages.refused, stages.last = [], set(), {}
        held = stages.left()
        self.n_starts += stages.n_behind < 0
        instances = (f"started {self.n_starts} times",)
        curve = smooth() if pipeline.config.schedule.draft else CostCurve()  # two stages, so that guesses can fill one
        costs = [StageCost(curve, curve, 64)] * (2 if curve.is_known else 1)
        merged = EpochFacts(stages.n_lanes, CTX, held, instances, costs, mutual_rows_max=64)
        connection = pipeline.epochs.connection = mock.Mock(facts=[], merged=lambda: merged)
        with mock.patch("relayline.coordinator.engine.epochs.TokenSender", return_value=stages):
            pipeline.epochs.resume(connection)

    def disconnect(self, error: RelaylineError | None = None) -> None:
        error = error or StageLostError("a stage died")
        self.pipeline.carry(self.pipeline.conductor.lost(error, time.monotonic_ns()))
        self.pipeline.epochs.connection = self.pipeline.epochs._sender = None

    def open(self, n_prompt: int, max_tokens: int) -> None:
        request = GenerationRequest(f"r{len(self.clients)}", tuple(range(n_prompt)), max_tokens, SamplingParams())
        try:
            stream = self.pipeline.open(request)
            (key,) = (a.session_id for a in self.pipeline._audiences.values() if stream in a.streams)
            session = self.pipeline.conductor.readers.get(key)
            assert session is not None
            self.stages.prompts[key] = request.prompt_tokens
            if self.pipeline.config.schedule.draft:
                predicted = [oracle(session.session_id, n_prompt + at) + (at % 3 == 2) for at in range(max_tokens)]
                session.request = dataclasses.replace(session.request, prediction=tuple(predicted))
            self.clients.append(Client(stream, session, self.pipeline._observer.record_of(key)))
        except NotReadyError:
            assert self.pipeline.phase is Phase.LOADING
        except OverloadedError:
            assert len(self.pipeline.conductor.admission.waiting) >= 2

    def deliver(self) -> None:
        if self.stages.replies:
            self.pipeline.on_return(self.stages.replies.pop(0))

    def fail_all(self, error: RelaylineError) -> None:
        self.pipeline.carry(self.pipeline.conductor.fail_all(error, time.monotonic_ns()))

    def fault(self, client: Client, retryable: bool, position: int = 0) -> None:
        session_id, label = client.session.session_id, "no_lane" if retryable else "not_finite"
        fault = pb.SessionFault(session_id=session_id, position=position, label=label, message="m", retryable=retryable)
        self.stages.said.append(pb.ReturnResponse(epoch=self.pipeline.epoch, faults=[fault]))
        self.pipeline.on_return(self.stages.said[-1])

    def check(self) -> None:
        for client in self.clients:
            client.read()
            assert len(client.ends) <= 1
        running = {id(c.session) for c in self.clients if c.session.state in (State.PREFILL, State.DECODE)}
        assert len(running) <= self.stages.n_lanes
        admission = self.pipeline.conductor.admission
        assert not admission.waiting or admission.running or admission.is_short, "no event will bring them a lane"
        assert not admission.is_short or self.pipeline.conductor._is_trying, "nothing is tried for them"
        if not any(fault.label == "no_lane" for message in self.stages.said for fault in message.faults):
            assert not admission.waiting or len(admission.running) >= admission.n_lanes, "a lane is free and some wait"

    def turn(self) -> None:
        """Let one frame and one answer arrive."""
        self.pipeline.dispatch()
        self.stages.step()
        self.deliver()
        self.check()

    def try_lanes(self) -> None:
        """Advance to the time when a pipeline asks again for lanes of another coordinator."""
        if self.pipeline.conductor._is_trying:
            self.pipeline.try_lanes()
            self.pipeline.dispatch()

    def finish(self) -> None:
        """Let everything end; nothing may be left."""
        if self.pipeline.phase is not Phase.READY:
            self.connect()
        self.pipeline.dispatch()
        while self.stages.frames or self.stages.replies or self.pipeline.conductor.admission.is_short:
            if not (self.stages.frames or self.stages.replies):
                self.try_lanes()
            self.stages.step()
            self.deliver()
            self.pipeline.dispatch()
        self.check()
        for client in self.clients:
            assert client.left or len(client.ends) == 1, "a request that never ended"
            if client.ends in (["length"], ["stop"]):
                assert len(client.tokens) == client.session.request.max_tokens
        admission = self.pipeline.conductor.admission
        assert (admission.running, len(admission.waiting)) == ({}, 0)
        readers = self.pipeline.conductor.readers
        assert (self.pipeline._audiences, readers._by_id, readers._by_key) == ({}, {}, {})
        kept = {kept.session.session_id: kept.tokens for kept in self.pipeline.conductor.prefixes._kept}
        assert self.stages.rows == kept, "a lane was never given back, or differs from the coordinator's view"
        assert len(kept) <= (self.pipeline.config.serving.prefix_lanes or 0)
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
            world.pipeline.on_return(world.stages.said[which % len(world.stages.said)])
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
