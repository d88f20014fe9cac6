"""The gateway's own figures for Prometheus. Those of a pipeline are at /pipelines/NAME/metrics."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from relayline.coordinator.gateway.router import Health, Router

PIPELINE = "pipeline"
PREFIX = "relayline_gateway_"


class _Backends:
    """The router's present knowledge. A figure goes with its pipeline."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each figure. Counters begin at 0: Prometheus sees no increase in a first value."""
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
        retries = counter(f"{PREFIX}retries", "Requests that another replica got after this one failed")
        broken = counter(f"{PREFIX}broken_answers", "Answers cut short because their pipeline was lost")
        # One that is replaced has the name of its successor, which comes later, until its requests have ended.
        for backend in {each.name: each for each in self._router.backends}.values():
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
            retries.add_metric(label, backend.n_retried)
            broken.add_metric(label, backend.n_broken)
        yield from (up, outstanding, others, work, sent, asleep, waiting, waited, swaps, retries, broken)


def gateway_metrics(router: Router) -> CollectorRegistry:
    """Return the figures of one gateway, and of its process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Backends(router))
    return registry
