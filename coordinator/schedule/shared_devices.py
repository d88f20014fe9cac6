"""Finds stages that compute on one device, so that one waits while the other computes. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """The place where a stage computes."""

    host: str
    """Of its host and of no other; empty: not known, and then it shares nothing."""
    gpus: Mapping[str, str]
    """Names of its GPUs by ids that are unique in the host; none: it computes on the processor."""
    cores: frozenset[int] = frozenset()
    """That it may run on."""
    n_threads: int = 1

    def shares(self, other: Place) -> bool:
        """Whether the two cannot compute at once at full speed.

        On processors that is where their threads together are more than the cores that they may run on.
        """
        if not self.host or self.host != other.host or bool(self.gpus) != bool(other.gpus):
            return False
        if self.gpus:
            return not self.gpus.keys().isdisjoint(other.gpus)
        has_common = not self.cores.isdisjoint(other.cores)
        return has_common and self.n_threads + other.n_threads > len(self.cores | other.cores)


def device_numbers(places: Sequence[Place]) -> list[int]:
    """Return a number for each stage; stages that share, directly or through a third one, have the same."""
    numbers = list(range(len(places)))
    for at, place in enumerate(places):
        for before in range(at):
            if numbers[before] != numbers[at] and place.shares(places[before]):
                old, new = numbers[at], numbers[before]
                numbers = [new if number == old else number for number in numbers]
    return numbers


def sharing(places: Sequence[Place], names: Sequence[str]) -> Iterator[str]:
    """Yield a line for each device that several stages share. `names`: of the stages."""
    numbers = device_numbers(places)
    for number in dict.fromkeys(numbers):
        mates = [at for at, each in enumerate(numbers) if each == number]
        if len(mates) > 1:
            yield _line([names[at] for at in mates], [places[at] for at in mates])


def _line(stages: Sequence[str], places: Sequence[Place]) -> str:
    """Say that several stages on one device only cost."""
    named = f"stages {', '.join(stages[:-1])} and {stages[-1]}"
    if not places[0].gpus:
        return (
            f"{named} share cores and have more threads than there are: they take turns; give them fewer threads, "
            "or make one stage of them"
        )
    return f"{named} share {_common(places)}: they take turns, so one stage in their place would be faster"


def _common(places: Sequence[Place]) -> str:
    known = {name for place in places for gpu, name in place.gpus.items()
             if sum(gpu in other.gpus for other in places) > 1}  # fmt: skip
    return ", ".join(sorted(known))
