"""Rendered files: YAML documents with comments, and the header that says where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relayline.deploy.manifest.dump import dump_yaml

Mapping = dict[str, Any]


def comment(text: str) -> str:
    """Return text as YAML comment lines."""
    return "".join(f"# {line}".rstrip() + "\n" for line in text.strip("\n").splitlines())


def header(target: str, name: str, kind: str = "Pipeline") -> str:
    """Return the first line of every rendered file."""
    return comment(f"{kind} {name!r}, made by `relayline render --target {target}`; render again rather than edit.")


def yaml_file(
    target: str, name: str, text: str, documents: Sequence[tuple[str, Mapping]], kind: str = "Pipeline"
) -> str:
    """Return a file of documents, each below its comment (which may be empty); `text` explains the file."""
    parts = [header(target, name, kind) + (comment(text) if text else "")]
    parts += [(comment(about) if about else "") + dump_yaml(document) for about, document in documents]
    return parts[0] + "---\n".join(parts[1:]) if len(documents) == 1 else "---\n".join(parts)


def without_none(mapping: Mapping) -> Mapping:
    """Leave out keys that have no value, and empty mappings and lists."""
    return {key: value for key, value in mapping.items() if value is not None and value != {} and value != []}
