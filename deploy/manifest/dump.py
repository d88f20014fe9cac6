"""Writing a manifest as YAML that reads back as the same manifest."""

from __future__ import annotations

from typing import Any

import yaml

from relayline.deploy.manifest.model import Manifest
from relayline.deploy.manifest.text import is_string

_OTHER_BREAKS = "\r\x85\u2028\u2029"  # further line breaks of YAML 1.1


class BlockDumper(yaml.SafeDumper):
    """Block style, indented lists, no anchors, and quotes around every string that YAML 1.1 or 1.2 could misread."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write repeated values out: a file for people holds no anchors."""
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent lists below their key."""
        super().increase_indent(flow, False)


def _represent_string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if any(char in text for char in _OTHER_BREAKS):  # which only double quotes keep
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
    if "\n" in text:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_string(text) else '"')


BlockDumper.add_representer(str, _represent_string)


def dump_yaml(value: Any) -> str:
    """Return plain values (dict, list, str, int, float, bool, None) as YAML, keys in their order."""
    return yaml.dump(
        value, Dumper=BlockDumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=False
    )


def dump_manifest(manifest: Manifest) -> str:
    """Return the manifest with what differs from the defaults; `parse_manifest` gives it back unchanged."""
    return dump_yaml(manifest.model_dump(mode="json", by_alias=True, exclude_defaults=True))
