"""Search for the split with the best predicted rate. Pure.

The best split makes the most tokens per second with `Load.streams` running streams. What it makes depends on their
groups, and those are the coordinator's to choose (see rates). So the search has two parts.

The first is exact: of all splits and groupings, it finds those that reach most. For a given grouping the rate falls
with three numbers: the work of the busiest device, the work of the busiest cores, and the time of a flight's way.
Labels of these three find the best split (see frontier). A label also holds the work of devices, and the used memory of
machines and GPUs, that several stages share. A rate already found bounds the work of every stage, so later groupings
have few stage ends to look at. A quick climb finds the first such rate. Among equal rates the search takes the least
sum of the stages' squared work, which is fast and even.

The second part starts from there, and takes the groups that the coordinator would choose. Each cut moves to the next
layer for as long as that makes the pipeline faster. So no such move would make the plan better. An exact search under
the coordinator's choice would have to plan groups for every split, at about a millisecond each.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Iterator, Sequence

from relayline.coordinator.model.cuts import ranges
from relayline.coordinator.planner.climb import climbed, shifts, transfers
from relayline.coordinator.planner.costs import Costs, Cycle, Edges, candidates, crowd_ns
from relayline.coordinator.planner.frontier import Effort, Label, TooLargeError, frontier
from relayline.coordinator.planner.instance import Instance, Machine, Offload
from relayline.coordinator.planner.memory import (
    Pool,
    StageMemory,
    pool_usable_bytes,
    pools_of,
    stage_memory,
    usable_bytes,
)
from relayline.coordinator.planner.rates import split_rates

CLIMB_CYCLES = 12  # groupings, those with the best bounds, that a first, quick search looks at
CLIMB_TRIES_MAX = 4_000  # splits that it looks at with each
SHIFTS_MAX = 400  # splits whose groups are planned as the coordinator would: a millisecond or more each
COMPARISONS_MAX = 3_000_000  # some seconds
SAME = 1 - 1e-12  # rates this close are equal: floating point


class Room:
    """The layers that stages may hold: legal ones that fit the memory of stage, machine and GPU."""

    def __init__(self, instance: Instance, *, ignore_memory: bool = False) -> None:
        self.instance = instance
        self.limits = tuple(None if ignore_memory else usable_bytes(host.memory_bytes) for host in instance.hosts)
        self.pools: tuple[tuple[Pool, int], ...] = () if ignore_memory else self._limited_pools()
        """Of each machine and GPU whose memory is known, what its stages may use together."""
        self.last_stage = {pool: stage for stage, host in enumerate(instance.hosts) for pool in pools_of(host)}
        limited = [pool for pool, _ in self.pools]
        self._slots_of = [
            [(limited.index(pool), pool) for pool in pools_of(host) if pool in limited] for host in instance.hosts
        ]
        offloads: list[Offload | None] = list(dict.fromkeys(host.offload for host in instance.hosts))
        self._kinds = [offloads.index(host.offload) for host in instance.hosts]
        self._needs: dict[tuple[int, int, int], StageMemory] = {}

    def _limited_pools(self) -> tuple[tuple[Pool, int], ...]:
        pools = dict.fromkeys(pool for host in self.instance.hosts for pool in pools_of(host))
        usable = ((pool, pool_usable_bytes(pool)) for pool in pools)
        return tuple((pool, size) for pool, size in usable if size is not None)

    def take(self, slots: list[float], first: int, stage: int, start: int, end: int) -> bool:
        """Add a stage's memory to the slots of its machine and GPU, slots[first:] being those; False if it does not
        fit.

        After a pool's last stage its slot is 0 again, because later stages do not share its memory.
        """
        for at, pool in self._slots_of[stage]:
            slots[first + at] += self.need_of(pool, stage, start, end)
            if slots[first + at] > self.pools[at][1]:
                return False
            if stage == self.last_stage[pool]:
                slots[first + at] = 0
        return True

    def some_cuts(self) -> tuple[int, ...] | None:
        """Return the cuts of any legal split that fits, or None."""

        def extend(label: Label, stage: int, start: int, end: int) -> Label | None:
            slots = list(label)
            return tuple(slots) if self.fits(stage, start, end) and self.take(slots, 0, stage, start, end) else None

        first = (0,) * len(self.pools)
        found = frontier(len(self.instance.hosts), self.instance.model.n_layers, first, self.ends, extend)
        return found[0][1] if found else None

    def need(self, stage: int, start: int, end: int) -> StageMemory:
        """Return the memory of a stage with these layers."""
        key = (self._kinds[stage], start, end)
        if key not in self._needs:
            offload = self.instance.hosts[stage].offload
            self._needs[key] = stage_memory(self.instance.model, self.instance.load, start, end, offload)
        return self._needs[key]

    def need_of(self, pool: Pool, stage: int, start: int, end: int) -> int:
        """Return what of it is in the memory of a machine, or of a GPU."""
        need = self.need(stage, start, end)
        if isinstance(pool, Machine):
            return need.total_bytes
        return 0 if need.gpu is None else need.gpu.total_bytes

    def ends(self, stage: int, start: int) -> Iterator[int]:
        """Yield the ends that are legal for a stage that begins here, ascending, with layers left for later stages."""
        host, model = self.instance.hosts[stage], self.instance.model
        left = len(self.instance.hosts) - stage - 1
        if host.layers is not None:
            if host.layers[0] == start and self._leaves(host.layers[1], left) and model.is_allowed(*host.layers):
                yield host.layers[1]
            return
        first, last = (start + 1, model.n_layers - left) if left else (model.n_layers, model.n_layers)
        for end in range(max(first, start + 1), last + 1):
            if model.is_allowed(start, end):
                yield end

    def _leaves(self, end: int, left: int) -> bool:
        n_layers = self.instance.model.n_layers
        return end <= n_layers - left if left else end == n_layers

    def holds(self, edges: Edges) -> bool:
        """Tell whether a split is legal and fits."""
        slots: list[float] = [0] * len(self.pools)
        for stage, (start, end) in enumerate(edges):
            host = self.instance.hosts[stage]
            if host.layers not in (None, (start, end)) or not self.instance.model.is_allowed(start, end):
                return False
            if not self.fits(stage, start, end) or not self.take(slots, 0, stage, start, end):
                return False
        return True

    def fits(self, stage: int, start: int, end: int) -> bool:
        """Tell whether the stage's own limit allows these layers."""
        limit = self.limits[stage]
        return limit is None or self.need(stage, start, end).limited_bytes <= limit


def _index_of(machine: Machine, machines: Sequence[Machine]) -> int | None:
    return machines.index(machine) if machine in machines else None


@dataclasses.dataclass(frozen=True, slots=True)
class Best:
    """The best split and its rate."""

    edges: Edges
    rate: float
    """Tokens per nanosecond with the groups that the coordinator would choose, as every plan shows it."""
    reachable: float
    """The same split's with the best grouping, which the coordinator may not choose."""
    is_exact: bool = True
    """False only where a search would have taken too long, see COMPARISONS_MAX and SHIFTS_MAX."""


def best_split(instance: Instance) -> Best | None:
    """Return the best split, or None if no legal split fits the memory."""
    costs, room, n_streams = Costs(instance), Room(instance), instance.load.streams
    reaching = most_reaching(costs, room)
    if reaching is None:
        return None

    def rate(edges: Edges) -> float:
        return split_rates(costs, edges).rate(n_streams)

    found = climbed(reaching.edges, rate, [lambda edges: shifts(edges, room.holds)], tries_max=SHIFTS_MAX)
    reachable = split_rates(costs, found.edges).reachable(n_streams)
    return Best(found.edges, found.rate, reachable, reaching.is_exact and found.is_done)


@dataclasses.dataclass(frozen=True, slots=True)
class Reaching:
    """The split with the highest rate under the best grouping."""

    edges: Edges
    is_exact: bool


def most_reaching(costs: Costs, room: Room) -> Reaching | None:
    """Return the split that reaches most with any grouping; None if no legal split fits the memory."""
    instance = costs.instance
    cuts, n_streams = room.some_cuts(), instance.load.streams
    if cuts is None:
        return None
    groupings = candidates(n_streams, len(instance.hosts), instance.load.max_rows)
    cycles = [Cycle(costs, n_streams, grouping) for grouping in groupings]
    bounded = sorted(((cycle.rate_bound(), cycle) for cycle in cycles), key=lambda pair: -pair[0])
    found = _climbed(bounded[:CLIMB_CYCLES], room, cuts)
    effort = Effort(COMPARISONS_MAX)
    try:
        found = _search(bounded, room, found, effort)
        return Reaching(_most_even(found, room, effort), True)
    except TooLargeError:
        return Reaching(ranges(costs.n_layers, found.cuts), False)


def _climbed(bounded: Sequence[tuple[float, Cycle]], room: Room, cuts: tuple[int, ...]) -> _Found:
    """Return the best split that a climb finds with these groupings. The better it is, the quicker the exact search."""
    best, n_layers = _Found(cuts=cuts), room.instance.model.n_layers
    sizes = [n_layers >> halved for halved in range(1, n_layers.bit_length())]
    kinds = [functools.partial(transfers, n_layers=size, is_possible=room.holds) for size in sizes]
    for bound, cycle in bounded:
        if bound < best.rate * SAME:
            break
        end = climbed(ranges(n_layers, best.cuts), cycle.of_split, kinds, tries_max=CLIMB_TRIES_MAX)
        if end.rate * SAME > best.rate:
            best = _Found(end.rate, tuple(start for start, _ in end.edges[1:]), (cycle,))
    return best


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """The best so far."""

    rate: float = 0.0
    cuts: tuple[int, ...] = ()
    winners: tuple[Cycle, ...] = ()  # groupings that reach the rate


def _search(bounded: Sequence[tuple[float, Cycle]], room: Room, best: _Found, effort: Effort) -> _Found:
    """Return the best of these groupings and of the earlier best."""
    for bound, cycle in bounded:
        if bound < best.rate * SAME:
            break
        labels = _labels(cycle, room, best.rate * SAME, effort=effort)
        rate, cuts = max(((cycle.rate(*label[:3]), cuts) for label, cuts in labels), default=(0.0, ()))
        if rate * SAME > best.rate:
            best = _Found(rate, cuts, (cycle,))
        elif rate and rate >= best.rate * SAME:
            best = dataclasses.replace(best, winners=(*best.winners, cycle))
    return best


def _most_even(best: _Found, room: Room, effort: Effort) -> Edges:
    """Of the splits with the best rate, return the quickest and most even. Raises TooLargeError."""
    found: list[tuple[float, Edges]] = []
    for cycle in dict.fromkeys(best.winners):
        for label, cuts in _labels(cycle, room, best.rate * SAME, breaks_ties=True, effort=effort):
            if cycle.rate(*label[:3]) >= best.rate * SAME:
                found.append((label[-1] / cycle.n_tokens**2, ranges(cycle.costs.n_layers, cuts)))
    return min(found)[1]


def _labels(
    cycle: Cycle,
    room: Room,
    rate: float,
    *,
    breaks_ties: bool = False,
    effort: Effort,
) -> list[tuple[Label, tuple[int, ...]]]:
    """Return the splits worth having with one grouping: (busiest device, busiest cores, way, ...) and cuts.

    Splits that cannot reach `rate` may be left out. With breaks_ties the last item is the sum of the squared work.
    """
    walk = _Walk(cycle, room, rate, breaks_ties)
    crowds = tuple(cycle.idle_crowd_ns(machine) for machine in walk.crowded)
    first = (0, 0, 0, *crowds, *(0,) * (len(walk.devices) + len(room.pools) + (1 if breaks_ties else 0)))
    if walk.earliest is None:
        return []
    return frontier(len(room.instance.hosts), cycle.costs.n_layers, first, walk.ends, walk.extend, effort)


class _Walk:
    """Labels of one grouping.

    (busiest device, busiest cores, way, thread-ns of each crowded machine, ns of each shared device, bytes of each
    pool of memory).
    """

    def __init__(self, cycle: Cycle, room: Room, rate: float, breaks_ties: bool) -> None:
        self.cycle, self.room, self.breaks_ties = cycle, room, breaks_ties
        self.hosts = room.instance.hosts
        self.crowded = cycle.costs.crowded
        self.crowd_of = [_index_of(host.machine, self.crowded) for host in self.hosts]
        self.device_of = numbers = cycle.costs.devices
        self.devices = [each for each in dict.fromkeys(numbers) if numbers.count(each) > 1]
        self.last_on = {number: stage for stage, number in enumerate(numbers)}
        self.cycle_max_ns = cycle.n_tokens / rate if rate else float("inf")
        self.last_stage = room.last_stage
        self.rest_ns = cycle.least_rest_ns()
        self.earliest = self._earliest_starts()

    def _earliest_starts(self) -> list[int] | None:
        """Return for each stage where it may begin at the earliest so that the rest can keep up; None if it cannot.

        A relaxation: every stage from the last backwards takes as many layers as its work and memory allow.
        """
        end = self.cycle.costs.n_layers
        earliest = [0] * len(self.hosts) + [end]
        for stage in range(len(self.hosts) - 1, -1, -1):
            at = end
            end = bisect.bisect_left(range(at), True, key=lambda start: self._is_possible(stage, start, at))
            earliest[stage] = end
        return None if end > 0 else earliest

    def _is_possible(self, stage: int, start: int, end: int) -> bool:
        return self.cycle.work_ns(stage, start, end) <= self.cycle_max_ns and self.room.fits(stage, start, end)

    def ends(self, stage: int, start: int) -> Iterator[int]:
        """Yield the ends of a stage that are legal, keep up and fit."""
        assert self.earliest is not None
        for end in self.room.ends(stage, start):
            if end < self.earliest[stage + 1]:
                continue
            if self.cycle.work_ns(stage, start, end) > self.cycle_max_ns:
                return  # nor does anything longer
            if self.room.fits(stage, start, end):  # a longer one may fit: its last layers, on the GPU, may be smaller
                yield end

    def extend(self, label: Label, stage: int, start: int, end: int) -> Label | None:
        """Add a stage to a label."""
        cycle, host = self.cycle, self.hosts[stage]
        work = cycle.work_ns(stage, start, end)
        busiest, crowd, way = max(label[0], work), label[1], label[2] + cycle.way_ns(stage, start, end)
        n_before = len(self.crowded) + len(self.devices)
        slots = list(label[3 : 3 + n_before + len(self.room.pools)])
        at = self.crowd_of[stage]
        if at is not None:
            slots[at] += host.cores_used * work
            crowd = max(crowd, crowd_ns(slots[at], self.crowded[at].cores))
            if stage == self.last_stage[host.machine]:
                slots[at] = 0
        if (device := self.device_of[stage]) in self.devices:  # stages on one device take turns
            at = len(self.crowded) + self.devices.index(device)
            slots[at] += work
            busiest = max(busiest, slots[at])
            if stage == self.last_on[device]:
                slots[at] = 0
        if not self.room.take(slots, n_before, stage, start, end):
            return None
        least_way = way + self.rest_ns[end] + cycle.ways_ns
        if max(busiest, crowd, least_way) > self.cycle_max_ns:
            return None
        ties: Label = ()
        if self.breaks_ties:
            ties = (label[-1] + work * work,)
        return (busiest, crowd, way, *slots, *ties)
