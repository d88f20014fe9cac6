"""The bench of tracing and its picture of a request, on made-up runs and spans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from benches.tracing import Plan, Run, figures, order_of, show
from benches.waterfall import bars_of, chosen, draw, hops, spans_in, to_line
from relayline.deploy.cli import load
from relayline.deploy.testing.otlp_receiver import SERVER
from relayline.deploy.testing.trace_rebuild import rebuild
from relayline.wire.telemetry import names
from relayline.wire.telemetry.config import LEVEL_NAMES

MS = 1_000_000
SESSION, MATE = "00000000000000aa", "00000000000000bb"
N_PROMPT, N_TOKENS, N_STAGES = 3, 10, 2


# --- the bench --------------------------------------------------------------------------------------------------------


def run_of(level: str, repeat: int, tok_s: float, n_complete: int = 4, cpu_ms: float = 0.0) -> Run:
    summary = load.Summary(4, n_complete, 32, 1.0, tok_s, tok_s, {"p50": 1.0}, {"p50": 2.0, "p95": 3.0, "p99": 4.0}, "")
    return Run(level, repeat, summary, 10, 1, cpu_ms)


def test_every_level_has_every_place_equally_often() -> None:
    orders = [order_of(repeat) for repeat in range(8)]
    for places in zip(*orders, strict=True):
        assert sorted(places) == sorted(2 * LEVEL_NAMES)
    assert orders[0] == orders[4][::-1]


def test_ratios_are_of_medians_and_a_failed_run_enters_none() -> None:
    runs = [run_of("off", 0, 100), run_of("off", 1, 200), run_of("off", 2, 110)]
    runs += [run_of("summary", 0, 99), run_of("summary", 1, 5, n_complete=3), run_of("summary", 2, 121)]
    found = figures(runs)
    assert found["off"]["median_tok_s"] == 110
    assert found["summary"]["ratio"] == pytest.approx(1.0)
    assert (found["summary"]["failed"], found["summary"]["dropped"], found["off"]["failed"]) == (1, 3, 0)
    assert found["frames"]["ratio"] is None


def test_processor_time_is_compared_as_the_rate_that_it_allows() -> None:
    found = figures([run_of("off", 0, 100, cpu_ms=2.0), run_of("summary", 0, 300, cpu_ms=2.5)])
    assert found["summary"]["cpu_ratio"] == pytest.approx(0.8)  # however fast the machine let it run


def test_without_off_the_figures_stand_alone(capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(4, 32, 1, N_STAGES, levels=("summary",))
    show(figures([run_of("summary", 0, 120.0, cpu_ms=2.5)]), plan)
    row = next(line for line in capsys.readouterr().out.splitlines() if "summary " in line)
    assert [cell.strip() for cell in row.split("│")][1:7] == ["summary", "120.0", "-", "120-120", "2.50", "-"]


# --- the picture ------------------------------------------------------------------------------------------------------


PASSES = bytes(range(16, 32))


def value(given: Any) -> AnyValue:
    if isinstance(given, list):
        return AnyValue(array_value=ArrayValue(values=map(value, given)))
    return AnyValue(**{{str: "string_value", int: "int_value"}[type(given)]: given})


def pairs(given: dict[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=key, value=value(item)) for key, item in given.items()]


def batch(stage: int, step: int, start_ms: int, positions: dict[str, int], parent: Span) -> Span:
    sessions = list(positions)
    return Span(
        name=names.sized(names.PHASE_DECODE, len(positions)),
        trace_id=PASSES,
        span_id=bytes([stage, step] * 4),
        parent_span_id=bytes([stage - 1, step] * 4) if stage else b"rootpass",
        start_time_unix_nano=(start_ms - 1) * MS,
        end_time_unix_nano=(start_ms + 2) * MS,
        events=[Span.Event(name=names.EVENT_CLOSED, time_unix_nano=start_ms * MS)],
        attributes=pairs(
            {
                names.ATTR_STAGE_INDEX: stage, names.ATTR_BATCH_STEP: step, names.ATTR_BATCH_ID: f"{stage}:{step}",
                names.ATTR_BATCH_ROWS: len(sessions), names.ATTR_BATCH_FRAMES: len(sessions),
                names.ATTR_BATCH_SESSIONS: len(sessions), names.ATTR_MEMBER_SESSIONS: sessions,
                names.ATTR_MEMBER_POSITIONS: [*positions.values()], names.ATTR_MEMBER_ROWS: [1] * len(sessions),
                names.ATTR_MEMBER_WAITS_NS: [MS] * len(sessions),
            }
        ),
        links=[
            Span.Link(trace_id=parent.trace_id, span_id=parent.span_id, attributes=pairs({names.ATTR_LINK: "member"}))
            for _ in sessions
        ],
    )  # fmt: skip


@pytest.fixture
def request_of_spans() -> ExportTraceServiceRequest:
    """One request of ten tokens over two stages, every other token with a mate, and a batch of the mate alone."""
    trace_id = bytes(range(16))
    root = Span(name="POST /v1/completions", kind=SERVER, trace_id=trace_id, span_id=b"rootroot",
                start_time_unix_nano=MS, end_time_unix_nano=90 * MS)  # fmt: skip
    identity = {
        names.ATTR_SESSION_ID: SESSION, names.ATTR_REQUEST_ID: "cmpl-1",
        names.ATTR_PROMPT_TOKENS: N_PROMPT, names.ATTR_GENERATED_TOKENS: N_TOKENS,
    }  # fmt: skip
    decode = Span(name=names.SPAN_DECODE, trace_id=trace_id, span_id=b"decoding", parent_span_id=b"rootroot",
                  start_time_unix_nano=2 * MS, end_time_unix_nano=90 * MS, attributes=pairs(identity))  # fmt: skip
    batches = [
        batch(
            stage,
            step,
            3 + 8 * step + 3 * stage,
            {SESSION: N_PROMPT - 1 + step} | ({MATE: 7} if step % 2 else {}),
            decode,
        )
        for step in range(N_TOKENS)
        for stage in range(N_STAGES)
    ]
    batches.append(batch(0, N_TOKENS, 88, {MATE: 8}, decode))
    request = ExportTraceServiceRequest()
    request.resource_spans.add().scope_spans.add().spans.extend([root, decode, *batches])
    return request


def test_spans_come_back_from_json_as_they_went(request_of_spans: ExportTraceServiceRequest) -> None:
    line = to_line(request_of_spans)
    found = spans_in(line + "\n" + line + "\n")
    assert len(found) == 2 * (2 + N_TOKENS * N_STAGES + 1)
    assert json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["traceId"] == bytes(range(16)).hex()
    jaeger = json.dumps({"result": json.loads(line)})
    assert spans_in(jaeger) == found[: len(found) // 2]
    assert rebuild(spans_in(line)).sessions[0].request_id == "cmpl-1"


def test_ids_in_a_file_are_hex_as_otlp_demands(request_of_spans: ExportTraceServiceRequest) -> None:
    ours = json.loads(to_line(request_of_spans))
    protobufs = json_format.MessageToDict(request_of_spans)
    span = ours["resourceSpans"][0]["scopeSpans"][0]["spans"][2]
    assert bytes.fromhex(span["links"][0]["spanId"]) == b"decoding"
    assert (
        protobufs["resourceSpans"][0]["scopeSpans"][0]["spans"][2]["links"][0]["spanId"] != span["links"][0]["spanId"]
    )


def test_bars_and_hops_follow_the_request(request_of_spans: ExportTraceServiceRequest) -> None:
    found = rebuild(spans_in(to_line(request_of_spans)))
    session = chosen(found, "cmpl-1")
    assert session == chosen(found, "")
    bars = bars_of(found, session, MS)
    assert len(bars) == N_TOKENS * N_STAGES + 1
    assert [bar.positions for bar in bars if not bar.positions] == [()]
    assert {bar.end_ms - bar.start_ms for bar in bars} == {2.0}, "a bar begins when its rows stopped waiting"
    assert {(left.stage, right.stage) for left, right in hops(bars)} == {(0, 1)}
    assert all(left.positions == right.positions for left, right in hops(bars))
    assert len(list(hops(bars))) == N_TOKENS


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_picture_is_drawn(request_of_spans: ExportTraceServiceRequest, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("matplotlib")
    title = draw(spans_in(to_line(request_of_spans)), tmp_path / f"request.{kind}")
    assert title == "3 prompt and 10 generated tokens in 20 batches of 2 stages, up to 2 rows"
    begins = (tmp_path / f"request.{kind}").read_bytes()[:5]
    assert begins == (b"\x89PNG\r" if kind == "png" else b"<?xml")
