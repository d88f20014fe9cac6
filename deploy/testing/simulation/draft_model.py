"""A simulation with a draft model beside its coordinator: its process takes virtual time, its code is the real one."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from relayline.coordinator.drafting.messages import Guessed, ToDrafter
from relayline.coordinator.drafting.streams import Row, Streams
from relayline.coordinator.sessions.drafted import Drafted
from relayline.coordinator.sessions.session import OutFrame, Session
from relayline.deploy.testing.simulation.drafts import N_VOCAB, oracle
from relayline.deploy.testing.simulation.run import AUTO, Simulation
from relayline.deploy.testing.simulation.world import World
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

PIPE_NS = 100_000  # one way between the coordinator and the process
CELLS = 1 << 20
_SURE, _DOUBTED = 0.9, 0.4  # what the model says of its guesses


@dataclasses.dataclass(frozen=True, slots=True)
class DraftModelFacts:
    """A model that drafts."""

    right: float
    """Its share of right guesses."""
    step_ns: int
    row_ns: int = 0
    """What each row of a step costs besides."""


class DraftedSimulation(Simulation):
    """Call `run` once; every request has a draft model."""

    def __init__(self, world: World, model: DraftModelFacts) -> None:
        schedule = dataclasses.replace(AUTO.schedule, draft_model_tokens=CELLS)
        super().__init__(world, dataclasses.replace(AUTO, schedule=schedule))
        self.drafted = Drafted(drafts=True, model_tokens=CELLS, n_vocab=2 * N_VOCAB)
        self._model, self._streams = model, Streams(CELLS, 2 * N_VOCAB, lambda _: False)
        self._inbox: list[ToDrafter] = []
        self._is_drafting = False
        self._rng = random.Random(f"{world.seed} draft model")

    # --- coordinator --------------------------------------------------------------------------------------------------

    def _start(self, session: Session) -> None:
        session.acceptance = self.drafted.acceptance
        self.drafted.began(session)
        super()._start(session)
        self._tell()

    def _finish(self, session: Session, frames: Sequence[OutFrame], *, is_cancelled: bool = False) -> None:
        self.drafted.ended(session.session_id)
        super()._finish(session, frames, is_cancelled=is_cancelled)

    def _on_sample(self, sample: pb.Sampled) -> None:
        session = self.sessions.get(sample.session_id)
        super()._on_sample(sample)
        if session is not None and sample.position == len(session.history) - 1:
            self.drafted.took(session, sample.position, sample.token, self.now_ns)
        self._tell()

    def _dispatch_now(self) -> None:
        super()._dispatch_now()
        if wait_ns := self.scheduler.guess_wait.left_ns:
            self._at(self.now_ns + wait_ns, self._dispatch)

    def _heard(self, guesses: list[Guessed]) -> None:
        if self.drafted.guessed(guesses, self.now_ns):
            self._dispatch()

    # --- the process --------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        if self.drafted.news:
            news, self.drafted.news = self.drafted.news, []
            self._at(self.now_ns + PIPE_NS, self._receive, news)

    def _receive(self, messages: list[ToDrafter]) -> None:
        self._inbox += messages
        if not self._is_drafting:
            self._draft()

    def _draft(self) -> None:
        inbox, self._inbox = self._inbox, []
        heard = [each for message in inbox for each in self._streams.hear(message)]
        rows = self._streams.next_step().rows
        self._is_drafting = bool(rows)
        if heard:
            self._at(self.now_ns + PIPE_NS, self._heard, heard)
        if rows:
            self._at(self.now_ns + self._model.step_ns + len(rows) * self._model.row_ns, self._drafted, rows)

    def _drafted(self, rows: list[Row]) -> None:
        by_sequence = {stream.sequence: key for key, stream in self._streams._running.items()}
        results = [self._guess(by_sequence[row.sequence], row.position + 1) for row in rows if row.is_last]
        heard = self._streams.computed(rows, results)
        if heard:
            self._at(self.now_ns + PIPE_NS, self._heard, heard)
        self._draft()

    def _guess(self, session_id: int, position: int) -> tuple[int, float]:
        """Return the model's guess for a position; the pipeline's model never says a wrong one."""
        right = self._rng.random() < self._model.right
        sure = self._rng.random() < (0.8 if right else 0.3)
        return oracle(session_id, position) + (0 if right else N_VOCAB), _SURE if sure else _DOUBTED
