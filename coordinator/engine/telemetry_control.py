"""Telemetry over all stages: one level for the whole pipeline, and the batches of a request from every stage's ring."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from relayline.coordinator.engine.stage_client import StageClient
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.observe.token_times import Known
from relayline.coordinator.observe.trace_view import view
from relayline.wire.common.errors import InvalidRequestError
from relayline.wire.common.tasks import end_task
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry.telemetry import LEVEL_NAMES, Level

LEVEL_FOR_S_MAX = 86_400.0  # a level that holds for a while only; then the one before it comes back


class _Loan(NamedTuple):
    """A level that holds for a while only."""

    back: Level  # that comes after it
    until_s: float  # of the event loop's clock
    timer: asyncio.TimerHandle


class TelemetryControl:
    """The telemetry operations behind the HTTP routes for traces and levels. Event loop only."""

    def __init__(self, observer: Observer, stages: Callable[[], Sequence[StageClient]]) -> None:
        """`stages` returns those that are connected now."""
        self.observer, self.stages = observer, stages
        self._loan: _Loan | None = None
        self._pushing = asyncio.Lock()
        self._returning: asyncio.Task[list[str | None]] | None = None

    async def describe(self) -> dict[str, object]:
        """Return the settings that hold here and at every stage (None where one does not answer)."""
        return self._here() | {"stages": await push_level(self.stages(), None)}

    async def change(
        self, level: str | None, sample_ratio: float | None, for_s: float | None = None
    ) -> dict[str, object]:
        """Change the given values, here and at every stage, now and whenever one connects; returns `describe`.

        `for_s`: after so many seconds the level before it comes back. Without it the level stays. Raises
        InvalidRequestError for values out of range; then nothing has changed.
        """
        if level is not None and level not in LEVEL_NAMES:
            text = f"level: {level[:40]!r} is unknown; choose one of {', '.join(LEVEL_NAMES)}"
            raise InvalidRequestError(text, param="level")
        if sample_ratio is not None and not 0.0 <= sample_ratio <= 1.0:
            raise InvalidRequestError.of_field("sample_ratio", f"{sample_ratio} is outside 0..1")
        if for_s is not None and not 0.0 < for_s <= LEVEL_FOR_S_MAX:
            raise InvalidRequestError.of_field("for_s", f"{for_s:g} is outside 0..{LEVEL_FOR_S_MAX:g} seconds")
        if for_s is not None and level is None:
            raise InvalidRequestError.of_field("for_s", "goes with `level`: it says for how long the level holds")
        if sample_ratio is not None:
            self.observer.tracing.sampler_ratio = sample_ratio
        if level is None:
            return await self.describe()
        back = self._end_loan()
        if for_s is not None and back is not Level.named(level):
            loop = asyncio.get_running_loop()
            self._loan = _Loan(back, loop.time() + for_s, loop.call_later(for_s, self._give_back))
        self.observer.telemetry.level = self.observer.pushed_level = Level.named(level)
        return self._here() | {"stages": await self._push()}

    async def close(self) -> None:
        """No level comes back any more."""
        self._end_loan()
        if self._returning is not None:
            await end_task(self._returning)

    def _end_loan(self) -> Level:
        """Return the level that would come back now, which is the present one where none is on loan."""
        loan, self._loan = self._loan, None
        if loan is None:
            return self.observer.telemetry.level
        loan.timer.cancel()
        return loan.back

    def _give_back(self) -> None:
        level = self._end_loan()
        self.observer.telemetry.level = self.observer.pushed_level = level
        if self._returning is None or self._returning.done():  # else it tells the stages this level, too
            self._returning = asyncio.create_task(self._push())

    async def _push(self) -> list[str | None]:
        """Set every stage to the level of now, one push after the other, so that each ends with the last level."""
        async with self._pushing:
            while True:
                level = self.observer.pushed_level
                found = await push_level(self.stages(), level)
                if level is self.observer.pushed_level:
                    return found

    def _here(self) -> dict[str, object]:
        telemetry, loan = self.observer.telemetry, self._loan
        left_s = None if loan is None else round(max(0.0, loan.until_s - asyncio.get_running_loop().time()), 1)
        return {
            "level": str(telemetry.level),
            "back_to": None if loan is None else str(loan.back),
            "back_in_s": left_s,
            "sample_ratio": self.observer.tracing.sampler_ratio,
            "exporting": telemetry.is_exporting,
            "exported_spans": telemetry.exported_spans,
            "dropped_spans": telemetry.dropped_spans,
            "remembered_requests": len(self.observer.log),
        }

    async def trace(self, wanted: str | None, now_ns: int) -> dict[str, object] | None:
        """Return the life of one request, or of the last one (None), with its batches at every stage.

        None when no such request is remembered.
        """
        log = self.observer.log
        record = log.last() if wanted is None else log.find(wanted)
        if record is None:
            return None
        session_ids = sorted({stream.session.session_id for stream in record.streams})
        if not session_ids:
            return view(record, [], log.owners(), now_ns)
        responses = await asyncio.gather(*(stage.batches(session_ids) for stage in self.stages()))
        known = Known(log.sessions(), list(self.observer.arrivals_ns))
        # Tens of thousands of batch members take a while: they are read in a thread, so that tokens keep flowing.
        return await asyncio.to_thread(view, record, responses, log.owners(), now_ns, known)


async def greet(stages: Sequence[StageClient], level: Level | None) -> None:
    """Set newly connected stages to the pipeline's level, if it has its own (otherwise None)."""
    if level is not None:
        await push_level(stages, level)


async def push_level(stages: Sequence[StageClient], level: Level | None) -> list[str | None]:
    """Set the level of every stage (None: no change); returns the present levels, None where a stage is silent."""
    wanted = pb.SetTelemetryRequest(level=None if level is None else level.to_wire())
    answers = await asyncio.gather(*(stage.set_telemetry(wanted) for stage in stages))
    levels = [None if answer is None else Level.from_wire(answer.level) for answer in answers]
    return [None if found is None else str(found) for found in levels]
