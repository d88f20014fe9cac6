"""The coordinator's spans in traces of passes: the root of each second, and its own part of every pass.

passes ×8                    the root: sums over the second.
  send                       from the choice of the rows until their envelope has left.
  decode ×8                  stage 0, see stage.observe.batch_spans.
    decode ×8                stage 1.
      decode ×8              stage 2.
        return               from the arrival of the tokens until the next frames have left.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from opentelemetry.trace import SpanKind

from relayline.coordinator.observe.description import known_from_ns, steps_of
from relayline.coordinator.observe.overlap import overlap_between
from relayline.coordinator.observe.passes import Passes, RecordOf, Window
from relayline.coordinator.sessions.frame import Frame
from relayline.wire.envelopes import trace_context
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry import names
from relayline.wire.telemetry.spans import Event, Finished
from relayline.wire.telemetry.telemetry import Level, Telemetry

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

LOOK_S = 0.25  # between looks at windows that are over by time

Statuses = Sequence[pb.StatusResponse | None]
"""What each stage, in layer order, says of its latest steps, on this process's monotonic clock; None: no answer."""
StatusesOf = Callable[[], Awaitable[Statuses]]
Later = Callable[[float, Callable[[], None]], object]


class PassTraces:
    """Makes the traces of passes of one coordinator. Event loop only."""

    def __init__(self, telemetry: Telemetry, later: Later | None, sampler_ratio: Callable[[], float]) -> None:
        """Without `later` a window ends when the next begins. `sampler_ratio` returns the share of sampled windows."""
        self._telemetry, self._later = telemetry, later
        self._passes = Passes(
            lambda root: random.random() < sampler_ratio() and telemetry.samples(root), self._window_over
        )
        self.statuses: StatusesOf | None = None
        """Asks the stages; None while none is connected."""
        self._looking = False
        self._ending: dict[asyncio.Task[None], Window] = {}

    def connected(self, n_stages: int, statuses: StatusesOf | None) -> None:
        """All stages are connected. `statuses` asks them for their latest steps."""
        self._passes.n_stages, self.statuses = n_stages, statuses

    def leaves(self, frames: Sequence[Frame], now_ns: int, record_of: RecordOf) -> bytes:
        """An envelope has been chosen: return the context that it carries."""
        if not self._telemetry.records(Level.BATCHES):
            return trace_context.NONE
        context = self._passes.leaves(frames, now_ns, record_of)
        if self._later is not None and not self._looking and context != trace_context.NONE:
            self._looking = True
            self._later(LOOK_S, self._look)
        return context

    def _look(self) -> None:
        self._passes.look(time.monotonic_ns())
        self._looking = self._later is not None and self._passes.is_busy
        if self._looking and self._later is not None:
            self._later(LOOK_S, self._look)

    def sent(self, context: bytes, frames: Sequence[Frame], chosen_ns: int, sent_ns: int) -> None:
        """An envelope that carries a sampled context was handed to gRPC, for stage 0, at sent_ns.

        Without rows it extends grants, and is no pass: the stages' answers tell of those that follow.
        """
        n_rows = sum([len(frame.tokens) for frame in frames])
        if not n_rows:
            return
        offset_ns = self._telemetry.wall_offset_ns()
        attributes: dict[str, AttributeValue] = {
            names.ATTR_PASS_ROWS: n_rows,
            names.ATTR_PASS_STREAMS: len({frame.session_id for frame in frames if frame.tokens}),
        }
        self._telemetry.emit(
            Finished(
                names.SPAN_SEND,
                trace_context.new_below(context),
                context,
                chosen_ns + offset_ns,
                sent_ns + offset_ns,
                attributes,
                kind=SpanKind.PRODUCER,
            )
        )

    def returned(self, message: pb.ReturnResponse, arrived_ns: int) -> None:
        """A stage's message has been handled, and the frames that follow from it have left."""
        if not self._passes.is_busy:
            return
        now_ns, n_tokens = time.monotonic_ns(), len(message.samples)
        if message.samples or message.progress:
            context = message.batch_trace
            if len(context) == len(trace_context.NONE) and self._passes.window_of(context) is not None:
                offset_ns = self._telemetry.wall_offset_ns()
                self._telemetry.emit(
                    Finished(
                        names.SPAN_RETURN,
                        trace_context.new_below(context),
                        context,
                        arrived_ns + offset_ns,
                        now_ns + offset_ns,
                        {names.ATTR_PASS_TOKENS: n_tokens},
                        kind=SpanKind.CONSUMER,
                    )
                )
            answered = [(sample.session_id, sample.position) for sample in message.samples]
            answered += [(passed.session_id, passed.position) for passed in message.progress]
            granted = [(sample.session_id, sample.position) for sample in message.samples if sample.grant]
            self._passes.returned(context, answered, n_tokens, now_ns, granted)

    def session_ended(self, session_id: int) -> None:
        """A session has ended: no more answers will come for it."""
        if self._passes.is_busy:
            self._passes.forget(session_id)

    def lost(self, why: str, now_ns: int) -> None:
        """The pipeline was lost."""
        self.statuses = None
        self._passes.lost(why, now_ns)

    def close(self) -> None:
        """End every window in its present state, at the end of the process."""
        self.statuses = None
        self._passes.end(time.monotonic_ns())
        for task, window in list(self._ending.items()):
            if not task.done():
                task.cancel()
                self._end(window, None)
        self._ending.clear()

    # --- the root -----------------------------------------------------------------------------------------------------

    def _window_over(self, window: Window) -> None:
        if self.statuses is None:
            self._end(window, None)
            return
        task = asyncio.ensure_future(self._ask_and_end(window, self.statuses))
        self._ending[task] = window
        task.add_done_callback(lambda done: self._ending.pop(done, None))

    async def _ask_and_end(self, window: Window, statuses: StatusesOf) -> None:
        self._end(window, await statuses())

    def _end(self, window: Window, statuses: Statuses | None) -> None:
        offset_ns = self._telemetry.wall_offset_ns()
        attributes: dict[str, AttributeValue] = {
            names.ATTR_PASSES: window.n_passes,
            names.ATTR_PASSES_TOKENS: window.n_tokens,
            names.ATTR_PASSES_ROWS: window.n_rows,
            names.ATTR_PASSES_STREAMS: len(window.streams),
            names.ATTR_PASSES_STREAMS_MAX: window.streams_max,
            **busy_attributes(statuses, window.started_ns, window.last_ns),
        }
        if window.waiting:
            attributes[names.ATTR_PASSES_UNANSWERED] = len(window.waiting)
        events = []
        if window.lost:
            events.append(Event("lost", window.last_ns + offset_ns, {names.EVENT_ATTR_CAUSE: window.lost}))
        self._telemetry.emit(
            Finished(
                names.sized(names.SPAN_PASSES, window.streams_max),
                window.root,
                trace_context.NONE,
                window.started_ns + offset_ns,
                window.last_ns + offset_ns,
                attributes,
                events,
                error=window.lost,
            )
        )


def busy_attributes(statuses: Statuses | None, from_ns: int, to_ns: int) -> dict[str, AttributeValue]:
    """Return each stage's busy share of a time span, and the share of busy time in which two or more stages computed.

    If a stage has forgotten steps, only the later part of the span counts. Empty if a stage did not answer.
    """
    known = [status for status in statuses or () if status is not None]
    if not known or len(known) != len(statuses or ()):
        return {}
    from_ns = max([from_ns, *(known_from_ns(status, to_ns) for status in known if status.n_steps)])
    if from_ns >= to_ns:
        return {}
    steps = [steps_of(status) for status in known]
    busy_ns = [sum([max(0, min(end, to_ns) - max(start, from_ns)) for start, end in each]) for each in steps]
    found: dict[str, AttributeValue] = {names.ATTR_PASSES_BUSY: [round(ns / (to_ns - from_ns), 4) for ns in busy_ns]}
    if shares := overlap_between(steps, from_ns, to_ns):
        found[names.ATTR_PASSES_OVERLAP] = round(shares["2+"], 4)
    return found
