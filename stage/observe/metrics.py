"""GET /metrics of a stage: its counters in Prometheus' form, put together when they are asked for.

Nothing is counted for this endpoint alone: a scrape reads what StageStats keeps anyway.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.samples import Exemplar

from relayline.stage.observe.stats import WAIT_BUCKETS_NS, StageStats
from relayline.wire.common.errors import StartError
from relayline.wire.links.revocation import Revocations
from relayline.wire.links.roles import CALLS, METRICS
from relayline.wire.links.security import PLAINTEXT, LinkSecurity, address_of, check_listen, is_loopback, warn_listen
from relayline.wire.links.tls_server import credential_of_peer, server_context
from relayline.wire.telemetry import names
from relayline.wire.telemetry.telemetry import Telemetry

ROW_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1_024, 2_048)
WHO = "the metrics port"
_SECONDS = 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class Gauges:
    """What a stage holds at this moment."""

    queued_rows: int
    queued_frames: int
    lanes_used: int
    lanes_kept: int
    lanes_total: int
    in_flight_bytes: int  # sent downstream, credit not yet given back
    window_bytes: int  # what may be


class StageCollector:
    """Every metric of one stage. `read` is asked at each scrape, on the event loop."""

    def __init__(
        self, info: Mapping[str, str], stats: StageStats, telemetry: Telemetry, read: Callable[[], Gauges]
    ) -> None:
        """info: labels of the info metric; `stage` among them labels all others."""
        self._info, self._stats, self._telemetry, self._read = dict(info), stats, telemetry, read
        self._stage = self._info[names.LABEL_STAGE]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they stand."""
        info = GaugeMetricFamily(names.METRIC_BATCH_INFO, "What this stage is", labels=list(self._info))
        info.add_metric(list(self._info.values()), 1)
        yield info
        yield from self._histograms()
        yield from self._counters()
        yield from self._gauges()

    def _histograms(self) -> Iterator[Metric]:
        stats = self._stats
        yield self._histogram(
            names.METRIC_BATCH_ROWS,
            "Rows of a native step, padding left out",
            _cumulative(dict(stats.steps_by_rows)),
            stats.n_rows,
        )
        yield self._histogram(
            names.METRIC_BATCH_SESSIONS,
            "Sessions of a native step",
            _cumulative(dict(stats.steps_by_sessions)),
            stats.n_frames,
        )
        ends = [str(bound * _SECONDS) for bound in WAIT_BUCKETS_NS]
        counts = itertools.accumulate(stats.waits_by_bucket)
        yield self._histogram(
            names.METRIC_FRAME_WAIT,
            "Wait of a frame from its arrival to the start of its step",
            [
                (end, count, _exemplar(found))
                for end, count, found in zip([*ends, "+Inf"], counts, stats.exemplars, strict=True)
            ],
            stats.wait_sum_ns * _SECONDS,
        )

    def _counters(self) -> Iterator[Metric]:
        stats = self._stats
        plain: tuple[tuple[str, str, float], ...] = (
            (names.METRIC_STEPS, "Native steps", stats.n_steps),
            (names.METRIC_ROWS, "Rows decoded, padding left out", stats.n_rows),
            (names.METRIC_PADDED_ROWS, "Scratch rows decoded beside them", stats.n_padded_rows),
            (names.METRIC_MICRO_BATCHES, "Parts in which llama.cpp ran the steps", stats.n_micro_batches),
            (names.METRIC_STEP_SECONDS, "Time inside native decode", stats.busy_ns * _SECONDS),
            (names.METRIC_STEP_PREDICTED_SECONDS, "Predicted time of steps that had a prediction",
             stats.predicted_ns * _SECONDS),
            (names.METRIC_STEP_MEASURED_SECONDS, "Measured time of the same steps", stats.measured_ns * _SECONDS),
            (names.METRIC_ENCODE_SECONDS, "Time for encoding rows or sampling", stats.encode_ns * _SECONDS),
            (names.METRIC_EPOCHS, "Connections by a coordinator; beyond its first, recoveries", stats.n_epochs),
            (names.METRIC_SPANS_EXPORTED, "Spans that a collector took", self._telemetry.exported_spans),
            (names.METRIC_SPANS_DROPPED, "Spans that were lost", self._telemetry.dropped_spans),
        )  # fmt: skip
        for name, text, value in plain:
            yield self._counter(name, text, (), [((), value)])
        reasons = [((reason,), float(count)) for reason, count in sorted(dict(stats.close_reasons).items())]
        yield self._counter(
            names.METRIC_CLOSE_REASONS, "Batches by what closed them", (names.LABEL_CLOSE_REASON,), reasons
        )
        faults = [((label,), float(count)) for label, count in sorted(dict(stats.faults_by_label).items())]
        yield self._counter(names.METRIC_FAULTS, "Faults of sessions by error", (names.LABEL_ERROR,), faults)
        directions = (names.LABEL_DIRECTION,)
        yield self._counter(
            names.METRIC_LINK_BYTES,
            "Payload bytes of neighbours' links",
            directions,
            [(("in",), stats.payload_bytes_in), (("out",), stats.payload_bytes_out)],
        )
        yield self._counter(
            names.METRIC_LINK_ENVELOPES,
            "Envelopes of neighbours' links",
            directions,
            [(("in",), stats.envelopes_in), (("out",), stats.envelopes_out)],
        )

    def _gauges(self) -> Iterator[Metric]:
        now = self._read()
        rows: tuple[tuple[str, str, float], ...] = (
            (names.METRIC_QUEUED_ROWS, "Rows waiting for a step", now.queued_rows),
            (names.METRIC_QUEUED_FRAMES, "Frames waiting for a step, controls included", now.queued_frames),
            (names.METRIC_LANES_USED, "Lanes of sessions that somebody waits for", now.lanes_used),
            (names.METRIC_LANES_KEPT, "Lanes that keep what ended sessions computed", now.lanes_kept),
            (names.METRIC_LANES_TOTAL, "Sessions that this stage can hold", now.lanes_total),
            (names.METRIC_LINK_IN_FLIGHT, "Payload bytes sent downstream and not yet decoded there",
             now.in_flight_bytes),
            (names.METRIC_LINK_WINDOW, "Payload bytes that may be in flight downstream", now.window_bytes),
            (names.METRIC_TELEMETRY_LEVEL, "0 off, 1 summary, 2 batches, 3 frames", int(self._telemetry.level)),
        )  # fmt: skip
        for name, text, value in rows:
            family = GaugeMetricFamily(name, text, labels=[names.LABEL_STAGE])
            family.add_metric([self._stage], value)
            yield family

    def _counter(
        self, name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
    ) -> Metric:
        family = CounterMetricFamily(name, text, labels=[names.LABEL_STAGE, *labels])
        for given, value in values:
            family.add_metric([self._stage, *given], value)
        return family

    def _histogram(self, name: str, text: str, buckets: Sequence[tuple[Any, ...]], total: float) -> Metric:
        family = HistogramMetricFamily(name, text, labels=[names.LABEL_STAGE])
        family.add_metric([self._stage], buckets, total)
        return family


def _exemplar(found: tuple[str, int] | None) -> Exemplar | None:
    """Return what leads from a bucket to a second of passes; only who asks for OpenMetrics is shown it."""
    if found is None:
        return None
    trace_id, wait_ns = found
    return Exemplar({names.LABEL_TRACE: trace_id}, wait_ns * _SECONDS)


def _cumulative(counts: Mapping[int, int]) -> list[tuple[str, int]]:
    """Turn value -> how often into Prometheus' cumulative buckets."""
    buckets = [(str(float(end)), sum(count for value, count in counts.items() if value <= end)) for end in ROW_BUCKETS]
    return [*buckets, ("+Inf", sum(counts.values()))]


def is_private(host: str, security: LinkSecurity) -> bool:
    """Return whether metrics on `host` take the links' TLS: everywhere but on loopback."""
    return security.is_tls and not is_loopback(host)


def refusal_of(request: web.Request, revocations: Revocations) -> str:
    """Return why a client that came over TLS may not read metrics, empty where it may."""
    shown = credential_of_peer(request.transport.get_extra_info("peercert") if request.transport else None)
    if shown.identity is None:
        return "this certificate says no role; issue one with `relayline certs issue --monitor`"
    revocations.look()
    if revocations.is_revoked(shown):
        return f"the credential of {shown.identity} is revoked"
    if shown.identity.role not in CALLS[METRICS].roles:
        return f"{shown.identity} may not read metrics; issue a certificate with `relayline certs issue --monitor`"
    return ""


@contextlib.asynccontextmanager
async def serve_metrics(
    address: tuple[str, int],
    collector: StageCollector,
    security: LinkSecurity = PLAINTEXT,
    revocations: Revocations | None = None,
) -> AsyncIterator[str]:
    """Serve GET /metrics inside the running loop; yields the address, host:port.

    Beyond loopback it is served over the links' TLS, to the roles of the table of calls. Raises StartError when the
    port cannot be taken, UsageError where it would be plaintext unasked or the TLS material cannot be used.
    """
    host, port = address
    check_listen(host, security, WHO)
    warn_listen(host, security, WHO)
    private = is_private(host, security)
    known = revocations or Revocations(security)
    context = None
    if private:
        from relayline.wire.links.tls_material import (
            check_material,  # loads cryptography, which plaintext does not need
        )

        ca, cert, key = security.files
        context = server_context(cert, key, ca, lambda: check_material(ca, cert, key))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(registry=registry)

    async def answer(request: web.Request) -> web.Response:
        if private and (refusal := refusal_of(request, known)):
            return web.Response(status=403, text=refusal + "\n")
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, ssl_context=context)
        try:
            await site.start()
        except OSError as error:
            raise StartError(f"cannot serve metrics on {address_of(host, port)}: {error.strerror or error}") from error
        yield address_of(host, runner.addresses[0][1])
    finally:
        await runner.cleanup()
