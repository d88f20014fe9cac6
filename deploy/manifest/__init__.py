"""Deploy manifests: `kind: Pipeline` as typed values, and reading them from YAML."""

from deploy.manifest.load import load_manifest, parse_manifest
from deploy.manifest.model import Manifest
from deploy.manifest.scalars import is_local
from deploy.manifest.stage import Link, Speed, Stage

__all__ = ["Link", "Manifest", "Speed", "Stage", "is_local", "load_manifest", "parse_manifest"]
