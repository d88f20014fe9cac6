"""Binds each stage to cores: one machine's cores are divided among its stages, each with its own share.

The threads of an unbound stage are woken on its neighbours' cores, which takes an interrupt where a switch on its own
core would do. A native step migrates with them. Kept to its share, a hop between two stages takes 0.7 of the time, and
streams make about 3 % more tokens (docs/results/host.md).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from relayline.wire.common.errors import UsageError
from relayline.wire.common.usable_cores import computing_cores, usable_cores

Cores = tuple[int, ...]

CORE_MAX = 8_191  # the largest number of a core that Linux is built for
LIST = r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*"  # as Linux, Docker and taskset write cores: 0-3,8
SYSTEM = Path("/sys/devices/system")


def read_cores(text: str) -> Cores:
    """Return the cores of a list such as 0-3,8, in order. Raises ValueError."""
    if re.fullmatch(LIST, text) is None:
        raise ValueError(f"{text!r} is no list of cores such as 0-3,8")
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) > CORE_MAX or int(last or first) < int(first):
            raise ValueError(f"{part} in {text!r} is no range of cores up to {CORE_MAX}")
        found |= {*range(int(first), int(last or first) + 1)}
    return tuple(sorted(found))


def write_cores(cores: Iterable[int]) -> str:
    """Return cores as `read_cores` reads them."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][1] + 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def keep_to(cores: Cores) -> None:
    """Keep this process to these cores, with the threads that libraries have started already. Raises UsageError."""
    bind = getattr(os, "sched_setaffinity", None)
    if bind is None:
        raise UsageError("--cores: this system keeps no process to cores; leave it out")
    allowed = usable_cores()
    if missing := set(cores) - set(allowed):
        raise UsageError(f"--cores {write_cores(missing)}: this process may run on {write_cores(allowed)}")
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            bind(int(thread), cores)


def shares(n_threads: Sequence[int]) -> list[Cores] | None:
    """Return the cores of each of this machine's stages, from their threads; None: they run on any.

    They do where there are fewer cores than threads, and where the system does not say where its cores are. Cores that
    are much slower than others have no part, unless there are more threads than others.
    """
    fast, usable = computing_cores(), usable_cores()
    places = _places(fast if sum(n_threads) <= len(fast) else usable)
    return None if places is None else divided(in_order(places), n_threads)


def in_order(places: dict[int, tuple[int, int]]) -> list[int]:
    """Return cores in the order in which they are best kept together; `places`: their memory node, and their thread
    number within a core.

    Nodes first, since weights are in the memory of one. Within a node all first threads of cores come before the second
    ones. So a stage that computes alone has whole cores, and one next to others shares them, as it would anyway.
    """
    return sorted(places, key=lambda core: (*places[core], core))


def divided(cores: Sequence[int], n_threads: Sequence[int]) -> list[Cores] | None:
    """Divide cores in proportion to threads, at least as many each as it has threads; None where they are too few.

    Pure. Left-over cores go to those whose part of them comes first to a whole core.
    """
    total = sum(n_threads)
    if not 0 < total <= len(cores) or min(n_threads) < 1:
        return None
    ends = [sum(n_threads[: index + 1]) * len(cores) // total for index in range(len(n_threads))]
    return [tuple(cores[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


def _places(cores: Iterable[int]) -> dict[int, tuple[int, int]] | None:
    """Return of each core its memory node and its place among the threads of its physical core."""
    try:
        nodes = {
            core: int(path.parent.name.removeprefix("node"))
            for path in SYSTEM.glob("node/node[0-9]*/cpulist")
            if (listed := path.read_text().strip())  # a node may have memory alone
            for core in read_cores(listed)
        }
        found = {}
        for core in cores:
            siblings = SYSTEM / "cpu" / f"cpu{core}" / "topology" / "thread_siblings_list"
            found[core] = (nodes.get(core, 0), read_cores(siblings.read_text().strip()).index(core))
    except (OSError, ValueError):
        return None
    return found
