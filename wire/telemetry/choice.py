"""Chooses the exporters of spans that the standard OTEL_* variables and one flag ask for.

The variables that only an exporter understands (headers, certificates, timeouts, compression) are left to it.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import urllib.parse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from relayline.wire.common.errors import UsageError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_ENDPOINT_KEYS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_KEYS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTER_KEY = "OTEL_TRACES_EXPORTER"
_ENTRY_POINTS = "opentelemetry_traces_exporter"
_BY_PROTOCOL = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
_HTTP_PORT = 4318
_TLS_KEYS = ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE")
_INSECURE_KEYS = ("OTEL_EXPORTER_OTLP_TRACES_INSECURE", "OTEL_EXPORTER_OTLP_INSECURE")
_TRACES_PATH = "/v1/traces"


def exporters(endpoint: str, environment: Mapping[str, str] | None = None) -> list[SpanExporter]:
    """Build the exporters; none when the SDK is disabled, "none" is asked for, or no endpoint is known.

    endpoint: given by flag, "" if not; it replaces the endpoint variables. environment is os.environ but in tests of
    the choice. Raises UsageError for an unknown exporter or protocol, and for values an exporter refuses.
    """
    given = os.environ if environment is None else environment
    if not endpoint and "://" not in (known := _first(given, _ENDPOINT_KEYS)):
        endpoint = _with_scheme(known, given)
    try:
        return [_build(name, endpoint) for name in chosen(endpoint, given)]
    except UsageError:
        raise
    except Exception as error:  # exporters raise any kind of exception for bad headers, files, numbers
        raise UsageError(f"telemetry cannot be set up, check the OTEL_* variables: {error}") from error


def chosen(endpoint: str, environment: Mapping[str, str]) -> list[str]:
    """Return the names of the exporters to use, as entry points. Pure. Raises UsageError."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    known = endpoint or _with_scheme(_first(environment, _ENDPOINT_KEYS), environment)
    asked = environment.get(_EXPORTER_KEY, "").strip()
    listed = [name.strip() for name in asked.split(",") if name.strip()] or (["otlp"] if known else [])
    if endpoint and not any(name.startswith("otlp") for name in listed):
        listed.append("otlp")  # a flag is more particular than a variable
    return list(dict.fromkeys(_protocol(known, environment) if name == "otlp" else name for name in listed
                              if name.lower() != "none"))  # fmt: skip


def hint(endpoint: str, environment: Mapping[str, str]) -> str:
    """Return a hint for people whose collector gets no spans: where they go, how, and what says so. Pure."""
    known = endpoint or _with_scheme(_first(environment, _ENDPOINT_KEYS), environment)
    protocols = [name for name, entry in _BY_PROTOCOL.items() if entry in chosen(endpoint, environment)]
    if not known or not protocols:
        return ""
    where = f"they go to {known} as OTLP over {protocols[0]}"
    for key in _PROTOCOL_KEYS:
        if environment.get(key, "").strip():
            return f"{where}, as {key} says"
    (other,) = (name for name in _BY_PROTOCOL if name not in protocols)
    return f"{where}; if the collector expects the other protocol there, set {_PROTOCOL_KEYS[1]}={other}"


def _with_scheme(endpoint: str, environment: Mapping[str, str]) -> str:
    """Return an endpoint that may be HOST:PORT alone as a URL; plaintext unless the variables ask for TLS."""
    if not endpoint:
        return ""
    insecure = _first(environment, _INSECURE_KEYS).lower()
    scheme = "https" if insecure == "false" or (not insecure and _first(environment, _TLS_KEYS)) else "http"
    url = endpoint if "://" in endpoint else f"{scheme}://{endpoint}"
    try:
        parts = urllib.parse.urlsplit(url)
        is_one = parts.scheme in ("http", "https") and parts.hostname and (parts.port or "://" in endpoint)
    except ValueError:  # a port that is none
        is_one = False
    if not is_one:
        raise UsageError(
            f"{_ENDPOINT_KEYS[1]} {endpoint!r} is not a collector's address; "
            "give http://HOST:4317 for OTLP over gRPC or http://HOST:4318 over HTTP"
        )
    return url


def _protocol(endpoint: str, environment: Mapping[str, str]) -> str:
    protocol = _first(environment, _PROTOCOL_KEYS).lower()
    if not protocol:
        # Port and path tell: gRPC has no path, and is never served at HTTP's port.
        url = urllib.parse.urlsplit(endpoint)
        protocol = "http/protobuf" if url.port == _HTTP_PORT or url.path.strip("/") else "grpc"
    if protocol not in _BY_PROTOCOL:
        raise UsageError(f"OTLP protocol {protocol!r} is not supported; choose grpc or http/protobuf")
    return _BY_PROTOCOL[protocol]


def _first(environment: Mapping[str, str], keys: tuple[str, ...]) -> str:
    return next((value.strip() for key in keys if (value := environment.get(key, ""))), "")


def _build(name: str, endpoint: str) -> SpanExporter:
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)  # stdout belongs to results
    entries = importlib.metadata.entry_points(group=_ENTRY_POINTS, name=name)
    if not entries:
        known = sorted({"otlp", "console", "none"} | importlib.metadata.entry_points(group=_ENTRY_POINTS).names)
        raise UsageError(f"{_EXPORTER_KEY} {name!r} is unknown; choose of {', '.join(known)}")
    from relayline.wire.telemetry.otlp import quick

    options: dict[str, Any] = {}
    if endpoint and name == "otlp_proto_http":
        url = urllib.parse.urlsplit(endpoint)
        options["endpoint"] = endpoint if url.path.strip("/") else endpoint.rstrip("/") + _TRACES_PATH
    elif endpoint and name == "otlp_proto_grpc":
        options["endpoint"] = endpoint
    exporter: SpanExporter = quick(next(iter(entries)).load())(**options)
    return exporter
