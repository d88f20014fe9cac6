"""The gateway's own figures for Prometheus. Those of a pipeline are at /pipelines/NAME/metrics."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from relayline.coordinator.gateway.router import Health, Router

PIPELINE = "pipeline"
PREFIX = "relayline_gateway_"


class _Backends:
    """The router's present knowledge."""

    def __init__(self, router: Router, counters: Sequence[Counter]) -> None:
        """counters: those that count by pipeline. A counter's first count is only seen if it was 0 before."""
        self._router, self._counters = router, counters

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each figure."""
        gauge = functools.partial(GaugeMetricFamily, labels=[PIPELINE])
        counter = functools.partial(CounterMetricFamily, labels=[PIPELINE])
        up = gauge(f"{PREFIX}pipeline_up", "Whether the pipeline gets requests")
        outstanding = gauge(f"{PREFIX}requests_running", "Requests of this gateway that run there")
        others = gauge(f"{PREFIX}requests_of_others", "Requests of others that run there")
        work = gauge(f"{PREFIX}work_tokens", "Outstanding work, in prompt tokens")
        sent = counter(f"{PREFIX}requests_sent", "All requests sent there: retries, scrapes and pages too")
        asleep = gauge(f"{PREFIX}pipeline_asleep", "Whether the pipeline sleeps")
        waiting = gauge(f"{PREFIX}requests_waiting", "Requests that wait until the pipeline may wake (awakeMax)")
        waited = counter(f"{PREFIX}requests_waited", "Requests that had to wait until the pipeline may wake")
        swaps = counter(f"{PREFIX}swaps", "How often the pipeline was put to sleep for another one")
        for backend in self._router.backends:
            label = [backend.name]
            up.add_metric(label, float(backend.health is Health.READY))
            outstanding.add_metric(label, backend.n_outstanding)
            others.add_metric(label, backend.n_others)
            work.add_metric(label, backend.work())
            sent.add_metric(label, backend.n_sent)
            asleep.add_metric(label, float(backend.is_asleep))
            counts = self._router.awake.counts(backend)
            waiting.add_metric(label, counts.n_waiting)
            waited.add_metric(label, counts.n_waited)
            swaps.add_metric(label, counts.n_sleeps)
            for each in self._counters:
                each.labels(backend.name)
        yield from (up, outstanding, others, work, sent, asleep, waiting, waited, swaps)


class GatewayMetrics:
    """Counters of one gateway."""

    def __init__(self, router: Router) -> None:
        self.retries = Counter(
            f"{PREFIX}retries", "Requests that another replica got after this one failed", [PIPELINE], registry=None
        )
        self.broken = Counter(
            f"{PREFIX}broken_answers", "Answers cut short because their pipeline was lost", [PIPELINE], registry=None
        )
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        for collector in (_Backends(router, (self.retries, self.broken)), self.retries, self.broken):
            self.registry.register(collector)
