"""The receiver itself, with the SDK's own exporters: what it stores, and how it refuses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Link, SpanKind

from relayline.deploy.testing.otlp_receiver import CONSUMER, Mode, Receiver, dead_endpoint, receiving


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as started:
        yield started


@pytest.fixture
def span() -> ReadableSpan:
    """A span with two links and attributes of several types."""
    provider = TracerProvider(
        resource=Resource.create({"service.name": "tester", "service.instance.id": "1@here"}),
        span_limits=SpanLimits(max_links=1000),
        shutdown_on_exit=False,
    )
    tracer = provider.get_tracer("test")
    members = [tracer.start_span("member") for _ in range(2)]
    links = [Link(member.get_span_context(), {"wait_ns": at}) for at, member in enumerate(members)]
    found = tracer.start_span("batch", kind=SpanKind.CONSUMER, links=links, attributes={"rows": 3, "who": ["a", "b"]})
    found.end()
    assert isinstance(found, ReadableSpan)
    return found


def exporter_for(receiver: Receiver, protocol: str) -> SpanExporter:
    if protocol == "grpc":
        return GrpcExporter(endpoint=receiver.grpc_endpoint, insecure=True, timeout=60)
    return HttpExporter(endpoint=receiver.http_endpoint + "/v1/traces", timeout=60)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_span_is_stored_as_it_was_sent(receiver: Receiver, span: ReadableSpan, protocol: str) -> None:
    exporter = exporter_for(receiver, protocol)
    assert exporter.export([span]) is SpanExportResult.SUCCESS
    exporter.shutdown()
    (stored,) = receiver.wait_for(lambda spans: len(spans) == 1)
    assert (stored.name, stored.kind, stored.service, stored.instance) == ("batch", CONSUMER, "tester", "1@here")
    assert stored.attributes == {"rows": 3, "who": ["a", "b"]}
    assert [link.attributes for link in stored.links] == [{"wait_ns": 0}, {"wait_ns": 1}]
    assert int(stored.trace_id, 16) == span.get_span_context().trace_id
    assert stored.parent_id == ""
    assert (stored.start_ns, stored.end_ns) == (span.start_time, span.end_time)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_refused_export_fails_and_stores_nothing(
    receiver: Receiver, span: ReadableSpan, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "opentelemetry")
    receiver.mode = Mode.REFUSING
    exporter = exporter_for(receiver, protocol)
    assert exporter.export([span]) is SpanExportResult.FAILURE
    exporter.shutdown()
    assert receiver.spans == []
    assert receiver.n_calls == 1


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_slow_receiver_holds_the_call_until_it_is_let_go(
    receiver: Receiver, span: ReadableSpan, protocol: str
) -> None:
    receiver.mode = Mode.SLOW
    exporter = exporter_for(receiver, protocol)
    results: list[SpanExportResult] = []
    sending = threading.Thread(target=lambda: results.append(exporter.export([span])))
    sending.start()
    receiver.wait_for_call()
    assert results == []
    receiver.mode = Mode.OK
    sending.join(10)
    assert results == [SpanExportResult.SUCCESS]
    exporter.shutdown()
    assert len(receiver.spans) == 1


def test_a_wait_that_times_out_shows_the_events_so_far(receiver: Receiver, span: ReadableSpan) -> None:
    exporter = exporter_for(receiver, "grpc")
    exporter.export([span])
    exporter.shutdown()
    with pytest.raises(AssertionError, match="batch"):
        receiver.wait_for(lambda spans: len(spans) > 1, timeout_s=0.05)


def test_nobody_answers_at_a_dead_endpoint(span: ReadableSpan, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "opentelemetry")
    with dead_endpoint() as endpoint:
        exporter = GrpcExporter(endpoint=endpoint, insecure=True, timeout=0.2)
        assert exporter.export([span]) is SpanExportResult.FAILURE
        exporter.shutdown()
