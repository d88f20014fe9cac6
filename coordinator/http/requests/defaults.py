"""Sampling options for requests that do not name them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from msgspec import structs

from relayline.coordinator.http.requests.bodies import GenerationBody
from relayline.wire.common.sampler_fields import FIELDS

Options = Iterable[tuple[str, int | float]]
Body = TypeVar("Body", bound=GenerationBody)

_NAMES = {name: (field.name, *field.aliases) for field in FIELDS for name in (field.name, *field.aliases)}


def with_defaults(body: Body, options: Options) -> Body:
    """Return a body that has each option: its own value, or the one given here."""
    missing = {
        name: value for name, value in options if all(getattr(body, each) is None for each in _NAMES.get(name, (name,)))
    }
    return structs.replace(body, **missing) if missing else body


def with_recommended(body: Body, options: Options) -> Body:
    """Do the same with what the model recommends. A greedy request takes nothing from it, so that it stays greedy."""
    is_greedy = body.temperature is not None and body.temperature <= 0
    return body if is_greedy else with_defaults(body, options)
