"""GET /metrics of a stage: its counters in Prometheus' form, put together when they are asked for.

Nothing is counted for this endpoint alone: a scrape reads what StageStats keeps anyway.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.samples import Exemplar

from relayline.stage.engine.tier import TierFigures
from relayline.stage.observe import figures
from relayline.stage.observe.figures import Figure
from relayline.stage.observe.metrics_port import serving
from relayline.stage.observe.stats import WAIT_BUCKETS_NS, StageStats
from relayline.wire.links.revocation import Revocations
from relayline.wire.links.roles import CALLS, METRICS
from relayline.wire.links.security import PLAINTEXT, LinkSecurity, address_of, check_listen, is_loopback, warn_listen
from relayline.wire.links.tls_server import credential_of_peer, server_context
from relayline.wire.telemetry import names
from relayline.wire.telemetry.telemetry import Telemetry

ROW_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1_024, 2_048)
WHO = "the metrics port"


@dataclasses.dataclass(frozen=True, slots=True)
class Gauges:
    """Gauges of a stage."""

    queued_rows: int
    queued_frames: int
    lanes_used: int
    lanes_kept: int
    lanes_total: int
    in_flight_bytes: int  # sent downstream, credit not yet given back
    window_bytes: int  # the limit
    tier: TierFigures = dataclasses.field(default_factory=TierFigures)

    @property
    def tier_bytes(self) -> dict[str, int]:
        """Bytes of the tier, by place."""
        return {"memory": self.tier.memory_bytes, "disk": self.tier.disk_bytes}

    @property
    def tier_states(self) -> int:
        """Lanes whose states the tier keeps."""
        return self.tier.n_states


class Collector(Protocol):
    """Anything that a registry asks for metrics."""

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their present values."""


class StageCollector:
    """Every metric of one stage. `read` is asked at each scrape, on the event loop."""

    def __init__(
        self, info: Mapping[str, str], stats: StageStats, telemetry: Telemetry, read: Callable[[], Gauges]
    ) -> None:
        """info: labels of the info metric; `stage` among them labels all others."""
        self._info, self._stats, self._telemetry, self._read = dict(info), stats, telemetry, read
        self._stage = self._info[names.LABEL_STAGE]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their present values."""
        info = GaugeMetricFamily(names.METRIC_BATCH_INFO, "What this stage is", labels=list(self._info))
        info.add_metric(list(self._info.values()), 1)
        yield info
        yield from self._histograms()
        yield from self._plain()

    def _histograms(self) -> Iterator[Metric]:
        stats, (rows, sessions, waits) = self._stats, figures.HISTOGRAMS
        yield self._histogram(rows, _cumulative(dict(stats.steps_by_rows)), stats.n_rows)
        yield self._histogram(sessions, _cumulative(dict(stats.steps_by_sessions)), stats.n_frames)
        ends = [str(bound * waits.scale) for bound in WAIT_BUCKETS_NS]
        counts = itertools.accumulate(stats.waits_by_bucket)
        buckets = [
            (end, count, _exemplar(found, waits.scale))
            for end, count, found in zip([*ends, "+Inf"], counts, stats.exemplars, strict=True)
        ]
        yield self._histogram(waits, buckets, stats.wait_sum_ns * waits.scale)

    def _plain(self) -> Iterator[Metric]:
        counters = ((self._stats, figures.COUNTERS), (self._telemetry, figures.TELEMETRY_COUNTERS))
        gauges = ((self._read(), figures.GAUGES), (self._telemetry, figures.TELEMETRY_GAUGES))
        for source, table in counters:
            yield from (self._filled(CounterMetricFamily, figure, source) for figure in table)
        for now, table in gauges:
            yield from (self._filled(GaugeMetricFamily, figure, now) for figure in table)

    def _filled(self, kind: type[Metric], figure: Figure, source: object) -> Metric:
        """Return one figure, of every label value that it was counted by."""
        held = getattr(source, figure.field)
        family = kind(figure.name, figure.help, labels=[names.LABEL_STAGE, *([figure.label] if figure.label else [])])
        for given, value in sorted(dict(held).items()) if figure.label else [(None, held)]:
            family.add_metric([self._stage, *([given] if figure.label else [])], float(value) * figure.scale)
        return family

    def _histogram(self, figure: Figure, buckets: Sequence[tuple[Any, ...]], total: float) -> Metric:
        family = HistogramMetricFamily(figure.name, figure.help, labels=[names.LABEL_STAGE])
        family.add_metric([self._stage], buckets, total)
        return family


class CertificateCollector:
    """When this process's certificate ends; nothing without one."""

    def __init__(self, security: LinkSecurity) -> None:
        self._security = security

    def collect(self) -> Iterator[Metric]:
        """Yield the metric with its present value."""
        expires_unix_s = self._security.certificate_expires_unix_s()
        if expires_unix_s is not None:
            yield GaugeMetricFamily(
                names.METRIC_CERTIFICATE_EXPIRES, names.HELP_CERTIFICATE_EXPIRES, value=expires_unix_s
            )


def _exemplar(found: tuple[str, int] | None, scale: float) -> Exemplar | None:
    """Return the exemplar that leads from a bucket to a second of passes; only OpenMetrics shows it."""
    if found is None:
        return None
    trace_id, wait_ns = found
    return Exemplar({names.LABEL_TRACE: trace_id}, wait_ns * scale)


def _cumulative(counts: Mapping[int, int]) -> list[tuple[str, int]]:
    """Turn value -> how often into Prometheus' cumulative buckets."""
    buckets = [(str(float(end)), sum(count for value, count in counts.items() if value <= end)) for end in ROW_BUCKETS]
    return [*buckets, ("+Inf", sum(counts.values()))]


def is_private(host: str, security: LinkSecurity) -> bool:
    """Return whether metrics on `host` take the links' TLS: everywhere but on loopback."""
    return security.is_tls and not is_loopback(host)


def refusal_of(request: web.BaseRequest, revocations: Revocations) -> str:
    """Return why a client that came over TLS may not read metrics, empty where it may."""
    shown = credential_of_peer(request.transport.get_extra_info("peercert") if request.transport else None)
    if shown.identity is None:
        return "this certificate states no role; issue one with `relayline certs issue --monitor`"
    revocations.look()
    if revocations.is_revoked(shown):
        return f"the credential of {shown.identity} is revoked"
    if shown.identity.role not in CALLS[METRICS].roles:
        return f"{shown.identity} may not read metrics; issue a certificate with `relayline certs issue --monitor`"
    return ""


@contextlib.asynccontextmanager
async def serve_metrics(
    address: tuple[str, int],
    collector: Collector,
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
    registry.register(CertificateCollector(security))
    ProcessCollector(registry=registry)

    async def answer(request: web.BaseRequest) -> web.Response:
        if private and (refusal := refusal_of(request, known)):
            return web.Response(status=403, text=refusal + "\n")
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    async with serving(host, port, answer, context) as (_, actual_port):
        yield address_of(host, actual_port)
