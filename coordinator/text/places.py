"""The places that parts of a chat's message had in the body of another dialect: errors about a part name its place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

PLACE = "place"  # an extra key of a part, such as "input[0].content[1].image_url"
_PLACE = re.compile(r"[a-z_.0-9\[\]]{1,100}")


def place_of(part: Any) -> str:
    """Return the place that a part names, "" for none, or for text that is not a place."""
    place = part.get(PLACE) if isinstance(part, Mapping) else None
    return place if isinstance(place, str) and _PLACE.fullmatch(place) else ""
