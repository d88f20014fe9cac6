"""Goal: spans go where flags and OTEL_* say, and the worst collector costs the caller no more than a counter.

Method: the choice of exporters as a table; spans through the real SDK into a list, and through the real exporters into
a receiver that is healthy, refusing, slow or gone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanKind

from relayline.deploy.testing.otlp_receiver import Mode, dead_endpoint, receiving
from relayline.wire.common.errors import UsageError
from relayline.wire.envelopes import trace_context
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry import choice as telemetry_choice
from relayline.wire.telemetry import export as telemetry_export
from relayline.wire.telemetry.spans import Finished
from relayline.wire.telemetry.spans import Link as FinishedLink
from relayline.wire.telemetry.telemetry import LEVEL_NAMES, Level, Role, Telemetry, TelemetryConfig

GRPC, HTTP = "otlp_proto_grpc", "otlp_proto_http"
WAIT_S = 20.0


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (*telemetry_choice._ENDPOINT_KEYS, *telemetry_choice._PROTOCOL_KEYS, "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(key, raising=False)


def started(*exporters: SpanExporter, **changes: object) -> Telemetry:
    return Telemetry.start(Role.STAGE, "1@box", TelemetryConfig(**changes), exporters, stage_index=1)  # type: ignore[arg-type]


def spans(telemetry: Telemetry, n_spans: int) -> None:
    for _ in range(n_spans):
        telemetry.start_span("x", start_ns=time.monotonic_ns() + telemetry.wall_offset_ns()).end()


# --- levels and configuration -----------------------------------------------------------------------------------------


def test_levels_have_names_an_order_and_a_wire_form() -> None:
    assert LEVEL_NAMES == ("off", "summary", "batches", "frames")
    assert [Level.named(name) for name in LEVEL_NAMES] == sorted(Level)
    for level in Level:
        assert level.to_wire() == getattr(pb, f"TELEMETRY_LEVEL_{level.name}")
        assert Level.from_wire(level.to_wire()) is level
    assert Level.from_wire(pb.TELEMETRY_LEVEL_UNSPECIFIED) is None
    assert Level.from_wire(99) is None
    with pytest.raises(UsageError, match="'loud' is unknown; choose one of off, summary"):
        Level.named("loud")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"otlp_endpoint": "localhost:4317"}, "give http://HOST:4317"),
        ({"otlp_endpoint": "ftp://x"}, "not a collector's address"),
        ({"sampler_ratio": 1.5}, "outside 0..1"),
        ({"sampler_ratio": -0.1}, "outside 0..1"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        TelemetryConfig(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("endpoint", "environment", "expected"),
    [
        ("", {}, []),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, [GRPC]),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, [GRPC]),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, [HTTP]),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c/otlp"}, [HTTP]),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, [GRPC]),
        ("http://c:4317", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, [HTTP]),
        ("http://c:4317", {}, [GRPC]),
        ("http://c:4318", {}, [HTTP]),
        ("", {"OTEL_TRACES_EXPORTER": "otlp"}, [GRPC]),
        ("", {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, []),
        ("", {"OTEL_TRACES_EXPORTER": " console , otlp,otlp"}, ["console", GRPC]),
        ("http://c:4317", {"OTEL_TRACES_EXPORTER": "none"}, [GRPC]),
        ("http://c:4317", {"OTEL_SDK_DISABLED": "True"}, []),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "c:4317"}, [GRPC]),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "10.0.0.5:4317"}, [GRPC]),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "[::1]:4317"}, [GRPC]),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "c:4318"}, [HTTP]),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "c:4318/v1/traces"}, [HTTP]),
    ],
)
def test_the_variables_choose_the_exporters(endpoint: str, environment: dict[str, str], expected: list[str]) -> None:
    assert telemetry_choice.chosen(endpoint, environment) == expected


@pytest.mark.parametrize("endpoint", ["localhost", "http://", "c:port", "http://c:99999", "tcp://c:4317", "/x/y"])
def test_an_endpoint_that_is_none_is_one_clear_line(endpoint: str) -> None:
    with pytest.raises(UsageError, match="is not a collector's address; give http://HOST:4317") as caught:
        telemetry_choice.exporters("", {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})
    assert repr(endpoint) in caught.value.message


@pytest.mark.parametrize(
    ("endpoint", "variables", "expected"),
    [
        ("c:4317", {}, "http://c:4317"),
        ("c:4317", {"OTEL_EXPORTER_OTLP_INSECURE": "false"}, "https://c:4317"),
        ("c:4317", {"OTEL_EXPORTER_OTLP_CERTIFICATE": "/ca.pem"}, "https://c:4317"),
        ("https://c:4317", {}, "https://c:4317"),
    ],
)
def test_host_and_port_alone_are_plaintext_unless_tls_is_asked_for(
    endpoint: str, variables: dict[str, str], expected: str
) -> None:
    hint = telemetry_choice.hint("", {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, **variables})
    assert f"they go to {expected} as OTLP over grpc" in hint


def test_a_collector_that_gets_nothing_may_speak_the_other_protocol(caplog: pytest.LogCaptureFixture) -> None:
    """A collector that speaks HTTP on another port than 4318 is taken for gRPC: the line says so, and what to set."""
    hint = telemetry_choice.hint("http://127.0.0.1:5318", {})
    assert hint == (
        "they go to http://127.0.0.1:5318 as OTLP over grpc; if the collector expects the other protocol there, "
        "set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"
    )
    assert telemetry_choice.hint("http://c:4318", {}).endswith("set OTEL_EXPORTER_OTLP_PROTOCOL=grpc")
    advice = telemetry_choice.hint("http://c:5318", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    assert advice == "they go to http://c:5318 as OTLP over grpc, as OTEL_EXPORTER_OTLP_PROTOCOL says"
    assert telemetry_choice.hint("", {"OTEL_TRACES_EXPORTER": "console"}) == ""
    handler = telemetry_export._SdkLog()
    handler.hint = hint
    with caplog.at_level("WARNING", "relayline.telemetry"):
        handler.complain("StatusCode.UNAVAILABLE")
    assert hint in caplog.text


def test_an_impossible_choice_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="protocol 'http/json' is not supported"):
        telemetry_choice.chosen("http://c:1", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})
    with pytest.raises(UsageError, match=r"'tape' is unknown; choose of .*console.*otlp"):
        telemetry_choice.exporters("", {"OTEL_TRACES_EXPORTER": "tape"})
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    with pytest.raises(UsageError, match="check the OTEL_"):
        telemetry_choice.exporters("http://c:4317")


def test_without_an_exporter_there_is_nothing_but_a_level() -> None:
    telemetry = Telemetry.start(Role.STAGE, "0@x", TelemetryConfig(level=Level.FRAMES))
    assert not telemetry.is_exporting
    assert not telemetry.records(Level.SUMMARY)
    span = telemetry.start_span("x", start_ns=1)
    assert not span.is_recording()
    telemetry.shutdown()
    assert (telemetry.dropped_spans, telemetry.exported_spans) == (0, 0)


# --- content of a span ------------------------------------------------------------------------------------------------


def test_a_span_is_a_root_unless_it_has_a_parent() -> None:
    store = InMemorySpanExporter()
    telemetry = started(store)
    request = trace_context.unpack(trace_context.new_root())
    assert request is not None
    first = telemetry.start_span("first", start_ns=10, kind=SpanKind.CONSUMER, links=[Link(request)])
    first.end(20)
    child = telemetry.start_span("child", start_ns=11, parent=request)
    child.end(12)
    telemetry.start_span("another root", start_ns=11).end(12)
    assert telemetry.flush(WAIT_S)
    batch, below, other = store.get_finished_spans()
    assert (batch.start_time, batch.end_time, batch.parent) == (10, 20, None)
    assert below.parent is not None
    assert (below.parent.span_id, below.context.trace_id) == (request.span_id, request.trace_id)
    assert len({batch.context.trace_id, below.context.trace_id, other.context.trace_id}) == 3
    telemetry.shutdown()
    assert (telemetry.exported_spans, telemetry.dropped_spans) == (3, 0)


def test_the_resource_names_the_process_and_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    store = InMemorySpanExporter()
    telemetry = started(store)
    spans(telemetry, 1)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab,service.instance.id=mine")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "renamed")
    renamed = started(store)
    spans(renamed, 1)
    assert telemetry.flush(WAIT_S)
    assert renamed.flush(WAIT_S)
    ours, theirs = (span.resource.attributes for span in store.get_finished_spans())
    assert (ours["service.name"], ours["service.instance.id"]) == ("relayline-stage-1", "1@box")
    assert ours["service.version"]
    assert (theirs["service.name"], theirs["service.instance.id"]) == ("renamed-stage-1", "mine")
    assert theirs["deployment.environment.name"] == "lab"


def links_kept(n_links: int) -> int:
    store = InMemorySpanExporter()
    telemetry = started(store)
    context = trace_context.unpack(trace_context.new_root())
    assert context is not None
    links = [Link(context) for _ in range(n_links)]
    telemetry.start_span("x", start_ns=1, links=links).end()
    packed = [FinishedLink(trace_context.pack(context))] * n_links
    telemetry.emit(Finished("y", trace_context.new_root(), trace_context.NONE, 1, 2, {}, links=packed))
    assert telemetry.flush(WAIT_S)
    span, whole = store.get_finished_spans()
    assert len(span.links) == len(whole.links)
    assert len(whole.links) + whole.dropped_links == n_links
    return len(span.links)


def test_links_survive_far_beyond_the_sdk_s_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert links_kept(2_000) == 2_000
    monkeypatch.setenv("OTEL_SPAN_LINK_COUNT_LIMIT", "5")
    assert links_kept(6) == 5


def test_the_number_of_events_is_ours_unless_the_variable_says_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert telemetry_export._limits().max_events == telemetry_export.EVENTS_PER_SPAN_MAX
    monkeypatch.setenv("OTEL_SPAN_EVENT_COUNT_LIMIT", "5")
    assert telemetry_export._limits().max_events == 5


@pytest.mark.parametrize(
    ("sampler", "argument", "expected"),
    [("parentbased_always_off", "", False), ("traceidratio", "0.0", False), ("parentbased_always_on", "", True)],
)
def test_whether_a_second_of_passes_is_recorded_the_variables_say(
    monkeypatch: pytest.MonkeyPatch, sampler: str, argument: str, expected: bool
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    assert started(InMemorySpanExporter()).samples(trace_context.new_root()) is expected
    assert not Telemetry().samples(trace_context.new_root())


def test_no_span_is_promised_where_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    assert not started(InMemorySpanExporter(), level=Level.FRAMES).records(Level.SUMMARY)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    assert started(InMemorySpanExporter(), level=Level.FRAMES).records(Level.FRAMES)


def test_the_head_sampler_keeps_a_share_and_follows_its_caller() -> None:
    store = InMemorySpanExporter()
    telemetry = started(store, sampler_ratio=0.25)
    spans(telemetry, 400)
    telemetry.flush(WAIT_S)
    assert 40 < len(store.get_finished_spans()) < 180
    store.clear()
    parent = trace_context.unpack(trace_context.new_root())
    for _ in range(50):
        telemetry.start_span("child", start_ns=1, parent=parent).end()
    telemetry.flush(WAIT_S)
    assert len(store.get_finished_spans()) == 50


# --- collectors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["grpc_endpoint", "http_endpoint"])
def test_spans_arrive_over_both_protocols(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=blue")
    if kind == "http_endpoint":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with receiving() as receiver:
        telemetry = Telemetry.start(Role.STAGE, "1@box", TelemetryConfig(otlp_endpoint=getattr(receiver, kind)))
        spans(telemetry, 3)
        telemetry.shutdown(WAIT_S)
        assert (telemetry.exported_spans, telemetry.dropped_spans) == (3, 0)
        assert [span.service for span in receiver.spans] == ["relayline-stage"] * 3
        assert receiver.headers[0]["x-team"] == "blue"


def test_the_endpoint_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.grpc_endpoint)
        telemetry = Telemetry.start(Role.COORDINATOR, "0@box", TelemetryConfig())
        spans(telemetry, 1)
        telemetry.shutdown(WAIT_S)
        assert [span.service for span in receiver.spans] == ["relayline-coordinator"]


def test_a_refusing_collector_costs_a_counter_and_a_line_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with receiving(Mode.REFUSING) as receiver:
        telemetry = Telemetry.start(Role.STAGE, "1@box", TelemetryConfig(otlp_endpoint=receiver.grpc_endpoint))
        spans(telemetry, 7)
        assert telemetry.flush(WAIT_S)
        assert (telemetry.exported_spans, telemetry.dropped_spans) == (0, 7)
        receiver.mode = Mode.OK
        spans(telemetry, 2)
        telemetry.shutdown(WAIT_S)
        assert (telemetry.exported_spans, telemetry.dropped_spans) == (2, 7)
        assert [record.fields for record in caplog.records if "lost spans" in record.message] == [{"dropped_spans": 7}]
        caplog.clear()
        whole = Telemetry.start(Role.STAGE, "1@box", TelemetryConfig(otlp_endpoint=receiver.grpc_endpoint))
        spans(whole, 1)
        whole.shutdown(WAIT_S)
        assert "lost spans" not in caplog.text


@pytest.mark.parametrize("is_dead", [True, False], ids=["dead", "slow"])
def test_the_end_does_not_wait_for_a_collector(is_dead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")  # so long an end that waits would take
    with receiving(Mode.SLOW) as receiver, dead_endpoint() as nobody:
        endpoint = nobody if is_dead else receiver.grpc_endpoint
        telemetry = Telemetry.start(Role.STAGE, "1@box", TelemetryConfig(otlp_endpoint=endpoint))
        spans(telemetry, 7)
        before_s = time.monotonic()
        telemetry.shutdown(0.2)
        assert time.monotonic() - before_s < 60
        assert (telemetry.exported_spans, telemetry.dropped_spans) == (0, 7)


class Held(SpanExporter):
    """An exporter that is stuck until released."""

    def __init__(self) -> None:
        self.entered, self.released = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.set()
        assert self.released.wait(WAIT_S)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.released.set()


def test_the_queue_is_bounded_and_counts_dropped_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    held = Held()
    telemetry = started(held)
    spans(telemetry, 4)
    assert held.entered.wait(WAIT_S)  # four are with the exporter
    spans(telemetry, 25)
    assert telemetry.dropped_spans == 15
    held.released.set()
    telemetry.shutdown(WAIT_S)
    assert (telemetry.exported_spans, telemetry.dropped_spans) == (14, 15)
    spans(telemetry, 1)
    assert telemetry.dropped_spans == 16


class Broken(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise RuntimeError("no\nway")


class Heard(logging.Handler):
    """The output of the process's log. Not caplog, which also listens to loggers that do not propagate."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.name, record.getMessage()))


def test_a_failing_exporter_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_export._SDK_LOG, "_quiet_until_s", 0.0)
    telemetry = started(Broken())
    heard = Heard()
    logging.getLogger().addHandler(heard)
    try:
        for _ in range(5):
            spans(telemetry, 1)
            assert telemetry.flush(WAIT_S)
        logging.getLogger("opentelemetry.sdk.trace").warning("something else")
    finally:
        logging.getLogger().removeHandler(heard)
    ((name, line),) = heard.lines
    assert name == "relayline.telemetry"
    assert "RuntimeError: no way" in line
    assert telemetry.dropped_spans == 5
    telemetry.shutdown()
