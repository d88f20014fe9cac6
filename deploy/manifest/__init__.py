"""Deploy manifests: `kind: Pipeline` as typed values, and reading them from YAML."""

from relayline.deploy.manifest.load import load_manifest, parse_manifest
from relayline.deploy.manifest.model import Manifest
from relayline.deploy.manifest.scalars import is_local
from relayline.deploy.manifest.stage import Link, Speed, Stage

__all__ = ["Link", "Manifest", "Speed", "Stage", "is_local", "load_manifest", "parse_manifest"]
