"""MLflow's tracking server as an independent trace store: it is installed into a cache, run, and read.

It takes OTLP over HTTP at /v1/traces and keeps spans, their attributes, links and the links' attributes in SQLite; it
does not keep the kind of a span.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanProto

from relayline.deploy.machine.ports import free_port
from relayline.deploy.testing.otlp_receiver import StoredSpan, stored
from relayline.wire.common.places import cache_dir
from tests.support import surroundings

VERSION = "3.17.2"
EXPERIMENT = "0"  # the one that is always there
INSTALL_TIMEOUT_S = 900.0
TRIES_MAX = 2_000  # looks at the store while spans are on their way; each is a round trip
PAGE = 500


def installed() -> Path:
    """Return the Python of an environment with MLflow, which is made on first use; skips the test where pip cannot."""
    home = cache_dir() / "tests" / f"mlflow-{VERSION}"
    python = home / "bin" / "python"
    ready = home / ".ready"
    if not ready.exists():
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True, capture_output=True)
            command = [python, "-m", "pip", "install", "--quiet", f"mlflow=={VERSION}"]
            environment = os.environ | surroundings.proxies
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, env=environment
            )
        except (subprocess.SubprocessError, OSError) as error:
            lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            pytest.skip(f"MLflow {VERSION} cannot be installed here: {lines[-1] if lines else error}")
        ready.touch()
    return python


class MlflowStore:
    """A running MLflow server."""

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def environment(self) -> dict[str, str]:
        """The settings of an OTLP exporter for it."""
        return {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{self.url}/v1/traces",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"x-mlflow-experiment-id={EXPERIMENT}",
        }

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())

    def _traces(self) -> Iterator[dict[str, Any]]:
        token = ""
        while True:
            location = {"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": EXPERIMENT}}
            body = {"locations": [location], "max_results": PAGE} | ({"page_token": token} if token else {})
            found = self._call("/api/3.0/mlflow/traces/search", body)
            yield from found.get("traces", [])
            token = found.get("next_page_token", "")
            if not token:
                return

    def spans(self) -> list[StoredSpan]:
        """Return every span that is stored."""
        spans: list[StoredSpan] = []
        for trace in self._traces():
            found = self._call(f"/api/3.0/mlflow/traces/get?trace_id={trace['trace_id']}")["trace"]
            for span in found.get("spans", []):
                message = json_format.ParseDict(span, SpanProto(), ignore_unknown_fields=True)
                spans.append(stored(message, found["trace_info"].get("tags", {})))
        return spans

    def wait_for(self, is_enough: Callable[[list[StoredSpan]], bool], n_traces: int) -> list[StoredSpan]:
        """Read until this number of traces exists and their spans fulfil a condition; returns the spans."""
        n_found = 0
        for _ in range(TRIES_MAX):
            n_found = sum(1 for _ in self._traces())
            if n_found >= n_traces and is_enough(found := self.spans()):
                return found
        raise AssertionError(f"{n_found} of {n_traces} traces arrived, or their spans are not complete")


@contextlib.contextmanager
def mlflow_store(directory: Path) -> Iterator[MlflowStore]:
    """Run a server with an empty database in `directory` for the length of a with block."""
    python = installed()
    port = free_port()
    command = [python, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{directory}/mlflow.db",
               "--no-serve-artifacts", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]  # fmt: skip
    environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen(
        command, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert child.stdout is not None
    lines: list[str] = []
    for line in child.stdout:
        lines.append(line)
        if "Application startup complete" in line:
            break
    else:
        raise AssertionError(f"MLflow did not start, exit code {child.wait()}: {''.join(lines[-5:])}")
    reader = threading.Thread(target=lines.extend, args=(child.stdout,), daemon=True)
    reader.start()
    try:
        yield MlflowStore(f"http://127.0.0.1:{port}")
    finally:
        child.terminate()
        child.wait(60)
        reader.join(60)
        child.stdout.close()
