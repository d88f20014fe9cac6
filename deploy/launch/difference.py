"""The differences between a manifest and the running pipeline, and those that can be applied while serving. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from relayline.coordinator.model.cuts import ranges
from relayline.deploy.launch.prepare import settled
from relayline.deploy.manifest import Manifest, Stage
from relayline.wire.common.texts import layer_range

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
    """What needs a new start."""
    added: tuple[Stage, ...] = ()
    """Stages that join the running pipeline."""
    spares: frozenset[str] = frozenset()
    """Names of those in `added` that are to be spares."""
    refusal: str = ""
    """Why a change of `others` cannot be made while serving, and what to change instead; empty where that is plain."""
    unlisted: tuple[str, ...] = ()
    """Names of stages that were added while it served and are not in the manifest: they stay until the next start."""


def difference(
    running: Manifest,
    wanted: Manifest,
    cuts: Cuts,
    n_layers: int,
    *,
    holders: Sequence[str] | None = None,
    known: Collection[str] = (),
) -> Difference:
    """Compare the settled manifest of the running pipeline with one that names its model by path.

    `cuts`: the present ones. Where `wanted` leaves layers to the planner they stay unchanged. `holders`: the stages
    that hold layers now, in layer order. `known`: stages, also those that have been added since the start.
    """
    old, new = [[stage.name for stage in manifest.members] for manifest in (running, wanted)]
    added = tuple(stage for stage in wanted.members if stage.name not in {*old, *known})
    spares = frozenset(stage.name for stage in added if stage in wanted.spares)
    unlisted = tuple(name for name in known if name not in {*old, *new})
    stages = Change("stages", ", ".join(old), ", ".join(new))
    if [name for name in new if name in old] != old or (added and _reaches(running) != _reaches(wanted)):
        return Difference((), cuts, (stages,))
    if refusal := _refused_beside_fixed(wanted, [stage.name for stage in added if stage.name not in spares]):
        return Difference((), cuts, (stages,), refusal=refusal)
    names, fixed_cuts = [stage.name for stage in wanted.stages], wanted.fixed_cuts()
    wanted = _without(wanted, set(new) - set(old))
    if names != list(holders or ()):  # else stages that were added have their layers by now
        names, fixed_cuts = [stage.name for stage in wanted.stages], wanted.fixed_cuts()
    others = _others(running, wanted)
    if holders is not None and names != list(holders):  # others have taken their places: there is nothing to compare
        return Difference((), cuts, others, added, spares, unlisted=unlisted)
    new_cuts = tuple(now if fixed is None else fixed for fixed, now in zip(fixed_cuts, cuts, strict=True))
    moved = _moved(names, cuts, new_cuts, n_layers)
    return Difference(moved, new_cuts, others, added, spares, unlisted=unlisted)


def _refused_beside_fixed(wanted: Manifest, sharing: Sequence[str]) -> str:
    """Return why stages cannot join a pipeline whose manifest fixes the layers of others; empty if it fixes none."""
    fixed = [stage.name for stage in wanted.stages if stage.layer_range is not None]
    return _fixed_text(", ".join(sharing), ", ".join(fixed)) if sharing and fixed else ""


def _others(running: Manifest, wanted: Manifest) -> tuple[Change, ...]:
    """Return what differs besides layers."""
    before, after = (_flat(_spec(each)) for each in (running, _settled_like(running, wanted)))
    for made in _MADE:
        key = ".".join(made)
        after.setdefault(key, before.get(key))
    return tuple(
        Change(key, before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.endswith("].layers")
    )


def _moved(names: Sequence[str], cuts: Cuts, new_cuts: Cuts, n_layers: int) -> tuple[Change, ...]:
    """Return the stages whose layers move between two cuts of a model."""
    held, wanted = ([list(edges) for edges in ranges(n_layers, each)] for each in (cuts, new_cuts))
    return tuple(
        Change(f"stages[{name}].layers", before, after)
        for name, before, after in zip(names, held, wanted, strict=True)
        if before != after
    )


def _fixed_text(sharing: str, fixed: str) -> str:
    """Return why stages cannot join a pipeline whose manifest fixes the layers of others, and what to change."""
    return (
        f"{sharing} would share all layers with the others, and the manifest fixes `layers` of {fixed}; leave these "
        f"out until {sharing} has joined, list it under `spares`"
    )


def _reaches(manifest: Manifest) -> tuple[bool, bool]:
    """Return how other hosts may join: whether any can, and whether with certificates."""
    return manifest.all_local, manifest.uses_tls


def _without(manifest: Manifest, names: Collection[str]) -> Manifest:
    """Return the manifest without these stages."""
    if not names:
        return manifest
    stages, spares = (
        [stage for stage in part if stage.name not in names] for part in (manifest.stages, manifest.spares)
    )
    spec = manifest.spec.model_copy(update={"stages": tuple(stages), "spares": tuple(spares)})
    return manifest.model_copy(update={"spec": spec}).with_directory(manifest.directory)


def _settled_like(running: Manifest, wanted: Manifest) -> Manifest:
    """Return the manifest with every choice made except layers, which are those of the running pipeline."""
    assert wanted.model_path is not None
    ranges = [stage.layer_range or (0, 1) for stage in running.stages]
    ranges += [(0, 1)] * (len(wanted.stages) - len(ranges))
    return settled(wanted, wanted.model_path, ranges[: len(wanted.stages)])


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
        elif key in ("stages", "spares") and isinstance(value, list):
            for stage in value:
                found |= _flat(stage, f"{key}[{stage['name']}]")
        else:
            found[place] = value
    return found


def _text(value: Any) -> str:
    return "nothing" if value is None else layer_range(*value) if _is_range(value) else str(value)


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(each, int) for each in value)
