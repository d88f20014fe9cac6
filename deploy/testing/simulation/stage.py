"""One simulated stage: the real batcher, policy, lanes and learned curves around a native step that only takes time.
Every event checks the invariants, see `Violation`.
"""

from __future__ import annotations

import dataclasses
import operator
import random
from typing import Any

import numpy as np

from relayline.deploy.testing.simulation.drafts import OracleSampler, answers, oracle, real
from relayline.deploy.testing.simulation.world import StageModel
from relayline.stage.engine.micro_batches import Cut, cut
from relayline.stage.queue_types import QueuedFrame, Step
from relayline.stage.speed.curves import Curves, StepShape, shape_of
from relayline.stage.steps.batcher import Batcher
from relayline.stage.steps.lanes import LaneTable
from relayline.stage.steps.picking import is_guessed_wrong
from relayline.stage.steps.placement import Placed
from relayline.stage.steps.policy import POLICIES, StepLimits
from relayline.wire.common.curve import ATTENTION_TILE_ROWS, mixed_cost_ns, price_per_lane
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

ROUTE = 1
PREFILL_ROWS = 128  # in a step with running decoders, with policy drain


_FIELDS = [field.name for field in dataclasses.fields(QueuedFrame) if field.init]
_values_of = operator.attrgetter(*_FIELDS)
_ARRIVED, _ENVELOPE = _FIELDS.index("arrived_ns"), _FIELDS.index("envelope")


class Violation(AssertionError):
    """An invariant was violated: the code under test is wrong."""


@dataclasses.dataclass(slots=True)
class StageCounts:
    """One stage's work so far."""

    n_steps: int = 0
    n_rows: int = 0
    n_parts: int = 0  # micro-batches of its steps
    n_decode_frames: int = 0
    decode_held_ns: int = 0  # sum over these, from arrival to the end of their step


class SimStage:
    """Queue, engine and lanes of one stage."""

    def __init__(
        self,
        index: int,
        model: StageModel,
        policy: str,
        n_lanes: int,
        rng: random.Random,
        *,
        is_calibrated: bool,
        is_last: bool,
    ) -> None:
        self.index, self.model, self.is_auto, self.is_last = index, model, policy == "auto", is_last
        decode, prefill = model.decode.points(), model.prefill.points()
        known: dict[str, Any] = {"decode": decode, "prefill": prefill}
        known |= {"context_ns": model.context_ns, "context_tiled_ns": model.context_tiled_ns}
        known |= {"is_per_lane": model.is_per_lane}
        self.curves = Curves.of_stage(has_head=decode != prefill, **(known if is_calibrated else {}))
        self.batcher = Batcher(POLICIES[policy](StepLimits(model.rows_max, PREFILL_ROWS, self.curves.decode)))
        self.lanes = LaneTable(n_lanes, 1 << 20)
        self.factor, self.stalled_until_ns = 1.0, 0
        self.step: Step | None = None
        self.placed: list[Placed] = []  # the computed part of the step
        self.cancelled: set[int] = set()
        self.cost_max_ns = 0  # dearest step so far
        self.counts = StageCounts()
        self._rng = rng
        self._pointless: list[QueuedFrame] = []  # and its wrong guesses
        self._samplers: dict[int, OracleSampler] = {}  # of the last stage
        self._wrong_from: dict[int, int] = {}  # session id -> first position of its lane with a wrong token, if any
        self._drafted: set[int] = set()  # sessions that have sent guesses
        self._waiting: dict[QueuedFrame, int] = {}  # row frames in the queue -> arrival, oldest first
        self._n_controls = 0  # in the queue
        self._step_cost_ns = 0
        self._shape = StepShape(0, 0)

    @property
    def is_busy(self) -> bool:
        """Whether a step is running."""
        return self.step is not None

    def oldest_arrival_ns(self) -> int:
        """Return when the frame that has waited longest arrived. Some frame must wait."""
        return next(iter(self._waiting.values()))

    @property
    def n_waiting(self) -> int:
        """Row frames in the queue, counted by the simulation."""
        return len(self._waiting)

    def push(self, frames: list[QueuedFrame], now_ns: int, envelope: int) -> int:
        """Queue one envelope's frames; returns the number of row frames that a close dropped."""
        n_dropped = 0
        for sent in frames:
            frame = _arrived(sent, now_ns, envelope)
            if frame.flags & Flag.CLOSE:
                self.cancelled.add(frame.session_id)
            if frame.n_rows:
                self._waiting[frame] = now_ns
            else:
                self._n_controls += 1
            for dropped in self.batcher.push(frame):
                del self._waiting[dropped]
                n_dropped += 1
        self.check()
        return n_dropped

    def begin(self, now_ns: int, jitter: float, crowding: float) -> int | None:
        """Begin the next step if there is one, slower by a factor; returns when it will end."""
        step = self.batcher.take(now_ns)
        if step is None:
            return None
        for control in step.controls:
            self._control(control)
        if step.controls:
            self._n_controls -= len(step.controls)
            self.lanes.check()
        self._place(step)
        self.check()
        self.step = step
        cost_ns = self._cost_ns([item.frame for item in self.placed])
        if jitter and cost_ns:
            cost_ns = round(cost_ns * (1 + jitter * (2 * self._rng.random() - 1)))
        cost_ns = round(cost_ns * self.factor * crowding)
        self.cost_max_ns = max(self.cost_max_ns, cost_ns + self.model.host_ns)
        self._step_cost_ns = cost_ns
        return max(now_ns, self.stalled_until_ns) + cost_ns + (self.model.host_ns if self.placed else 0)

    def finish(self, now_ns: int) -> list[QueuedFrame]:
        """End the step; returns the frames for the next stage: controls first, then row frames."""
        step = self.step
        assert step is not None
        self.step = None
        for item in self.placed:
            item.lane.next_position = item.position_after
        if self.placed:
            self.counts.n_steps += 1
            self.counts.n_rows += self.n_placed
            arrived_ns = [item.frame.arrived_ns for item in self.placed if not item.frame.is_prefill]
            self.counts.n_decode_frames += len(arrived_ns)
            # Curves do not include host work here, so plans treat it as overhead.
            self.counts.decode_held_ns += len(arrived_ns) * (now_ns - self.model.host_ns) - sum(arrived_ns)
            self.curves.observe(self._shape, self._step_cost_ns)
        return step.controls + step.frames

    @property
    def n_placed(self) -> int:
        """Rows of the native step."""
        return sum(item.frame.n_rows for item in self.placed)

    def answer(self) -> tuple[pb.ReturnResponse, int]:
        """Return the last stage's answer to the step that has ended, and the number of frames without a reader."""
        computed = [item for item in self.placed if item.frame.session_id not in self.cancelled]
        pointless = [frame for frame in self._pointless if frame.session_id not in self.cancelled]
        message = answers(computed, pointless, self._samplers)
        for sample in message.samples:
            if self._wrong_from.get(sample.session_id, sample.position) < sample.position:
                raise Violation(f"session {sample.session_id} was sampled at {sample.position} behind a wrong token")
        return message, len(self.placed) + len(self._pointless) - len(computed) - len(pointless)

    def check(self) -> None:
        """Compare the queue with the simulation's own books."""
        n_waiting = len(self._waiting) + self._n_controls
        if len(self.batcher) != n_waiting:
            raise Violation(f"stage {self.index} lost or invented a frame: {len(self.batcher)} != {n_waiting}")

    def _control(self, control: QueuedFrame) -> None:
        if control.flags & Flag.OPEN:
            if (ROUTE, control.session_id) in self.lanes._by_session:
                raise Violation(f"session {control.session_id} was opened twice at stage {self.index}")
            self.lanes.open(control.session_id, ROUTE, control.argument - 1)
            if self.is_last:
                self._samplers[control.session_id] = OracleSampler(control.session_id)
        elif control.flags & Flag.CLOSE:
            self.lanes.close(control.session_id, ROUTE)
            self.cancelled.discard(control.session_id)
            self._drafted.discard(control.session_id)
            self._wrong_from.pop(control.session_id, None)
            self._samplers.pop(control.session_id, None)

    def _place(self, step: Step) -> None:
        n_rows = step.n_rows
        if n_rows > self.model.rows_max and len(step.frames) > 1:
            raise Violation(f"stage {self.index} took {n_rows} rows, at most {self.model.rows_max} fit")
        if len(step.frames) > 1 and any(frame.is_mutual for frame in step.frames):
            raise Violation(f"stage {self.index} took rows that see each other with others")
        self.placed, self._pointless = [], []
        sessions, row = set(), 0
        for frame in step.frames:
            if frame.session_id in sessions:
                raise Violation(f"session {frame.session_id} is twice in a step of stage {self.index}")
            sessions.add(frame.session_id)
            if self._waiting.pop(frame, None) is None:
                raise Violation(f"stage {self.index} ran a frame that was not waiting")
            if is_guessed_wrong(frame, real(self._samplers.get(frame.session_id))):
                self._pointless.append(frame)
                continue
            lane, drop_from = self.lanes.place(frame.session_id, ROUTE, frame.position, frame.n_rows)
            if drop_from is not None:
                lane.next_position = drop_from
            self._check_tokens(frame, drop_from)
            self.placed.append(Placed(frame, row, lane, drop_from))
            row += frame.n_rows

    def _check_tokens(self, frame: QueuedFrame, drop_from: int | None) -> None:
        """Check that only guesses make a lane forget, and that true rows never follow a wrong token. Records wrong
        tokens.
        """
        key = frame.session_id
        if drop_from is not None:
            if key not in self._drafted:
                raise Violation(f"session {key} repeats position {drop_from} at stage {self.index}")
            if self._wrong_from.get(key, -1) >= drop_from:
                del self._wrong_from[key]
        if frame.flags & Flag.DRAFTED:
            self._drafted.add(key)
            rows = enumerate(frame.draft_tokens, frame.position)
            wrong = next((position for position, token in rows if token != oracle(key, position)), None)
            if wrong is not None:
                self._wrong_from.setdefault(key, wrong)
        elif key in self._wrong_from:
            raise Violation(f"session {key} goes on behind a wrong token at stage {self.index}")

    def _cost_ns(self, frames: list[QueuedFrame]) -> float:
        """Return the native step's true cost: tiles of all rows, the head for those that want it, and the context."""
        shape = shape_of(frames)
        if self.model.is_per_lane:
            return self._parts_cost_ns(frames, shape)
        if self.is_auto and shape.decode_rows:
            shape = shape.padded(self.curves.padded_rows(shape, self.model.rows_max) - shape.n_rows)
        self._shape = shape
        context_ns = self._context_ns(frames, shape.n_rows)
        if not shape.decode_rows:
            return self.model.prefill.cost_ns(shape.n_rows) + context_ns
        if not shape.prefill_rows:
            return self.model.decode.cost_ns(shape.n_rows) + context_ns
        prompt_rows = shape.n_rows - shape.decode_rows
        return mixed_cost_ns(self.model.decode, self.model.prefill, shape.decode_rows, prompt_rows) + context_ns

    def _context_ns(self, frames: list[QueuedFrame], n_rows: int) -> float:
        """Return the true cost of context: for each row its own lane's, or for a tile that of all its lanes."""
        model = self.model
        if n_rows < ATTENTION_TILE_ROWS or not model.context_tiled_ns:
            return model.context_ns * sum(frame.n_rows * frame.position for frame in frames)
        by_row = [frame for frame in frames for _ in range(frame.n_rows)]
        tiles = [set(by_row[at : at + ATTENTION_TILE_ROWS]) for at in range(0, len(by_row), ATTENTION_TILE_ROWS)]
        n_tokens = sum(frame.position for tile in tiles for frame in tile)
        return model.context_tiled_ns * ATTENTION_TILE_ROWS * n_tokens

    def _parts_cost_ns(self, frames: list[QueuedFrame], shape: StepShape) -> float:
        """Return the cost if every run of neighbouring lanes is a separate native step."""
        lanes = [
            self.lanes.place(frame.session_id, ROUTE, frame.position, 0)[0].index
            for frame in frames
            for _ in range(frame.n_rows)
        ]
        if not lanes:
            return 0.0
        parts = cut(np.array(lanes, np.int32))
        self.counts.n_parts += len(parts.sizes)
        self._shape = dataclasses.replace(shape, micro_batches=parts.sizes)
        head_ns = self.model.decode.cost_ns(shape.decode_rows) - self.model.prefill.cost_ns(shape.decode_rows)
        rows_ns = sum(map(self.model.prefill.cost_ns, parts.sizes)) + max(0.0, head_ns)
        return rows_ns + self._parts_context_ns(frames, parts)

    def _parts_context_ns(self, frames: list[QueuedFrame], parts: Cut) -> float:
        """Return the true cost of context: the rows of a part read the cells of its longest lane."""
        first_ns, further_ns = self.model.context_ns, self.model.context_tiled_ns
        if not further_ns:
            return first_ns * sum(frame.n_rows * frame.position for frame in frames)
        by_row = [frame for frame in frames for _ in range(frame.n_rows)]
        total_ns, at = 0.0, 0
        for size in parts.sizes:
            mine = [by_row[row] for row in parts.computed[at : at + size].tolist()]
            at, longest = at + size, max(frame.position for frame in mine)
            total_ns += price_per_lane(first_ns, further_ns, size * longest, len(set(mine)) * longest)
        return total_ns


def _arrived(sent: QueuedFrame, now_ns: int, envelope: int) -> QueuedFrame:
    """Return the frame as it arrived. (dataclasses.replace takes five times as long, a sixth of a simulation.)"""
    values = list(_values_of(sent))
    values[_ARRIVED], values[_ENVELOPE] = now_ns, envelope
    return QueuedFrame(*values)
