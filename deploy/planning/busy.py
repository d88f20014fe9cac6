"""Bounds the measurement of a busy host by what its cores suggest, compared with the other hosts. Pure.

A host that computes something else while it is measured may seem thousands of times slower than it is. Such a
measurement is only used for the first plan, and the next start measures the host again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from relayline.coordinator.planner.instance import Host
from relayline.coordinator.planner.speed import Speed

BUSY_SLOWER_MAX = 2.0  # times: more than a busy measurement can tell, less than what takes a host's layers away
BOUNDED = "bounded"  # the source of such a host's speed
ROWS_COMPARED = 8
MEASURED = ("measured", "calibrated")


def bounded(hosts: Sequence[Host], busy: Collection[str], estimates: Mapping[str, Speed]) -> list[Host]:
    """Return the hosts of a plan, those in `busy` at most BUSY_SLOWER_MAX times as slow as their estimates suggest.

    `busy`: stages whose hosts were too busy to be measured well; `estimates`: the speed of each stage by its cores
    alone. Estimates are compared with each other, not with measurements: the least slow of the quiet hosts, or of all
    where none was quiet, says how far they are off.
    """
    slower = {
        host.name: host.speed.layer_ns(ROWS_COMPARED) / estimates[host.name].layer_ns(ROWS_COMPARED)
        for host in hosts
        if host.speed.source in MEASURED
    }
    quiet = [name for name in slower if name not in busy]
    if not busy or not slower:
        return list(hosts)
    by_name = {host.name: host for host in hosts}
    reference = min(quiet or slower, key=slower.__getitem__)
    return [
        dataclasses.replace(host, speed=_like(by_name[reference].speed, estimates[reference], estimates[host.name]))
        if host.name in busy and slower.get(host.name, 0.0) > BUSY_SLOWER_MAX * slower[reference]
        else host
        for host in hosts
    ]


def _like(speed: Speed, estimate: Speed, other: Speed) -> Speed:
    """Return the speed of a host BUSY_SLOWER_MAX times as slow as that one, where their estimates are equal."""
    share = other.layer_ns(ROWS_COMPARED) / estimate.layer_ns(ROWS_COMPARED)
    return speed.scaled(BUSY_SLOWER_MAX * share, BOUNDED)
