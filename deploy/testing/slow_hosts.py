"""Several hosts of different speed on one machine: their manifest, and how the stages of the other hosts start here."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from relayline.deploy.machine.ports import free_port
from relayline.deploy.testing.paths import ROOT

SLOWED = ROOT / "benches" / "slowed"
"""In PYTHONPATH it makes a stage's steps take SLOWED_LAYER_MS milliseconds for each layer."""
CTX_TOKENS = 512
MANIFEST = """
apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {{name: unequal}}
spec:
  model: {{path: {path}}}
  context: {{tokens: {ctx}, lanes: {lanes}}}
  wire: {{tls: {{mode: "off"}}}}
  batching: {{calibrate: {calibrates}}}
  coordinator: {{host: 127.0.0.1, joinPort: {join}, http: {{port: 0}}}}
  stages:
{stages}
"""


def manifest_text(path: Path, hosts: Sequence[str], n_lanes: int, *, calibrates: bool = True) -> str:
    """Return a manifest of hosts with addresses that this machine does not have (RFC 5737), each with a stage of open
    layers.

    Without `calibrates` stages do not measure their steps when they load their layers.
    """
    stages = [
        f"  - {{name: {name}, host: 203.0.113.{at}, threads: 1, port: {free_port()}, "
        f"link: {{roundTripMs: 0, bandwidthGbps: 16}}}}"
        for at, name in enumerate(hosts, 1)
    ]
    values = {"calibrates": str(calibrates).lower(), "join": free_port(), "stages": "\n".join(stages)}
    return MANIFEST.format(path=path, ctx=CTX_TOKENS, lanes=n_lanes, **values)


def local_command(command: str, state: Path) -> list[str]:
    """Return the command of another host's stage with the addresses and the files of this machine."""
    words = iter(shlex.split(command)[1:])
    changed = {"--advertise": "127.0.0.1", "--listen": "127.0.0.1:0", "--metrics": "127.0.0.1:0"}
    found = []
    for word in words:
        if not word.startswith("--") or word == "--insecure":
            found.append(word)
            continue
        value = next(words)
        found += [word, changed.get(word, str(state / "join" / value) if word == "--token-file" else value)]
    return found
