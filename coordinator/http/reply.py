"""Running a job: read its streams to the end and answer, as one body or as server-sent events."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Sequence

from aiohttp import web

from relayline.coordinator.http.body import Request
from relayline.coordinator.http.choice import ChoiceState, Growth, Prompt, Scored
from relayline.coordinator.http.dialects import Dialect, OpenAIStream, SoFar
from relayline.coordinator.http.merge import Arrival, Merge
from relayline.coordinator.http.middleware import json_response, request_id
from relayline.coordinator.http.observe import note_failure, note_output, note_whole, wants_content
from relayline.coordinator.http.service import Job, Service, open_streams
from relayline.coordinator.http.shapes import CompletionTokensDetails, PromptTokensDetails, Timings, Usage
from relayline.coordinator.http.sse import EventWriter
from relayline.wire.common.errors import InternalError, RelaylineError

log = logging.getLogger("relayline.http")

# Longer answers are written elsewhere than on the event loop: 6,400 tokens with 5 alternatives each take 100 ms.
WRITTEN_INLINE_TOKENS_MAX = 512


async def run(request: web.Request, service: Service, job: Job, dialect: Dialect) -> web.StreamResponse:
    """Admit the job and answer it in the form that it asks for. Raises the refusal, before any byte is sent."""
    streams = await open_streams(service.generator, job)
    if isinstance(request, Request):
        request.body_done()  # all that it says is in the job
    states = job.choice_states(service)
    if isinstance(dialect, OpenAIStream):
        dialect.begun_ns = time.monotonic_ns()
    if isinstance(dialect, OpenAIStream) and (job.plan.continuous_usage or job.plan.shows_timings):
        dialect.so_far = functools.partial(_so_far, job, states, time.monotonic_ns())
    async with Merge(streams, service.limits.backlog_events_max) as merge:
        if job.plan.stream:
            return await _stream(request, service, job, dialect, merge, states)
        return await _collect(request, service, job, dialect, merge, states)


async def _collect(
    request: web.Request, service: Service, job: Job, dialect: Dialect, merge: Merge, states: Sequence[ChoiceState]
) -> web.StreamResponse:
    grown: list[list[Growth]] = [[Growth(text=job.prompt_of(index).echo)] for index in range(len(states))]
    while _is_open(states):
        for arrival in await merge.next(None):
            growth = _advance(job, states, merge, arrival)
            if growth is not None:
                grown[arrival.index].append(growth)
    choices = [
        (_sum(parts, job.prompt_of(index)), states[index].finish_reason or "stop") for index, parts in enumerate(grown)
    ]
    if wants_content(service.observer, request):
        note_output(request, [whole for whole, _ in choices])
    usage = _usage(job, states)
    n_scored = sum(len(whole.prompt_scores) for whole, _ in choices)
    if usage.completion_tokens + n_scored <= WRITTEN_INLINE_TOKENS_MAX:
        return json_response(dialect.reply(choices, usage))
    return json_response(await asyncio.to_thread(dialect.reply, choices, usage))


async def _stream(
    request: web.Request, service: Service, job: Job, dialect: Dialect, merge: Merge, states: Sequence[ChoiceState]
) -> web.StreamResponse:
    first = await _first(service, merge)
    limits = service.limits
    writer = EventWriter(request, limits.write_timeout_s, limits.ping_interval_s, dialect.frame)
    await writer.start()
    grown: list[list[Growth]] | None = [[] for _ in states] if wants_content(service.observer, request) else None
    opening = [dialect.opening_event(index, job.prompt_of(index)) for index in range(len(states))]
    await writer.send([event for event in opening if event is not None])
    is_whole = True
    while True:
        arrivals, first = first or await merge.next(service.limits.ping_interval_s), []
        if not arrivals:
            await writer.ping()
            continue
        events: list[bytes] = []
        try:
            for arrival in arrivals:
                events += _events(dialect, job, states, merge, arrival, grown)
        except Exception as error:
            # The status is long sent. The event makes OpenAI's clients raise; for all others the connection is cut.
            failure = error if isinstance(error, RelaylineError) else _unforeseen(request)
            note_failure(request, failure.label, failure.message)
            events.append(dialect.failure_event(failure))
            is_whole = False
            break
        if not _is_open(states):
            events += [dialect.usage_event(_usage(job, states))] if job.plan.include_usage else []
            events += dialect.closing_events()
            break
        await writer.send(events)
    if grown is not None:
        note_output(request, [_sum(parts) for parts in grown])
    if is_whole:
        await writer.finish(events)
        note_whole(request)
    else:
        await writer.cut(events)
    return writer.response


async def _first(service: Service, merge: Merge) -> list[Arrival]:
    """Wait for the first event, and raise the error that a stream begins with: no status has been sent yet.

    Returns nothing if the answer only takes long: a client in line, or with a long prompt, gets pings with status 200.
    While a stage is lost it is unknown whether it returns, and there is no status for that.
    """
    while True:
        arrivals = await merge.next(service.limits.ping_interval_s)
        if not arrivals and not service.generator.is_ready():
            continue
        if arrivals and arrivals[0].error is not None:
            raise arrivals[0].error
        return arrivals


def _unforeseen(request: web.Request) -> InternalError:
    log.exception("an answer of %s cannot be written [%s]", request.path, request_id(request))
    return InternalError(f"internal error; the server's log has the details under {request_id(request)}")


def _events(
    dialect: Dialect,
    job: Job,
    states: Sequence[ChoiceState],
    merge: Merge,
    arrival: Arrival,
    grown: list[list[Growth]] | None,
) -> list[bytes]:
    if arrival.progress is not None:
        return _progress_events(dialect, states, arrival)
    growth = _advance(job, states, merge, arrival)
    if growth is None:
        return []
    if grown is not None:
        grown[arrival.index].append(growth)
    events = [dialect.growth_event(arrival.index, growth)] if growth else []
    reason = states[arrival.index].finish_reason
    if reason is not None:
        events.append(dialect.finish_event(arrival.index, reason, growth.stop))
    return events


def _progress_events(dialect: Dialect, states: Sequence[ChoiceState], arrival: Arrival) -> list[bytes]:
    if arrival.progress is None or not isinstance(dialect, OpenAIStream) or states[arrival.index].is_finished():
        return []
    time_ms = (time.monotonic_ns() - dialect.begun_ns) // 1_000_000
    event = dialect.progress_event(arrival.index, arrival.progress, time_ms)
    return [] if event is None else [event]


def _advance(job: Job, states: Sequence[ChoiceState], merge: Merge, arrival: Arrival) -> Growth | None:
    """Give an arrival to its choice. None: the choice had finished. Raises the error that ended a stream too soon."""
    state = states[arrival.index]
    if state.is_finished() or arrival.progress is not None:
        return None  # tokens computed after a stop string, or the end of a stream that said why before
    if arrival.event is None:
        raise arrival.error or InternalError("generation ended without a reason; this is a bug of the server")
    if job.plan.shows_timings and not state.first_ns:
        state.first_ns = time.monotonic_ns()
    growth = state.on_event(arrival.event)
    job.note(arrival.index, state)
    if state.is_finished() and arrival.event.finish_reason is None:
        merge.drop(arrival.index)  # a stop string: the pipeline does not know that this choice is done
    return growth


def _is_open(states: Sequence[ChoiceState]) -> bool:
    return not all(state.is_finished() for state in states)


def _sum(parts: Sequence[Growth], prompt: Prompt | None = None) -> Growth:
    text = "".join([part.text for part in parts])
    tokens = tuple(token for part in parts for token in part.tokens)
    scored: tuple[Scored, ...] = tuple(one for part in parts for one in part.scored)
    reasoning = "".join([part.reasoning for part in parts])
    calls = tuple(call for part in parts for call in part.calls)
    scores = next((part.prompt_scores for part in parts if part.prompt_scores), ())
    return Growth(text, tokens, scored, reasoning, calls, parts[-1].stop if parts else "", prompt, scores)


def _so_far(job: Job, states: Sequence[ChoiceState], begun_ns: int) -> SoFar:
    """Return what an event says of the answers up to now."""
    usage = _usage(job, states)
    if not job.plan.shows_timings:
        return SoFar(usage)
    now_ns = time.monotonic_ns()
    first_ns = min((state.first_ns for state in states if state.first_ns), default=now_ns)
    n_cached = usage.prompt_tokens_details.cached_tokens
    n_read, n_generated = usage.prompt_tokens - n_cached, usage.completion_tokens
    # The first token of a choice comes of its prompt's last step, before the time that is measured here.
    n_steps = n_generated - sum(state.n_tokens > 0 for state in states)
    read_ms, generated_ms = (first_ns - begun_ns) / 1e6, (now_ns - first_ns) / 1e6
    timings = Timings(
        cache_n=n_cached,
        prompt_n=n_read,
        prompt_ms=read_ms,
        prompt_per_token_ms=read_ms / max(1, n_read),
        prompt_per_second=n_read * 1e3 / read_ms if read_ms else 0.0,
        predicted_n=n_generated,
        predicted_ms=generated_ms,
        predicted_per_token_ms=generated_ms / n_steps if n_steps else 0.0,
        predicted_per_second=n_steps * 1e3 / generated_ms if generated_ms else 0.0,
    )
    return SoFar(usage if job.plan.continuous_usage else None, timings)


def _usage(job: Job, states: Sequence[ChoiceState]) -> Usage:
    n_completion = sum(state.n_tokens for state in states)
    n_cached = sum(state.n_cached for state in states[:: job.plan.n])  # of each prompt's first choice
    details = CompletionTokensDetails(
        reasoning_tokens=sum(state.n_thought for state in states),
        accepted_prediction_tokens=sum(state.n_predicted for state in states),
        # Several choices may be predicted right more often than the prediction is long.
        rejected_prediction_tokens=sum(
            max(0, len(request.prediction) - state.n_predicted)
            for request, state in zip(job.requests, states, strict=True)
        ),
    )
    n_all = job.n_prompt_tokens + n_completion
    return Usage(job.n_prompt_tokens, n_completion, n_all, PromptTokensDetails(n_cached), details)
