"""The keys of the manifest and their places: read from the model itself, for messages."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator

from relayline.deploy.manifest.scalars import Part

LISTS = ("stages", "pipelines", "replicas")  # of mappings


def child_type(path: tuple[str | int, ...], root: type[Part]) -> type[Part] | None:
    """Return the mapping type at a path of keys and list places; None where there is none (labels, scalars)."""
    found: type[Part] | None = root
    for part in path:
        if isinstance(part, int):
            continue
        found = _children(found).get(part) if found is not None else None
    return found


def field_names(part: type[Part] | None) -> list[str]:
    """Return the keys of a mapping in their order."""
    return [] if part is None else [field.alias or name for name, field in part.model_fields.items()]


def places_of(key: str, root: type[Part]) -> list[str]:
    """Return the mappings that know `key`, as dotted paths from the top."""
    return [path or "the top level" for path, part in _parts(root) if key in field_names(part)]


def _children(part: type[Part]) -> dict[str, type[Part]]:
    """Return the keys whose values are mappings or lists of mappings, with the type of these."""
    children = {}
    for name, field in part.model_fields.items():
        for found in _parts_in(field.annotation):
            children[field.alias or name] = found
    return children


def _parts_in(annotation: object) -> Iterator[type[Part]]:
    if isinstance(annotation, type) and issubclass(annotation, Part):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _parts_in(argument)


@functools.cache
def _parts(root: type[Part]) -> tuple[tuple[str, type[Part]], ...]:
    found: list[tuple[str, type[Part]]] = [("", root)]
    for path, part in found:
        for key, child in _children(part).items():
            is_list = key in LISTS
            found.append((f"{path}.{key}".lstrip(".") + ("[]" if is_list else ""), child))
    return tuple(found)
