"""One response that goes on without a connection: what its clients see of it at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from relayline.coordinator.http.conversations.keeper import Conversations
from relayline.coordinator.http.conversations.store import Turn
from relayline.coordinator.http.edge.record import set_failure
from relayline.coordinator.http.replies import shapes
from relayline.coordinator.http.replies.answers import Answers
from relayline.coordinator.http.replies.choice import Growth
from relayline.coordinator.http.replies.job import Job
from relayline.coordinator.http.replies.merge import Arrival
from relayline.coordinator.http.replies.reply import WRITTEN_INLINE_TOKENS_MAX
from relayline.coordinator.http.replies.shapes import Usage
from relayline.coordinator.http.responses.asking import AnswerOptions
from relayline.coordinator.http.responses.dialect import Item, ResponsesDialect
from relayline.coordinator.http.responses.items import KeptItem
from relayline.coordinator.http.responses.recording import Recording
from relayline.coordinator.http.responses.store import Stored
from relayline.coordinator.http.responses.waiting import Waiting
from relayline.coordinator.observe.tracing import CLIENT_GONE
from relayline.coordinator.sessions.request_log import RequestRecord
from relayline.wire.common.bounds import STORED_RESPONSES_BYTES_MAX
from relayline.wire.common.errors import InternalError, RelaylineError, RequestCancelledError


class Running:
    """One response that waits or runs."""

    def __init__(
        self,
        owner: str,
        job: Job,
        record: RequestRecord,
        dialect: ResponsesDialect,
        options: AnswerOptions,
        turn: Turn | None = None,
        again: Waiting | None = None,
    ) -> None:
        """`turn`: in its conversation. `again`: what it was while it waited to be asked for again, whose readers and
        whose ids of items stay.
        """
        self.id, self.owner, self.job, self.record = job.header.id, owner, job, record
        self.dialect, self.options, self.turn = dialect, options, turn
        self.is_whole = False
        """Its answer has been made, and it is no longer to be cancelled."""
        self._input_items = options.input_items if again is None else again.order.input_items
        self.recording = Recording() if job.plan.stream else None
        self._going = asyncio.Event() if again is None else again.is_going
        if again is not None:
            self.recording = again.recording
        self.task: asyncio.Task[None] | None = None
        self._is_opened = False  # it is past the queue, as its events say

    def admitted(self) -> None:
        """It waits or runs from now on."""
        self._write(self.dialect.queued_events())

    def as_stored(self) -> Stored:
        """Return it as far as it is known."""
        has_started = self._is_opened or any(stream.session.started_ns for stream in self.record.streams)
        return self._stored(self.dialect.state("in_progress" if has_started else "queued"), ())

    def take(self, answers: Answers, arrival: Arrival) -> Growth | None:
        """Take what the pipeline has made. Raises the error that ended it too soon."""
        growth = answers.advance(arrival)
        if not self._is_opened and arrival.error is None:
            self._is_opened = True
            self._write(self.dialect.opening_event(0, self.job.prompt_of(0)))
        if growth is None:
            return None
        self._write(self.dialect.growth_event(0, growth) if growth else b"")
        reason = answers.states[0].finish_reason
        if reason is not None:
            self._closing()
            self._write(self.dialect.finish_event(0, reason, growth.stop))
        return growth

    async def complete(self, answers: Answers, conversations: Conversations) -> Stored:
        """End it as a whole answer. A long one is written elsewhere than on the event loop."""
        usage = answers.usage()
        if usage.completion_tokens <= WRITTEN_INLINE_TOKENS_MAX:
            event, stored = self._whole(usage)
        else:
            event, stored = await asyncio.to_thread(self._whole, usage)
        if self.turn is not None:
            self.is_whole = True
            await conversations.add(self.turn, [*stored.input_items, *stored.output_items])
        self._write(event)
        self._end()
        return stored

    def without_output(self) -> Stored:
        """Return it as one that failed, because it is too large to be stored."""
        n_mib = STORED_RESPONSES_BYTES_MAX >> 20
        text = f"the answer is larger than what is stored of it: all API keys share {n_mib} MiB"
        return self._stored(self.dialect.failed(InternalError(text), ()), ())

    def fail(self, error: RelaylineError) -> Stored:
        """End it with an error."""
        set_failure(self.record, error.label, error.message)
        self._closing()
        self._write(self.dialect.close_open())
        if isinstance(error, RequestCancelledError):
            return self._ended(self.dialect.state("cancelled"))
        body = self.dialect.failed(error)
        self._write(self.dialect.failed_event(body))
        return self._ended(body)

    def cancel(self) -> Stored:
        """End it because its client wishes so. OpenAI's API has no event for that."""
        set_failure(self.record, CLIENT_GONE, "the client has cancelled it")
        self._closing()
        self._write(self.dialect.close_open())
        return self._ended(self.dialect.state("cancelled"))

    def leave(self) -> None:
        """It goes on after the end of this process."""
        set_failure(self.record, CLIENT_GONE, "the coordinator has ended, and the next one goes on with it")
        self._end()

    def is_going(self) -> None:
        """It has said something new."""
        self._going.set()

    def _closing(self) -> None:
        if self.recording is not None:
            self.recording.closing()

    def _write(self, frames: bytes) -> None:
        if self.recording is not None:
            self.recording.add(frames)

    def _whole(self, usage: Usage) -> tuple[bytes, Stored]:
        body = self.dialect.state(self.dialect.ending, usage)
        return self.dialect.ended_event(body), self._with_output(body)

    def _ended(self, body: bytes) -> Stored:
        self._end()
        return self._with_output(body)

    def _end(self) -> None:
        self._going.set()
        if self.recording is not None:
            self.recording.end()

    def _with_output(self, body: bytes) -> Stored:
        return self._stored(body, kept_output(self.dialect.items))

    def _stored(self, body: bytes, output: Sequence[KeptItem]) -> Stored:
        previous_id, inputs = self.options.previous_response_id, self._input_items
        return Stored(self.id, self.owner, body, inputs, output, previous_id, True, self.recording)


def kept_output(items: Sequence[Item]) -> list[KeptItem]:
    """Return the items that a next response may continue, as their ids and their JSON: without a call that has not been
    finished.
    """
    kept = [item for item in items if item["status"] == "completed" or "content" in item]
    return [(item["id"], shapes.encode(item)) for item in kept]
