"""Jaeger itself, if RELAYLINE_JAEGER names its program (2.20 or newer), accepts our config and our spans.

Its query API is asked for everything that its page draws: services, operations, and traces with their parents.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import json
import os
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benches.waterfall import spans_in
from relayline.deploy.machine.ports import free_port
from relayline.deploy.testing.otlp_receiver import StoredSpan
from relayline.deploy.testing.paths import DEPLOY
from relayline.deploy.testing.trace_rebuild import is_batch
from relayline.deploy.testing.traced_pipeline import PROMPTS, ask_all, traced_pipeline
from relayline.wire.telemetry import names

PROGRAM = os.environ.get("RELAYLINE_JAEGER", "")
CONFIG = DEPLOY / "observability" / "jaeger"
TIMEOUT_S = 60.0
TRIES_MAX = 2_000  # looks at the store while spans are on their way; each is a round trip
N_TOKENS = 40

pytestmark = [
    pytest.mark.slow,
    pytest.mark.jaeger,
    pytest.mark.skipif(not PROGRAM, reason="RELAYLINE_JAEGER names no Jaeger program (2.20 or newer)"),
]


class Jaeger:
    """A running Jaeger."""

    def __init__(self, query_port: int, otlp_port: int) -> None:
        self.url, self.endpoint = f"http://127.0.0.1:{query_port}", f"http://127.0.0.1:{otlp_port}"

    def get(self, path: str, **query: str) -> Any:
        """Return a JSON answer; None where there is nothing of the kind."""
        url = f"{self.url}{path}?{urllib.parse.urlencode(query)}"
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(url, timeout=30) as reply:
            return json.loads(reply.read())
        return None

    def services(self) -> set[str]:
        return set((self.get("/api/v3/services") or {}).get("services", []))

    def operations(self, service: str) -> set[str]:
        return {each["name"] for each in (self.get("/api/v3/operations", service=service) or {}).get("operations", [])}

    def search(self, service: str, operation: str = "", tags: dict[str, str] | None = None) -> list[StoredSpan]:
        """Return the spans of the traces that a search finds."""
        now = datetime.datetime.now(datetime.UTC)
        query = {
            "query.service_name": service,
            "query.start_time_min": (now - datetime.timedelta(hours=1)).isoformat(),
            "query.start_time_max": (now + datetime.timedelta(minutes=1)).isoformat(),
            "query.search_depth": "100",
        }
        query |= {"query.operation_name": operation} if operation else {}
        query |= {"query.attributes": json.dumps(tags)} if tags else {}
        found = self.get("/api/v3/traces", **query)
        return spans_in(json.dumps(found)) if found else []

    def await_spans(self, service: str, operation: str, n_spans: int) -> list[StoredSpan]:
        """Look until this number of spans of that name is stored."""
        for _ in range(TRIES_MAX):
            found = self.search(service, operation)
            if sum(span.name == operation for span in found) >= n_spans:
                return found
        raise AssertionError(f"{operation}: {len(found)} spans came")


@contextlib.contextmanager
def jaeger_running(directory: Path) -> Iterator[Jaeger]:
    """Run Jaeger with the real config; its ports, and the place of its page's file, are replaced."""
    config = yaml.safe_load((CONFIG / "config.yaml").read_text())
    ports = [free_port() for _ in range(5)]
    query, otlp = config["extensions"]["jaeger_query"], config["receivers"]["otlp"]["protocols"]
    query["ui"]["config_file"] = str(CONFIG / "ui.json")
    places = (query["http"], query["grpc"], otlp["grpc"], otlp["http"], config["extensions"]["healthcheckv2"]["http"])
    for place, port in zip(places, ports, strict=True):
        place["endpoint"] = f"127.0.0.1:{port}"
    (directory / "jaeger.yaml").write_text(yaml.safe_dump(config))
    child = subprocess.Popen([PROGRAM, "--config", directory / "jaeger.yaml"], stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    lines: list[str] = []
    try:
        for line in child.stderr:
            lines.append(line)
            if "Everything is ready" in line:
                break
        else:
            raise AssertionError(f"Jaeger did not start, exit code {child.wait()}: {''.join(lines[-5:])}")
        reader = threading.Thread(target=lines.extend, args=(child.stderr,), daemon=True)
        reader.start()
        yield Jaeger(ports[0], ports[2])
        child.terminate()
        reader.join(TIMEOUT_S)
    finally:
        child.kill()
        child.wait(TIMEOUT_S)
        child.stderr.close()


@pytest.fixture(scope="module")
def jaeger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jaeger]:
    """Jaeger with the spans of a run of eight streams over three stages."""
    with jaeger_running(tmp_path_factory.mktemp("jaeger")) as running:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": running.endpoint}
        with traced_pipeline(tmp_path_factory.mktemp("split"), environment, n_stages=3) as traced:
            asyncio.run(ask_all(traced, PROMPTS, N_TOKENS, request_ids=True))
        running.await_spans("relayline-coordinator", "decode", len(PROMPTS))
        yield running


def test_the_list_of_services_is_the_pipeline(jaeger: Jaeger) -> None:
    assert {name for name in jaeger.services() if "relayline" in name} == {
        "relayline-coordinator",
        *(f"relayline-stage-{index}" for index in range(3)),
    }


def test_the_list_of_operations_says_which_batches_formed(jaeger: Jaeger) -> None:
    for index in range(3):
        operations = jaeger.operations(f"relayline-stage-{index}")
        assert operations <= names.BATCH_NAMES | {names.SPAN_BATCHES}
        assert any(name.startswith("decode ×") for name in operations)
    assert jaeger.operations("relayline-coordinator") & names.PASSES_NAMES


def test_a_search_lists_seconds_of_passes_with_the_diagonal_in_them(jaeger: Jaeger) -> None:
    roots = jaeger.operations("relayline-coordinator") & names.PASSES_NAMES
    for root in roots:
        spans = jaeger.search("relayline-coordinator", root)
        by_context = {span.context: span for span in spans}
        batches = list(filter(is_batch, spans))
        assert batches
        for span in batches:
            stage, parent = span.attributes[names.ATTR_STAGE_INDEX], by_context[span.trace_id, span.parent_id]
            above = "relayline-coordinator" if stage == 0 else f"relayline-stage-{stage - 1}"
            assert (span.service, parent.service) == (f"relayline-stage-{stage}", above)
            assert [event.name for event in span.events] == [names.EVENT_CLOSED, names.EVENT_DECODED]


def test_the_searches_of_the_page_find_a_request_and_its_seconds(jaeger: Jaeger) -> None:
    (trace_id,) = {
        span.trace_id
        for span in jaeger.search("relayline-coordinator", tags={names.HTTP_REQUEST_ID: "caller-3"})
    }  # fmt: skip
    request = [span for span in jaeger.search("relayline-coordinator", "decode") if span.trace_id == trace_id]
    (decode,) = (span for span in request if span.name == names.SPAN_DECODE)
    session = decode.attributes[names.ATTR_SESSION_ID]
    seconds = {span.trace_id for span in jaeger.search("relayline-stage-0", tags={names.ATTR_SESSION_ID: session})}
    linked = {link.trace_id for span in request for link in span.links}
    assert seconds == linked | {trace_id}
    rhythm = [span for span in request if span.name == names.SPAN_BATCHES and span.parent_id == decode.span_id]
    assert sorted(span.service for span in rhythm) == [f"relayline-stage-{index}" for index in range(3)]
    assert all(span.events for span in rhythm)


def test_no_trace_of_one_span_is_stored(jaeger: Jaeger) -> None:
    spans = jaeger.search("relayline-coordinator")
    assert min([sum(other.trace_id == span.trace_id for other in spans) for span in spans]) > 1


def test_the_dependencies_are_the_pipeline(jaeger: Jaeger) -> None:
    found = jaeger.get(
        "/api/dependencies",
        endTs=str(round(1_000 * datetime.datetime.now(datetime.UTC).timestamp())),
        lookback="3600000",
    )
    assert found is not None
    edges = {(edge["parent"], edge["child"]) for edge in found["data"]}
    way = ["relayline-coordinator", *(f"relayline-stage-{index}" for index in range(3)), "relayline-coordinator"]
    assert set(itertools.pairwise(way)) <= edges
