"""Predicted times of a split: the length of a stage's step, and the rate that a grouping reaches. Pure.

The rate follows coordinator.schedule.groups: with N streams in G flights of r rows, a cycle lasts as long as the
busiest part needs for all flights, or one flight for its round trip, whichever is longer. Besides a stage, the busiest
part can be a link, or a machine whose stages have more threads than it has cores. Its cores then work on all stages'
steps one after the other.

Times are whole nanoseconds, so that sums do not depend on the order in which they were added up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from relayline.coordinator.planner.instance import Instance, Machine
from relayline.coordinator.planner.speed import ROWS
from relayline.coordinator.schedule.cycles import flights_of, joined
from relayline.coordinator.schedule.groups import GROUPS_MAX_PER_STAGE, ROWS_ONE_BY_ONE
from relayline.coordinator.schedule.overhead import HOST_STEP_NS
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.wire.common.curve import PAD_SEARCH_ROWS, CostCurve
from relayline.wire.common.units import GIB

# The coordinator's work for a flight (scheduling, sending, receiving) and for a token of a stream (text, HTTP):
# processor time measured on a Zen 4 core, rounded. It matters where native steps are equally short.
COORDINATOR_FLIGHT_NS = 600_000
COORDINATOR_TOKEN_NS = 200_000
# Exponent that joins a machine's crowded cores with its busiest stage: steps of several stages do not tile its cores
# without gaps, so both limits at once cost up to 9 %.
CROWD_SHARPNESS = 8
Grouping = tuple[int, int]  # flights, rows of one
Flights = tuple[int, int, int]  # of a cycle: how many are full, the rows of one, the rows of the one that is not
Edges = tuple[tuple[int, int], ...]  # of each stage its layers [start, end)


class Costs:
    """The times of every possible stage of one instance; computed when asked for, then remembered."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.n_layers = instance.model.n_layers
        speeds = [host.speed for host in instance.hosts]
        self.devices, self.crowded = instance.devices, instance.crowded_machines
        self.kinds = tuple(speeds.index(speed) for speed in speeds)  # of each stage: the first one as fast
        self._layers_ns: dict[tuple[int, int], tuple[int, ...]] = {}
        self._heads_ns: dict[tuple[int, int], int] = {}
        self._steps_ns: dict[tuple[int, int, int, int], int] = {}
        self._stages: dict[tuple[int, int, int], StageCost] = {}

    def layers_ns(self, stage: int, rows: int) -> tuple[int, ...]:
        """Return the time of all layers before each layer in a step of `rows` rows on this stage's host."""
        key = (self.kinds[stage], rows)
        found = self._layers_ns.get(key)
        if found is None:
            per_gib = self._in_service(stage) * self.instance.hosts[stage].speed.layer_ns(rows)
            each = (round(per_gib * size / GIB) for size in self.instance.model.layer_bytes)
            found = self._layers_ns[key] = (0, *itertools.accumulate(each))
        return found

    def head_ns(self, stage: int, rows: int) -> int:
        """Return the time of the head for `rows` rows that all want logits."""
        key = (self.kinds[stage], rows)
        found = self._heads_ns.get(key)
        if found is None:
            per_gib = self._in_service(stage) * self.instance.hosts[stage].speed.head_ns(rows)
            found = self._heads_ns[key] = round(per_gib * self.instance.model.head_bytes / GIB)
        return found

    def _in_service(self, stage: int) -> float:
        return self.instance.hosts[stage].speed.in_service

    def raw_ns(self, stage: int, start: int, end: int, rows: int, head_rows: int) -> int:
        """Predict a step of exactly `rows` rows, of which `head_rows` want logits, with the host's work around it."""
        before = self.layers_ns(stage, rows)
        head = self.head_ns(stage, head_rows) if end == self.n_layers and head_rows else 0
        return HOST_STEP_NS + round(self.instance.hosts[stage].speed.step_ns) + before[end] - before[start] + head

    def step_ns(self, stage: int, start: int, end: int, rows: int) -> int:
        """Predict a step of `rows` decode rows, padded where more rows cost less; 0 for no rows."""
        if not rows:
            return 0
        key = (stage, start, end, rows)
        found = self._steps_ns.get(key)
        if found is None:
            found = min(self.raw_ns(stage, start, end, padded, padded) for padded in self.padded(rows))
            self._steps_ns[key] = found
        return found

    def padded(self, rows: int) -> range:
        """Return the row counts that a step of `rows` rows may be padded to; rows with cells of their own are not."""
        if self.instance.load.kv_layout == "per-lane":
            return range(rows, rows + 1)
        return range(rows, max(rows, min(rows + PAD_SEARCH_ROWS, self.instance.load.max_rows)) + 1)

    def prefill_ns(self, stage: int, start: int, end: int, rows: int) -> int:
        """Predict a step of `rows` rows of one prompt."""
        return self.raw_ns(stage, start, end, rows, 1)

    def stage_cost(self, stage: int, start: int, end: int) -> StageCost:
        """Return the curves that the stage would measure, as the coordinator reads them."""
        key = (stage, start, end)
        found = self._stages.get(key)
        if found is None:
            found = self._stages[key] = self._stage_cost(stage, start, end)
        return found

    def _stage_cost(self, stage: int, start: int, end: int) -> StageCost:
        rows_max, host = self.instance.load.max_rows, self.instance.hosts[stage]
        ladder = sorted({rows for rows in ROWS if rows <= rows_max} | {1})
        return StageCost(
            CostCurve((rows, self.raw_ns(stage, start, end, rows, rows)) for rows in ladder),
            CostCurve((rows, self.prefill_ns(stage, start, end, rows)) for rows in ladder),
            rows_max,
            is_per_lane=self.instance.load.kv_layout == "per-lane",
            device=self.devices[stage],
            shares_host=[other.machine for other in self.instance.hosts].count(host.machine) > 1,
            runs_ahead=host.runs_ahead,
        )


def candidates(n_streams: int, n_stages: int, rows_max: int) -> Iterator[Grouping]:
    """Yield every (flights, rows) worth looking at: none with more rows than streams divided evenly have.

    Streams may divide in any way over flights with room to spare, so those are no better than even ones.
    """
    most = min(n_streams, rows_max)
    groups_max = max(math.ceil(n_streams / rows_max), min(n_streams, GROUPS_MAX_PER_STAGE * n_stages))
    sizes = {*range(1, min(most, ROWS_ONE_BY_ONE) + 1), *range(ROWS_ONE_BY_ONE, most, 16), most}
    sizes |= {math.ceil(n_streams / n_groups) for n_groups in range(1, groups_max + 1)}
    found = [
        (n_groups, rows)
        for rows in sizes
        if rows <= most
        for n_groups in range(1, min(math.ceil(n_streams / rows), groups_max) + 1)
        if rows <= math.ceil(n_streams / n_groups)
    ]
    yield from sorted(set(found))


class Around:
    """How busy everything but the stages is with the flights of one cycle."""

    def __init__(self, instance: Instance, flights: Flights, edges: Sequence[tuple[int, int]] = ()) -> None:
        """`edges`: as in link_bytes."""
        self.instance = instance
        self.n_full, self.rows, self.rest = flights
        self.n_tokens = self.n_full * self.rows + self.rest
        full = instance.link_bytes(self.rows, edges)
        rest = instance.link_bytes(self.rest, edges) if self.rest else None
        self.links_ns = tuple(
            self.n_full * link.transfer_ns(full[at]) + (link.transfer_ns(rest[at]) if rest else 0)
            for at, link in enumerate(instance.links)
        )
        self.coordinator_ns = coordinator_ns(flights)
        self.least_ns = max(*self.links_ns, self.coordinator_ns)
        """Of a cycle, however quick the stages are."""
        self.ways_ns = COORDINATOR_FLIGHT_NS + COORDINATOR_TOKEN_NS
        """Of a full flight on all links and in the coordinator."""
        self.ways_ns += sum(link.one_way_ns(full[at]) for at, link in enumerate(instance.links))

    def crowds_ns(self, works_ns: Sequence[float], crowded: Sequence[Machine]) -> dict[Machine, int]:
        """Return how long the cores of machines with too many threads work, given their stages' work."""
        hosts = self.instance.hosts
        return {
            machine: crowd_ns(
                self.idle_crowd_ns(machine)
                + sum(
                    host.cores_used * ns for host, ns in zip(hosts, works_ns, strict=True) if host.machine == machine
                ),
                machine.cores,
            )
            for machine in crowded
        }

    def idle_crowd_ns(self, machine: Machine) -> int:
        """Return a machine's thread-nanoseconds in a cycle outside its stages: the coordinator's, where it runs."""
        return self.coordinator_ns if machine == self.instance.coordinator else 0


class Cycle(Around):
    """One grouping on one instance: turns stage times into the rate of a split."""

    def __init__(self, costs: Costs, n_streams: int, grouping: Grouping) -> None:
        n_full, rest = flights_of(n_streams, *grouping)
        super().__init__(costs.instance, (n_full, grouping[1], rest))
        self.costs = costs

    def work_ns(self, stage: int, start: int, end: int) -> int:
        """Return a stage's work in one cycle."""
        full = self.costs.step_ns(stage, start, end, self.rows)
        return self.n_full * full + self.costs.step_ns(stage, start, end, self.rest)

    def way_ns(self, stage: int, start: int, end: int) -> int:
        """Return the time of a full flight in a stage."""
        return self.costs.step_ns(stage, start, end, self.rows)

    def rate(self, work_ns: float, crowd_ns: float, way_ns: float) -> float:
        """Return tokens per nanosecond from the busiest stage's work, the busiest cores', and a flight's way."""
        work_ns = joined(max(work_ns, self.least_ns), crowd_ns, CROWD_SHARPNESS)
        return self.n_tokens / joined(work_ns, way_ns + self.ways_ns)

    def of_split(self, edges: Sequence[tuple[int, int]]) -> float:
        """Return the rate of a whole split, tokens per nanosecond."""
        works = [self.work_ns(stage, *edge) for stage, edge in enumerate(edges)]
        way = sum(self.way_ns(stage, *edge) for stage, edge in enumerate(edges))
        return self.rate(
            self.busiest_ns(works), max(self.crowds_ns(works, self.costs.crowded).values(), default=0), way
        )

    def busiest_ns(self, works: Sequence[int]) -> int:
        """Return the work of the busiest device, given that of each stage."""
        return max(devices_ns(self.costs.devices, works).values())

    def least_rest_ns(self) -> list[int]:
        """Return a bound of the way through the layers from each layer on: all on the quickest host."""
        costs = self.costs
        befores = [costs.layers_ns(stage, rows) for stage in set(costs.kinds) for rows in costs.padded(self.rows)]
        each = [min(before[at + 1] - before[at] for before in befores) for at in range(costs.n_layers)]
        return [*itertools.accumulate(reversed(each), initial=0)][::-1]

    def rate_bound(self) -> float:
        """Return a rate that no split exceeds: layers are handed out like sand, to all cores at once.

        A machine takes most per time if its stages that do most with a core get its cores first.
        """
        per_machine: dict[Machine, list[tuple[float, int]]] = {}
        for stage, host in enumerate(self.costs.instance.hosts):
            spent_ns = max(1, self.n_full * self._whole_ns(stage, self.rows) + self._whole_ns(stage, self.rest))
            per_machine.setdefault(host.machine, []).append((1 / spent_ns / host.cores_used, host.cores_used))
        share = 0.0  # of a model's work per nanosecond
        for machine, stages in per_machine.items():
            cores = machine.cores if machine in self.costs.crowded else math.inf
            for per_core, used in sorted(stages, reverse=True):
                share += per_core * min(used, cores)
                cores -= min(used, cores)
        return self.rate(1 / share, 0.0, self.least_rest_ns()[0])

    def _whole_ns(self, stage: int, rows: int) -> int:
        """Return the least time of all layers on one host."""
        return min(self.costs.layers_ns(stage, padded)[-1] for padded in self.costs.padded(rows)) if rows else 0


def devices_ns(devices: Sequence[int], works_ns: Sequence[int]) -> dict[int, int]:
    """Return the work of each device, given the stages' devices and work: stages on one device take turns."""
    found: dict[int, int] = {}
    for device, work_ns in zip(devices, works_ns, strict=True):
        found[device] = found.get(device, 0) + work_ns
    return found


def coordinator_ns(flights: Flights) -> int:
    """Return the coordinator's work in one cycle."""
    n_full, rows, rest = flights
    return (n_full + (rest > 0)) * COORDINATOR_FLIGHT_NS + (n_full * rows + rest) * COORDINATOR_TOKEN_NS


def crowd_ns(spent_ns: float, cores: int) -> int:
    """Return how long a machine's cores work, given thread-nanoseconds."""
    return math.ceil(spent_ns / cores)
