"""Counters of a gateway by pipeline begin at 0: `increase()` of one that appears with its first count misses it."""

from __future__ import annotations

from prometheus_client import generate_latest

from relayline.coordinator.gateway.metrics import GatewayMetrics
from relayline.coordinator.gateway.router import Router


def test_counters_are_there_before_they_count() -> None:
    router = Router(["a"])
    metrics = GatewayMetrics(router)
    router.add("b")
    metrics.broken.labels("b").inc()
    text = generate_latest(metrics.registry).decode()
    for name, pipeline, value in (("retries", "a", 0), ("retries", "b", 0), ("broken_answers", "a", 0)):
        assert f'relayline_gateway_{name}_total{{pipeline="{pipeline}"}} {value}.0' in text
    assert 'relayline_gateway_broken_answers_total{pipeline="b"} 1.0' in text
