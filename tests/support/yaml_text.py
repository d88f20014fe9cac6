"""Reads YAML by libyaml where PyYAML was built with it, many times as fast as by PyYAML itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(text: str) -> Any:
    return yaml.load(text, _LOADER)


def read_all(text: str) -> Iterator[Any]:
    """Every document of a text."""
    return yaml.load_all(text, _LOADER)
