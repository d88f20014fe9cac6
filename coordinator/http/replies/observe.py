"""A request's options and answer, in its record and its span."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from relayline.coordinator.http.edge.clients import BATCH
from relayline.coordinator.http.edge.record import OPERATIONS, RECORD
from relayline.coordinator.http.replies.choice import Growth
from relayline.coordinator.http.requests.plan import Plan
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.sessions.media_record import MediaRecord
from relayline.coordinator.sessions.request_log import RequestRecord
from relayline.wire.telemetry import names

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

INTEGER_MAX = (1 << 63) - 1  # the range of an attribute; a larger number would spoil the export of its whole batch


def note_plan(observer: Observer, request: web.Request, plan: Plan, model: str, completion_id: str) -> None:
    """Record the body's options, once it has been checked."""
    record = request[RECORD]
    record.completion_id, record.model = completion_id, model
    if record.span is None:
        return
    attributes: dict[str, AttributeValue] = {
        **_operation(request, record),
        names.GEN_AI_REQUEST_TEMPERATURE: plan.sampling.temperature,
        names.GEN_AI_REQUEST_TOP_P: plan.sampling.top_p,
        names.GEN_AI_REQUEST_TOP_K: plan.sampling.top_k,
        names.GEN_AI_REQUEST_STREAM: plan.stream,
        names.GEN_AI_REQUEST_CHOICE_COUNT: plan.n,
        names.GEN_AI_OUTPUT_TYPE: "json" if plan.shape and plan.shape.is_json else "text",
    }
    if plan.sampling.is_penalised:
        attributes[names.GEN_AI_REQUEST_FREQUENCY_PENALTY] = plan.sampling.frequency_penalty
        attributes[names.GEN_AI_REQUEST_PRESENCE_PENALTY] = plan.sampling.presence_penalty
    if plan.sampling.seed <= INTEGER_MAX:
        attributes[names.GEN_AI_REQUEST_SEED] = plan.sampling.seed
    if plan.max_tokens is not None and plan.max_tokens <= INTEGER_MAX:
        attributes[names.GEN_AI_REQUEST_MAX_TOKENS] = plan.max_tokens
    observer.tracing.describe(record, attributes)


def note_pooled(observer: Observer, request: web.Request, model: str, completion_id: str) -> None:
    """Record what a request for pooled rows is, once its body has been checked."""
    record = request[RECORD]
    record.completion_id, record.model = completion_id, model
    observer.tracing.describe(record, _operation(request, record))


def _operation(request: web.Request, record: RequestRecord) -> dict[str, AttributeValue]:
    return {
        names.GEN_AI_OPERATION_NAME: OPERATIONS[record.route],
        names.GEN_AI_PROVIDER_NAME: names.GEN_AI_PROVIDER,
        names.GEN_AI_REQUEST_MODEL: record.model,
        names.GEN_AI_RESPONSE_MODEL: record.model,
        names.URL_SCHEME: request.scheme,
        **({names.ATTR_API_KEY_NAME: record.tenant.name} if record.tenant.name else {}),
        **({names.ATTR_REQUEST_BATCH: request[BATCH]} if BATCH in request else {}),
        **_addresses(request),
    }


def note_prompts(request: web.Request, start_ns: int, end_ns: int, prompt_lengths: Sequence[int]) -> None:
    """Say when the prompts were tokenised (of the monotonic clock), and how long each is in tokens."""
    record = request[RECORD]
    record.tokenize_start_ns, record.tokenize_end_ns = start_ns, end_ns
    record.n_prompt = sum(prompt_lengths)


def note_grammar(request: web.Request, start_ns: int, end_ns: int) -> None:
    """Say when the grammar of the answer was made (of the monotonic clock)."""
    record = request.get(RECORD)
    if record is not None:
        record.grammar_start_ns, record.grammar_end_ns = start_ns, end_ns


@contextlib.contextmanager
def noted_media(observer: Observer, request: web.Request) -> Iterator[MediaRecord]:
    """Give the record of a request's images and audio. It ends, and is counted, once they are in its prompt."""
    found, record = MediaRecord(time.monotonic_ns()), request.get(RECORD)
    if record is not None:
        record.media = found
    try:
        yield found
    finally:
        found.end_ns = time.monotonic_ns()
        observer.metrics.media.ended(found)


def wants_content(observer: Observer, request: web.Request) -> bool:
    """Return whether prompt and answer are to be recorded."""
    record = request.get(RECORD)
    return observer.telemetry.config.content and record is not None and record.span is not None


def note_input(request: web.Request, messages: str) -> None:
    """Record the prompt itself, as JSON of messages."""
    _set(request[RECORD], names.GEN_AI_INPUT_MESSAGES, messages)


def note_output(record: RequestRecord, choices: Sequence[Growth]) -> None:
    """Record the answer: what each choice said in all, thought, and called."""
    messages = [{"role": "assistant", "parts": _parts(whole)} for whole in choices]
    _set(record, names.GEN_AI_OUTPUT_MESSAGES, json.dumps(messages))


def _parts(whole: Growth) -> list[dict[str, str]]:
    """Return the parts of an answer as OpenTelemetry's conventions have them."""
    parts = [{"type": "reasoning", "content": whole.reasoning}] if whole.reasoning else []
    if whole.text or not (parts or whole.calls):
        parts.append({"type": "text", "content": whole.text})
    for call in whole.whole_calls():
        parts.append({"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments})
    return parts


def _set(record: RequestRecord, name: str, messages: str) -> None:
    if record.span is not None:
        record.span.set_attribute(name, messages)


def _addresses(request: web.Request) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {}
    if request.url.host:
        found[names.SERVER_ADDRESS] = request.url.host
    if request.url.port:
        found[names.SERVER_PORT] = request.url.port
    if request.remote:
        found[names.CLIENT_ADDRESS] = request.remote
    return found
