"""What the flags of `relayline up` change in its manifest."""

from __future__ import annotations

from typing import Any

from relayline.deploy.cli.setting_flags import manifest_changes
from relayline.deploy.manifest import Manifest
from relayline.wire.common.errors import UsageError

_FILES = {"api_keys": "coordinator.apiKeysFile", "chat_template": "coordinator.chatTemplateFile"}


def changes_of(changed: dict[str, Any]) -> dict[str, Any]:
    """Return what flags change in the manifest: values by dotted place below `spec`."""
    changes = manifest_changes(changed)
    if "http" in changed:
        changes["coordinator.http.host"], changes["coordinator.http.port"] = changed["http"]
    for parameter, place in _FILES.items():
        if changed.get(parameter) is not None:
            changes[place] = str(changed[parameter].absolute())
    if changed.get("http_cert") is not None:
        pair = {"certFile": changed["http_cert"], "keyFile": changed["http_key"]}
        changes["coordinator.http.tls"] = {key: str(path.absolute()) for key, path in pair.items()}
    if changed.get("allow_hosts"):
        changes["coordinator.allowHosts"] = list(changed["allow_hosts"])
    return changes


def named(manifest: Manifest, name: str) -> Manifest:
    """Return the manifest with another name. Raises UsageError for an invalid name."""
    data = manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
    data["metadata"]["name"] = name
    try:
        return Manifest.model_validate(data).with_directory(manifest.directory)
    except ValueError as error:
        raise UsageError(
            f"--name {name!r} is not a name of lower-case letters, digits and inner dashes, at most 63 characters"
        ) from error


def http_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return where the API of a model without a manifest listens: the flag's own default is one too."""
    return changes_of({"http": given["http"]})
