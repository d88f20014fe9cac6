"""The TARGET of `relayline up`: a manifest or a model. Nothing is loaded from the network here."""

from __future__ import annotations

from pathlib import Path

from relayline.deploy.manifest.load import KINDS
from relayline.deploy.manifest.model import API_VERSION, HUB_SCHEME
from relayline.deploy.models.hub_reference import is_hub_name
from relayline.deploy.models.model_source import is_pattern
from relayline.wire.common.errors import UsageError

MANIFEST_SUFFIXES = (".yaml", ".yml", ".json")
HEAD_BYTES = 64 * 1024  # of a file in which a manifest's kind is looked for


def manifest_of(target: str | None, here: Path) -> Path | None:
    """Return the manifest meant by the target, None for a model.

    Without a target it is the only manifest of `here`. Raises UsageError where nothing is given and there is not
    exactly one manifest, and for a target that is neither.
    """
    if target is None:
        return _only_manifest(here)
    path = Path(target)
    if target.startswith(HUB_SCHEME):
        return None
    if path.is_dir():
        found = manifests_in(path)
        return found[0] if len(found) == 1 and not any(path.glob("*.gguf")) else None
    if path.suffix.lower() in MANIFEST_SUFFIXES:
        return path
    if path.exists() or path.suffix.lower() == ".gguf" or is_pattern(target) or is_hub_name(target):
        return None
    raise UsageError(
        f"{target}: no such file; give a .gguf file, a directory of shards, ORG/NAME[:QUANT] or a manifest (.yaml)"
    )


def gateway_of(target: str | None, here: Path) -> Path | None:
    """Return the manifest meant by the target where it is a gateway's, None otherwise. Raises as `manifest_of`."""
    from relayline.deploy.manifest.gateway import is_gateway

    path = manifest_of(target, here)
    return path if path is not None and is_gateway(path) else None


def manifests_in(directory: Path) -> list[Path]:
    """Return the manifests of a directory, by name."""
    files = (path for path in directory.iterdir() if path.suffix.lower() in MANIFEST_SUFFIXES and path.is_file())
    return sorted(path for path in files if _looks_like_one(path))


def _looks_like_one(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return False
    return API_VERSION.encode() in head and any(kind.encode() in head for kind in KINDS)


def _only_manifest(here: Path) -> Path:
    found = manifests_in(here)
    if len(found) == 1:
        return found[0].relative_to(here) if found[0].is_relative_to(here) else found[0]
    if found:
        names = ", ".join(path.name for path in found)
        raise UsageError(f"this folder has several manifests; name one of {names}")
    raise UsageError(
        "give a model or a manifest, as in `relayline up MODEL.gguf`; this folder has no manifest "
        "(`relayline init` writes one, `relayline demo` needs none)"
    )
