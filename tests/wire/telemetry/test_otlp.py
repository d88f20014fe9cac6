"""Finished spans give the same message from both encoders: the SDK's exporter and `wire.telemetry._otlp`."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanKind

from relayline.deploy.testing.otlp_receiver import receiving
from relayline.wire.envelopes import trace_context
from relayline.wire.telemetry import _otlp
from relayline.wire.telemetry.otlp import quick, request_of
from relayline.wire.telemetry.spans import Event, Finished, FinishedSpan, Link
from relayline.wire.telemetry.telemetry import Role, Telemetry, TelemetryConfig
from tests.support.examples import thinned

RESOURCE, OTHER = Resource({"service.name": "a", "n": 1}), Resource({"service.name": "b"})
SCOPE = InstrumentationScope("relayline", "1")
I64 = st.integers(-(2**63), 2**63 - 1)
U64 = st.integers(0, 2**64 - 1)
PLAIN = st.one_of(st.text(max_size=20), st.booleans(), I64, st.floats(allow_nan=False))
VALUES = st.one_of(
    PLAIN,
    st.lists(st.text(max_size=5), max_size=6),
    st.lists(I64, max_size=6),
    st.lists(st.floats(allow_nan=False), max_size=5),
    st.lists(st.booleans(), max_size=5),
)
ATTRIBUTES = st.dictionaries(st.text(min_size=1, max_size=10), VALUES, max_size=4)
CONTEXTS = st.integers(1, 255).map(lambda seed: bytes([seed] * 24) + b"\x01")
EVENTS = st.lists(st.builds(Event, st.text(max_size=30), U64, ATTRIBUTES), max_size=4)
LINKS = st.lists(st.builds(Link, CONTEXTS, ATTRIBUTES), max_size=4)
SPANS = st.builds(
    Finished, st.text(max_size=30), CONTEXTS, st.one_of(st.just(trace_context.NONE), CONTEXTS), U64, U64,
    ATTRIBUTES, EVENTS, LINKS, st.sampled_from(list(SpanKind)), st.text(max_size=10),
)  # fmt: skip


@settings(max_examples=thinned(60), suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(SPANS, st.sampled_from([RESOURCE, OTHER]), st.integers(0, 3)), min_size=1, max_size=3))
def test_a_message_equals_the_sdks_for_the_same_spans(made: list[tuple[Finished, Resource, int]]) -> None:
    spans = [FinishedSpan(finished, resource, SCOPE, n_dropped, n_dropped) for finished, resource, n_dropped in made]
    ours, theirs = request_of(spans), encode_spans(spans)
    by_service = {str(group.resource): group for group in theirs.resource_spans}
    assert len(ours.resource_spans) == len(by_service)
    for group in ours.resource_spans:
        assert group == by_service[str(group.resource)]
    assert len(ours.SerializeToString()) == len(theirs.SerializeToString())


def test_spans_of_the_sdk_travel_with_them() -> None:
    store = InMemorySpanExporter()
    provider = TracerProvider(resource=RESOURCE)
    provider.add_span_processor(SimpleSpanProcessor(store))
    provider.get_tracer("x").start_span("theirs").end()
    (theirs,) = store.get_finished_spans()
    own = FinishedSpan(Finished("ours", trace_context.new_root(), trace_context.NONE, 1, 2, {}), RESOURCE, SCOPE)
    found = [
        span.name
        for group in request_of([theirs, own]).resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]
    assert found == ["theirs", "ours"]


@pytest.mark.parametrize(
    ("value", "error"),
    [(object(), TypeError), (2**63, OverflowError), ([None], TypeError), (b"bytes", TypeError)],
    ids=["object", "too large", "nothing", "bytes"],
)
def test_an_invalid_attribute_is_refused(value: Any, error: type[Exception]) -> None:
    own = trace_context.new_root()
    with pytest.raises(error):
        _otlp.span("x", own, trace_context.NONE, 1, 2, {"k": value}, [], [], 1, "", 0, 0)


@pytest.mark.parametrize(
    "changes",
    [{1: b"short"}, {2: b""}, {6: [("x", 1)]}, {6: 5}, {7: [(b"short", {})]}, {5: [("k", 1)]}, {0: "\ud800"}],
)
def test_malformed_spans_raise_and_crash_nothing(changes: dict[int, Any]) -> None:
    arguments: list[Any] = ["x", trace_context.new_root(), trace_context.NONE, 1, 2, {}, [], [], 1, "", 0, 0]
    for at, value in changes.items():
        arguments[at] = value
    with pytest.raises((TypeError, ValueError)):
        _otlp.span(*arguments)


def test_long_texts_and_many_attributes_move_as_their_lengths_do() -> None:
    for size in (0, 1, 126, 127, 128, 129, 16_383, 16_384, 300_000):
        finished = Finished("n" * size, trace_context.new_root(), trace_context.NONE, 1, 2, {"k": ["v" * size, "w"]})
        span = FinishedSpan(finished, RESOURCE, SCOPE)
        assert request_of([span]) == encode_spans([span])
    number = Finished("x", trace_context.new_root(), trace_context.NONE, 1, 2, {"nan": math.nan})
    (found,) = request_of([FinishedSpan(number, RESOURCE, SCOPE)]).resource_spans[0].scope_spans[0].spans
    assert math.isnan(found.attributes[0].value.double_value)


def test_an_exporter_that_has_no_such_way_stays_as_it_is() -> None:
    assert quick(HttpExporter) is HttpExporter
    assert quick(InMemorySpanExporter) is InMemorySpanExporter


@pytest.mark.parametrize("kind", ["grpc_endpoint", "http_endpoint"])
def test_they_arrive_whole_over_both_protocols(kind: str) -> None:
    with receiving() as receiver:
        path = "/v1/traces" if kind == "http_endpoint" else ""  # by which the exporter is chosen
        endpoint = getattr(receiver, kind) + path
        telemetry = Telemetry.start(Role.STAGE, "box:1", TelemetryConfig(otlp_endpoint=endpoint), stage_index=4)
        parent, linked = trace_context.new_root(), trace_context.new_root()
        own = trace_context.new_below(parent)
        telemetry.emit(
            Finished("x", own, parent, 5, 9, {"k": [1, 2]}, [Event("e", 7, {"w": 0.5})], [Link(linked)], error="broken")
        )
        assert telemetry.flush(20)
        telemetry.shutdown()
        (span,) = receiver.spans
    assert (span.name, span.trace_id, span.span_id) == ("x", own[:16].hex(), own[16:24].hex())
    assert (span.parent_id, span.start_ns, span.end_ns) == (parent[16:24].hex(), 5, 9)
    assert span.attributes == {"k": [1, 2]}
    assert [(event.name, event.at_ns, event.attributes) for event in span.events] == [("e", 7, {"w": 0.5})]
    assert [link.span_id for link in span.links] == [linked[16:24].hex()]
    assert (span.is_error, span.status_text, span.service) == (True, "broken", "relayline-stage-4")
