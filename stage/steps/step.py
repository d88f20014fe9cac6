"""Runs one step: controls, placement, one native decode, and the stage's output.

Lives in the decode thread, which alone owns lanes, engine and samplers. Engine and embedding lookup are passed in, so
tests run this very code on a fake engine. Everything that goes wrong with a single session becomes its fault; the
others of the step continue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from array import array
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLTokenizer

from relayline.stage.queue_types import QueuedFrame, Step
from relayline.stage.speed.curves import shape_of
from relayline.stage.steps.forwarding import Forwarding
from relayline.stage.steps.grants import mark_granted
from relayline.stage.steps.lane_states import LaneStates
from relayline.stage.steps.lanes import LaneTable, LaneUsage
from relayline.stage.steps.outputs import StepOutputs
from relayline.stage.steps.padding import Padding
from relayline.stage.steps.picking import (
    Picking,
    count_wanted,
    is_guessed_wrong,
    pick_all,
    pooled,
    prepare,
    wanted_rows,
)
from relayline.stage.steps.placement import Placed, grid_at, run_length
from relayline.stage.steps.sessions import Sessions
from relayline.stage.steps.step_types import Embeddings, Engine, Predictor, RouteWiring, StepResult
from relayline.wire.common.errors import (
    InternalError,
    LaneLimitError,
    ProtocolError,
    RelaylineError,
)
from relayline.wire.envelopes import trace_context
from relayline.wire.envelopes.frames import Flag
from relayline.wire.envelopes.rows import decode_f16

GUESSES = Flag.DRAFTED | Flag.GUESSED
_TOKENS, _HALF = np.dtype(np.int32), np.dtype(np.float16)


class StepExecutor:
    """Owns lanes, samplers and the engine's batch arrays."""

    def __init__(
        self,
        engine: Engine,
        lanes: LaneTable,
        stage_index: int,
        embeddings: Embeddings | None,
        close: Callable[[], None] = lambda: None,
        padding: Padding | None = None,
        vocabulary: LLTokenizer | None = None,
        states: LaneStates | None = None,
        predictor: Predictor | None = None,
    ) -> None:
        """`vocabulary` is the last stage's, for grammars; None: it has none that can follow one.

        `states` keeps what lanes held, `predictor` guesses tokens; None: nothing does.
        """
        self.engine, self.lanes, self.stage_index = engine, lanes, stage_index
        self.sessions = Sessions(engine, lanes, vocabulary, states, predictor)
        self.routes: dict[int, RouteWiring] = {}
        # Says which span a batch of these frames will have: 25 bytes, zeros for none. Set before the first step.
        self.mark: Callable[[list[QueuedFrame]], bytes] = lambda members: trace_context.NONE
        self.usage = LaneUsage()  # of the lanes, after the latest controls or change of a route
        self._n_decodes = 0
        self._gives_hidden = False  # whether the last step gave hidden rows
        self._embeddings, self._close_engine, self._padding = embeddings, close, padding
        # By memoryview: with cold caches numpy takes several times as long to take a single number.
        self._positions, self._seq_ids = engine.positions.data, engine.seq_ids.data
        self._wants = engine.wants.data
        self._forwarding = Forwarding(engine.output_rows, engine.max_rows, stage_index)

    def execute(self, step: Step, riders: Sequence[QueuedFrame] = ()) -> StepResult:
        """Run the step. Session errors become faults in the result; nothing is raised for them.

        riders: rows that `stage.steps.run_ahead` adds to the decode. Their lanes fit. Nothing is sampled for them, and
        their lanes' positions do not move; the result has their places.
        """
        outputs = StepOutputs(self.routes, self.sessions.broken, self.stage_index)
        controls = [frame for frame in self._current(step.controls) if self._apply_control(outputs, frame)]
        if step.controls:
            self.usage = self.lanes.usage
        # Rows of one route stand together, so that each route's output is one slice of the native result.
        frames = sorted(step.frames, key=lambda frame: frame.route_id) if len(self.routes) > 1 else step.frames
        due = [
            frame
            for frame in self._current(frames)
            if not (frame.flags & GUESSES and self._is_pointless(outputs, frame))
        ]
        if self.sessions.states.copies:
            self.sessions.make_way([*due, *riders])
        placed = self._place_all(outputs, [*due, *riders] if riders else due)
        placed, riding = _apart(placed, riders) if riders else (placed, [])
        members = due if len(placed) == len(due) else [item.frame for item in placed]
        result = StepResult(step, [], due, members, riding=riding)
        if controls:
            result.closed = [frame for frame in controls if frame.flags & Flag.CLOSE]
        if (placed or riding) and not self._decode(outputs, placed, result):
            placed, result.riding = [], []
        _advance(self.engine, placed)
        decoded_ns = time.monotonic_ns()
        if self.engine.is_last:
            self._sample(outputs, placed)
        else:
            self._forwarding.write(outputs, controls, placed, result.context)
        outputs.finish(result, decoded_ns)
        return result

    def _decode(self, outputs: StepOutputs, placed: list[Placed], result: StepResult) -> bool:
        """Run the native decode and describe it in the result; false, with a fault for every frame, if it failed."""
        members, padding = result.members, self._padding
        self._n_decodes += 1
        result.number = self._n_decodes
        result.is_reported = bool(members)
        if members:
            result.context = self.mark(members)
        result.n_rows = sum([frame.n_rows for frame in members])
        computed = result.computed = members + [item.frame for item in result.riding] if result.riding else members
        n_rows = result.n_rows + len(result.riding)
        if padding is not None:
            result.padded_rows = padding.pad(self.engine, computed, n_rows)
            n_rows += result.padded_rows
        if self.engine.hidden is not None and (self.sessions.pools or self._gives_hidden):
            self._gives_hidden = any(frame.session_key in self.sessions.pools for frame in computed)
            self.engine.hidden.want(wanted=self._gives_hidden)
        meanwhile = None
        if self.engine.is_last:
            meanwhile = functools.partial(prepare, [*placed, *result.riding], self.sessions.samplers, self.engine)
        result.started_ns = time.monotonic_ns()
        try:
            try:
                _decode_rows(self.engine, result, n_rows, placed, meanwhile)
            except LaneLimitError:
                if not self.sessions.states.copies.finish_stores():
                    raise
                # Shared cells were kept for the tier.
                _decode_rows(self.engine, result, n_rows, placed, meanwhile)
        except RelaylineError as error:
            result.error = error.label
            for item in placed:
                # A lane with a recurrent state may be empty now, and its next row would not be refused.
                item.lane.next_position = min(item.lane.next_position, self.engine.lane_tokens(item.lane.index))
                outputs.fault(item.frame, error)
        result.decode_ns = time.monotonic_ns() - result.started_ns
        result.micro_batches = self.engine.micro_batches
        if padding is not None and result.padded_rows:
            self.engine.clear(padding.spare_lane)
        return not result.error

    def answer(self, step: Step, placed: list[Placed], ahead: StepResult) -> StepResult:
        """Carry out a step whose rows are those of an earlier decode, the engine's last one: sample them.

        ahead: the result of that decode. The first step that uses it has the decode's time; others have none of it.
        """
        if ahead.is_reported:
            self._n_decodes += 1
            result = StepResult(step, [], step.frames, step.frames, number=self._n_decodes, computed_in=ahead.number)
            result.started_ns = ahead.started_ns + ahead.decode_ns
        else:
            result = dataclasses.replace(ahead, step=step, due=step.frames, members=step.frames)
        ahead.is_reported = result.is_ahead = True
        result.n_rows, result.context = len(placed), self.mark(step.frames)
        for item in placed:
            item.lane.next_position = item.position_after
        outputs = StepOutputs(self.routes, self.sessions.broken, self.stage_index)
        began_ns = time.monotonic_ns()
        self._sample(outputs, placed)
        outputs.finish(result, began_ns)
        return result

    def learn(self, result: StepResult) -> None:
        """Add the prediction for its step to the result, and refine the curves from it.

        Not part of `execute`, since nothing that leaves the stage waits for it; any thread may do it, one at a time.
        """
        if self._padding is not None and result.number and not result.computed_in:
            curves, parts = self._padding.curves, result.micro_batches
            shape = dataclasses.replace(shape_of(result.computed), scratch_rows=result.padded_rows, micro_batches=parts)
            result.predicted_ns = round(curves.predict_ns(shape))
            if not result.error:
                curves.observe(shape, result.decode_ns)
                self._padding.prepare(self.engine, result.n_rows)

    def reset_route(self, route_id: int, wiring: RouteWiring | None) -> None:
        """Forget all sessions of a route; with a wiring, begin its new epoch."""
        self.sessions.forget_route(route_id)
        self.usage = self.lanes.usage
        if wiring is None:
            self.routes.pop(route_id, None)
        else:
            self.routes[route_id] = wiring

    def begin_route(self, route_id: int, wiring: RouteWiring) -> dict[int, int]:
        """Begin an epoch of a route; returns the lanes left for it, see `leave_route`: {session id: positions held}."""
        self.routes[route_id] = wiring
        return self.sessions.held(route_id)

    def leave_route(self, route_id: int, *, stores: bool = True) -> int:
        """End an epoch: nothing of it runs any more, but its sessions' lanes stay. Returns how many are not empty.

        `stores`: see `Sessions.leave_route`.
        """
        self.routes.pop(route_id, None)
        n_left = self.sessions.leave_route(route_id, stores=stores)
        self.usage = self.lanes.usage
        return n_left

    def forget_left(self, route_id: int) -> None:
        """No epoch has claimed the lanes that a route left."""
        self.sessions.forget_left(route_id)
        self.usage = self.lanes.usage

    def close(self) -> None:
        """Give every session's lane and sampler back, then the engine's memory."""
        for route_id in list(self.routes):
            self.reset_route(route_id, None)
        self.sessions.forget_grammars()
        self.sessions.states.close()
        self.sessions.handing.close()
        self._close_engine()

    # --- controls and placement ---------------------------------------------------------------------------------------

    def _current(self, frames: list[QueuedFrame]) -> list[QueuedFrame]:
        """Leave out frames whose epoch ended while they waited: no coordinator expects an answer."""
        routes = self.routes
        return [f for f in frames if (wiring := routes.get(f.route_id)) is not None and wiring.epoch == f.epoch]

    def _apply_control(self, outputs: StepOutputs, frame: QueuedFrame) -> bool:
        """Apply a control; returns whether it is passed on downstream."""
        try:
            self.sessions.control(frame)
        except RelaylineError as error:
            outputs.fault(frame, error)
            return False
        return True

    def _is_pointless(self, outputs: StepOutputs, frame: QueuedFrame) -> bool:
        """Answer a frame whose draft rows this stage already knows to be wrong; returns whether it was one.

        Drafts behind a fault are dropped silently: their lane may be long enough, and yet have other content.
        """
        if frame.flags & Flag.DRAFTED and frame.session_key in self.sessions.broken:
            return True
        is_wrong = is_guessed_wrong(frame, self.sessions.samplers.get(frame.session_key))
        if is_wrong:
            outputs.passed(frame)
        return is_wrong

    def _place_all(self, outputs: StepOutputs, frames: list[QueuedFrame]) -> list[Placed]:
        """Put the rows of all frames that can run into the batch arrays; the others become faults, changing nothing."""
        rows_max, wanted_max = self.engine.max_rows, self.engine.max_wanted
        place, is_last = self.lanes.place, self.engine.is_last
        while True:
            placed: list[Placed] = []
            n_rows = n_wanted = 0
            for frame in frames:
                try:
                    lane, drop_from = place(frame.session_id, frame.route_id, frame.position, frame.n_rows)
                    rows_after = n_rows + frame.n_rows
                    wanted_after = n_wanted + (count_wanted(frame) if is_last else 0)
                    if frame.payload is None or rows_after > rows_max or wanted_after > wanted_max:
                        raise ProtocolError(f"{frame.n_rows} rows do not fit a step of {rows_max}")
                    if drop_from is not None:
                        self.engine.check_rewind(lane.index, drop_from)
                except RelaylineError as error:
                    outputs.fault(frame, error)
                    continue
                placed.append(Placed(frame, n_rows, lane, drop_from))
                self._describe(frame, n_rows, lane.index)
                n_rows, n_wanted = rows_after, wanted_after
            unreadable = self._fill_all(outputs, placed)
            if not unreadable:
                break
            frames = [item.frame for item in placed if item.frame not in unreadable]
        for item in placed:
            if self.sessions.broken:
                self.sessions.broken.discard(item.frame.session_key)
            if item.drop_from is not None:
                self.engine.drop_from(item.lane.index, item.drop_from)
                item.lane.next_position = item.drop_from
        return placed

    def _describe(self, frame: QueuedFrame, row: int, lane: int) -> None:
        """Fill positions, lanes and wanted rows of the batch for a frame whose rows begin at `row`."""
        count = frame.n_rows
        if count == 1:  # nearly always
            self._positions[row], self._seq_ids[row] = frame.position, lane
            self._wants[row] = 1 if frame.flags & (Flag.WANTS_SAMPLE | Flag.DRAFTED) else 0
            return
        self._positions[row : row + count] = array("i", range(frame.position, frame.position + count))
        self._seq_ids[row : row + count] = array("i", (lane,)) * count
        self._wants[row : row + count] = array("b", wanted_rows(frame))

    def _fill_all(self, outputs: StepOutputs, placed: list[Placed]) -> list[QueuedFrame]:
        """Fill the input rows, with one call for neighbouring frames of one message.

        Returns frames that cannot be filled. Their faults are reported; the caller places the others again.
        """
        unreadable: list[QueuedFrame] = []
        at = 0
        while at < len(placed):
            run = run_length(placed, at)
            items = placed[at : at + run]
            try:
                self._fill(items)
            except RelaylineError:
                for item in items:  # one of them; each is reported separately
                    try:
                        self._fill([item])
                    except RelaylineError as error:
                        outputs.fault(item.frame, error)
                        unreadable.append(item.frame)
            at += run
        return unreadable

    def _fill(self, items: list[Placed]) -> None:
        first, last = items[0], items[-1].frame
        payload, begin, end = first.frame.payload, first.frame.first_row, last.first_row + last.n_rows
        assert payload is not None
        rows = payload[begin:end]
        exponents = first.frame.exponents[begin:end] if first.frame.exponents is not None else None
        out = self.engine.input_rows[first.row : first.row + end - begin]
        if self._embeddings is not None and rows.dtype == _TOKENS:
            self._embeddings.lookup(rows[:, 0], out)
        elif self._embeddings is not None:
            self._embeddings.take(rows, out)
        elif rows.shape[1] != out.shape[1]:
            raise ProtocolError(f"rows of {rows.shape[1]} values came, and this stage takes {out.shape[1]}")
        elif rows.dtype == _HALF:
            decode_f16(rows, exponents, out)
        else:
            np.copyto(out, rows)

    # --- output -------------------------------------------------------------------------------------------------------

    def _sample(self, outputs: StepOutputs, placed: list[Placed]) -> None:
        pickings: list[Picking] = []
        for item in placed:
            frame = item.frame
            if frame.session_key in self.sessions.cancelled:
                continue
            if frame.session_key in self.sessions.pools:
                self._pool(outputs, item)
                continue
            if not frame.flags & (Flag.WANTS_SAMPLE | Flag.DRAFTED):
                outputs.passed(frame)
                continue
            sampler = self.sessions.samplers[frame.session_key]
            wants_logits = frame.session_key in self.sessions.wants_logits
            pickings.append(Picking(item, self.engine, sampler, wants_logits=wants_logits))
        pick_all(pickings)
        self.sessions.predicting.guess(pickings)
        self.sessions.predicting.note(placed, pickings)
        for picking in pickings:
            frame = picking.item.frame
            output = outputs.of(frame.route_id)
            output.samples.extend(picking.samples)
            if frame.argument and frame.flags == Flag.WANTS_SAMPLE and picking.is_complete:
                output.granted.append((frame, mark_granted(picking.samples[-1], frame.argument)))
            if picking.error is not None:
                outputs.fault(frame, picking.error)
            elif not picking.is_complete:
                outputs.passed(frame)

    def _pool(self, outputs: StepOutputs, item: Placed) -> None:
        """Pool a frame's hidden rows; behind the last of its prompt, answer with the embedding."""
        frame, hidden = item.frame, self.engine.hidden
        try:
            if hidden is None:
                raise InternalError("a session pools hidden rows at a stage that has none")
            sample = pooled(item, hidden, self.sessions.pools[frame.session_key])
        except RelaylineError as error:
            outputs.fault(frame, error)
            return
        if sample is None:
            outputs.passed(frame)
        else:
            outputs.of(frame.route_id).samples.append(sample)


def _advance(engine: Engine, placed: list[Placed]) -> None:
    """Move the lanes behind the rows that were computed, and take the checkpoints that these ask for."""
    for item in placed:
        item.lane.next_position = item.frame.position + item.frame.n_rows
        if item.frame.flags & Flag.CHECKPOINT:
            with contextlib.suppress(RelaylineError):  # frames that would need it are refused then, and read again
                engine.checkpoint(item.lane.index)


def _apart(placed: list[Placed], riders: Sequence[QueuedFrame]) -> tuple[list[Placed], list[Placed]]:
    """Return the rows of the step itself, and those of its riders."""
    ahead = set(map(id, riders))
    own = [item for item in placed if id(item.frame) not in ahead]
    return own, [item for item in placed if id(item.frame) in ahead]


def _decode_rows(
    engine: Engine,
    result: StepResult,
    n_rows: int,
    placed: list[Placed],
    meanwhile: Callable[[], None] | None,
) -> None:
    """Run the native decode of a step. Prompt rows, which come after all others, may be those of images."""
    frames, adapter = result.step.frames, result.computed[0].adapter  # of all of them, see stage.steps.batcher
    if not frames or not frames[-1].flags & Flag.PREFILL:
        engine.decode(n_rows, adapter=adapter, meanwhile=meanwhile)
    elif placed and placed[0].frame.is_mutual:  # and alone, see stage.steps.batcher
        engine.decode(n_rows, adapter=adapter, is_mutual=True, meanwhile=meanwhile)
    elif grids := [grid_at(item) for item in placed if item.frame.flags & Flag.GRID]:
        engine.decode(n_rows, adapter=adapter, grids=grids, meanwhile=meanwhile)
    else:
        engine.decode(n_rows, adapter=adapter, meanwhile=meanwhile)
