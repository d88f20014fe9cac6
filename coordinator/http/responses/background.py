"""Responses that go on without a connection (`background: true`): one task for each.

A slow model's long answer outlasts the time limits of proxies, and laptops that sleep. Such a response takes its place
in the queue as any other.

Where responses are kept in a directory, it outlasts the coordinator, too. The request is written before the client is
answered, and each token before a client sees it. So the next coordinator goes on behind the last token, and no event is
told in two ways.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Sequence

from aiohttp import web

from relayline.coordinator.http.conversations.keeper import Conversations
from relayline.coordinator.http.edge.body import Request
from relayline.coordinator.http.edge.errors import using_disk
from relayline.coordinator.http.edge.middleware import json_response
from relayline.coordinator.http.replies.answers import Answers, sum_of
from relayline.coordinator.http.replies.choice import Growth
from relayline.coordinator.http.replies.job import open_streams
from relayline.coordinator.http.replies.merge import Arrival, Merge
from relayline.coordinator.http.replies.observe import note_output, wants_content
from relayline.coordinator.http.replies.service import Service
from relayline.coordinator.http.replies.spending import Spending
from relayline.coordinator.http.responses.following import follow
from relayline.coordinator.http.responses.keeper import ResponseKeeper
from relayline.coordinator.http.responses.running import Running
from relayline.coordinator.http.responses.store import ResponseStore, Stored
from relayline.coordinator.http.responses.waiting import AGAIN, Waiting
from relayline.coordinator.sessions.generation import TokenEvent, TokenStream
from relayline.wire.common.bounds import BACKGROUND_RESPONSES_MAX, BACKGROUND_RESPONSES_PER_KEY_MAX
from relayline.wire.common.errors import (
    InternalError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    RelaylineError,
    RequestCancelledError,
)

log = logging.getLogger("relayline.http")

SAID_AT_ONCE_MAX = 64  # tokens of the coordinator before that are taken in one turn of the event loop


class Background:
    """All such responses of one application."""

    def __init__(
        self,
        service: Service,
        store: ResponseStore,
        conversations: Conversations,
        n_max: int = BACKGROUND_RESPONSES_MAX,
    ) -> None:
        self._service, self._store, self._n_max = service, store, n_max
        self._conversations = conversations
        self._running: dict[str, Running | Waiting] = {}
        self.keeper: ResponseKeeper | None = None
        """Keeps them over the end of this process; None: they end with it."""
        self._is_leaving = False

    def keep(self, keeper: ResponseKeeper, left: Sequence[Waiting]) -> None:
        """Keep responses over the end of this process, beginning with those that the one before has left."""
        self.keeper = keeper
        self._running |= {waiting.id: waiting for waiting in left}

    def get(self, id: str, owner: str) -> Running | Waiting | None:
        """Return one of this owner's that waits or runs."""
        found = self._running.get(id)
        return found if found is not None and found.owner == owner else None

    def waiting(self, id: str) -> Waiting | None:
        """Return one that waits to be asked for again."""
        found = self._running.get(id)
        return found if isinstance(found, Waiting) else None

    def ids(self) -> list[str]:
        """Return those of all that wait or run."""
        return [*self._running]

    def all_waiting(self) -> list[Waiting]:
        """Return those that wait to be asked for again."""
        return [each for each in self._running.values() if isinstance(each, Waiting)]

    async def begin(self, request: web.Request, running: Running) -> web.StreamResponse:
        """Admit a job and answer at once. Raises the refusal."""
        try:
            await self._admit(request, running)
        except BaseException:
            if self.keeper is not None and AGAIN not in request:
                self.keeper.finished(running.id)
            raise
        await asyncio.sleep(0)  # a task that is cancelled before its first step would leave the streams open
        if running.recording is not None and AGAIN not in request:
            return await follow(request, running.recording, 0, self._service.limits)
        return json_response(running.dialect.state("queued"))  # as OpenAI's always begins

    async def _admit(self, request: web.Request, running: Running) -> None:
        again, job = request.get(AGAIN), running.job
        if again is None:
            self.check_room(running.owner)
        else:
            self._check_again(again, running)
        service = self._service
        spending = Spending(request, service.observer)
        spending.check(job.n_prompt_tokens)
        said = () if again is None else tuple(again.said)
        is_said = bool(said) and said[-1].finish_reason is not None
        streams = [] if is_said else await open_streams(service.generator, job.continued([each.token for each in said]))
        spending.begun(job.n_prompt_tokens, len(said))
        if isinstance(request, Request):
            request.body_done()  # all that it says is in the job
        running.record.is_detached = True
        if running.turn is not None:
            running.turn.detach()
        running.admitted()
        self._running[running.id] = running
        keeps = wants_content(service.observer, request)
        running.task = asyncio.create_task(self._run(running, streams, said, spending, keeps=keeps))

    def _check_again(self, again: Waiting, running: Running) -> None:
        """Raise an error unless a response can go on where it was."""
        if self._is_leaving or self._running.get(again.id) is not again:
            raise RequestCancelledError("the response was cancelled meanwhile")
        order, service, said = again.order, self._service, again.said
        if not said or said[-1].finish_reason is not None:
            return
        if (order.model_id, order.n_vocab) != (service.model_id, service.tokenizer.n_vocab):
            text = f"it was begun by the model {order.model_id!r}, and {service.model_id!r} is served now"
            raise InvalidRequestError(f"{text}; ask again")
        if len(said) >= running.job.requests[0].max_tokens:
            raise InvalidRequestError("the context is shorter now, and the answer does not fit any more; ask again")

    def check_room(self, owner: str) -> None:
        """Raise OverloadedError if all places are taken, or by one API key as many as it may have; NotReadyError at the
        end of this process.
        """
        if self._is_leaving:
            raise NotReadyError("the coordinator ends")
        n_own = sum(running.owner == owner for running in self._running.values()) if owner else 0
        n_max = min(self._n_max, BACKGROUND_RESPONSES_PER_KEY_MAX) if owner else self._n_max
        if n_own >= n_max or len(self._running) >= self._n_max:
            whose = "of this API key " if n_own >= n_max else ""
            text = f"{n_max} background responses {whose}wait or run, which is the limit; try again later"
            raise OverloadedError(text)

    def _keep(self, running: Running | Waiting, ended: Stored) -> None:
        """Store one that has ended, with as much of it as there is room for."""
        del self._running[running.id]
        if running.turn is not None:
            # Not before: the next one would be written down while this one is still to be asked for after a crash. Only
            # one of both would get the turn then.
            running.turn.leave()
        smaller = dataclasses.replace(ended, recording=None)
        if ended.recording is not None:
            ended = dataclasses.replace(ended, recording=ended.recording.kept())
        is_stored = self._store.put(ended) or self._store.put(smaller) or self._store.put(running.without_output())
        if self.keeper is not None and not is_stored:
            self.keeper.finished(running.id)

    async def cancel(self, running: Running | Waiting) -> None:
        """Cancel one and wait for its end; one whose answer has been made ends by itself. Raises HttpRefusal where too
        much waits for the disk.
        """
        if running.task is not None:
            if not running.is_whole:
                running.task.cancel()
            await asyncio.wait([running.task])
        if self._running.get(running.id) is running:  # it is not asked for now
            self._keep(running, running.cancel())
        if self.keeper is not None:
            self.keeper.finished(running.id)  # also where the disk has no room for how it has ended
            with using_disk("the disk with the responses"):
                await self.keeper.settled()

    def fail(self, waiting: Waiting, message: str) -> None:
        """End one that cannot be asked for again."""
        if self._running.get(waiting.id) is waiting:  # it was not cancelled meanwhile
            log.warning("the background response %s cannot go on: %s", waiting.id, message)
            self._keep(waiting, waiting.fail(message))

    async def leave(self) -> None:
        """End what runs, and leave it for the next coordinator."""
        if self.keeper is None or self._is_leaving:
            return
        self._is_leaving = True
        left = [*self._running.values()]
        for running in left:
            if running.task is not None and not running.is_whole:
                running.task.cancel()
        tasks = [running.task for running in left if running.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        left = [running for running in left if running.id in self._running]
        for running in left:
            if isinstance(running, Waiting):  # of the others each task has done it
                running.leave()
        await self.keeper.left([running.id for running in left])
        if left:
            log.info("%d background responses have not ended, and go on after the next start", len(left))

    async def close(self, _app: web.Application) -> None:
        """Cancel all, or leave them for the next coordinator."""
        await self.leave()
        if self.keeper is None:
            for running in [*self._running.values()]:
                await self.cancel(running)

    async def _run(
        self,
        running: Running,
        streams: Sequence[TokenStream],
        said: Sequence[TokenEvent],
        spending: Spending,
        *,
        keeps: bool,
    ) -> None:
        """Read an answer to its end. `said`: by the model, before; `keeps`: the whole of it is for telemetry, too."""
        service, job, record = self._service, running.job, running.record
        grown: list[Growth] = []
        begun_ns = time.monotonic_ns()
        try:
            async with Merge(streams, service.limits.backlog_events_max) as merge:
                answers = Answers(job, job.choice_states(service), merge, begun_ns)

                def take(arrivals: list[Arrival]) -> bool:
                    growths = [running.take(answers, arrival) for arrival in arrivals]
                    if keeps:
                        grown.extend(growth for growth in growths if growth is not None)
                    return answers.is_open

                try:
                    for begin in range(0, len(said), SAID_AT_ONCE_MAX):
                        take([Arrival(0, event) for event in said[begin : begin + SAID_AT_ONCE_MAX]])
                        await asyncio.sleep(0)
                    said = ()  # their memory, for as long as the rest takes
                    while answers.is_open:
                        if self.keeper is None:
                            await merge.pass_on(take, None)
                        else:
                            take(await self._written(running, await merge.next(None)))
                finally:
                    if not self._is_leaving:  # or the next coordinator counts all of it
                        spending.ended(answers.spent())
            ended: Stored | None = await running.complete(answers, self._conversations)
        except asyncio.CancelledError:
            ended = None
            if self._is_leaving:
                running.leave()
            else:
                ended = running.cancel()
        except RelaylineError as error:
            ended = running.fail(error)
        except Exception:
            log.exception("the background response %s cannot be written", running.id)
            ended = running.fail(InternalError(f"internal error; the server's log has the details under {running.id}"))
        if ended is not None:
            self._keep(running, ended)
        if grown:
            note_output(record, [sum_of(grown)])
        service.observer.answered(record, time.monotonic_ns())

    async def _written(self, running: Running, arrivals: list[Arrival]) -> list[Arrival]:
        """Return arrivals once what they say is written: what a client sees is never said otherwise."""
        events = [arrival.event for arrival in arrivals if arrival.event is not None]
        if events and self.keeper is not None:
            await self.keeper.add(running.id, events)
            running.is_going()
        return arrivals
