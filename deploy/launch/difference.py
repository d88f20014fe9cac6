"""The differences between a manifest and the running pipeline, and those that can be applied while serving. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from relayline.deploy.launch.prepare import settled
from relayline.deploy.manifest import Manifest

Cuts = tuple[int, ...]

_MADE = (("wire", "tokenFile"), ("wire", "tls", "directory"))  # by the launcher where the manifest names none


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One value that differs; None where a side says nothing."""

    field: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.field}: {_text(self.before)} -> {_text(self.after)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """All that differs."""

    layers: tuple[Change, ...]
    """Stages whose layers move."""
    cuts: Cuts
    """The first layer of each stage but the first, as the manifest wants it."""
    others: tuple[Change, ...]
    """What takes a new start."""


def difference(running: Manifest, wanted: Manifest, cuts: Cuts, n_layers: int) -> Difference:
    """Compare the settled manifest of the running pipeline with one that names its model by path.

    `cuts`: the present ones. Where `wanted` leaves layers to the planner they stay unchanged.
    """
    names = [[stage.name for stage in manifest.stages] for manifest in (running, wanted)]
    if names[0] != names[1]:
        return Difference((), cuts, (Change("stages", ", ".join(names[0]), ", ".join(names[1])),))
    edges = (0, *cuts, n_layers)
    ranges = [(edges[at], edges[at + 1]) for at in range(len(edges) - 1)]
    assert wanted.model_path is not None
    before, after = (_flat(each) for each in (_spec(running), _spec(settled(wanted, wanted.model_path, ranges))))
    for made in _MADE:
        key = ".".join(made)
        after.setdefault(key, before.get(key))
    others = tuple(
        Change(key, before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.endswith("].layers")
    )
    new = tuple(now if said is None else said for said, now in zip(wanted.fixed_cuts(), cuts, strict=True))
    ends = (0, *new, n_layers)
    moved = tuple(
        Change(f"stages[{name}].layers", list(held), [ends[at], ends[at + 1]])
        for at, (name, held) in enumerate(zip(names[0], ranges, strict=True))
        if list(held) != [ends[at], ends[at + 1]]
    )
    return Difference(moved, new, others)


def _spec(manifest: Manifest) -> dict[str, Any]:
    spec: dict[str, Any] = manifest.model_dump(mode="json", by_alias=True, exclude_none=True)["spec"]
    return spec


def _flat(part: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Return values by dotted place; stages by name."""
    found: dict[str, Any] = {}
    for key, value in part.items():
        place = f"{where}.{key}" if where else key
        if isinstance(value, dict):
            found |= _flat(value, place)
        elif key == "stages" and isinstance(value, list):
            for stage in value:
                found |= _flat(stage, f"stages[{stage['name']}]")
        else:
            found[place] = value
    return found


def _text(value: Any) -> str:
    return "nothing" if value is None else f"{value[0]}-{value[1] - 1}" if _is_range(value) else str(value)


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(each, int) for each in value)
