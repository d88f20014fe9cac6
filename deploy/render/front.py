"""A gateway as its container sees it: its paths, its command, and a manifest in which every pipeline has a `url`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

from relayline.deploy.manifest import Manifest
from relayline.deploy.manifest.deployment import Deployment
from relayline.deploy.manifest.dump import dump_yaml
from relayline.deploy.manifest.gateway import Behind, GatewayManifest
from relayline.deploy.render import inside
from relayline.wire.common.errors import UsageError

GATEWAY = "gateway"
MANIFEST_FILE = "/etc/relayline/gateway.yaml"
BACKENDS_DIR = "/etc/relayline/backends"  # below it, by a pipeline's name, the key for its requests
KEYS_FILE, CA_FILE = "keys", "ca.pem"


@dataclasses.dataclass(frozen=True, slots=True)
class Front:
    """One gateway before pipelines of the same deployment and elsewhere."""

    gateway: GatewayManifest
    pipelines: tuple[Behind, ...]
    urls: Mapping[str, str]
    """Where the gateway finds the pipelines of this deployment, by their names behind it."""

    @property
    def rendered(self) -> tuple[tuple[str, Manifest], ...]:
        """Name and manifest of every pipeline that is part of the deployment."""
        return tuple((each.name, each.manifest) for each in self.pipelines if each.manifest is not None)

    @property
    def deployment(self) -> Deployment:
        """Image, pull settings and the like: those of the first pipeline of the deployment."""
        return self.rendered[0][1].spec.deployment if self.rendered else Deployment()

    @property
    def image(self) -> str:
        """The gateway's image."""
        return self.deployment.image or f"relayline:{importlib.metadata.version('relayline')}"

    @property
    def uses_api_keys(self) -> bool:
        """Whether clients have to show a key."""
        return self.gateway.spec.api_keys_file is not None

    def needs(self, pipeline: Behind) -> tuple[str, ...]:
        """Return the files with which a pipeline is asked: a key, certificates, both or neither."""
        place, manifest = pipeline.member.place, pipeline.manifest
        has_key = place.key_file if manifest is None else manifest.spec.coordinator.api_keys_file
        return (*((KEYS_FILE,) if has_key else ()), *((CA_FILE,) if place.ca_file else ()))

    def command(self) -> list[str]:
        """Return the arguments after the image's entry point."""
        return ["gateway", "--manifest", MANIFEST_FILE, *inside.OUTPUT_FLAGS]

    def manifest_text(self) -> str:
        """Return the manifest that the gateway reads in its container."""
        gateway, by_name = self.gateway, {each.name: each for each in self.pipelines}
        entries: list[dict[str, Any]] = []
        for entry in gateway.spec.pipelines:
            names = [entry.name, *(f"{entry.name}-{number}" for number in range(2, len(entry.replicas) + 2))]
            first, *more = (self._place(by_name[name]) for name in names)
            entries.append({"name": entry.name} | first | ({"replicas": more} if more else {}))
        spec: dict[str, Any] = {"http": {"host": "0.0.0.0", "port": inside.HTTP_PORT}, "pipelines": entries}
        if self.uses_api_keys:
            spec["apiKeysFile"] = inside.API_KEYS_FILE
        if gateway.spec.awake_max:
            spec["awakeMax"] = gateway.spec.awake_max
        if gateway.spec.allow_hosts:
            spec["allowHosts"] = list(gateway.spec.allow_hosts)
        return dump_yaml(
            {"apiVersion": gateway.api_version, "kind": gateway.kind, "metadata": {"name": gateway.name}, "spec": spec}
        )

    def _place(self, pipeline: Behind) -> dict[str, str]:
        url = self.urls[pipeline.name] if pipeline.manifest is not None else str(pipeline.member.place.url)
        fields = {KEYS_FILE: "keyFile", CA_FILE: "caFile"}
        files = {fields[file]: f"{BACKENDS_DIR}/{pipeline.name}/{file}" for file in self.needs(pipeline)}
        return {"url": url, **files}


def check_pipelines(rendered: Sequence[tuple[str, Manifest]]) -> None:
    """Raise UsageError, naming the pipeline, for what pipelines behind a gateway can't say."""
    for name, manifest in rendered:
        if manifest.spec.deployment.replicas > 1:
            raise UsageError(f"{name}: deployment.replicas; list `replicas` in the gateway's manifest in its place")
        if manifest.spares:
            raise UsageError(
                f"{name}: spares stand by where `relayline up` runs the pipeline; leave them out of what is rendered"
            )


def notes(front: Front, *, in_kubernetes: bool) -> list[str]:
    """Return what could not be carried over, of the gateway and of each pipeline, one line each."""
    found = []
    if front.gateway.spec.http.tls is not None:
        found.append("http.tls is left out: give the proxy or ingress before this deployment the TLS")
    for name, manifest in front.rendered:
        found += [f"{name}: {note}" for note in inside.notes(manifest, in_kubernetes=in_kubernetes)]
    return found
