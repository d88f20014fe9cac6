"""Running a job: read its streams to the end and answer, as one body or as server-sent events."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from relayline.coordinator.http.edge.body import Request
from relayline.coordinator.http.edge.middleware import json_response
from relayline.coordinator.http.edge.record import RECORD
from relayline.coordinator.http.edge.sse import SSE, StreamForm
from relayline.coordinator.http.replies.answers import Answers, sum_of
from relayline.coordinator.http.replies.choice import Growth
from relayline.coordinator.http.replies.dialect import Dialect
from relayline.coordinator.http.replies.job import Job, open_streams
from relayline.coordinator.http.replies.merge import Arrival, Merge
from relayline.coordinator.http.replies.observe import note_output, wants_content
from relayline.coordinator.http.replies.service import Service
from relayline.coordinator.http.replies.spending import Spending
from relayline.coordinator.http.replies.streaming import BeforeEnd, Streaming

# Longer answers are written elsewhere than on the event loop: 6,400 tokens with 5 alternatives each take 100 ms.
WRITTEN_INLINE_TOKENS_MAX = 512


async def run(
    request: web.Request,
    service: Service,
    job: Job,
    dialect: Dialect,
    form: StreamForm = SSE,
    before_end: BeforeEnd | None = None,
) -> web.StreamResponse:
    """Admit the job and answer it in the form that it asks for. Raises the refusal, before any byte is sent.

    `form` is that of a stream. `before_end` is awaited once the answer is whole, before its client sees that.
    """
    spending = Spending(request, service.observer)
    spending.check(job.n_prompt_tokens)
    streams = await open_streams(service.generator, job)
    spending.begun(job.n_prompt_tokens)
    if isinstance(request, Request):
        request.body_done()  # all that it says is in the job
    begun_ns = time.monotonic_ns()
    async with Merge(streams, service.limits.backlog_events_max) as merge:
        answers = Answers(job, job.choice_states(service), merge, begun_ns)
        dialect.begun_ns = begun_ns
        if job.plan.continuous_usage or job.plan.shows_timings:
            dialect.so_far = answers.so_far
        try:
            if job.plan.stream:
                return await Streaming(request, service, dialect, merge, answers, form, before_end).run()
            reply = await _collect(request, service, dialect, merge, answers)
            if before_end is not None:
                await before_end()
            return reply
        finally:
            spending.ended(answers.spent())


async def _collect(
    request: web.Request, service: Service, dialect: Dialect, merge: Merge, answers: Answers
) -> web.StreamResponse:
    job, states = answers.job, answers.states
    grown: list[list[Growth]] = [[Growth(text=job.prompt_of(index).echo)] for index in range(len(states))]

    def take(arrivals: list[Arrival]) -> bool:
        for arrival in arrivals:
            growth = answers.advance(arrival)
            if growth is not None:
                grown[arrival.stream].append(growth)
        return answers.is_open

    while answers.is_open:
        await merge.pass_on(take, None)
    choices = [
        (sum_of(parts, job.prompt_of(index)), states[index].finish_reason or "stop")
        for index, parts in enumerate(grown)
    ]
    if wants_content(service.observer, request):
        note_output(request[RECORD], [whole for whole, _ in choices])
    usage = answers.usage()
    n_scored = sum(len(whole.prompt_scores) for whole, _ in choices)
    if usage.completion_tokens + n_scored <= WRITTEN_INLINE_TOKENS_MAX:
        return json_response(dialect.reply(choices, usage))
    return json_response(await asyncio.to_thread(dialect.reply, choices, usage))
