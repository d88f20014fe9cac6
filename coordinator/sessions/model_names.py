"""Names of the served models. Pure."""

from __future__ import annotations

LATEST = ":latest"  # what Ollama's clients put behind a name that has no tag


def without_latest(name: str) -> str:
    """Return a model's name as it is served where it came with Ollama's usual tag."""
    return name.removesuffix(LATEST)
