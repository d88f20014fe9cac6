"""The time of flights on stages that share devices: steps, rounds, trains. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relayline.coordinator.schedule.stage_cost import StageCost

# Sizes of prefill chunks that are tried.
CHUNK_LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
SHARPNESS = 32  # exponent that joins the two terms of a cycle; equal terms make it 2 % longer than either

Devices = tuple[tuple[StageCost, ...], ...]  # the stages of each


def by_device(stages: Sequence[StageCost]) -> Devices:
    """Return the stages of each device; a stage without a known device has its own."""
    found: dict[tuple[int, int], list[StageCost]] = {}
    for at, stage in enumerate(stages):
        found.setdefault((stage.device, 0) if stage.device >= 0 else (-1, at), []).append(stage)
    return tuple(map(tuple, found.values()))


def cost_of_each(devices: Devices, cost_ns: Callable[[StageCost], float]) -> tuple[float, ...]:
    """Return what something costs on each device: the sum over its stages."""
    return tuple(sum(map(cost_ns, stages)) for stages in devices)


def prompts_ns(devices: Devices, rows: int) -> tuple[float, ...]:
    """Return the cost of a step of this many prompt rows on each device."""
    return cost_of_each(devices, lambda stage: stage.prefill_ns(rows))


def train_ns(costs: Sequence[float], n_chunks: int) -> float:
    """Return how long chunks that follow each other take through idle stages, where one takes `costs` in each.

    The slowest stage reads one chunk after the other, each other stage one before or one behind those.
    """
    return (n_chunks - 1) * max(costs) + sum(costs)


def turns_of(n_streams: int, n_groups: int, rows: int) -> float:
    """Return in how many rounds of the flights each stream has a token: more than one where they take turns."""
    return max(1.0, n_streams / (n_groups * rows))


def flights_of(n_streams: int, n_groups: int, rows: int) -> tuple[int, int]:
    """Return how many of n_groups flights of at most `rows` rows are full, and the rows of the one that is not."""
    n_full = min(n_groups, n_streams // rows)
    return n_full, min(n_streams - n_full * rows, rows) if n_full < n_groups else 0


def joined(work_ns: float, way_ns: float, sharpness: int = SHARPNESS) -> float:
    """Return the larger of the two, a little more when they are close."""
    larger, smaller = max(work_ns, way_ns), min(work_ns, way_ns)
    return float(larger * (1 + (smaller / larger) ** sharpness) ** (1 / sharpness)) if larger else 0.0
