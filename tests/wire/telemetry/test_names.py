"""Goal: names that boards and alarms of users hold on to follow one pattern, and one table has them all.

Prometheus' and OpenTelemetry's own rules say how: base units at the end, seconds rather than milliseconds, lower case.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

from relayline.coordinator.gateway.metrics import gateway_metrics
from relayline.coordinator.gateway.router import Router
from relayline.wire.telemetry import names

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "wire" / "telemetry" / "names.py"
UNITS = ("seconds", "bytes", "ratio", "perc", "info")
SCALED = {
    "ms",
    "us",
    "ns",
    "millis",
    "milliseconds",
    "minutes",
    "hours",
    "kb",
    "kib",
    "mb",
    "mib",
    "gb",
    "gib",
    "percent",
}
TIMES = {"time", "duration", "latency", "wait", "busy", "age", "delay", "took"}
"""Words of a quantity that is a time."""


def constants(*prefixes: str) -> dict[str, str]:
    return {key: value for key, value in vars(names).items() if key.startswith(prefixes) and isinstance(value, str)}


def metrics() -> set[str]:
    gateway = {family.name for family in gateway_metrics(Router(["a"])).collect()}
    return set(constants("METRIC_").values()) | {name for name in gateway if not name.startswith("process_")}


def test_metrics_end_in_their_unit() -> None:
    for name in sorted(metrics()):
        assert re.fullmatch(r"relayline(_[a-z][a-z0-9]*)+", name), name
        words = name.split("_")
        assert not SCALED & set(words), f"{name}: metrics are in seconds, bytes and shares of 1"
        assert words[-1] != "total", f"{name}: a counter gets its _total on its way out"
        for unit in set(UNITS) & set(words):
            assert words[-1] == unit, f"{name}: {unit} goes to the end"
        if TIMES & set(words):
            assert words[-1] == "seconds", f"{name}: a time is in seconds, and says so"


def test_attributes_are_ours_or_of_a_convention() -> None:
    for key, name in constants("ATTR_").items():
        assert re.fullmatch(r"relayline(\.[a-z][a-z0-9_]*)+", name), key
        words = name.replace(".", "_").split("_")
        assert not {"ms", "us", "millis", "seconds"} & set(words), f"{name}: times end in _s or _ns"
        if {"wait", "waits", "ttft", "itl", "hop", "handle"} & set(words):
            assert words[-1] in ("s", "ns"), f"{name}: a time, without its unit"


def test_names_of_conventions_are_spelled_as_there() -> None:
    """Boards and searches of other tools know these. A name that is in no convention begins with ours."""
    assert set(constants("GEN_AI_", "HTTP_", "URL_", "SERVER_", "CLIENT_", "ERROR_", "RESOURCE_SERVICE_").values()) == {
        "relayline",  # the value of gen_ai.provider.name
        "gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.output.type",
        "gen_ai.request.model", "gen_ai.request.max_tokens", "gen_ai.request.temperature", "gen_ai.request.top_p",
        "gen_ai.request.top_k", "gen_ai.request.frequency_penalty", "gen_ai.request.presence_penalty",
        "gen_ai.request.seed", "gen_ai.request.stream", "gen_ai.request.choice.count",
        "gen_ai.response.id", "gen_ai.response.model", "gen_ai.response.finish_reasons",
        "gen_ai.response.time_to_first_chunk",
        "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "gen_ai.usage.cache_read.input_tokens",
        "gen_ai.usage.reasoning.output_tokens", "gen_ai.input.messages", "gen_ai.output.messages",
        "http.request.method", "http.route", "http.response.status_code",
        "http.request.header.x-request-id", "http.response.header.x-request-id",
        "url.path", "url.scheme", "server.address", "server.port", "client.address", "error.type",
        "service.name", "service.namespace", "service.instance.id", "service.version",
    }  # fmt: skip


def test_no_name_is_used_twice() -> None:
    for prefix in ("ATTR_", "METRIC_", "GEN_AI_", "SPAN_", "LINK_", "LABEL_"):
        twice = [name for name, n in Counter(constants(prefix).values()).items() if n > 1]
        assert twice == [], prefix


def test_names_are_in_the_table_alone() -> None:
    """A name that is spelled out elsewhere is missed by whoever looks for it there."""
    of_spans = re.compile(r"(gen_ai|rpc|http\.(request|response|route))\.?[a-z_.]*\.[a-z_.]+")
    known = set(constants("ATTR_", "METRIC_", "GEN_AI_", "HTTP_").values()) - {names.GEN_AI_PROVIDER}
    loggers = {names.ATTR_LINK, names.ATTR_BATCHES}  # also names of loggers
    wrong = []
    for room in ("wire", "stage", "coordinator", "deploy"):
        for path in sorted((ROOT / room).rglob("*.py")):
            if path == TABLE or "pb" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    text = node.value
                    if (text in known and text not in loggers) or of_spans.fullmatch(text):
                        wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {text}")
    assert wrong == []
