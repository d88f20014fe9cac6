"""A real OTLP receiver in the test process, over gRPC and HTTP: stores spans, and can refuse, stall or be gone.

Spans arrive as any collector gets them, so what a test reads here has passed the exporter, its limits and the wire.
Tests wait for a condition over the stored spans, never for a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import gzip
import http.server
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanProto

TIMEOUT_S = 120.0
WORKERS = 4
CLIENT, SERVER, PRODUCER, CONSUMER, INTERNAL = 3, 2, 4, 5, 1  # span kinds as OTLP numbers them


class Mode(enum.Enum):
    """How the receiver answers."""

    OK = "ok"
    REFUSING = "refusing"  # a final error at once
    UNAVAILABLE = "unavailable"  # an error that exporters retry
    SLOW = "slow"  # the call is held until the mode changes or the caller gives up


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """One link of a stored span; ids in hex."""

    trace_id: str
    span_id: str
    attributes: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One event of a stored span."""

    name: str
    at_ns: int
    attributes: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class StoredSpan:
    """One span as it came over the wire; ids in hex, times in ns of the wall clock."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[Link, ...]
    n_dropped_links: int
    n_dropped_attributes: int
    is_error: bool
    status_text: str
    events: tuple[Event, ...]
    n_dropped_events: int
    resource: dict[str, Any]

    @property
    def context(self) -> tuple[str, str]:
        """(trace id, span id)."""
        return self.trace_id, self.span_id

    @property
    def service(self) -> str:
        """Return the resource's service.name."""
        return str(self.resource.get("service.name", ""))

    @property
    def instance(self) -> str:
        """Return the resource's service.instance.id."""
        return str(self.resource.get("service.instance.id", ""))


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    return None if kind is None else getattr(value, kind)


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def stored(span: SpanProto, resource: dict[str, Any]) -> StoredSpan:
    """Turn one span of the wire into a plain one."""
    return StoredSpan(
        name=span.name,
        kind=span.kind,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        links=tuple(Link(link.trace_id.hex(), link.span_id.hex(), _attributes(link.attributes)) for link in span.links),
        n_dropped_links=span.dropped_links_count,
        n_dropped_attributes=span.dropped_attributes_count,
        is_error=span.status.code == 2,
        status_text=span.status.message,
        events=tuple(Event(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events),
        n_dropped_events=span.dropped_events_count,
        resource=resource,
    )


def spans_of(request: service_pb.ExportTraceServiceRequest) -> list[StoredSpan]:
    """Every span of one export request."""
    return [
        stored(span, _attributes(group.resource.attributes))
        for group in request.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


class Receiver(service_grpc.TraceServiceServicer):
    """Takes spans over gRPC at `grpc_endpoint` and over HTTP at `http_endpoint` (append /v1/traces for one signal)."""

    def __init__(self, mode: Mode = Mode.OK) -> None:
        self._changed = threading.Condition()
        self._mode = mode
        self._spans: list[StoredSpan] = []
        self.requests: list[service_pb.ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.n_calls = 0
        self._grpc = grpc.server(futures.ThreadPoolExecutor(WORKERS, thread_name_prefix="otlp"))
        service_grpc.add_TraceServiceServicer_to_server(self, self._grpc)  # type: ignore[no-untyped-call]
        port = self._grpc.add_insecure_port("127.0.0.1:0")
        self.grpc_endpoint = f"http://127.0.0.1:{port}"
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._http.daemon_threads = True
        self.http_endpoint = f"http://127.0.0.1:{self._http.server_port}"
        self._serving = threading.Thread(target=self._http.serve_forever, args=(0.05,), name="otlp-http")

    def start(self) -> None:
        """Serve both protocols until `stop`."""
        self._grpc.start()
        self._serving.start()

    def stop(self) -> None:
        """Close both ports; calls that are held are let go."""
        self.mode = Mode.REFUSING
        self._grpc.stop(None).wait(TIMEOUT_S)
        self._http.shutdown()
        self._http.server_close()
        self._serving.join(TIMEOUT_S)

    # --- modes --------------------------------------------------------------------------------------------------------

    @property
    def mode(self) -> Mode:
        """Return how calls are answered at present."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        with self._changed:
            self._mode = mode
            self._changed.notify_all()

    def _admit(self, is_wanted: Callable[[], bool]) -> Mode:
        """Count a call and hold it if the mode says so; returns the mode of its answer."""
        with self._changed:
            self.n_calls += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._mode is not Mode.SLOW or not is_wanted())
            return self._mode

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # --- receiving
    # -------------------------------------------------------------------------------------------------------

    def Export(
        self, request: service_pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> service_pb.ExportTraceServiceResponse:
        """Answer one gRPC export as the mode says."""
        context.add_callback(self._wake)
        mode = self._admit(context.is_active)
        if mode is Mode.UNAVAILABLE:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the receiver is set to be unavailable")
        if mode is Mode.REFUSING:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "the receiver is set to refuse")
        if mode is Mode.OK:
            self.take(request, {str(key): str(value) for key, value in context.invocation_metadata()})
        return service_pb.ExportTraceServiceResponse()

    def take(self, request: service_pb.ExportTraceServiceRequest, headers: dict[str, str]) -> None:
        """Store the spans of one export."""
        with self._changed:
            self._spans += spans_of(request)
            self.requests.append(request)
            self.headers.append(headers)
            self._changed.notify_all()

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def spans(self) -> list[StoredSpan]:
        """Return a copy of all spans stored so far."""
        with self._changed:
            return list(self._spans)

    def clear(self) -> None:
        """Forget all stored spans."""
        with self._changed:
            self._spans.clear()
            self.requests.clear()
            self.headers.clear()

    def wait_for(self, is_enough: Callable[[list[StoredSpan]], bool], timeout_s: float = TIMEOUT_S) -> list[StoredSpan]:
        """Block until the stored spans fulfil a condition; returns them. AssertionError lists the stored spans."""
        with self._changed:
            found = self._changed.wait_for(lambda: is_enough(list(self._spans)), timeout_s)
            names: dict[tuple[str, str], int] = {}
            for span in self._spans:
                names[span.service, span.name] = names.get((span.service, span.name), 0) + 1
            assert found, f"the awaited spans did not come; there are {names}"
            return list(self._spans)

    def wait_for_call(self, n_calls: int = 1) -> None:
        """Block until exporters have made so many calls, whatever the answers were."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.n_calls >= n_calls, TIMEOUT_S), "no call came"


def _handler_of(receiver: Receiver) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path != "/v1/traces":
                self._answer(404, b"")
                return
            mode = receiver._admit(lambda: True)
            if mode is not Mode.OK:
                self._answer(503 if mode is Mode.UNAVAILABLE else 403, b"")
                return
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            headers = {key.lower(): value for key, value in self.headers.items()}
            receiver.take(service_pb.ExportTraceServiceRequest.FromString(body), headers)
            self._answer(200, service_pb.ExportTraceServiceResponse().SerializeToString())

        def _answer(self, status: int, body: bytes) -> None:
            # A client that has given up gets no answer.
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Keep the test output clean."""

    return Handler


@contextlib.contextmanager
def receiving(mode: Mode = Mode.OK) -> Iterator[Receiver]:
    """Run a receiver for the length of a with block."""
    receiver = Receiver(mode)
    receiver.start()
    try:
        yield receiver
    finally:
        receiver.stop()


@contextlib.contextmanager
def dead_endpoint() -> Iterator[str]:
    """Yield an address without a listener, reserved during the with block."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"
