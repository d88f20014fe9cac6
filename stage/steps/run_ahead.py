"""Rows that a stage computes before the coordinator asks for them. Decode thread only.

Where one stage is the whole model, a stream's next row is known the moment its token is sampled, and the coordinator
nearly always asks for just that row. Its turn takes about as long as a step of a GPU. So while nothing waits, the stage
computes these rows *ahead*. Nothing leaves the stage for them. When the coordinator's frame arrives, its row has been
computed, and its token is sampled from the logits that are there. If anything else arrives, the row is dropped from its
lane, as a rejected draft is.

So the coordinator decides everything as before, and never sees a row that it has not asked for: a loss, a stop, a
cancelled request or a grammar needs no special rule. Schedulers that run one step ahead of the host are known from
engines in one process (vLLM's async scheduling, SGLang's overlap scheduler).

A wrong row costs a part of a step. A stream whose frames are often others than expected, as with drafts, sits out for
some frames after each miss: 2, 4 and up to SIT_OUT_MAX.

Logits of rows ahead last until the next decode. If other rows need a decode first, two kinds of rows *ride* along. Rows
ahead that were not asked for yet are computed once more, up to RIDES_MAX times. With rows of a prompt, streams that
this very step has answered continue. With other decode rows they do not: those belong to streams of the same group that
were not computed ahead, and the coordinator waits for both. If one half of a group is always a step ahead of the other,
nothing is gained. So all wait for that one decode, and the next rows of the whole group are computed together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

import numpy as np

from relayline.stage.queue_types import QueuedFrame, Step
from relayline.stage.steps.lanes import Lane
from relayline.stage.steps.placement import Placed
from relayline.stage.steps.step import StepExecutor
from relayline.stage.steps.step_types import StepResult
from relayline.wire.common.errors import RelaylineError
from relayline.wire.envelopes.frames import Flag
from relayline.wire.envelopes.session_ids import adapter_of

SIT_OUT_MAX = 64
RIDES_MAX = 4  # times that a row is computed once more
AHEAD = "computed_ahead"  # why a step of such rows took no more

_Key = tuple[int, int]  # QueuedFrame.session_key


@dataclasses.dataclass(slots=True)
class _Stream:
    """A session's probable next request."""

    position: int = 0
    token: int = 0
    epoch: int = 0
    is_due: bool = False  # its token has left, and its next frame has not come
    n_rides: int = 0  # times that this next row was computed once more
    sits_out: int = 0  # frames until its rows are computed ahead again
    penalty: int = 1

    @property
    def may_run(self) -> bool:
        """Whether its next row may be computed now."""
        return self.is_due and not self.sits_out

    def arrived(self, frame: QueuedFrame) -> None:
        """Compare the expected frame with one that came."""
        if not self.is_due:
            return
        self.is_due = False
        if not _is_plain(frame) or frame.position != self.position or frame.epoch != self.epoch:
            self.missed()
        elif self.sits_out:
            self.sits_out -= 1
        else:
            self.penalty = max(1, self.penalty - 1)

    def rides_again(self) -> None:
        """Its row will be computed once more, which is a miss in the end: its frame may be long in coming."""
        self.n_rides += 1
        if self.n_rides > RIDES_MAX:
            self.missed()

    def missed(self) -> None:
        """Sit out for a while."""
        self.penalty = min(SIT_OUT_MAX, 2 * self.penalty)
        self.sits_out = self.penalty


@dataclasses.dataclass(slots=True)
class _Computed:
    """A decode whose rows, or some of them, wait for the coordinator's frames."""

    rows: dict[_Key, Placed]
    result: StepResult
    n_runs: int  # the engine's, see `_look_at_logits`


class RunAhead:
    """Carries out the steps of one executor, and computes ahead between them."""

    def __init__(self, executor: StepExecutor, rows_max: int = 0) -> None:
        """`rows_max`: rows of a step with rows ahead; 0: nothing is computed ahead. The coordinator's own steps may
        have more, and then steps ahead may too. Takes a stage that is the whole model, and lanes that can be taken
        back by a row.
        """
        self._executor, self._rows_max = executor, rows_max
        self._streams: dict[_Key, _Stream] = {}  # bounded by the lanes: see `_forget_closed`
        self._computed: _Computed | None = None
        self._split_off: tuple[Step, list[Placed]] | None = None  # what of the present step was computed ahead
        self._answered: list[_Key] = []  # the streams that the present step has answered from rows ahead
        self._rows_asked = 0  # of the largest step of decode rows that the coordinator has made lately
        self.n_used = self.n_dropped = 0  # rows computed ahead, by what became of them
        self._n_reported = 0  # of those that were dropped

    # --- rows ahead ---------------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether something may be computed ahead now, if nothing waits."""
        return self._computed is None and any(stream.may_run for stream in self._streams.values())

    @property
    def lanes(self) -> frozenset[int]:
        """The lanes that hold a row that was not asked for yet."""
        rows = {} if self._computed is None else self._computed.rows
        return frozenset([item.lane.index for item in rows.values()])

    def next_step(self, now_ns: int) -> Step | None:
        """Return the rows that the streams will probably ask for, None if there are none. Then nothing is due."""
        frames = self._frames(self._streams, self._room(0), now_ns)
        return Step([], frames, AHEAD, now_ns, 0, 0) if frames else None

    def compute(self, step: Step) -> None:
        """Compute the rows of `next_step`; their logits wait for the coordinator's frames."""
        riders = step.frames
        self._keep(self._executor.execute(dataclasses.replace(step, frames=[]), riders))

    def settle(self) -> None:
        """Take every lane back to where the coordinator knows it. For work that looks at lanes, and before a decode."""
        computed, self._computed = self._computed, None
        if computed is not None:
            self._drop(computed.rows.values())

    def _drop(self, rows: Collection[Placed]) -> None:
        self.n_dropped += len(rows)
        for item in rows:
            self._take_back(item.lane)

    def _take_back(self, lane: Lane) -> None:
        """Take a lane back to where the coordinator knows it, if the session still has it."""
        if self._executor.lanes.has(lane):
            self._executor.engine.drop_from(lane.index, lane.next_position)

    def _keep(self, result: StepResult) -> None:
        riding, result.riding = result.riding, []
        rows = {item.frame.session_key: item for item in riding}
        self._computed = _Computed(rows, result, self._executor.engine.n_runs) if rows else None

    def _look_at_logits(self) -> None:
        """Drop rows whose logits are gone: controls, and copies of lanes between steps, may run the engine too."""
        if self._computed is not None and self._computed.n_runs != self._executor.engine.n_runs:
            self.settle()

    def _room(self, n_rows: int) -> int:
        """Return how many rows may join a step that has `n_rows`."""
        engine = self._executor.engine
        return max(0, min(max(self._rows_max, self._rows_asked), engine.max_rows, engine.max_wanted) - n_rows)

    def _frames(self, keys: Iterable[_Key], room: int, now_ns: int, adapter: int | None = None) -> list[QueuedFrame]:
        """Return the frames of those of the streams that may run, as the coordinator would send them. They have one
        adapter: this one, or by default that of the first.
        """
        streams = [(key, self._streams[key]) for key in keys if key in self._streams]
        due = [(key, stream) for key, stream in streams if stream.may_run]
        for key, stream in due:
            stream.is_due = self._fits(key, stream)  # otherwise its epoch is over, or its answer as long as may be
        due = [each for each in due if each[1].is_due]
        wanted = adapter_of(due[0][0][1]) if due and adapter is None else adapter
        due = [each for each in due if adapter_of(each[0][1]) == wanted][:room]
        payload = np.array([[stream.token] for _, stream in due], np.int32)
        return [
            QueuedFrame(
                route_id=key[0],
                session_id=key[1],
                epoch=stream.epoch,
                position=stream.position,
                n_rows=1,
                flags=Flag.WANTS_SAMPLE,
                argument=0,
                payload=payload,
                exponents=None,
                options=None,
                trace=b"",
                arrived_ns=now_ns,
                upstream_wait_ns=0,
                first_row=row,
            )
            for row, (key, stream) in enumerate(due)
        ]

    def _fits(self, key: _Key, stream: _Stream) -> bool:
        executor = self._executor
        if key in executor.sessions.cancelled or not self._is_current(key[0], stream.epoch):
            return False
        try:
            _, drop_from = executor.lanes.place(key[1], key[0], stream.position, 1)
        except RelaylineError:
            return False
        return drop_from is None

    def _is_current(self, route_id: int, epoch: int) -> bool:
        wiring = self._executor.routes.get(route_id)
        return wiring is not None and wiring.epoch == epoch

    # --- the coordinator's steps --------------------------------------------------------------------------------------

    def parts(self, step: Step) -> list[Step]:
        """Divide a step: rows that were computed ahead are answered first, and need no decode."""
        if not self._rows_max:
            return [step]
        for frame in step.frames:
            if (stream := self._streams.get(frame.session_key)) is not None:
                stream.arrived(frame)
        self._answered = []
        if not any(frame.is_prefill for frame in step.frames):
            self._rows_asked = max(step.n_rows, self._rows_asked - 1)
        self._look_at_logits()
        if self._computed is None:
            return [step]
        touched = {frame.session_key for frame in step.controls}
        asked: list[Placed] = []
        others: list[QueuedFrame] = []
        for frame in step.frames:
            row = self._computed.rows.get(frame.session_key)
            if row is not None and frame.session_key not in touched and self._is_same(frame, row.frame):
                asked.append(Placed(frame, row.row, row.lane, None))
            else:
                others.append(frame)
        if not asked:
            return [step]
        answered = dataclasses.replace(step, controls=[], frames=[item.frame for item in asked])
        self._split_off = answered, asked
        return [answered, dataclasses.replace(step, frames=others)] if others or step.controls else [answered]

    def _is_same(self, frame: QueuedFrame, ahead: QueuedFrame) -> bool:
        return (
            _is_plain(frame)
            and frame.position == ahead.position
            and frame.epoch == ahead.epoch
            and self._is_current(frame.route_id, frame.epoch)
            and frame.payload is not None
            and ahead.payload is not None
            and int(frame.payload[frame.first_row, 0]) == int(ahead.payload[ahead.first_row, 0])
        )

    def execute(self, part: Step) -> StepResult:
        """Carry out one of `parts`, in their order."""
        if not self._rows_max:
            return self._executor.execute(part)
        split_off, self._split_off = self._split_off, None
        if split_off is not None and split_off[0] is part:
            return self._answer(*split_off)
        riders: list[QueuedFrame] = []
        if part.frames:
            riders = self._riders(part)
        elif self._computed is not None:
            touched = {frame.session_key for frame in part.controls}
            self._drop([self._computed.rows.pop(key) for key in touched & self._computed.rows.keys()])
            if not self._computed.rows:
                self._computed = None
        result = self._executor.execute(part, riders)
        if riders:
            self._keep(result)
        self._look_at_logits()
        self._expect(result)
        return result

    def _answer(self, part: Step, asked: list[Placed]) -> StepResult:
        computed = self._computed
        assert computed is not None
        for item in asked:
            del computed.rows[item.frame.session_key]
        self.n_used += len(asked)
        self._answered = [item.frame.session_key for item in asked]
        result = self._executor.answer(part, asked, computed.result)
        if not computed.rows:
            self._computed = None
        self._expect(result)
        return result

    def _riders(self, part: Step) -> list[QueuedFrame]:
        """Return the rows that are computed with the rows of a step, and take all other rows ahead back."""
        waiting = {} if self._computed is None else self._computed.rows
        self._computed = None
        self._drop(waiting.values())
        again = [key for key in waiting if key in self._streams]
        for key in again:
            if adapter_of(key[1]) == part.frames[0].adapter:
                self._streams[key].rides_again()
        if any(frame.is_mutual for frame in part.frames):
            return []
        going_on = self._answered if any(frame.is_prefill for frame in part.frames) else []
        touched = {frame.session_key for frame in (*part.controls, *part.frames)}
        keys = [key for key in dict.fromkeys([*again, *going_on]) if key not in touched]
        return self._frames(keys, self._room(part.n_rows), part.taken_ns, part.frames[0].adapter)

    def _expect(self, result: StepResult) -> None:
        """Note the next expected frames of a step's streams, and report rows computed in vain."""
        result.n_dropped, self._n_reported = self.n_dropped - self._n_reported, self.n_dropped
        members = {frame.session_key: frame for frame in result.members}
        for output in result.outputs:
            for sample in output.samples:
                key = (output.route_id, sample.session_id)
                frame = members.get(key)
                if frame is None or not frame.flags & Flag.WANTS_SAMPLE or sample.embedding:
                    continue
                stream = self._streams.setdefault(key, _Stream())
                stream.position, stream.token, stream.epoch = sample.position, sample.token, frame.epoch
                stream.is_due, stream.n_rides = True, 0
        for frame in result.closed:
            self._streams.pop(frame.session_key, None)
        self._forget_closed()

    def _forget_closed(self) -> None:
        """Forget sessions that have ended without a close: those of epochs that are over."""
        lanes = self._executor.lanes
        if len(self._streams) > lanes.n_lanes:
            open_keys = {(lane.route_id, lane.session_id) for lane in lanes}
            self._streams = {key: stream for key, stream in self._streams.items() if key in open_keys}


def _is_plain(frame: QueuedFrame) -> bool:
    """Return whether a frame is one row that continues an answer."""
    return frame.n_rows == 1 and frame.flags == Flag.WANTS_SAMPLE
