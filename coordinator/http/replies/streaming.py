"""One answer as server-sent events. Events are written where the pipeline publishes them: no task wakes for a token.

`_take` gets everything of one answer that came in one turn of the event loop, and writes it at once. The request's own
task sleeps until then. It does the parts that may have to wait: the beginning, the end, pings, and a client that reads
slowly.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from relayline.coordinator.http.edge.middleware import request_id
from relayline.coordinator.http.edge.record import RECORD, note_failure, note_whole
from relayline.coordinator.http.edge.sse import SSE, EventWriter, StreamForm
from relayline.coordinator.http.replies.answers import Answers, sum_of
from relayline.coordinator.http.replies.choice import Growth
from relayline.coordinator.http.replies.dialect import Dialect
from relayline.coordinator.http.replies.merge import Arrival, Merge
from relayline.coordinator.http.replies.observe import note_output, wants_content
from relayline.coordinator.http.replies.service import Service
from relayline.wire.common.errors import InternalError, RelaylineError

log = logging.getLogger("relayline.http")

BeforeEnd = Callable[[], Awaitable[None]]


class Streaming:
    """Streams one answer; `run` once."""

    def __init__(
        self,
        request: web.Request,
        service: Service,
        dialect: Dialect,
        merge: Merge,
        answers: Answers,
        form: StreamForm = SSE,
        before_end: BeforeEnd | None = None,
    ) -> None:
        """`before_end` is awaited before the last events of a whole answer."""
        self._before_end = before_end
        self._request, self._service, self._dialect = request, service, dialect
        self._merge, self._answers = merge, answers
        limits = service.limits
        self._writer = EventWriter(request, limits.write_timeout_s, limits.ping_interval_s, dialect.frame, form)
        self._events: list[bytes] = []  # that have not been written
        self._is_over = False  # no event follows these
        self._is_whole = True
        keeps = wants_content(service.observer, request)
        self._grown: list[list[Growth]] | None = [[] for _ in answers.states] if keeps else None

    async def run(self) -> web.StreamResponse:
        """Send the answer to its end. Raises the error that it begins with, and ClientGoneError."""
        first = await self._first()
        writer, job = self._writer, self._answers.job
        for index in range(len(self._answers.states)):
            opening = self._dialect.opening_event(index, job.prompt_of(index))
            self._events += [opening] if opening is not None else []
        self._add_all(first)
        await writer.start()
        is_first = True
        while not self._is_over:
            if self._events or is_first:
                events, self._events, is_first = self._events, [], False
                await writer.send(events)
            elif (left_s := writer.silent_in_s()) <= 0:
                await writer.ping()
            else:
                await self._merge.pass_on(self._take, left_s)
        if self._grown is not None:
            note_output(self._request[RECORD], [sum_of(parts) for parts in self._grown])
        if self._is_whole:
            if self._before_end is not None:
                await self._before_end()
            await writer.finish(self._events)
            note_whole(self._request)
        else:
            await writer.cut(self._events)
        return writer.response

    async def _first(self) -> list[Arrival]:
        """Wait for the first event, and raise the error that a stream begins with: no status has been sent yet.

        Returns nothing if the answer only takes long: a client in line, or with a long prompt, gets pings with status
        200. While a stage is lost it is unknown whether it returns, and there is no status for that.
        """
        while True:
            arrivals = await self._merge.next(self._service.limits.ping_interval_s)
            if not arrivals and not self._service.generator.is_ready():
                continue
            if arrivals and arrivals[0].error is not None:
                raise arrivals[0].error
            return arrivals

    def _take(self, arrivals: list[Arrival]) -> bool:
        """Write what these add to the answer; returns whether more may be given at once."""
        self._add_all(arrivals)
        if self._is_over or not self._writer.send_at_once(self._events):
            return False
        self._events = []
        return True

    def _add_all(self, arrivals: list[Arrival]) -> None:
        answers, dialect = self._answers, self._dialect
        try:
            for arrival in arrivals:
                self._add(arrival)
        except Exception as error:
            # The status is long sent. The event makes OpenAI's clients raise; for all others the connection is cut.
            failure = error if isinstance(error, RelaylineError) else self._unforeseen()
            note_failure(self._request, failure.label, failure.message)
            self._events.append(dialect.failure_event(failure))
            self._is_over, self._is_whole = True, False
            return
        if not answers.is_open:
            if answers.job.plan.include_usage:
                self._events.append(dialect.usage_event(answers.usage()))
            self._events += dialect.closing_events()
            self._is_over = True

    def _add(self, arrival: Arrival) -> None:
        answers, dialect, index = self._answers, self._dialect, arrival.stream
        if arrival.progress is not None:
            if answers.states[index].finish_reason is None:
                time_ms = (time.monotonic_ns() - dialect.begun_ns) // 1_000_000
                event = dialect.progress_event(index, arrival.progress, time_ms)
                self._events += [event] if event is not None else []
            return
        growth = answers.advance(arrival)
        if growth is None:
            return
        if self._grown is not None:
            self._grown[index].append(growth)
        if growth:
            self._events.append(dialect.growth_event(index, growth))
        reason = answers.states[index].finish_reason
        if reason is not None:
            self._events.append(dialect.finish_event(index, reason, growth.stop))

    def _unforeseen(self) -> InternalError:
        request = self._request
        log.exception("an answer of %s cannot be written [%s]", request.path, request_id(request))
        return InternalError(f"internal error; the server's log has the details under {request_id(request)}")
