"""Versions of installed packages, each read once: every process asks several times, and reading one takes 10 ms."""

from __future__ import annotations

import functools


@functools.cache
def version_of(package: str = "relayline") -> str:
    """Return the version of an installed package. Raises importlib.metadata.PackageNotFoundError."""
    import importlib.metadata  # takes a third of the start of a small command

    return importlib.metadata.version(package)
