"""The published JSON Schema of manifests. `python -m relayline.deploy.manifest.schema` writes schema.json."""

from __future__ import annotations

import json
from pathlib import Path

from relayline.deploy.manifest.gateway import GatewayManifest
from relayline.deploy.manifest.model import Manifest
from relayline.deploy.manifest.scalars import Part

SCHEMA_FILE = Path(__file__).with_name("schema.json")
GATEWAY_SCHEMA_FILE = Path(__file__).with_name("gateway.schema.json")
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema_text(root: type[Part] = Manifest) -> str:
    """Return the JSON Schema (draft 2020-12) of a manifest; a test compares it with schema.json."""
    schema = root.model_json_schema(by_alias=True, mode="validation")
    return json.dumps({"$schema": DIALECT, **schema}, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
    GATEWAY_SCHEMA_FILE.write_text(schema_text(GatewayManifest), encoding="utf-8")
