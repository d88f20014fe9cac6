"""Counters of a gateway by pipeline begin at 0: `increase()` of one that appears with its first count misses it. They
go with their pipeline.
"""

from __future__ import annotations

from prometheus_client import generate_latest

from relayline.coordinator.gateway.metrics import PREFIX, gateway_metrics
from relayline.coordinator.gateway.router import Router


def series(router: Router) -> list[str]:
    """Return what a scrape finds, but for the gateway's own process."""
    text = generate_latest(gateway_metrics(router)).decode()
    return [line for line in text.splitlines() if line.startswith(PREFIX)]


def test_counters_are_there_before_they_count() -> None:
    router = Router(["a"])
    router.add("b").n_broken += 1
    found = series(router)
    for name, pipeline, value in (("retries", "a", 0), ("retries", "b", 0), ("broken_answers", "a", 0)):
        assert f'{PREFIX}{name}_total{{pipeline="{pipeline}"}} {value}.0' in found
    assert f'{PREFIX}broken_answers_total{{pipeline="b"}} 1.0' in found


def test_a_pipeline_that_is_gone_leaves_no_series() -> None:
    router = Router(["a"])
    gone = router.add("b")
    gone.n_retried = gone.n_broken = 1
    router.leave(gone)
    assert f'{PREFIX}retries_total{{pipeline="b"}} 1.0' in series(router), "its last requests still run"
    router.remove(gone)
    assert [line for line in series(router) if 'pipeline="b"' in line] == []
    assert any('pipeline="a"' in line for line in series(router))


def test_a_pipeline_and_its_successor_are_one_series() -> None:
    """While requests of the one that is replaced still run, both have the name."""
    router = Router(["a"])
    router.leave(router.backends[0])
    router.add("a").n_sent = 7
    found = series(router)
    names = [line.split(" ")[0] for line in found]
    assert len(names) == len(set(names)), "Prometheus drops what a scrape has twice"
    assert f'{PREFIX}requests_sent_total{{pipeline="a"}} 7.0' in found
