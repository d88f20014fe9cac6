"""The changes that flags of `relayline up` make in its manifest."""

from __future__ import annotations

from typing import Any

from relayline.deploy.cli.setting_flags import manifest_changes

DOWNLOAD = "model.download"
_FILES = {"api_keys": "coordinator.apiKeysFile", "chat_template": "coordinator.chatTemplateFile"}


def changes_of(changed: dict[str, Any]) -> dict[str, Any]:
    """Return what flags change in the manifest: values by dotted place below `spec`."""
    changes = manifest_changes(changed)
    if "http" in changed:
        changes["coordinator.http.host"], changes["coordinator.http.port"] = changed["http"]
    if "download" in changed:
        changes[DOWNLOAD] = changed["download"]
    for parameter, place in _FILES.items():
        if changed.get(parameter) is not None:
            changes[place] = str(changed[parameter].absolute())
    if changed.get("http_cert") is not None:
        pair = {"certFile": changed["http_cert"], "keyFile": changed["http_key"]}
        changes["coordinator.http.tls"] = {key: str(path.absolute()) for key, path in pair.items()}
    if changed.get("allow_hosts"):
        changes["coordinator.allowHosts"] = list(changed["allow_hosts"])
    return changes


def http_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return where the API of a model without a manifest listens: the flag's own default is one too."""
    return changes_of({"http": given["http"]})
